# SPDX-License-Identifier: Apache-2.0
"""Every option of the connector: one model, with units. They go in `kv_connector_extra_config`.

Read in the API server (so that a mistake ends the start with one sentence), in EngineCore and in the workers.
"""

import fcntl
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_lifetime.conversations import MIN_NEW_TOKENS
from vllm_lifetime.flash.emulation import FlashTiming
from vllm_lifetime.flash.endurance import DEFAULT_ENDURANCE_CYCLES
from vllm_lifetime.flash.erase_blocks import DEFAULT_ERASE_BLOCK_BYTES
from vllm_lifetime.flash.layout import MAGIC
from vllm_lifetime.lifecycle import DEFAULT_LEASE_S
from vllm_lifetime.policy.eviction import EvictionPolicy, parse_policy
from vllm_lifetime.policy.placement.hbm_first import HbmFirst
from vllm_lifetime.policy.placement.registry import PLACEMENTS, parse_placement
from vllm_lifetime.policy.scoring import DEFAULT_GAMMA
from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON
from vllm_lifetime.prediction.predictor_file import PredictorFileError, read_predictor_file

__all__ = ["LifetimeOptions", "OptionsError", "parse_options", "refuse_other_platforms"]

MIB = 1 << 20

Bytes = Annotated[int, Field(strict=True, ge=0)]


_LIVE_PLACEMENTS = tuple(
    name
    for name, policy in PLACEMENTS.items()
    if not (policy.is_offline or policy.migrates or policy.uses_reads or policy.uses_requests)
)
"""Those that need nothing of the engine but what it takes and gives back."""


class OptionsError(ValueError):
    """An option cannot be used; the text says which, with what value, and what to change."""


