# SPDX-License-Identifier: Apache-2.0
"""What `vllm-lifetime serve` makes of its arguments, and what it says when it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_lifetime.cli.serve import NOT_INSTALLED, serve_arguments

OURS = ["--kv-connector", "lifetime"]

# Runs the command line with a stand-in for vLLM, so that no test loads torch.
FAKE_VLLM = """
import sys, types
for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli", "vllm.entrypoints.cli.main"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["vllm"].__spec__ = object()
def fake_main():
    {body}
sys.modules["vllm.entrypoints.cli.main"].main = fake_main
from vllm_lifetime.cli import main
main()
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with `arguments` in a Python of its own."""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def test_connector_is_added_after_the_users_arguments() -> None:
    assert serve_arguments(["some/model", "--port", "80"]) == [
        "serve", "some/model", "--port", "80", *OURS
    ]  # fmt: skip


@pytest.mark.parametrize(
    "chosen",
    [
        ["--kv-connector", "other"],
        ["--kv-connector=other"],
        ["--kv_connector", "other"],
        ["--kv-transfer-config", '{"kv_connector": "other", "kv_role": "kv_both"}'],
        ['--kv_transfer_config={"kv_connector": "other"}'],
        ["--kv-transfer-config.kv_connector", "other"],
        ["--kv-transfer-config.kv_connector=other"],
    ],
)
def test_a_connector_the_user_chose_stays(chosen: list[str]) -> None:
    assert serve_arguments(["model", *chosen]) == ["serve", "model", *chosen]


@pytest.mark.parametrize(
    "options",
    [
        ["--kv-transfer-config.kv_connector_extra_config.host_bytes", "1000000"],
        ["--kv-transfer-config.kv_connector_extra_config", '{"host_bytes": 1000000}'],
        ["--kv-transfer-config", '{"kv_connector_extra_config": {"host_bytes": 1000000}}'],
        ["--kv_transfer_config={}"],
    ],
)
def test_options_of_the_connector_alone_choose_none(options: list[str]) -> None:
    assert serve_arguments(["model", *options]) == ["serve", "model", *options, *OURS]


@pytest.mark.parametrize("value", ["kv-connector", "--kv-connector-extra", "--kv-connectors=1"])
def test_what_only_looks_like_the_option_changes_nothing(value: str) -> None:
    assert serve_arguments(["model", value])[-2:] == OURS


def test_everything_reaches_vllm_untouched() -> None:
    given = ["model", "-tp", "2", "--help", "-O3", "--a.b=c d", "--", "-x", "positional"]
    done = run_python(FAKE_VLLM.format(body="print(sys.argv)"), "serve", *given)
    assert done.stderr == ""
    assert done.stdout.strip() == repr(["vllm", "serve", *given, *OURS])


def test_options_may_stand_before_the_model() -> None:
    given = ["--port", "80", "model", "--help"]
    done = run_python(FAKE_VLLM.format(body="print(sys.argv)"), "serve", *given)
    assert done.stdout.strip() == repr(["vllm", "serve", *given, *OURS])


def test_vllm_sees_a_version_for_the_cpu_wheel() -> None:
    body = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    done = run_python(FAKE_VLLM.format(body=body), "serve", "model")
    assert done.stderr == ""
    assert done.stdout[0].isdigit()


def test_an_unsupported_vllm_ends_in_one_sentence() -> None:
    body = "from vllm_lifetime.patches.versions import require; require(False, 'BlockPool is gone')"
    done = run_python(FAKE_VLLM.format(body=body), "serve", "model")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ") and "BlockPool is gone" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_vllm_it_says_how_to_install_it() -> None:
    code = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'vllm' else find(name, *a)\n"
        "from vllm_lifetime.cli import main; main()"
    )
    done = run_python(code, "serve", "model")
    assert done.returncode == 1
    assert done.stderr == f"Error: {NOT_INSTALLED}\n"


def test_help_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys\n"
        "from vllm_lifetime.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print({'torch', 'vllm'} & set(sys.modules))"
    )
    done = run_python(code, "--help")
    assert "serve" in done.stdout and done.stdout.endswith("set()\n")


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).parent / "vllm-lifetime"
    done = subprocess.run([script, "version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm-lifetime ") and "supported: 0.31.x" in done.stdout
