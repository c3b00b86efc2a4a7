# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime top`: what the dashboard shows, in a terminal.

Asks the control API of a running server and needs no vLLM. Ids are chosen by whoever sends requests: they are printed as text,
with what a terminal would act on replaced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import NO_ANSWER, fail
from vllm_lifetime.cli.server_url import server_root

if TYPE_CHECKING:
    import httpx
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

__all__ = ["Reader", "Sample", "TokenOption", "Unavailable", "add_to", "fill_bar", "render", "top"]

CLASSES = {
    "shared": ("S", "white on blue"),
    "lead": ("L", "black on green"),
    "worker": ("W", "black on cyan"),
    "reviewer": ("V", "black on yellow"),
    "reasoning_laden": ("R", "black on magenta"),
    "reasoning_stripped": ("r", "white on purple4"),
    "unknown": ("?", "white on grey42"),
    "retired": (":", "dim"),
    "empty": (".", "dim"),
}
"""Letter and style of each class of blocks. Letters, so that a pipe and a monochrome terminal show them too."""

TIERS = ("hbm", "host", "flash")
PAGE = 500
MAX_PAGES = 4
RATE_SPAN_S = 10.0
"""Seconds that rates are taken over."""

LOAD_SHARE = 0.1
"""Share of the time that the server may be busy with us, unless we would wait longer than `LONGEST_WAIT_S` seconds for it."""

LONGEST_WAIT_S = 10.0
REQUEST_TIMEOUT_S = 15.0
TokenOption = Annotated[
    str | None,
    typer.Option(
        envvar="VLLM_LIFETIME_TOKEN",
        help="Bearer token. Better in the environment: a command line can be read by all.",
    ),
]


class Unavailable(Exception):
    """The server did not say what was asked for; the message is a sentence."""


@dataclass(frozen=True)
class Sample:
    """What the server said at one moment (`at_s`: seconds of a monotonic clock)."""

    at_s: float
    tiers: dict[str, Any]
    health: dict[str, Any]
    sessions: list[dict[str, Any]]
    total: int
    events: list[dict[str, Any]]


class Reader:
    """Asks one server."""

    def __init__(self, client: httpx.Client) -> None:
        """Ask with `client`, whose base URL is the server's root."""
        self._client = client

    def read(self, max_events: int) -> Sample:
        """Ask for everything once. Raises `Unavailable`."""
        health = self._get("health", accepted=(200, 503))
        tiers = self._get("tiers")
        events = self._get("events", limit=max_events)
        sessions: list[dict[str, Any]] = []
        query: dict[str, Any] = {"limit": PAGE}
        for _ in range(MAX_PAGES):
            page = self._get("sessions", **query)
            sessions += page["sessions"]
            if page.get("next") is None:
                break
            query["after"] = page["next"]
        return Sample(time.monotonic(), tiers, health, sessions, max(page["total"], len(sessions)), events["events"])

    def _get(self, path: str, accepted: Sequence[int] = (200,), **query: Any) -> Any:
        import httpx

        try:
            response = self._client.get(f"/lifetime/v1/{path}", params=query)
            answer = response.json()
        except httpx.TimeoutException:
            raise Unavailable(f"{self._client.base_url}/lifetime/v1/{path}: no answer within {REQUEST_TIMEOUT_S:g} s") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"No answer from {self._client.base_url}: {str(error) or type(error).__name__}") from None
        except ValueError:
            answer = None
        if response.status_code in accepted and isinstance(answer, dict) and ("status" in answer or response.status_code == 200):
            return answer
        if response.status_code == 404:
            raise Unavailable(f"{self._client.base_url} has no /lifetime/v1/{path}: was it started with --kv-connector lifetime?")
        detail = answer.get("detail", "") if isinstance(answer, dict) else ""
        raise Unavailable(f"GET /lifetime/v1/{path}: {response.status_code} {printable(detail)}".rstrip())


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    app.command("top")(top)


def top(
    url: Annotated[str, typer.Option(envvar="VLLM_LIFETIME_URL", help="Root of the server.")] = "http://localhost:8000",
    token: TokenOption = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what is so now and exit; 1 if there is no answer.")] = False,
) -> None:
    """Show tiers, sessions and boundaries of a running server as they change. Ends with Ctrl-C."""
    import httpx

    console = results_console()
    if not console.is_terminal and not once:
        fail("this is no terminal. Use --once to print what is so now.")
    root = server_root(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=root, headers=headers, timeout=REQUEST_TIMEOUT_S) as client:
        reader = Reader(client)
        if once:
            try:
                console.print(render(root, [reader.read(10)], None, 20, 10))
            except Unavailable as error:
                fail(str(error), NO_ANSWER)
            return
        try:
            watch(console, reader, root, interval)
        except KeyboardInterrupt:
            return


