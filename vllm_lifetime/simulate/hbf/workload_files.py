# SPDX-License-Identifier: Apache-2.0
"""The published statistics that the workloads are made from, as their data files say them."""

from typing import Annotated, Literal

from pydantic import Field

from vllm_lifetime.simulate.hbf.quantities import Quantity, Strict, in_unit, read_data

__all__ = ["Benchmark", "Domain", "StructuralFile", "TemporalFile", "load_structural", "load_temporal"]

Number = Annotated[Quantity, in_unit("1")]
NumberOrZero = Annotated[Quantity, in_unit("1", above_zero=False)]
Tokens = Annotated[Quantity, in_unit("tokens")]
TokensOrZero = Annotated[Quantity, in_unit("tokens", above_zero=False)]
Ratio = Annotated[Quantity, in_unit("ratio")]
Seconds = Annotated[Quantity, in_unit("us", "ms", "s")]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Corpus(Strict):
    """One line of Lachesis Table 3."""

    sessions: Count
    requests: Count
    tokens_written: Count


class Benchmark(Corpus):
    """One benchmark of the structural regime."""

    rounds_per_worker: Positive
    rounds_sigma: Positive
    tool_s: Positive


class StructuralGeneral(Strict):
    """What all benchmarks share."""

    output_per_round: Tokens
    output_sigma: NumberOrZero
    observation_sigma: NumberOrZero
    first_prompt_rounds: Number
    worker_size_sigma: NumberOrZero
    lead_output: Tokens
    reviewer_output: Tokens
    lead_share: Ratio
    reviewer_share: Ratio
    fan_out: Number
    shared_prefix: TokensOrZero
    predictor_rank_correlation: NumberOrZero
    tool_time_scale: Number


class StructuralFile(Strict):
    """The multi-agent trace."""

    name: Literal["structural"]
    general: StructuralGeneral
    benchmarks: Annotated[dict[str, Benchmark], Field(min_length=1)]


class Spread(Strict):
    """A log-normal by its median and mean."""

    median: Positive
    mean: Positive


class Domain(Corpus):
    """One domain of the temporal regime."""

    trace: str
    laden: Spread
    stripped: Spread
    shared_prefix: Annotated[int, Field(ge=0)]


class TemporalGeneral(Strict):
    """What all domains share."""

    output_share: Ratio
    output_limit: Number
    tool_time: Seconds
    user_delay_median: Seconds
    user_delay_sigma: NumberOrZero


class TemporalFile(Strict):
    """The single-agent traces."""

    name: Literal["temporal"]
    general: TemporalGeneral
    domains: Annotated[dict[str, Domain], Field(min_length=1)]


def load_structural(name: str = "structural") -> StructuralFile:
    """By the package's name or by path. Raises DataFileError."""
    return read_data(name, StructuralFile)


def load_temporal(name: str = "temporal") -> TemporalFile:
    """By the package's name or by path. Raises DataFileError."""
    return read_data(name, TemporalFile)