class LifetimeOptions(BaseModel):
    """Options of the `lifetime` connector, from `kv_connector_extra_config`.

    All sizes are for one engine (one data-parallel rank), over all its tensor-parallel ranks together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_bytes: Bytes = Field(default=0, description="Host memory for KV blocks below HBM, in bytes. 0: no host tier.")
    flash_path: Path | None = Field(
        default=None,
        description="File that emulates High-Bandwidth Flash. Rank and data-parallel index are appended to its name where "
        "there are several. None: no flash tier.",
    )
    flash_bytes: Bytes = Field(default=0, description="Size of the flash file in bytes, reserved at start.")
    flash_persist: bool = Field(
        default=False, description="Keep the flash file's blocks across restarts. False: start empty, remove at exit."
    )
    flash_staging_bytes: Bytes = Field(
        default=64 * MIB,
        description="Host memory through which flash blocks travel, in bytes; used only with a flash tier.",
    )
    flash_mode: Literal["staged", "in_place"] = Field(
        default="staged",
        description="staged: flash lies behind HBM, and blocks are copied up before they are used. in_place: the last KV blocks "
        "of the engine lie in flash, where attention reads and writes them (CPU backend only).",
    )
    placement: str = Field(
        default="",
        description="Which tier blocks belong in: hbm_first, lachesis_no_predictive, lachesis. In place: where new blocks are "
        "taken. Staged: which are never copied to flash. Default: lachesis in place, hbm_first (all may be copied) staged.",
    )
    placement_unknown: Literal["hbm", "flash"] = Field(
        default="hbm", description="Where placement by class puts blocks of no known class; hbm: never copied to flash."
    )
    flash_write_bytes_per_day: Annotated[int, Field(strict=True, gt=0)] | None = Field(
        default=None,
        description="Most KV bytes copied to flash in any 24 hours, over all ranks; what exceeds it is not kept. None: no limit.",
    )
    flash_endurance_cycles: Annotated[int, Field(strict=True, ge=1, le=1 << 40)] = Field(
        default=DEFAULT_ENDURANCE_CYCLES,
        description="Program/erase cycles that a flash cell is taken to tolerate, for device-years.",
    )
    flash_erase_block_bytes: Annotated[int, Field(strict=True, ge=MIB, le=1 << 30, multiple_of=4096)] = Field(
        default=DEFAULT_ERASE_BLOCK_BYTES, description="Bytes that flash is taken to erase at once, for cycles per erase block."
    )
    flash_emulation: FlashTiming = Field(
        default=FlashTiming(),
        description="With flash_mode in_place, the speed that flash is to have: read_bytes_per_s, write_bytes_per_s, "
        "read_latency_s, page_bytes. Nothing is emulated unless one of the first three is set.",
    )
    load_policy: Literal["measured", "always"] = Field(
        default="measured",
        description="measured: skip a load that is expected to take longer than recomputing. always: load whatever is found.",
    )
    load_deadline_s: Annotated[float, Field(gt=0, le=600)] = Field(
        default=10.0, description="A load that has not finished after this many seconds is given up and recomputed."
    )
    demote_ahead_blocks: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        default=None,
        description="How many blocks from the next eviction the copying begins. None: two steps' worth of prefill, at most half "
        "of the pool.",
    )
    demote_batch_bytes: Annotated[int, Field(strict=True, gt=0)] = Field(
        default=64 * MIB, description="Most bytes copied down at a time; loads go first."
    )
    io_threads: Annotated[int, Field(strict=True, ge=1, le=256)] = Field(
        default=4, description="Threads per worker for flash reads and writes."
    )

    eviction_policy: str = Field(
        default="lifecycle",
        description="Order of eviction: lru, lifecycle, hierarchical, lifetime, lifetime_ordered, pbkv, kvflow, ttl, time.",
    )
    horizon: Annotated[int, Field(strict=True, ge=1, le=32)] = Field(
        default=DEFAULT_HORIZON, description="K: how many invocations of each workflow are looked ahead."
    )
    gamma: Annotated[float, Field(ge=0, le=1)] = Field(
        default=DEFAULT_GAMMA, description="Confidence that each invocation further ahead keeps."
    )
    predictor_path: Path | None = Field(
        default=None,
        description="File of a trained predictor (vllm-lifetime predict train). None, or one that cannot be used: the one that "
        "learns while serving.",
    )
    hidden_states: bool | None = Field(
        default=None,
        description="Send the hidden state of each prompt's last token to the scheduler side. None: if the trained predictor "
        "reads it.",
    )
    rank_path: Path | None = Field(
        default=None,
        description="File of a trained lifetime rank (vllm-lifetime rank train), for placement by lachesis. None, or "
        "one that cannot be used: sub-agents are ordered by expected size, and by what is learned while serving.",
    )
    state_path: Path | None = Field(
        default=None,
        description="File in which what was learned while serving is kept across restarts. The data-parallel index is appended "
        "where there are several; the lifetime rank's is beside it, with .rank at its end. None: nowhere.",
    )
    record_path: Path | None = Field(
        default=None,
        description="File to which requests and boundaries are appended, as a trace for vllm-lifetime replay. The data-parallel "
        "index is appended to its name where there are several. None: nothing is recorded.",
    )
    prefetch: Literal["off", "conservative", "aggressive"] | None = Field(
        default=None,
        description="Bring blocks up to HBM before they are asked for, into free and retired space (conservative), or into that "
        "of active blocks, too (aggressive). None: conservative if the eviction policy prefetches (lifetime, pbkv), else off.",
    )
    prefetch_rho: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="Share of HBM that aggressive prefetching may displace."
    )

    lease_s: Annotated[float, Field(gt=0, le=30 * 86400)] = Field(
        default=DEFAULT_LEASE_S,
        description="An agent of which nothing is heard for so many seconds is taken for lost: its blocks are retired.",
    )
    compaction_tokens: Annotated[int, Field(strict=True, ge=1)] = Field(
        default=MIN_NEW_TOKENS,
        description="A request that names no agent, leaves its session's context in the middle and brings at least so many "
        "tokens of its own is taken for a compaction; with fewer it is another conversation of the session.",
    )

    @model_validator(mode="after")
    def _flash_is_whole(self) -> "LifetimeOptions":
        if self.flash_bytes and self.flash_path is None:
            raise ValueError("flash_bytes is set but flash_path is not: name the file, or set flash_bytes to 0")
        if self.flash_path is not None and not self.flash_bytes:
            raise ValueError("flash_path is set but flash_bytes is not: say how many bytes the file may take")
        return self

    @model_validator(mode="after")
    def _mode_fits(self) -> "LifetimeOptions":
        if not self.is_in_place:
            if self.flash_emulation.is_on:
                raise ValueError("flash_emulation works with flash_mode = 'in_place' only: set that, or leave it out")
            return self
        if self.flash_path is None:
            raise ValueError("flash_mode is 'in_place' but flash_path is not set: name the file and its size, flash_bytes")
        if self.host_bytes:
            raise ValueError("flash_mode = 'in_place' has no host tier: set host_bytes to 0")
        if self.flash_persist:
            raise ValueError("flash_mode = 'in_place' keeps nothing across restarts: set flash_persist to false")
        if self.flash_write_bytes_per_day is not None:
            raise ValueError(
                "flash_write_bytes_per_day works with flash_mode = 'staged' only: in place, new blocks lie in flash when HBM is "
                "full, and no budget can hold them back. Set that, or leave it out and choose what is written by placement"
            )
        knows_segments = self.policy.acts_on_boundaries or self.policy.needs_scorer
        if not knows_segments and self.placement != HbmFirst.name:
            raise ValueError(
                f"placement {self.placement!r} goes by segments, which eviction_policy = {self.eviction_policy!r} does not "
                f"follow: choose another eviction_policy, or placement = {HbmFirst.name!r}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _placement_fits_the_mode(cls, options: Any) -> Any:
        if isinstance(options, dict) and not options.get("placement"):
            name = "lachesis" if options.get("flash_mode") == "in_place" else "hbm_first"
            return {**options, "placement": name}
        return options

    @field_validator("placement")
    @classmethod
    def _placement_is_known(cls, name: str) -> str:
        if name in PLACEMENTS and name not in _LIVE_PLACEMENTS:
            raise ValueError(f"placement {name!r} works in the simulator only; choose {', '.join(_LIVE_PLACEMENTS)}")
        return parse_placement(name).name

    @field_validator("eviction_policy")
    @classmethod
    def _policy_is_known(cls, name: str) -> str:
        return parse_policy(name).name

    @property
    def policy(self) -> EvictionPolicy:
        """The eviction policy, with the options' horizon and gamma."""
        return replace(parse_policy(self.eviction_policy), horizon=self.horizon, gamma=self.gamma)

    @property
    def prefetches(self) -> bool:
        """Whether blocks are brought up ahead of their request."""
        if self.prefetch is None:
            return self.policy.prefetches
        return self.prefetch != "off"

    @property
    def is_in_place(self) -> bool:
        """Whether flash is a part of the KV tensor."""
        return self.flash_mode == "in_place"

    @property
    def has_lower_tiers(self) -> bool:
        """Whether blocks are copied to anything below HBM."""
        return self.host_bytes > 0 or (self.flash_bytes > 0 and not self.is_in_place)


