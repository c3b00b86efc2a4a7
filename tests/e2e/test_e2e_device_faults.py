# SPDX-License-Identifier: Apache-2.0
"""A flash device that lies, shrinks or dies under a running server costs recomputation: never a token, never the engine.

The tests damage one device more and more, in this order.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e_client import Api, Delta, tier_options
from e2e_flash_file import FlashFileKnife
from e2e_mounts import break_device, disk_image
from e2e_refusal import refusal
from e2e_servers import Servers
from e2e_workload import RELOAD

PROMPT = RELOAD[0]
LONG = RELOAD[2]
Check = Callable[..., None]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of its own for the flash file; a plain directory where there can be none."""
    base = tmp_path_factory.mktemp("device")
    with ExitStack() as mounts:
        try:
            path = mounts.enter_context(disk_image(base / "disk", 64))
        except pytest.skip.Exception:
            path = base
        yield path


@pytest.fixture(scope="module")
def server(servers: Servers, device: Path) -> Iterator[Api]:
    """A float32 server whose only tier below HBM is the device."""
    servers.stop()
    options = tier_options("float32", device / "flash.kv", 0, 150)
    with servers.start(servers.directory(), "float32", options) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Iterator[Api]:
    """The same, holding nothing; afterwards it must be well."""
    server.reset()
    yield server
    assert server.is_healthy()
    server.settle()


def evict(api: Api) -> None:
    """Serve two known prompts and push them to flash."""
    for prompt in (PROMPT, LONG):
        api.ask(prompt)
        api.settle()
    api.fill(4)


def check_prompts(api: Api, same_as_stock: Check) -> None:
    """Both prompts give stock's tokens, now and again."""
    for prompt in (PROMPT, LONG, PROMPT):
        same_as_stock(prompt, api.ask(prompt))


def test_second_server_on_the_same_flash_file_is_let_in(api: Api, device: Path, servers: Servers) -> None:
    """It is refused in a sentence that names the file, and the first one does not notice.

    The worker finds it, so the sentence stands among the traces of three processes.
    """
    evict(api)
    options = tier_options("float32", device / "flash.kv", 0, 150)
    refused = refusal(servers.make(servers.directory(), "float32", options))
    print(refused)
    assert refused.exit_code != 0
    assert refused.says(f"{device / 'flash.kv'} is in use by another process")
    delta = Delta(api)
    assert api.ask(PROMPT).cached_tokens == PROMPT.reusable_tokens
    assert delta.await_growth("lifetime_loads_total", outcome="done") == 1


def test_flipped_bits_change_tokens(api: Api, device: Path, same_as_stock: Check) -> None:
    """R4, R19, R20: every payload on the device is damaged while the server runs; the idle engine recomputes at once."""
    evict(api)
    assert FlashFileKnife(device / "flash.kv").flip_a_bit_of_every_payload() >= 28
    delta = Delta(api)
    same_as_stock(PROMPT, api.ask(PROMPT))
    assert delta.await_growth("lifetime_loads_total", outcome="failed") == 1
    assert delta("lifetime_loads_total", outcome="done") == 0
    assert delta("lifetime_recomputed_blocks_total") > 0
    assert delta("lifetime_flash_faults_total", kind="checksum") > 0
    same_as_stock(LONG, api.ask(LONG))
    assert delta("lifetime_loads_total", outcome="failed") == 2
    # What failed once is not asked again, and what was computed again is kept again.
    same_as_stock(PROMPT, api.ask(PROMPT))
    api.settle()
    api.fill(4)
    assert api.ask(PROMPT).cached_tokens == PROMPT.reusable_tokens
    print({o: delta("lifetime_loads_total", outcome=o) for o in ("done", "failed")})


def test_truncated_file_kills_the_engine(api: Api, device: Path, same_as_stock: Check) -> None:
    """The file is cut behind its table of records while the server runs (a mapping would raise SIGBUS)."""
    evict(api)
    FlashFileKnife(device / "flash.kv").cut_payloads()
    delta = Delta(api)
    check_prompts(api, same_as_stock)
    assert delta.await_growth("lifetime_loads_total", outcome="failed") == 2
    assert delta("lifetime_flash_faults_total") >= 2
    api.settle()
    api.fill(4)  # writes go on
    check_prompts(api, same_as_stock)


def test_read_only_device_kills_the_engine(api: Api, device: Path, same_as_stock: Check) -> None:
    """The device takes no more writes in mid-run: what is there is read or recomputed, nothing new is kept, all goes on."""
    if not device.is_mount():
        pytest.skip("the flash file has no file system of its own here")
    evict(api)
    break_device(device)
    delta = Delta(api)
    check_prompts(api, same_as_stock)
    api.fill(6)
    check_prompts(api, same_as_stock)
    assert delta.await_growth("lifetime_flash_faults_total") > 0
    assert delta("lifetime_bytes_written_total", tier="flash") == 0
    print({kind: delta("lifetime_flash_faults_total", kind=kind) for kind in ("write_EROFS", "write_EIO", "short_read")})
