# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime wear [PATH | --url URL]`: what has been written to flash, and how long it lasts at that rate.

Reads the ledgers beside a flash file, whether a server uses it or not, or asks a running server. Needs no vLLM.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import NO_ANSWER, fail
from vllm_lifetime.cli.server_url import server_root
from vllm_lifetime.cli.top import TokenOption, format_bytes, printable

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["add_to", "find_ledgers", "wear"]

REQUEST_TIMEOUT_S = 15.0
WIDTH = 120
"""Columns where there is no terminal to ask."""

WINDOWS = {"hour": "last hour", "day": "last day", "ledger": "since counting began", "process": "since the server started"}


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    app.command("wear")(wear)


def wear(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="The flash file (flash_path) or its ledger. Without it: ask a server.")
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="VLLM_LIFETIME_URL", help="A running server's root, or its URL that ends in /v1.")
    ] = "http://localhost:8000",
    token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show bytes written to flash by segment class, program/erase cycles, and device-years at the present rate."""

    files, writes = (_read_files(path), None) if path is not None else _ask(url, token)
    if as_json:
        typer.echo(json.dumps({"wear": files, "flash_writes": writes}, indent=2))
        return
    console = results_console(WIDTH, highlight=True)
    if not files:
        console.print("This server has no flash tier that keeps a wear ledger.")
    for figures in files:
        console.print(written_table(figures))
        console.print(life_table(figures))
        for line in notes(figures):
            console.print(line, markup=False, highlight=False)
        console.print()
    for number, part in enumerate(writes or []):
        console.print(budget_line(part, number if len(writes or []) > 1 else None), markup=False, highlight=False)


def find_ledgers(path: Path) -> list[Path]:
    """The ledgers of a flash file and of its other ranks' (`PATH.dp1-rank0.wear`, ...); or `path` itself if it is one."""
    if path.suffix == ".wear":
        return [path]
    own = path.with_name(f"{path.name}.wear")
    ranks = sorted(file for file in path.parent.glob("*.wear") if file.name.startswith(f"{path.name}.dp"))
    return [own, *ranks] if own.exists() else ranks


def _read_files(path: Path) -> list[dict[str, Any]]:
    from vllm_lifetime.flash.drive import describe_drive
    from vllm_lifetime.flash.errors import FlashError
    from vllm_lifetime.flash.wear_figures import WearSnapshot, wear_figures
    from vllm_lifetime.flash.wear_file import read_wear_file

    found = find_ledgers(path)
    if not found:
        fail(f"{path}: there is no ledger beside it ({path}.wear); a server with this flash_path keeps one")
    answer = []
    for ledger in found:
        try:
            header, counts, _ = read_wear_file(str(ledger))
        except (FlashError, OSError) as error:
            fail(str(error))
        snapshot = WearSnapshot.of(header, counts, drive=describe_drive(ledger))
        answer.append(wear_figures(snapshot, time.time()))
    return answer


