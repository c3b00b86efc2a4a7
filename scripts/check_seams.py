# SPDX-License-Identifier: Apache-2.0
"""Check the places in vLLM that this package stands on, in vLLM's source, without importing it.

    python -m scripts.check_seams [--markdown] [WHEEL_OR_DIR ...]

Each argument is a wheel (`pip download --no-deps vllm==0.33.0` fetches one), a folder that contains the
package `vllm`, or that package itself; without arguments the installed vLLM is checked. Prints one row
for each seam of `scripts/seams.py` and one column for each version. Exits with 1 when a seam is missing
or changed and this package has no other way.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
import zipfile
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.seams import GROUPS, Seam, Use

Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceTree:
    """The text of one vLLM: a wheel, or a folder."""

    def __init__(self, origin: Path) -> None:
        """Open `origin`; raises FileNotFoundError when there is no package vllm in it."""
        self._archive = zipfile.ZipFile(origin) if origin.is_file() else None
        self._folder = origin / "vllm" if (origin / "vllm" / "__init__.py").is_file() else origin
        self._parsed: dict[str, ast.Module] = {}
        if self.text("__init__.py") is None or self.text("v1/core/block_pool.py") is None:
            raise FileNotFoundError(f"no vLLM sources in {origin}")

    def text(self, path: str) -> str | None:
        """Return the file `path` (relative to the package), or None where there is none."""
        try:
            if self._archive is not None:
                return self._archive.read(f"vllm/{path}").decode()
            return (self._folder / path).read_text()
        except (KeyError, OSError):
            return None

    def tree(self, path: str) -> ast.Module | None:
        """Return the parsed file `path`, or None where there is none."""
        if path not in self._parsed:
            text = self.text(path)
            if text is None:
                return None
            self._parsed[path] = ast.parse(text)
        return self._parsed[path]

    @cached_property
    def version(self) -> str:
        """The version that this vLLM says it is."""
        found = re.search(r"^__version__ = [^'\n]*'([^'\n]+)'", self.text("_version.py") or "", re.M)
        return found.group(1) if found else "unknown"


class Verdict(StrEnum):
    """What became of a seam."""

    OK = "ok"
    MISSING = "missing"
    CHANGED = "changed"


@dataclass(frozen=True)
class Finding:
    """One seam in one version."""

    seam: Seam
    verdict: Verdict
    how: str = ""

    @property
    def breaks(self) -> bool:
        """Whether this package cannot work here."""
        return self.verdict is not Verdict.OK and not self.seam.without

    def __str__(self) -> str:
        """Say it in a table's cell."""
        text = f"{self.verdict}: {self.how}" if self.how else str(self.verdict)
        return text if self.verdict is Verdict.OK or self.breaks else f"{text} (handled)"


def check(source: SourceTree, seam: Seam) -> Finding:
    """Look for `seam` in `source`."""
    if seam.pattern:
        text = source.text(seam.path)
        if text is None:
            return Finding(seam, Verdict.MISSING, f"no file {seam.path}")
        found = re.search(seam.pattern, text, re.M)
        return Finding(seam, Verdict.OK) if found else Finding(seam, Verdict.CHANGED, "other code")
    tree = source.tree(seam.path)
    if tree is None:
        return Finding(seam, Verdict.MISSING, f"no file {seam.path}")
    node = _find(tree, seam.name)
    if node is None:
        return Finding(seam, Verdict.MISSING)
    if seam.parameters is None:
        return Finding(seam, Verdict.OK)
    if not isinstance(node, Function):
        return Finding(seam, Verdict.CHANGED, "no longer a function")
    how = _difference(node, seam)
    return Finding(seam, Verdict.CHANGED, how) if how else Finding(seam, Verdict.OK)


def _find(tree: ast.Module, name: str) -> ast.AST | None:
    """Find `Class.member`, `Class` or `function` in a module."""
    owner_name, _, member = name.rpartition(".")
    if not owner_name:
        return _named(tree.body, member)
    owner = _named(tree.body, owner_name)
    if not isinstance(owner, ast.ClassDef):
        return None
    return _named(owner.body, member) or _assigned_to_self(owner, member)


