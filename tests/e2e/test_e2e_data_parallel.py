# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel engines behind one API server. Opt in with LIFETIME_E2E_DP=1: two engines on few cores are slow."""

import os
from collections.abc import Callable

import pytest
from e2e_client import Api, tier_options
from e2e_servers import Servers
from e2e_workload import RELOAD

pytestmark = pytest.mark.skipif(os.environ.get("LIFETIME_E2E_DP") != "1", reason="set LIFETIME_E2E_DP=1")


def test_boundary_reaches_one_engine_of_two(servers: Servers, same_as_stock: Callable[..., None]) -> None:
    """One POST retires a workflow's blocks on both engines; each engine has a flash file of its own."""
    servers.stop()
    directory = servers.directory()
    options = tier_options("float32", directory / "flash.kv", 32, 50)
    server = servers.make(directory, "float32", options, "--data-parallel-size", "2", "--max-num-seqs", "4", start_timeout_s=500)
    with server:
        api = Api(server)
        files = {"flash.kv", "flash.kv.dp1-rank0"}
        assert {path.name for path in directory.glob("flash.kv*")} == files | {f"{name}.wear" for name in files}
        who = {"session": "the session", "metadata": {"workflow_id": "everywhere"}}
        for _ in range(2):
            # At the same time, so that the load balancer gives some to each engine.
            for prompt, answer in zip(RELOAD, api.ask_together(RELOAD, **who), strict=True):
                same_as_stock(prompt, answer)
        api.settle()
        engines = api.http.get("/lifetime/v1/tiers").json()["engines"]
        assert len(engines) == 2
        assert all(engine["tiers"]["hbm"]["used_blocks"] > 0 for engine in engines)
        outcome = api.boundary("workflow_end", workflow_id="everywhere")
        assert outcome["status"] == "accepted"
        after = api.http.get("/lifetime/v1/tiers").json()["engines"]
        retired = [sum(tier["retired_blocks"] for tier in engine["tiers"].values()) for engine in after]
        print(f"{outcome}, retired by engine: {retired}")
        assert min(retired) > 0
        assert sum(retired) == outcome["blocks"]
        assert api.boundary("workflow_end", workflow_id="everywhere")["status"] == "ignored"
        assert api.http.post("/reset_prefix_cache").json() == {"success": True}
        assert all(tier["used_blocks"] == 0 for tier in api.settle().values())
