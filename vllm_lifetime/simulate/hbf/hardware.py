# SPDX-License-Identifier: Apache-2.0
"""Devices, their configurations, and models: what the data files say, and what follows from it for one GPU."""

from typing import Annotated

from pydantic import Field

from vllm_lifetime.simulate.hbf.quantities import DataFileError, Quantity, Strict, in_unit, list_data, read_data

__all__ = ["SECONDS_PER_YEAR", "Configuration", "Device", "Model", "load_device", "load_model", "model_names"]

SECONDS_PER_YEAR = 3.156e7

Bytes = Annotated[Quantity, in_unit("B", "GB", "TB")]
BytesOrNone = Annotated[Quantity, in_unit("B", "GB", "TB", above_zero=False)]
BytesPerSecond = Annotated[Quantity, in_unit("GB/s", "TB/s")]
Seconds = Annotated[Quantity, in_unit("us", "ms", "s")]
Ratio = Annotated[Quantity, in_unit("ratio")]
Cycles = Annotated[Quantity, in_unit("cycles")]
Tokens = Annotated[Quantity, in_unit("tokens")]
Stacks = Annotated[int, Field(ge=1, le=64)]


class HbmStack(Strict):
    """One HBM stack."""

    capacity: Bytes


class HbfStack(Strict):
    """One HBF stack."""

    capacity: Bytes
    write_bandwidth: BytesPerSecond
    program_time: Seconds
    program_erase_cycles: Cycles
    write_amplification: Ratio


class Gpu(Strict):
    """What does not depend on how the slots are split."""

    read_bandwidth: BytesPerSecond
    hbm_reserve: BytesOrNone
    step_overhead: Seconds
    time_to_first_token: Seconds
    reference_tpot: Seconds


class Configuration(Strict):
    """How many stacks of each kind a GPU has."""

    hbm_stacks: Stacks
    hbf_stacks: Stacks


class Device(Strict):
    """One data file of a device."""

    name: str
    hbm_stack: HbmStack
    hbf_stack: HbfStack
    gpu: Gpu
    configurations: Annotated[dict[str, Configuration], Field(min_length=1)]

    def configuration(self, name: str) -> Configuration:
        """By name. Raises DataFileError, saying which there are."""
        if name not in self.configurations:
            raise DataFileError(f"{self.name} has no configuration {name!r}; it has {', '.join(self.configurations)}")
        return self.configurations[name]

    def hbm_kv_bytes(self, configuration: Configuration) -> float:
        """HBM that KV can have."""
        return configuration.hbm_stacks * self.hbm_stack.capacity.value - self.gpu.hbm_reserve.value

    def flash_kv_bytes(self, configuration: Configuration, model: "Model") -> float:
        """Flash that KV can have beside the weights."""
        return configuration.hbf_stacks * self.hbf_stack.capacity.value - model.weights_held.value

    def lifetime_years(self, configuration: Configuration, flash_bytes_per_s: float) -> float:
        """How long the P/E budget lasts at that write rate; infinite without writes (Lachesis section 5.2)."""
        stack = self.hbf_stack
        budget = configuration.hbf_stacks * stack.capacity.value * stack.program_erase_cycles.value
        if flash_bytes_per_s <= 0:
            return float("inf")
        return budget / (stack.write_amplification.value * flash_bytes_per_s * SECONDS_PER_YEAR)


class Model(Strict):
    """One data file of a model: what one GPU of the serving group holds, reads and writes."""

    name: str
    label: str
    kv_per_token: Bytes
    weights_held: Bytes
    weights_read: Bytes
    full_attention_share: Annotated[Quantity, in_unit("ratio", above_zero=False)]
    attention_chunk: Tokens


def load_device(name: str = "rubin_hbf") -> Device:
    """A device by the package's name or by the path of its file. Raises DataFileError."""
    return read_data(name, Device)


def load_model(name: str) -> Model:
    """A model by the package's name or by the path of its file. Raises DataFileError."""
    if not name.endswith(".toml") and name not in model_names():
        raise DataFileError(f"unknown model {name!r}; there are {', '.join(model_names())}, or give the path of a .toml file")
    return read_data(name, Model)


def model_names() -> list[str]:
    """Models that come with the package."""
    return list_data("kv_per_token")
