# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm` with several command lines that it should refuse, all from one import of it.

    echo '{"CASE": [["serve", ...], "LOG"], ...}' | python refusal_forks.py

Each runs in a fork made where `vllm` has imported its commands and done nothing else, and ends as a process of its own would.
Prints `{"CASE": [EXIT_CODE, SECONDS], ...}`; the code is null for one that went on for too long.
"""

import json
import os
import signal
import sys
import time

import vllm.entrypoints.cli.main as command
import vllm.entrypoints.cli.serve  # noqa: F401  one of those that the command imports first

from vllm_lifetime.patches import distribution_name

TIMEOUT_S = 60.0
"""A server that goes on is ready after about as long."""


def wait(pid: int) -> int | None:
    """The exit code of a fork; it and its children are killed when they are late."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


distribution_name.apply()
ends: dict[str, tuple[int | None, float]] = {}
for case, (arguments, log_path) in json.load(sys.stdin).items():
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["vllm", *arguments]
        sys.exit(command.main())
    ends[case] = (wait(pid), time.monotonic() - began)
print(json.dumps(ends))
