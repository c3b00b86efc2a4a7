# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping a server's processes, with small stand-ins for vLLM."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.server import ServerError, VllmServer

LISTENS = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"up 1.0\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DIES = "import sys; print('no such model'); sys.exit(3)"
HANGS = "import time; print('thinking', flush=True); time.sleep(600)"


class StandIn(VllmServer):
    """The real thing around a script instead of vLLM."""

    script = LISTENS

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.script, str(self.port)]


def stand_in(tmp_path: Path, script: str, timeout_s: float = 30.0) -> StandIn:
    server = StandIn("model", log_path=tmp_path / "server.log", start_timeout_s=timeout_s)
    server.script = script
    return server


def gone(pid: int) -> bool:
    # A child that nobody reaped yet is a zombie: dead all the same.
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("ending", ["stop", "kill_9"])
def test_no_process_is_left_behind(tmp_path: Path, ending: str) -> None:
    server = stand_in(tmp_path, LISTENS)
    with server:
        child = int(server.log_path.read_text().split()[1])
        leader = server.pid
        assert server.metrics() == {("up", ()): 1.0}
        getattr(server, ending)()
    assert gone(child)
    assert gone(leader)
    with pytest.raises(ServerError, match="not running"):
        server.check_alive()


def test_a_server_that_dies_tells_why_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"(?s)exit code 3.*no such model"):
        stand_in(tmp_path, DIES).start()
    assert time.monotonic() - began < 20


def test_a_server_that_hangs_is_ended(tmp_path: Path) -> None:
    server = stand_in(tmp_path, HANGS, timeout_s=1.0)
    with pytest.raises(ServerError, match=r"(?s)did not answer within 1 s.*thinking"):
        server.start()
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid


def test_command_line(tmp_path: Path) -> None:
    stock = VllmServer("some/model", log_path=tmp_path / "log", args=["--dtype", "float32"])
    assert "--kv-connector" not in stock.command()
    assert stock.command()[-2:] == ["--dtype", "float32"]
    ours = VllmServer("some/model", log_path=tmp_path / "log", connector={"host_bytes": 1})
    command = ours.command()
    assert command[command.index("--kv-connector") + 1] == "lifetime"
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config == {"kv_connector_extra_config": {"host_bytes": 1}}
    bare = VllmServer("some/model", log_path=tmp_path / "log", connector={})
    assert "--kv-transfer-config" not in bare.command()
