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
from vllm_lifetime.flash.layout import MAGIC
from vllm_lifetime.lifecycle import DEFAULT_LEASE_S
from vllm_lifetime.policy.eviction import EvictionPolicy, parse_policy
from vllm_lifetime.policy.scoring import DEFAULT_GAMMA
from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON
from vllm_lifetime.prediction.predictor_file import PredictorFileError, read_predictor_file

__all__ = ["LifetimeOptions", "OptionsError", "parse_options"]

MIB = 1 << 20

Bytes = Annotated[int, Field(strict=True, ge=0)]


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
    state_path: Path | None = Field(
        default=None,
        description="File in which what was learned while serving is kept across restarts. The data-parallel index is appended "
        "where there are several. None: nowhere.",
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
    def has_lower_tiers(self) -> bool:
        """Whether there is anything below HBM."""
        return self.host_bytes > 0 or self.flash_bytes > 0


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
    wanted = options.host_bytes + (options.flash_staging_bytes if options.flash_bytes else 0)
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
