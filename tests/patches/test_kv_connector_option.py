# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_lifetime.patches import kv_connector_option
from vllm_lifetime.patches.versions import UnsupportedVllmError

plugins = pytest.importorskip("vllm.plugins")
arg_utils = pytest.importorskip("vllm.engine.arg_utils")
EngineArgs, AsyncEngineArgs = arg_utils.EngineArgs, arg_utils.AsyncEngineArgs
METHODS = ("add_cli_args", "from_cli_args", "create_engine_config")
ENGINE_ID = {"engine_id": "e1"}


def stock(method: Any) -> Any:
    """Return vLLM's own function, also when this process has loaded our plugin."""
    function = getattr(method, "__func__", method)
    while function.__code__.co_filename == kv_connector_option.__file__:
        function = function.__wrapped__
    return function


@pytest.fixture(autouse=True)
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from vLLM without our plugin; `create_engine_config` only returns the transfer config."""
    monkeypatch.setattr(plugins, "plugins_loaded", True)
    methods = vars(EngineArgs)
    monkeypatch.setattr(EngineArgs, "add_cli_args", staticmethod(stock(methods["add_cli_args"])))
    monkeypatch.setattr(EngineArgs, "from_cli_args", classmethod(stock(methods["from_cli_args"])))
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: self.kv_transfer_config)
    yield


def install(ensure_usable: Callable[[Any], None] = lambda config: None) -> None:
    kv_connector_option.install("lifetime", ensure_usable)


def parse(*argv: str) -> Any:
    """Return the engine arguments that `vllm serve` would make of `argv`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(argv)))


def configure(*argv: str) -> Any:
    """Return the transfer config of an engine started with `argv`."""
    return parse(*argv).create_engine_config()


def transfer_config(**fields: Any) -> list[str]:
    return ["--kv-transfer-config", json.dumps(fields)]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--block-size", "16", "--max-model-len", "1k"],
        transfer_config(kv_connector="ExampleConnector", kv_role="kv_both", **ENGINE_ID),
        transfer_config(kv_connector="ExampleConnector", kv_role="kv_both", kv_load_failure_policy="fail", **ENGINE_ID),
    ],
)
def test_without_the_option_engine_arguments_are_vllms(argv: list[str]) -> None:
    before = parse(*argv)
    install()
    after = parse(*argv)
    fields = dataclasses.fields(before)
    assert {f.name: getattr(after, f.name) for f in fields} == {f.name: getattr(before, f.name) for f in fields}
    assert after.create_engine_config() == before.kv_transfer_config


def test_the_option_is_enough() -> None:
    install()
    config = configure("--kv-connector", "lifetime")
    assert (config.kv_connector, config.kv_role) == ("lifetime", "kv_both")
    assert config.kv_load_failure_policy == "recompute"


def test_dotted_options_go_along() -> None:
    install()
    config = configure(
        "--kv-connector",
        "lifetime",
        "--kv-transfer-config.kv_connector_extra_config.host_bytes",
        "1000000",
        "--kv-transfer-config.kv_connector_extra_config.flash_path",
        "/x",
    )
    assert config.kv_connector == "lifetime"
    assert config.kv_connector_extra_config == {"host_bytes": 1000000, "flash_path": "/x"}
    assert config.kv_load_failure_policy == "recompute"


def test_a_config_file_may_name_the_connector(tmp_path: Any) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("kv-connector: lifetime\n")
    install()
    assert configure("--config", str(file)).kv_connector == "lifetime"


def test_the_stock_option_gets_the_safe_policy_too() -> None:
    install()
    config = configure(*transfer_config(kv_connector="lifetime", kv_role="kv_both"))
    assert config.kv_load_failure_policy == "recompute"


