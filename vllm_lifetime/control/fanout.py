# SPDX-License-Identifier: Apache-2.0
"""The control API in front of several vLLM servers: one event goes to each of them.

`FanoutPort` stands where in a vLLM server the way to its own engines stands, so routes and service are the same. What a server
answers in time is merged as usual; for one that is down or slow, what changes something waits in that server's queue and is
delivered later (the outcome's `reason` says so), and what only looks is answered without it.

Runs in the process of `vllm-lifetime control`, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from vllm_lifetime.boundaries import Outcome, OutcomeStatus
from vllm_lifetime.control.fanout_engine import FanoutOptions, RemoteEngine, RemoteError
from vllm_lifetime.control.fanout_queue import Refused, Ticket
from vllm_lifetime.control.merging import merge_health
from vllm_lifetime.control.routes import MAX_PAGE, PREFIX, build_router
from vllm_lifetime.control.service import ControlService
from vllm_lifetime.control.settings import ControlSettings
from vllm_lifetime.control.views import EngineHealth, HealthView, SessionsPage, SessionView, TiersOfEngine
from vllm_lifetime.hints import PROTOCOL_VERSION, HintOutcome, HintStatus

__all__ = ["DRAIN_S", "FanoutHealth", "FanoutPort", "FanoutService", "ServerHealth", "build_fanout_app"]

logger = logging.getLogger("vllm_lifetime.control")

DRAIN_S = 10.0
"""Seconds for which a shutdown tries to deliver what waits."""

_Outcome = TypeVar("_Outcome", Outcome, HintOutcome)
_View = TypeVar("_View", bound=BaseModel)


class FanoutPort:
    """An `EnginePort` over HTTP. One answer may stand for several engines of a server."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        """Reach all of `engines`, which have been started."""
        self._engines = engines
        self._answer_timeout_s = max(engine.options.answer_timeout_s for engine in engines)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Do `lifetime_call(name, payload)` on every server; return the answers that there are.

        Raises `RemoteError` when no server answers what only looks.
        """
        name, payload = args
        match name:
            case "boundaries":
                return await self._send_boundaries(payload["events"])
            case "hints":
                return await self._send_hints(payload)
            case "release":
                return await self._release(payload)
            case "tiers":
                return await self._read_tiers()
            case "sessions":
                return await self._read_sessions(payload)
            case "session":
                return await self._read_session(payload["session_id"])
        raise RemoteError(f"{name} cannot be asked of a remote server")

    # ------------------------------------------------------------------ what changes something

    async def _send_boundaries(self, events: list[dict[str, Any]]) -> list[Any]:
        bodies = [to_json(event) for event in events]
        tickets = [engine.submit(f"{PREFIX}/boundaries", bodies, can_share=True) for engine in self._engines]
        results = await self._await_results(tickets)
        by_server: list[list[Outcome]] = [[] for _ in self._engines]
        for index, event in enumerate(events):
            empty = Outcome(message_id=event["message_id"], status=OutcomeStatus.ACCEPTED)
            for server, outcome in zip(by_server, self._read_outcomes(empty, [result[index] for result in results]), strict=True):
                server.append(outcome)
        return [{"outcomes": outcomes} for outcomes in by_server]

    async def _send_hints(self, payload: dict[str, Any]) -> list[Any]:
        body = to_json({"protocol_version": PROTOCOL_VERSION, **payload})
        tickets = [engine.submit(f"{PREFIX}/hints", [body]) for engine in self._engines]
        answers = [result[0] for result in await self._await_results(tickets)]
        by_server: list[list[HintOutcome]] = [[] for _ in self._engines]
        for index, action in enumerate(payload["actions"]):
            empty = HintOutcome(action_id=action["action_id"], status=HintStatus.DEFERRED)
            results = [_item(answer, "outcomes", index) for answer in answers]
            for server, outcome in zip(by_server, self._read_outcomes(empty, results), strict=True):
                server.append(outcome)
        return [{"outcomes": outcomes} for outcomes in by_server]

    async def _release(self, payload: dict[str, Any]) -> list[Any]:
        path = f"{PREFIX}/sessions/{quote(payload['session_id'], safe='')}"
        tickets = [engine.submit(path, [b""], method="DELETE") for engine in self._engines]
        answers = [_item(result[0], "outcome", None) for result in await self._await_results(tickets)]
        empty = Outcome(message_id=payload["message_id"], status=OutcomeStatus.ACCEPTED)
        return [{"outcome": outcome} for outcome in self._read_outcomes(empty, answers)]

    async def _await_results(self, tickets: Sequence[Ticket]) -> list[list[Any]]:
        """Return what each ticket has got, at the latest after `answer_timeout_s`; what has none yet is None."""
        await asyncio.wait([ticket.done for ticket in tickets], timeout=self._answer_timeout_s)
        return [list(ticket.results) for ticket in tickets]

    def _read_outcomes(self, waiting: _Outcome, results: Sequence[Any]) -> list[_Outcome]:
        """Return one event's outcome by server; `waiting` is that of a server which has not answered.

        Every outcome says in its reason for which servers the event waits, and which refuse it: whichever of them becomes the
        merged one, it tells.
        """
        outcomes: list[_Outcome | Refused | None] = []
        remarks = []
        for engine, result in zip(self._engines, results, strict=True):
            outcome = _read_outcome(waiting, result, engine.url)
            outcomes.append(outcome)
            if outcome is None:
                remarks.append(f"queued for {engine.url}")
            elif isinstance(outcome, Refused):
                remarks.append(outcome.reason)
        if not remarks:
            return [outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, Refused)]
        remark = "; ".join(remarks)
        rejected = type(waiting.status).REJECTED
        read: list[_Outcome] = []
        for outcome in outcomes:
            if outcome is None:
                read.append(waiting.model_copy(update={"reason": remark}))
            elif isinstance(outcome, Refused):
                read.append(waiting.model_copy(update={"status": rejected, "reason": remark}))
            else:
                read.append(outcome.model_copy(update={"reason": f"{outcome.reason}; {remark}" if outcome.reason else remark}))
        return read

    # ------------------------------------------------------------------ what looks

    async def _read_tiers(self) -> list[Any]:
        """The tiers of every engine of every server. A server that does not answer stands there without any."""
        found: list[Any] = []
        for engine, answer in zip(self._engines, await self._read_all(f"{PREFIX}/tiers"), strict=True):
            views: list[Any] = []
            if not isinstance(answer, RemoteError):
                parts = [part for part in answer[1].get("engines") or [answer[1]] if _is_valid(TiersOfEngine, part)]
                views = [{**part, "server": engine.url} for part in parts]
                if not views:
                    answer = RemoteError(f"{engine.url} gave no valid answer")
            found += views or [{"tiers": {}, "server": engine.url, "missing": str(answer)}]
        if all("missing" in view for view in found):
            raise RemoteError("; ".join(view["missing"] for view in found))
        return found

    async def _read_sessions(self, payload: dict[str, Any]) -> list[Any]:
        params = {"limit": min(payload["limit"], MAX_PAGE), "segments": payload["segments"]}
        if payload["after"] is not None:
            params["after"] = payload["after"]
        answers = await self._read_all(f"{PREFIX}/sessions", params)
        pages = [answer[1] for answer in answers if not isinstance(answer, RemoteError) and _is_valid(SessionsPage, answer[1])]
        if not pages:
            raise _first_error(answers)
        return pages

    async def _read_session(self, session_id: str) -> list[Any]:
        answers = await self._read_all(f"{PREFIX}/sessions/{quote(session_id, safe='')}", unknown_is_fine=True)
        well = [answer for answer in answers if not isinstance(answer, RemoteError)]
        views = [body for status, body in well if status == 200 and _is_valid(SessionView, body)]
        if not views and len(well) < len(answers):
            # It may be there where nobody answers.
            raise _first_error(answers)
        return [{"session": view} for view in views] or [{"session": None}]

    async def _read_all(
        self, path: str, params: dict[str, Any] | None = None, *, unknown_is_fine: bool = False
    ) -> list[tuple[int, dict[str, Any]] | RemoteError]:
        """Ask all servers at once; a status other than 200 (and 404, if `unknown_is_fine`) is an error."""

        async def read(engine: RemoteEngine) -> tuple[int, dict[str, Any]] | RemoteError:
            try:
                status, answer = await engine.read(path, params)
            except RemoteError as error:
                return error
            if status == 200 or (status == 404 and unknown_is_fine):
                return status, answer
            return RemoteError(f"{engine.url} answered {status}: {answer.get('detail', '')}")

        return list(await asyncio.gather(*(read(engine) for engine in self._engines)))


