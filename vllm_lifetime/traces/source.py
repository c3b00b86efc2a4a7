# SPDX-License-Identifier: Apache-2.0
"""What every reader of a trace needs: files, packed or not, and errors that say where and what."""

import gzip
import json
import lzma
import math
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

__all__ = ["Row", "TraceError", "is_text", "json_documents", "json_lines", "parse_json", "text_lines"]

_T = TypeVar("_T")
_PACKED_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)
_REQUIRED: Any = object()


class TraceError(ValueError):
    """A trace cannot be read: `where` (file and line or member), and what was wrong with which field."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class Row:
    """One JSON object of a trace, with fields that are checked as they are read. `where` begins every error."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise TraceError(where, f"expected a JSON object, found {_short(value)}")
        self.value: Mapping[str, Any] = value
        self.where = where

    def error(self, name: str, expected: str) -> TraceError:
        """The error for field `name` whose value is not what was `expected`."""
        found = _short(self.value[name]) if name in self.value else "nothing"
        return TraceError(self.where, f"field {name!r}: expected {expected}, found {found}")

    def text(self, name: str, default: str = _REQUIRED) -> str:
        """A non-empty string."""
        return self._get(name, default, "a non-empty string that UTF-8 can hold", lambda value: is_text(value) and bool(value))

    def optional_text(self, name: str) -> str | None:
        """A string, or None where the field is absent, null or empty."""
        value = self.value.get(name)
        if value is not None and not is_text(value):
            raise self.error(name, "a string that UTF-8 can hold, or null")
        return value or None

    def count(self, name: str, default: int = _REQUIRED) -> int:
        """A whole number of at least 0, small enough to be counted with."""
        expected = "a whole number of at least 0, below 2**53"
        return self._get(name, default, expected, lambda value: type(value) is int and 0 <= value < 1 << 53)

    def seconds(self, name: str, default: float = _REQUIRED) -> float:
        """A finite number of at least 0."""
        return float(self._get(name, default, "a number of at least 0", _is_duration))

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """True or false."""
        return self._get(name, default, "true or false", lambda value: isinstance(value, bool))

    def items(self, name: str, default: list[Any] = _REQUIRED) -> list[Any]:
        """A list."""
        return self._get(name, default, "a list", lambda value: isinstance(value, list))

    def child(self, name: str) -> "Row":
        """An object."""
        return Row(self._get(name, _REQUIRED, "an object", lambda value: isinstance(value, dict)), f"{self.where}, {name}")

    def rows(self, name: str, default: list[Any] = _REQUIRED) -> list["Row"]:
        """A list of objects."""
        return [Row(item, f"{self.where}, {name}[{index}]") for index, item in enumerate(self.items(name, default))]

    def _get(self, name: str, default: _T, expected: str, is_good: Any) -> _T:
        value: _T = self.value.get(name, default)
        if value is _REQUIRED or (value is not default and not is_good(value)):
            raise self.error(name, expected)
        return value


def is_text(value: object) -> bool:
    """Whether it is a string that can be written: JSON can hold half a surrogate pair, which UTF-8 cannot."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Where, and the text of each line that is not empty, of a file (also .xz or .gz). Raises TraceError."""
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except UnicodeDecodeError as error:
        raise TraceError(str(path), f"expected UTF-8 text: {error}") from error
    except _PACKED_ERRORS as error:
        raise TraceError(str(path), f"cannot be read: {error}") from error


def json_lines(path: Path) -> Iterator[Row]:
    """The objects of a file with one JSON object a line. Raises TraceError."""
    for where, line in text_lines(path):
        yield Row(parse_json(line, where), where)


def json_documents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Where, and the bytes of each .json file in `path`: one file, a folder (searched deep), or a tar (also .xz, .gz, .bz2)."""
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                yield str(file), file.read_bytes()
        elif path.suffix == ".json":
            yield str(path), path.read_bytes()
        else:
            # Members are taken in the archive's order: seeking back in a compressed file would read it again.
            with _open_tar(path) as archive:
                for member in archive:
                    if member.isfile() and PurePosixPath(member.name).suffix == ".json":
                        file_in_archive = archive.extractfile(member)
                        if file_in_archive is not None:
                            yield f"{path}:{member.name}", file_in_archive.read()
    except _PACKED_ERRORS as error:
        raise TraceError(str(path), f"cannot be read: {error}") from error


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of `text`. Raises TraceError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(where, f"expected JSON: {error}") from error


def _open_tar(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r|*")
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
        expected = "a .json file, a folder of such files or a tar of them, as kv-cache-tester has"
        raise TraceError(str(path), f"expected {expected}; check the file and its --format: {error}") from error


def _open_text(path: Path) -> Any:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _is_duration(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:  # a whole number beyond any float
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
