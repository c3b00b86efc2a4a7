# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared, and how each is started with the same bytes.

Systems that are not ours run without our vLLM plugin (`VLLM_PLUGINS` is empty for them).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.comparison.settings import Budget, ServerSettings
from benchmarks.server import ServerError, VllmServer, free_port

__all__ = ["LMCACHE_VENV", "SYSTEMS", "Running", "Site", "System", "lmcache_version", "why_not_here"]

LMCACHE_VENV = Path(".venv-lmcache")
STAGING_BLOCKS = 8
"""Of the lifetime connector; they count as host memory."""
LMCACHE_START_S = 120.0
LMCACHE_GRACE_S = 10.0
_NO_PLUGINS = {"VLLM_PLUGINS": ""}


@dataclass(frozen=True)
class Site:
    """Where and with what a system is started. `folder` takes its logs, and its disk tier while it runs."""

    model: Path
    folder: Path
    settings: ServerSettings
    budget: Budget
    label: str
    """Of this run, for file names."""

    def log(self, name: str) -> Path:
        """The log of one of the run's processes."""
        return self.folder / "logs" / f"{self.label}-{name}.log"

    @property
    def disk(self) -> Path:
        """Where the disk tier lies; removed when the system has ended."""
        return self.folder / "disk"


@dataclass(frozen=True)
class Running:
    """A system that answers. `process_groups`: of all its processes, to find what they write."""

    server: VllmServer
    process_groups: tuple[int, ...]


@dataclass(frozen=True)
class System:
    """One system. `start` yields it when it answers, and raises `ServerError` if it does not."""

    name: str
    title: str
    start: Callable[[Site], AbstractContextManager[Running]]
    is_ours: bool = False


def _server(site: Site, arguments: list[str], environment: dict[str, str], **more: Any) -> VllmServer:
    return VllmServer(
        site.model.absolute(),
        log_path=site.log("vllm"),
        args=[*site.settings.arguments(site.budget.hbm_blocks), *arguments],
        env=site.settings.environment() | environment,
        **more,
    )


@contextlib.contextmanager
def _stock(site: Site) -> Iterator[Running]:
    with _server(site, [], _NO_PLUGINS) as server:
        yield Running(server, (server.pid,))


@contextlib.contextmanager
def _offloading(site: Site) -> Iterator[Running]:
    """vLLM's own connector, host memory and a folder. It says itself where it does not run."""
    spec = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": site.budget.host_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(site.disk.absolute())}],
        },
    }
    with _disk(site), _server(site, ["--kv-transfer-config", json.dumps(spec)], _NO_PLUGINS) as server:
        yield Running(server, (server.pid,))


def _ours(policy: str) -> Callable[[Site], AbstractContextManager[Running]]:
    @contextlib.contextmanager
    def start(site: Site) -> Iterator[Running]:
        staging_bytes = STAGING_BLOCKS * site.budget.block_bytes
        options = {
            "eviction_policy": policy,
            "host_bytes": site.budget.host_bytes - staging_bytes,
            "flash_path": str(site.disk / "flash.bin"),
            "flash_bytes": site.budget.disk_bytes,
            "flash_staging_bytes": staging_bytes,
        }
        with _disk(site), _server(site, [], {}, connector=options) as server:
            yield Running(server, (server.pid,))

    return start


@contextlib.contextmanager
def _lmcache(site: Site) -> Iterator[Running]:
    """LMCache's server (DRAM, then a folder) and its own connector for vLLM, in an environment of their own."""
    gib = 1 << 30
    port, http_port, metrics_port = free_port(), free_port(), free_port()
    evicts: dict[str, Any] = {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.3}
    disk = {
        "type": "fs_native",
        "base_path": str(site.disk.absolute()),
        "max_capacity_gb": site.budget.disk_bytes / gib,
        "eviction": evicts,
    }
    command = [
        str((LMCACHE_VENV / "bin" / "lmcache").absolute()),
        "server",
        *("--host", "localhost"),
        *("--port", str(port)),
        *("--http-port", str(http_port)),
        *("--prometheus-port", str(metrics_port)),
        *("--chunk-size", str(site.settings.block_size_tokens)),
        *("--l1-size-gb", str(site.budget.host_bytes / gib)),
        *("--eviction-policy", evicts["eviction_policy"]),
        *("--eviction-trigger-watermark", str(evicts["trigger_watermark"])),
        *("--eviction-ratio", str(evicts["eviction_ratio"])),
        *("--supported-transfer-mode", "lmcache_driven"),
        *("--l2-adapter", json.dumps(disk)),
    ]
    spec = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    # Chunks are named by Python's hash in both processes; neither reports its usage to anybody.
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    python = str((LMCACHE_VENV / "bin" / "python").absolute())
    arguments = ["--kv-transfer-config", json.dumps(spec)]
    with (
        _disk(site),
        _process(command, environment, site.log("lmcache"), f"http://localhost:{http_port}/healthcheck") as group,
        _server(site, arguments, environment | _NO_PLUGINS, python=python) as server,
    ):
        yield Running(server, (server.pid, group))


@contextlib.contextmanager
def _disk(site: Site) -> Iterator[None]:
    """An empty folder for the disk tier."""
    shutil.rmtree(site.disk, ignore_errors=True)
    site.disk.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(site.disk, ignore_errors=True)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], log_path: Path, health_url: str) -> Iterator[int]:
    """A process in a group of its own that answers at `health_url`; yields the group's id. Raises `ServerError`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            _wait_for(process, health_url, log_path)
            yield process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LMCACHE_GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline_s = time.monotonic() + LMCACHE_START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
            raise ServerError(f"{process.args!r} ended with exit code {process.returncode}.\n{tail}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0).status_code == httpx.codes.OK:
                return
        time.sleep(0.25)
    raise ServerError(f"{url} did not answer within {LMCACHE_START_S:.0f} s; see {log_path}")


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("vllm", "vLLM", _stock),
        System("lmcache", "vLLM + LMCache", _lmcache),
        System("offloading", "vLLM's offloading", _offloading),
        System("lru", "ours, `lru`", _ours("lru"), is_ours=True),
        System("lifecycle", "ours, `lifecycle`", _ours("lifecycle"), is_ours=True),
        System("hierarchical", "ours, `hierarchical`", _ours("hierarchical"), is_ours=True),
        System("lifetime", "ours, `lifetime`", _ours("lifetime"), is_ours=True),
    )
}
"""By name, in the order of the tables. The first is what the others are compared with."""


def why_not_here(name: str) -> str | None:
    """Why a system cannot be started at all; None: it is tried."""
    if name == "lmcache" and not (LMCACHE_VENV / "bin" / "lmcache").exists():
        return (
            f"{LMCACHE_VENV} is missing: "
            f"python3 scripts/setup_venv.py {LMCACHE_VENV} requirements/cpu-0.32.txt requirements/lmcache.txt"
        )
    return None


def lmcache_version() -> dict[str, str]:
    """What is installed in LMCache's environment, by name; empty where there is none."""
    found = sorted(LMCACHE_VENV.glob("lib/python*/site-packages/lmcache-*.dist-info"))
    return {"lmcache": found[0].name.removesuffix(".dist-info").split("-")[1]} if found else {}