class ServerHealth(BaseModel):
    """One server behind the fan-out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    status: Literal["ok", "stalled", "dead"]
    """What it says of itself; `stalled` if it does not answer in time, `dead` if it cannot be reached."""

    detail: str | None = None
    """Why it is not ok."""

    queued: int
    """Events that wait for it, or are on their way."""

    queued_bytes: int
    oldest_queued_s: float
    delivered: int
    rejected: int
    dropped: int
    expired: int
    retries: int
    last_error: str | None = None


class FanoutHealth(HealthView):
    """Whether the servers can be reached: ok if one of them is, so look at `detail` and `servers`, too."""

    servers: list[ServerHealth]


class FanoutService(ControlService):
    """The control API's operations on several servers."""

    def __init__(self, engines: Sequence[RemoteEngine], settings: ControlSettings | None = None) -> None:
        """Work on `engines`, which the caller starts and ends."""
        super().__init__(FanoutPort(engines), settings=settings)
        self._servers = engines

    async def read_health(self) -> HealthView:
        """Return the state of every server and of the queue for it. Never raises."""
        read = await asyncio.gather(*(self._read_server(engine) for engine in self._servers))
        servers = [server for server, _ in read]
        engines = [health for _, healths in read for health in healths]
        unwell = [f"{server.url}: {server.detail or server.status}" for server in servers if server.status != "ok"]
        states = {server.status for server in servers}
        merged = merge_health(engines).model_dump() if engines else {}
        return FanoutHealth.model_validate(
            merged
            | {
                "status": "ok" if "ok" in states else "stalled" if "stalled" in states else "dead",
                "detail": f"{len(unwell)} of {len(servers)} servers: {'; '.join(unwell)}" if unwell else None,
                "servers": servers,
            }
        )

    @staticmethod
    async def _read_server(engine: RemoteEngine) -> tuple[ServerHealth, list[EngineHealth]]:
        state = {"url": engine.url, **engine.state()}
        try:
            _, answer = await engine.read(f"{PREFIX}/health")
            view = HealthView.model_validate(answer)
        except RemoteError as error:
            detail = str(error).removeprefix(f"{engine.url} ")
            return ServerHealth(status="stalled" if error.is_late else "dead", detail=detail, **state), []
        except ValidationError:
            detail = f"it answers, but not as the control API does: {answer.get('detail', '')}"
            return ServerHealth(status="dead", detail=detail, **state), []
        return ServerHealth(status=view.status, detail=view.detail, **state), view.engines


