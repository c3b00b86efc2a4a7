# SPDX-License-Identifier: Apache-2.0
"""The seam check, on a small tree that stands in for vLLM's source."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts.check_seams import SourceTree, Verdict, as_markdown, check, findings, main
from scripts.seams import GROUPS, Seam, Use

POOL = """\
class Pool:
    size: int = 0

    def __init__(self):
        self.queue = []

    def take(self, count, *, strict=False): ...
    def give(self, blocks): ...
    @classmethod
    def make(cls, size): ...
    async def wait(self): ...
"""
PATH = "v1/core/block_pool.py"


@pytest.fixture
def source(tmp_path: Path) -> SourceTree:
    """A folder with a package vllm of one class."""
    return SourceTree(make_tree(tmp_path))


def make_tree(folder: Path) -> Path:
    """Write the stand-in sources."""
    files = {"__init__.py": "", "_version.py": "__version__ = version = '9.8.7'\n", PATH: POOL}
    for path, text in files.items():
        target = folder / "vllm" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("seam", "verdict", "how"),
    [
        (Seam(PATH, "Pool.give", Use.CALL, ("blocks",)), "ok", ""),
        (Seam(PATH, "Pool.size", Use.READ), "ok", ""),
        (Seam(PATH, "Pool.queue", Use.READ), "ok", ""),
        (Seam(PATH, "Pool.touch", Use.CALL, ("blocks",)), "missing", ""),
        (Seam(PATH, "Other.give", Use.CALL, ("blocks",)), "missing", ""),
        (Seam("gone.py", "Pool", Use.READ), "missing", "no file gone.py"),
        (Seam(PATH, "Pool.give", Use.CALL, ("free",)), "changed", "no free, new blocks"),
        (Seam(PATH, "Pool.take", Use.CALL, ("count",)), "ok", ""),
        (Seam(PATH, "Pool.take", Use.OVERRIDE, ("count",)), "changed", "new strict"),
        (Seam(PATH, "Pool.take", Use.CALL, ("strict", "count")), "changed", "order is count, strict"),
        (Seam(PATH, "Pool.make", Use.CALL, ("size",), "classmethod"), "ok", ""),
        (Seam(PATH, "Pool.make", Use.CALL, ("size",)), "changed", "is classmethod, was a plain method"),
        (Seam(PATH, "Pool.wait", Use.CALL, (), "async"), "ok", ""),
        (Seam(PATH, "queue", Use.READ, pattern=r"^        self\.queue = \[\]$"), "ok", ""),
        (Seam(PATH, "deque", Use.READ, pattern=r"deque\(\)"), "changed", "other code"),
    ],
)  # fmt: skip
def test_verdicts(source: SourceTree, seam: Seam, verdict: str, how: str) -> None:
    found = check(source, seam)
    assert (found.verdict, found.how) == (verdict, how)
    assert found.breaks is (verdict != "ok")


def test_a_handled_difference_breaks_nothing(source: SourceTree) -> None:
    found = check(source, Seam(PATH, "Pool.touch", Use.CALL, (), without="we do without"))
    assert found.verdict is Verdict.MISSING and not found.breaks
    assert str(found) == "missing (handled)"


def test_wheels_and_folders_read_alike(tmp_path: Path, source: SourceTree) -> None:
    wheel = tmp_path / "vllm-9.8.7-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (tmp_path / "vllm").rglob("*.py"):
            archive.write(path, path.relative_to(tmp_path))
    seam = Seam(PATH, "Pool.give", Use.CALL, ("blocks",))
    for tree in (source, SourceTree(wheel), SourceTree(tmp_path / "vllm")):
        assert tree.version == "9.8.7"
        assert check(tree, seam).verdict is Verdict.OK


def test_markdown_explains_what_is_handled(source: SourceTree) -> None:
    seams = [
        Seam(PATH, "Pool.give", Use.CALL, ("blocks",)),
        Seam(PATH, "Pool.touch", Use.CALL, (), without="we do without"),
    ]
    text = as_markdown([source.version], findings([source], {"Pools": seams}))
    assert "### Pools" in text and "| `Pool.give` |" in text and "| ok |" in text
    assert "- `Pool.touch`: we do without." in text


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make_tree(tmp_path))]) == 1
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no vLLM sources" in capsys.readouterr().err


def test_the_installed_vllm_has_every_seam(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--markdown"]) == 0
    output = capsys.readouterr().out
    assert all(f"### {group}" in output for group in GROUPS)