def test_the_python_config_gets_the_safe_policy_too() -> None:
    from vllm.config import KVTransferConfig

    install()
    config = KVTransferConfig(kv_connector="lifetime", kv_role="kv_both")
    assert EngineArgs(kv_transfer_config=config).create_engine_config().kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(
    "argv",
    [
        transfer_config(kv_connector="lifetime", kv_role="kv_both", kv_load_failure_policy="fail"),
        ["--kv-connector", "lifetime", "--kv-transfer-config.kv_load_failure_policy", "fail"],
    ],
)
def test_a_policy_on_the_command_line_is_kept(argv: list[str]) -> None:
    install()
    assert configure(*argv).kv_load_failure_policy == "fail"


def test_other_connectors_keep_vllms_policy() -> None:
    install()
    config = configure("--kv-connector", "ExampleConnector")
    assert (config.kv_connector, config.kv_role) == ("ExampleConnector", "kv_both")
    assert config.kv_load_failure_policy == "fail"


def test_a_given_role_is_kept() -> None:
    install()
    config = configure("--kv-connector", "ExampleConnector", "--kv-transfer-config.kv_role", "kv_producer")
    assert config.kv_role == "kv_producer"


def test_two_different_connectors_are_refused() -> None:
    install()
    stock_option = transfer_config(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match=r"--kv-connector lifetime contradicts .* ExampleConnector"):
        parse("--kv-connector", "lifetime", *stock_option)
    assert configure("--kv-connector", "ExampleConnector", *stock_option).kv_connector == "ExampleConnector"


def test_vllms_own_offloading_is_refused_beside_it() -> None:
    install()
    with pytest.raises(ValueError, match="--kv-offloading-size"):
        configure("--kv-connector", "lifetime", "--kv-offloading-size", "1")


def test_every_api_server_process_gets_the_same_engine_id() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    install()
    args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--kv-connector", "lifetime"])
    ids = {AsyncEngineArgs.from_cli_args(args).kv_transfer_config.engine_id for _ in range(2)}
    assert len(ids) == 1


def test_an_unsupported_vllm_is_refused_only_for_the_connector() -> None:
    def refuse(config: Any) -> None:
        raise UnsupportedVllmError("no seam")

    install(refuse)
    assert configure() is None
    assert configure("--kv-connector", "ExampleConnector").kv_connector == "ExampleConnector"
    with pytest.raises(SystemExit, match="no seam"):
        configure("--kv-connector", "lifetime")
    config = importlib.import_module("vllm.config").KVTransferConfig(kv_connector="lifetime", kv_role="kv_both")
    engine_args = EngineArgs(kv_transfer_config=config)
    with pytest.raises(UnsupportedVllmError, match="no seam"):
        engine_args.create_engine_config()


def test_installing_twice_adds_one_option() -> None:
    install()
    methods = [getattr(EngineArgs, name) for name in METHODS]
    install()
    assert [getattr(EngineArgs, name) for name in METHODS] == methods
    assert configure("--kv-connector", "lifetime").kv_connector == "lifetime"


def test_an_option_of_another_plugin_is_left_alone() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    install()
    parser = FlexibleArgumentParser()
    parser.add_argument("--kv-connector", type=int)
    assert EngineArgs.add_cli_args(parser).parse_args([]).kv_connector is None


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_method_is_refused_before_anything_is_changed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineArgs, method, None)
    before = [vars(EngineArgs)[name] for name in METHODS]
    with pytest.raises(UnsupportedVllmError, match=method):
        install()
    assert [vars(EngineArgs)[name] for name in METHODS] == before


def test_an_option_of_vllms_own_is_refused() -> None:
    @dataclasses.dataclass
    class Fields(EngineArgs):  # type: ignore[misc, valid-type]
        kv_connector: str | None = None
        add_cli_args = staticmethod(lambda parser: parser)
        from_cli_args = classmethod(lambda cls, args: cls())
        create_engine_config = lambda self: None  # noqa: E731

    from vllm.config import KVTransferConfig

    with pytest.raises(UnsupportedVllmError, match="--kv-connector is taken"):
        kv_connector_option._check_seams(Fields, KVTransferConfig)