def watch(console: Console, reader: Reader, root: str, interval_s: float) -> None:
    """Draw until interrupted. A server that does not answer is asked on; what it said last stays."""
    from rich.live import Live

    samples: deque[Sample] = deque()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            # The tiers and heads take about 20 lines; sessions get twice as many of the rest as boundaries.
            rest = max(6, console.size.height - 20)
            problem = None
            began = time.monotonic()
            try:
                samples.append(reader.read(max(1, rest // 3)))
                while len(samples) > 2 and samples[-1].at_s - samples[0].at_s > RATE_SPAN_S:
                    samples.popleft()
            except Unavailable as error:
                problem = f"{error}. Trying again."
            took_s = time.monotonic() - began
            live.update(render(root, list(samples), problem, rest - rest // 3, rest // 3), refresh=True)
            time.sleep(max(interval_s, min(LONGEST_WAIT_S, took_s / LOAD_SHARE)))


# ---------------------------------------------------------------------- drawing


def render(root: str, samples: Sequence[Sample], problem: str | None, max_sessions: int, max_events: int) -> RenderableType:
    """Return one frame: the latest of `samples`, rates over all of them, and what is wrong."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if problem is not None:
        parts.append(Text(problem, style="bold red"))
    if not samples:
        parts.insert(0, Text.assemble(("vllm-lifetime ", "bold"), printable(root)))
        return Group(*parts)
    last = samples[-1]
    status = str(last.health.get("status", "?"))
    style = {"ok": "bold green", "stalled": "bold yellow"}.get(status, "bold red")
    head = Text.assemble(
        ("vllm-lifetime ", "bold"),
        printable(root),
        "  ",
        (printable(status) if problem is None else "no answer", style if problem is None else "bold red"),
        f"  oldest transfer {last.health.get('oldest_io_s') or 0.0:.1f} s",
        f"  flash faults {last.health.get('flash_faults') or 0}",
    )
    if last.health.get("detail"):
        head.append(f"  {printable(last.health['detail'])}", style=style)
    parts.insert(0, head)
    parts += [_tiers(samples), _sessions(last, max_sessions), _events(last, max_events)]
    return Group(*parts)


def _tiers(samples: Sequence[Sample]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    first, last = samples[0].tiers, samples[-1].tiers
    seconds = samples[-1].at_s - samples[0].at_s
    counters, before = last.get("counters") or {}, first.get("counters") or {}
    tokens = counters.get("prompt_tokens", 0)
    new_tokens = tokens - before.get("prompt_tokens", 0)
    parts: list[RenderableType] = []
    for name in sorted(last["tiers"], key=_tier_order):
        tier, old = last["tiers"][name], first["tiers"].get(name, {})
        hits = counters.get("hit_tokens", {}).get(name, 0)
        new_hits = hits - before.get("hit_tokens", {}).get(name, 0)
        line = Text.assemble(
            (f"{printable(name):6}", "bold"),
            f"{tier.get('used_blocks') or 0:,} of {tier.get('capacity_blocks') or 0:,} blocks, ",
            f"{format_bytes(tier.get('used_bytes'))} of {format_bytes(tier.get('capacity_bytes'))}; hit rate ",
            # A counter that went back belongs to another run of the engine: then nothing is known yet.
            f"{new_hits / new_tokens:.1%}" if new_tokens > 0 <= new_hits else "-",
            f" ({hits / tokens:.1%} ever)" if tokens else "",
        )
        if name != "hbm":
            written = tier.get("bytes_written") or 0
            grown = written - (old.get("bytes_written") or 0)
            rate = f"{format_bytes(grown / seconds)}/s, " if seconds > 0 and grown >= 0 else ""
            line.append(f"; written {rate}{format_bytes(written)}; read {format_bytes(tier.get('bytes_read'))}")
        counts = class_counts(tier, last.get("classes", {}).get(name, {}))
        numbers = Text(", ".join(f"{each} {count:,}" for each, count in counts.items() if count), style="dim")
        parts += [line, Padding(_Bar(counts), (0, 0, 0, 6)), Padding(numbers, (0, 0, 0, 6))]
    legend = Text()
    for name, (letter, style) in CLASSES.items():
        legend.append(letter, style=style)
        legend.append(f"\N{NO-BREAK SPACE}{name}  ", style="dim")
    span = f"rates over {seconds:.0f} s" if seconds > 0 else "no rates yet: they need two looks"
    note = Text(f"{counters.get('requests', 0):,} requests, {tokens:,} prompt tokens; {span}", style="dim")
    return Group(*parts, legend, note)


class _Bar:
    """A bar of a tier's blocks by class, as wide as there is room."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for name, cells in fill_bar(self._counts, options.max_width).items():
            letter, style = CLASSES[name]
            yield Segment(letter * cells, console.get_style(style))
        yield Segment.line()


def class_counts(tier: Mapping[str, Any], classes: Mapping[str, int]) -> dict[str, int]:
    """Return the blocks of a tier by class, with the retired and the empty; what is used but of no known segment is `unknown`."""
    counts = dict.fromkeys(CLASSES, 0)
    for name, blocks in classes.items():
        counts[name if name in CLASSES else "unknown"] += blocks
    counts["retired"] = tier.get("retired_blocks") or 0
    counts["empty"] = max(0, (tier.get("free_blocks") or 0) - counts["retired"])
    live = sum(counts.values()) - counts["retired"] - counts["empty"]
    counts["unknown"] += max(0, (tier.get("used_blocks") or 0) - live)
    return counts


def fill_bar(counts: Mapping[str, int], width: int) -> dict[str, int]:
    """Return how many of `width` cells each name gets: rounded, with what would not be seen first in line for a cell."""
    total = sum(counts.values())
    if total == 0:
        return dict.fromkeys(counts, 0)
    cells = {name: count * width // total for name, count in counts.items()}
    by_remainder = sorted(counts, key=lambda name: (cells[name] > 0 or counts[name] == 0, -(counts[name] * width % total)))
    for name in by_remainder[: width - sum(cells.values())]:
        cells[name] += 1
    return cells


def _sessions(sample: Sample, most: int) -> RenderableType:
    def held_bytes(session: dict[str, Any]) -> int:
        return sum(held.get("bytes") or 0 for held in session.get("held", {}).values())

    tiers = [f">{tier}" for tier in TIERS]
    table = _table("session", "workflows", "state", ">running", ">idle", *tiers, ">bytes", "last boundary")
    for session in sorted(sample.sessions, key=held_bytes, reverse=True)[:most]:
        last = session.get("last_boundary")
        table.add_row(
            _cell(session["session_id"] if session.get("session_id") is not None else "-"),
            _cell(", ".join(session.get("workflow_ids", []))),
            _cell(session.get("state", "")),
            str(session.get("running_requests", 0)),
            f"{session.get('idle_s', 0.0):.0f} s",
            *(f"{session.get('held', {}).get(tier, {}).get('blocks', 0):,}" for tier in TIERS),
            format_bytes(held_bytes(session)),
            _cell(f"{last['kind']} {last['age_s']:.0f} s ago" if last else "-"),
        )
    table.title = f"Sessions by bytes held: {len(table.rows):,} of {sample.total:,}"
    if len(sample.sessions) < sample.total:
        table.title += f", from the {len(sample.sessions):,} that were read"
    return table


def _events(sample: Sample, most: int) -> RenderableType:
    table = _table("time", "kind", "session", "workflow", "agent", "outcome", ">blocks", ">bytes")
    table.title = "Latest boundaries" if sample.events else "No boundary has come yet"
    for record in sample.events[::-1][:most]:
        event, outcome = record["event"], record["outcome"]
        table.add_row(
            datetime.fromtimestamp(record["received_at_s"]).strftime("%H:%M:%S"),
            _cell(event["kind"]),
            _cell(event.get("session_id") or "-"),
            _cell(event.get("workflow_id") or "-"),
            _cell(" ".join(part for part in (event.get("agent"), event.get("agent_id")) if part) or "-"),
            _cell(outcome["status"]),
            f"{outcome.get('blocks', 0):,}",
            format_bytes(outcome.get("bytes")),
        )
    return table


def _table(*columns: str) -> Table:
    """Return an empty table; a name that begins with `>` makes a column of numbers."""
    from rich.table import Table

    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold", title_justify="left", title_style="bold")
    for name in columns:
        if name.startswith(">"):
            table.add_column(name[1:], justify="right", no_wrap=True)
        else:
            # Not `no_wrap`: these columns give way first, and their cells are cut, not wrapped.
            table.add_column(name, min_width=len(name))
    return table


def _tier_order(name: str) -> tuple[int, str]:
    return (TIERS.index(name) if name in TIERS else len(TIERS), name)


def printable(value: object) -> str:
    """Return foreign text with each character that a terminal would act on, or not show, replaced by a replacement character."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in str(value))


def _cell(value: object) -> Text:
    """Return foreign text for a cell, not to be read as markup."""
    from rich.text import Text

    return Text(printable(value), no_wrap=True, overflow="ellipsis")


def format_bytes(value: float | None) -> str:
    """Return so many bytes in a binary unit."""
    rest = float(value or 0)
    units = iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    while rest >= 1024 and unit != "PiB":
        rest /= 1024
        unit = next(units)
    return f"{rest:.0f} {unit}" if unit == "B" or rest >= 100 else f"{rest:.1f} {unit}"