def parse_options(extra_config: dict[str, Any] | None, *, check_machine: bool) -> LifetimeOptions:
    """Read the options; with `check_machine`, also see that this machine can provide them.

    Raises:
        OptionsError: an unknown key, a bad value, more memory than is available, a flash path that cannot be written or has no
            room. Nothing has been created or changed.

    """
    try:
        options = LifetimeOptions.model_validate(extra_config or {})
    except ValidationError as error:
        raise OptionsError(_explain(error)) from None
    if check_machine:
        if options.is_in_place:
            refuse_other_platforms()
        _check_memory(options)
        _check_flash(options)
        _check_file("state_path", options.state_path)
        _check_file("record_path", options.record_path)
    if options.hidden_states is None:
        options = options.model_copy(update={"hidden_states": _predictor_reads_hidden_states(options)})
    return options


def _predictor_reads_hidden_states(options: LifetimeOptions) -> bool:
    """From the file, in every process. A file that cannot be used reads nothing; the scheduler side says so."""
    if options.predictor_path is None or not options.policy.needs_scorer:
        return False
    try:
        return bool(read_predictor_file(options.predictor_path).header.get("hidden_size"))
    except PredictorFileError:
        return False


def refuse_other_platforms() -> None:
    """Raise `OptionsError` unless vLLM runs on its CPU backend, as flash in place needs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise OptionsError(
            "flash_mode = 'in_place' works on vLLM's CPU backend only (docs/in-place.md describes the CUDA design): use "
            "flash_mode = 'staged'."
        )


def _check_file(name: str, path: Path | None) -> None:
    if path is None:
        return
    directory = path.absolute().parent
    if path.is_dir():
        raise OptionsError(f"{name} = {str(path)!r} is a directory: name a file in it, e.g. {str(path / 'lifetime.json')!r}")
    if not directory.is_dir():
        raise OptionsError(f"{name} = {str(path)!r}: the directory {str(directory)!r} does not exist. Create it first.")
    if not os.access(directory, os.W_OK):
        raise OptionsError(f"{name} = {str(path)!r} cannot be written by this user. Give write permission or another path.")


def _explain(error: ValidationError) -> str:
    problems = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = ", ".join(LifetimeOptions.model_fields)
            problems.append(f"kv_connector_extra_config has the unknown key {key!r}; the lifetime connector knows: {known}")
        elif key:
            problems.append(f"kv_connector_extra_config.{key} = {item['input']!r} cannot be used: {item['msg']}")
        else:
            problems.append(f"kv_connector_extra_config: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(problems)


def _check_memory(options: LifetimeOptions) -> None:
    wanted = options.host_bytes + (options.flash_staging_bytes if options.flash_bytes and not options.is_in_place else 0)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    if wanted > available:
        raise OptionsError(
            f"host_bytes = {options.host_bytes} does not fit: {wanted} bytes would be allocated (host tier and flash "
            f"staging) and {available} are available. Lower host_bytes."
        )


def _check_flash(options: LifetimeOptions) -> None:
    path = options.flash_path
    if path is None:
        return
    directory = path.absolute().parent
    if path.is_dir():
        raise OptionsError(f"flash_path = {str(path)!r} is a directory: name a file in it, e.g. {str(path / 'flash.kv')!r}")
    if not directory.is_dir():
        raise OptionsError(f"flash_path = {str(path)!r}: the directory {str(directory)!r} does not exist. Create it first.")
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    except OSError as error:
        raise OptionsError(f"flash_path = {str(path)!r} cannot be used: {error.strerror}") from None
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise OptionsError(f"flash_path = {str(path)!r} is not a regular file: name a file on a file system of the device")
    if not os.access(directory if status is None else path, os.W_OK):
        raise OptionsError(f"flash_path = {str(path)!r} cannot be written by this user. Give write permission or another path.")
    if status is not None and status.st_size:
        _check_flash_file(path)
    already = 0 if status is None else status.st_blocks * 512
    free = shutil.disk_usage(directory).free
    if options.flash_bytes > free + already:
        raise OptionsError(
            f"flash_bytes = {options.flash_bytes} does not fit on the file system of {str(path)!r}: {free + already} bytes are "
            "available there. Lower flash_bytes or use another device."
        )


def _check_flash_file(path: Path) -> None:
    """An existing file must be one of ours that nobody uses. The worker looks closer; here one sentence comes at once."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise OptionsError(
                f"flash_path = {str(path)!r} is not a flash file of vllm-lifetime and stays as it is. Give another path."
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionsError(
                f"flash_path: {path} is in use by another process. Give each server its own file, or stop the other one."
            ) from None
        except OSError:
            pass  # a file system without locks: the worker says what that means