def _named(body: list[ast.stmt], name: str) -> ast.AST | None:
    """Find the function, class or annotated or assigned name in `body`."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return node
            case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return node
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return node
    return None


def _assigned_to_self(owner: ast.ClassDef, name: str) -> ast.AST | None:
    """Find where a method of `owner` sets `self.<name>`."""
    for node in ast.walk(owner):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=found, ctx=ast.Store()) if found == name:
                return node
    return None


def _difference(function: Function, seam: Seam) -> str:
    """Say how a function differs from what `seam` expects; empty where it does not matter."""
    kind = _kind(function)
    if kind != seam.kind:
        return f"is {kind or 'a plain method'}, was {seam.kind or 'a plain method'}"
    wanted = seam.parameters or ()
    names, optional = _parameters(function)
    gone = [name for name in wanted if name not in names]
    added = [name for name in names if name not in wanted]
    if seam.use is Use.CALL:
        # A caller who does not know of an optional parameter is not hurt by it.
        added = [name for name in added if name not in optional]
    if gone or added:
        return ", ".join([f"no {name}" for name in gone] + [f"new {name}" for name in added])
    if [name for name in names if name in wanted] != list(wanted):
        return f"order is {', '.join(names)}"
    return ""


def _kind(function: Function) -> str:
    """Name the decorator that decides how a function is called, or `async`, or nothing."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Name) and decorator.id in (
            "staticmethod",
            "classmethod",
            "property",
        ):
            return decorator.id
    return "async" if isinstance(function, ast.AsyncFunctionDef) else ""


def _parameters(function: Function) -> tuple[list[str], set[str]]:
    """Return a function's parameters without self or cls, and which of them need no argument."""
    arguments = function.args
    positional = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    optional = set(positional[len(positional) - len(arguments.defaults) :])
    names = positional[1:] if positional[:1] in (["self"], ["cls"]) else positional
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
        optional.add(names[-1])
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(arg.arg)
        if default is not None:
            optional.add(arg.arg)
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
        optional.add(names[-1])
    return names, optional


def installed_source() -> Path:
    """Return the folder of the installed package vllm, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("vLLM is not installed; name a wheel or a folder")
    return Path(spec.origin).parent


def findings(sources: list[SourceTree], groups: dict[str, list[Seam]]) -> dict[str, list[list[Finding]]]:
    """Check every seam in every source: for each group its rows, for each row a finding a source."""
    return {group: [[check(source, seam) for source in sources] for seam in seams] for group, seams in groups.items()}


def as_markdown(versions: list[str], table: dict[str, list[list[Finding]]]) -> str:
    """Render one Markdown table a group, and under it what this package does about differences."""
    parts = []
    for group, rows in table.items():
        lines = [
            f"### {group}\n",
            f"| seam | file | use | {' | '.join(versions)} |",
            "|---|---|---|" + "---|" * len(versions),
        ]
        for row in rows:
            seam = row[0].seam
            cells = " | ".join(str(finding) for finding in row)
            lines.append(f"| {_label(seam)} | `{seam.path}` | {seam.use} | {cells} |")
        notes = [
            f"- {_label(row[0].seam)}: {row[0].seam.without}."
            for row in rows
            if any(finding.verdict is not Verdict.OK and not finding.breaks for finding in row)
        ]
        parts.append("\n".join([*lines, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"


def _label(seam: Seam) -> str:
    """Name a seam, as code where it is a name in the source."""
    return seam.name if seam.pattern else f"`{seam.name}`"


def as_table(versions: list[str], table: dict[str, list[list[Finding]]]) -> Table:
    """Render everything as one table for a terminal."""
    colours = {Verdict.OK: "green", Verdict.MISSING: "red", Verdict.CHANGED: "yellow"}
    result = Table("seam", *versions, title="What vllm-lifetime needs of vLLM")
    for group, rows in table.items():
        result.add_row(f"[bold]{group}")
        for row in rows:
            cells = [f"[{colours[finding.verdict]}]{finding}" for finding in row]
            result.add_row(f"  {row[0].seam.name}", *cells)
        result.add_section()
    return result


def main(arguments: list[str]) -> int:
    """Check what the command line names and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("origins", nargs="*", type=Path, metavar="WHEEL_OR_DIR")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = parser.parse_args(arguments)
    try:
        sources = [SourceTree(path) for path in options.origins or [installed_source()]]
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    versions = [source.version for source in sources]
    table = findings(sources, GROUPS)
    if options.markdown:
        print(as_markdown(versions, table), end="")
    else:
        Console().print(as_table(versions, table))
    flat = [finding for rows in table.values() for row in rows for finding in row]
    breaking = sum(finding.breaks for finding in flat)
    handled = sum(finding.verdict is not Verdict.OK for finding in flat) - breaking
    print(
        f"{len(flat)} checked, {breaking} missing or changed, {handled} more handled",
        file=sys.stderr,
    )
    return 1 if breaking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