def build_fanout_app(
    urls: Sequence[str],
    *,
    settings: ControlSettings,
    engine_token: str | None = None,
    options: FanoutOptions | None = None,
    drain_s: float = DRAIN_S,
) -> FastAPI:
    """Return the app that serves the control API for the servers at `urls` (from `normalize_engine_url`).

    `settings` say who may use it; `engine_token` is what the servers ask for. When the app shuts down it delivers what
    waits, for at most `drain_s` seconds, and logs how much is lost.
    """
    engines = [RemoteEngine(url, engine_token, options or FanoutOptions()) for url in urls]
    service = FanoutService(engines, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for engine in engines:
            engine.start()
        yield
        # What was answered `queued` may not have come to the servers' queues yet.
        began_s = time.monotonic()
        await service.drain(drain_s)
        left_s = max(0.0, drain_s - (time.monotonic() - began_s))
        lost = await asyncio.gather(*(engine.aclose(left_s) for engine in engines))
        for engine, count in zip(engines, lost, strict=True):
            if count:
                logger.warning("not delivered to %s: %d event(s)", engine.url, count)

    app = FastAPI(title="vllm-lifetime control", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(build_router(lambda: service, settings))
    return app


def _item(answer: Any, key: str, index: int | None) -> Any:
    """Return what stands in a server's answer under `key` (and `index`); a missing answer or refusal as it is."""
    if answer is None or isinstance(answer, Refused):
        return answer
    value = answer.get(key)
    if index is None:
        return value
    return value[index] if isinstance(value, list) and index < len(value) else {}


def _read_outcome(waiting: _Outcome, result: Any, url: str) -> _Outcome | Refused | None:
    """Return a server's outcome as ours, without fields that we do not know; a missing one or a refusal as it is."""
    if result is None or isinstance(result, Refused):
        return result
    model = type(waiting)
    fields = {key: value for key, value in result.items() if key in model.model_fields} if isinstance(result, dict) else {}
    try:
        return model.model_validate(waiting.model_dump(include={"message_id", "action_id"}) | fields)
    except ValidationError:
        return Refused(f"{url} gave no valid outcome")


def _is_valid(model: type[_View], answer: Any) -> bool:
    try:
        model.model_validate(answer)
    except ValidationError:
        return False
    return True


def _first_error(answers: Sequence[tuple[int, dict[str, Any]] | RemoteError]) -> RemoteError:
    return next((answer for answer in answers if isinstance(answer, RemoteError)), RemoteError("no server gave a valid answer"))
