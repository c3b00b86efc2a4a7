# SPDX-License-Identifier: Apache-2.0
"""The file of a trained predictor: a `.npz` of plain arrays and, as one of them, a JSON header with a checksum over the others.

Reading it runs no code from it (no pickle) and imports no torch.
"""

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.whole_file import replacing

__all__ = ["FORMAT_VERSION", "PredictorFile", "PredictorFileError", "read_predictor_file", "write_predictor_file"]

FORMAT = "vllm-lifetime transition predictor"
FORMAT_VERSION = 1

HEADER = "header"
"""Name of the array that holds the header, as bytes of UTF-8."""

MAX_FILE_BYTES = 256 << 20
"""A predictor's file is a few MB; a larger one is something else, and not read into memory."""


class PredictorFileError(ValueError):
    """A predictor's file cannot be used; the message says which and why, in one sentence."""


class PredictorFile(NamedTuple):
    """What a file holds. `header` has `model`, `agents`, `horizon`, `hidden_size` and what the model adds."""

    header: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def write_predictor_file(path: str | Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the file as a whole or not at all. Raises `OSError`, also where something stands that is no regular file."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file: a predictor is not written over it.")
    full = {**header, "format": FORMAT, "version": FORMAT_VERSION, "checksum": _checksum(header, arrays)}
    text = np.frombuffer(json.dumps(full, ensure_ascii=False).encode(), dtype=np.uint8)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **{HEADER: text, **arrays})  # type: ignore[arg-type]


def read_predictor_file(path: str | Path) -> PredictorFile:
    """Read and check a file. Raises `PredictorFileError`."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PredictorFileError(f"The predictor file {path} cannot be read: {error.strerror}.") from None
    if len(content) > MAX_FILE_BYTES:
        raise PredictorFileError(f"The predictor file {path} is larger than {MAX_FILE_BYTES >> 20} MiB: it is no predictor.")
    if content[:2] != b"PK":
        raise PredictorFileError(
            f"{path} is no predictor file: it is no .npz; `vllm-lifetime predict train` or `rank train` makes one."
        )
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError) as error:
        raise PredictorFileError(f"The predictor file {path} is damaged or truncated: {error}.") from None
    header = _read_header(path, arrays.pop(HEADER, None))
    if header.pop("checksum", None) != _checksum(header, arrays):
        raise PredictorFileError(f"The predictor file {path} is damaged: its checksum is wrong.")
    return PredictorFile(header, arrays)


def _read_header(path: str | Path, text: NDArray[Any] | None) -> dict[str, Any]:
    try:
        header = None if text is None else json.loads(text.tobytes().decode())
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
        raise PredictorFileError(f"{path} is no predictor file: an .npz, but of something else.")
    version = header.pop("version", None)
    if version != FORMAT_VERSION:
        raise PredictorFileError(
            f"The predictor file {path} has format version {version!r}, and this package reads version {FORMAT_VERSION}: "
            "train it again with this version."
        )
    return header


def _checksum(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