def _ask(url: str, token: str | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    import httpx
    from pydantic import ValidationError

    from vllm_lifetime.control.views import TiersView

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    address = f"{server_root(url)}/lifetime/v1/tiers"
    try:
        response = httpx.get(address, headers=headers, timeout=REQUEST_TIMEOUT_S)
    except httpx.HTTPError as error:
        fail(f"no answer from {address}: {str(error) or type(error).__name__}", NO_ANSWER)
    if response.status_code == 404:
        fail(f"{url} has no /lifetime/v1/tiers: was it started with --kv-connector lifetime?", NO_ANSWER)
    if response.status_code != 200:
        fail(f"GET {address}: {response.status_code} {printable(response.text[:200])}".rstrip(), NO_ANSWER)
    try:
        view = TiersView.model_validate_json(response.content)
    except ValidationError as error:
        fail(f"{address} answered what is no state of tiers ({error.error_count()} problems)", NO_ANSWER)
    files = [item.model_dump(mode="json") for item in view.wear or []]
    return files, [engine.flash_writes.model_dump(mode="json") for engine in view.engines if engine.flash_writes is not None]


def written_table(figures: dict[str, Any]) -> Table:
    """Bytes by class and reason."""
    reasons = sorted({reason for by_reason in figures["written_bytes"].values() for reason in by_reason})
    total = figures["payload_bytes"] + figures["overhead_bytes"]
    table = _table(f"{printable(figures['file'])}: {format_bytes(total)} written in {format_age(figures['age_s'])}")
    table.add_column("class")
    for name in (*reasons, "all", "share"):
        table.add_column(printable(name), justify="right", no_wrap=True)
    by_class = sorted(figures["written_bytes"].items(), key=lambda item: (item[0] == "overhead", -sum(item[1].values())))
    for segment_class, by_reason in by_class:
        length = sum(by_reason.values())
        cells = [format_bytes(by_reason[reason]) if reason in by_reason else "" for reason in reasons]
        share = f"{100 * length / total:.1f} %" if total else ""
        table.add_row(printable(segment_class), *cells, format_bytes(length), share)
    return table


def life_table(figures: dict[str, Any]) -> Table:
    """Rates, drive writes and device-years by window."""
    table = _table("At the rate of the")
    for name in ("", "KV written", "drive writes/day", "device-years"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for key, label in WINDOWS.items():
        if key in figures["rates_bytes_per_s"]:
            years = figures["device_years"][key]
            table.add_row(
                label,
                f"{format_bytes(figures['rates_bytes_per_s'][key])}/s",
                f"{figures['drive_writes_per_day'][key]:.3g}",
                "-" if years is None else f"{years:,.3g}",
            )
    return table


def notes(figures: dict[str, Any]) -> list[str]:
    """What does not fit into a table, a sentence a line."""
    cycles = figures["cycles"]
    lines = [
        f"Endurance: {100 * figures['endurance_used']:.4g} % of {figures['endurance_cycles']:,} cycles x "
        f"{format_bytes(figures['size_bytes'])} used.",
        f"Cycles of {cycles['erase_blocks']:,} erase blocks of {format_bytes(figures['erase_block_bytes'])}: mean "
        f"{cycles['mean']:.3g}, most {cycles['max']:.3g}; written in place: {cycles['in_place_erases']:,} erases, most "
        f"{cycles['max_in_place_erases']:,}.",
    ]
    if figures["write_amplification"] is not None:
        lines.append(
            f"Write amplification: {figures['write_amplification']:.3f} by whole pages; written in place "
            f"{figures['in_place_write_amplification']:.3g}."
        )
    ledger = figures["ledger"]
    if not ledger["is_kept"]:
        lines.append("The ledger is NOT kept: it cannot be read or written, and these figures end with the server.")
    if ledger["errors"]:
        told = ", ".join(f"{printable(kind)} {count}" for kind, count in sorted(ledger["errors"].items()))
        lines.append(f"Failed reads and writes of the ledger: {told}.")
    drive = figures["drive"]
    if drive is not None:
        if drive["name"]:
            written = drive["written_since_boot_bytes"]
            known = "" if written is None else f", {format_bytes(written)} written since boot by all processes"
            model = printable(drive["model"]) or "no model given"
            lines.append(f"Drive {printable(drive['name'])} ({model}), {format_bytes(drive['capacity_bytes'])}{known}.")
        if drive["note"]:
            lines.append(printable(drive["note"]))
    return lines


def budget_line(writes: dict[str, Any], engine: int | None) -> str:
    """What may be written, in a sentence."""
    who = "" if engine is None else f"Engine {engine}: "
    refused = sum(count for by_reason in writes["refused_blocks"].values() for count in by_reason.values())
    line = f"{who}placement {printable(writes['placement'])}, {refused:,} blocks refused"
    if writes["bytes_per_day"] is None:
        return f"{line}; no daily budget."
    state = "used up for now, nothing is written" if writes["is_throttled"] else f"{format_bytes(writes['available_bytes'])} now"
    return f"{line}; budget {format_bytes(writes['bytes_per_day'])} a day: {state}."


def format_age(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
