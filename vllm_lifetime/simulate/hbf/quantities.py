# SPDX-License-Identifier: Apache-2.0
"""Data files whose every number says its unit, where it is from, and how sure that is. One sentence for each mistake."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

__all__ = ["DataFileError", "Quantity", "Status", "in_unit", "list_data", "read_data", "with_values"]

DATA_PACKAGE = "vllm_lifetime.simulate.hbf"


class DataFileError(ValueError):
    """A data file cannot be used; says which, what is wrong and what to change."""


class Status(StrEnum):
    """How sure a number is."""

    KNOWN = "known"
    INFERRED = "inferred"
    ASSUMED = "assumed"
    CALIBRATED = "calibrated"


class Strict(BaseModel):
    """Takes no field that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantity(Strict):
    """A number, its unit, its source and how sure it is."""

    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    unit: str
    status: Status
    source: Annotated[str, Field(min_length=1)]


_BASE = {
    "B": 1.0,
    "GB": 1e9,
    "TB": 1e12,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "ratio": 1.0,
    "cycles": 1.0,
    "tokens": 1.0,
    "1": 1.0,
}


def in_unit(*units: str, above_zero: bool = True) -> AfterValidator:
    """Only quantities in one of `units`; their value becomes one in bytes, seconds, bytes per second, or the plain number."""

    def check(quantity: Quantity) -> Quantity:
        if quantity.unit not in units:
            raise ValueError(f"the unit must be {' or '.join(units)}, not {quantity.unit!r}")
        if above_zero and not quantity.value:
            raise ValueError("the value must be above 0")
        return quantity.model_copy(update={"value": quantity.value * _BASE[quantity.unit]})

    return AfterValidator(check)


Part = TypeVar("Part", bound=BaseModel)


def with_values(part: Part, values: Mapping[str, float]) -> Part:
    """`part` with other values of the quantities named; bytes, seconds, bytes per second or the plain number."""
    return part.model_copy(
        update={name: getattr(part, name).model_copy(update={"value": value}) for name, value in values.items()}
    )


def list_data(marker: str) -> list[str]:
    """Names of the package's data files that have a key `marker`."""
    folder = resources.files(DATA_PACKAGE) / "data"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return [file.name.removesuffix(".toml") for file in files if marker in tomllib.loads(file.read_text("utf-8"))]


Model = TypeVar("Model", bound=BaseModel)


def read_data(name: str, kind: type[Model]) -> Model:
    """The data file `name`: one of the package's by its name, or a path ending in .toml. Raises DataFileError."""
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text("utf-8")
        else:
            text = (resources.files(DATA_PACKAGE) / "data" / f"{name}.toml").read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(
            f"cannot read {name!r} ({error}); give the path of a .toml file or a name that the package has"
        ) from None
    try:
        return kind.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise DataFileError(f"{name!r} is no TOML: {error}") from None
    except ValidationError as error:
        raise DataFileError(f"{name!r}: {'; '.join(_sentence(detail) for detail in error.errors())}") from None


def _sentence(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"there is no field {where!r}; remove it, or correct its name"
    if detail["type"] == "missing":
        return f"the field {where!r} is missing; add it"
    return f"{where}: {detail['msg'].removeprefix('Value error, ')}, and it is {detail['input']!r}"
