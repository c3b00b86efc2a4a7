# SPDX-License-Identifier: Apache-2.0
"""A mistake in the options ends the start with one sentence that says what to change."""

import fcntl
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lifetime.connectors.lifetime.flash_file import flash_file_path
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions, OptionsError, parse_options
from vllm_lifetime.flash.layout import MAGIC


def refusal(options: dict[str, Any]) -> str:
    """The text with which the options are refused."""
    with pytest.raises(OptionsError) as caught:
        parse_options(options, check_machine=True)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_need_nothing() -> None:
    """`--kv-connector lifetime` alone: eviction by lifetime, nothing below HBM."""
    options = parse_options(None, check_machine=True)
    assert not options.has_lower_tiers


def test_every_option_says_what_it_is() -> None:
    """One documented model."""
    assert all(field.description for field in LifetimeOptions.model_fields.values())


def test_unknown_key_is_named_with_the_known_ones() -> None:
    """A typo is the commonest mistake."""
    text = refusal({"host_byte": 1})
    assert "'host_byte'" in text and "host_bytes" in text


@pytest.mark.parametrize(
    "options,words",
    [
        ({"host_bytes": -1}, ["host_bytes", "-1", "greater than or equal to 0"]),
        ({"host_bytes": "1GB"}, ["host_bytes", "1GB", "integer"]),
        ({"io_threads": 0}, ["io_threads", "0"]),
        ({"load_deadline_s": 0}, ["load_deadline_s", "greater than 0"]),
        ({"load_policy": "sometimes"}, ["load_policy", "sometimes", "measured", "always"]),
        ({"flash_bytes": 1 << 20}, ["flash_path is not", "name the file"]),
        ({"flash_path": "/tmp/x"}, ["flash_bytes is not", "how many bytes"]),
        ({"host_bytes": 1 << 60}, ["host_bytes", "does not fit", "available", "Lower host_bytes"]),
    ],
)
def test_bad_values(options: dict[str, Any], words: list[str]) -> None:
    """The text has the key, the value and what is wrong with it."""
    text = refusal(options)
    assert all(word in text for word in words), text


def test_flash_path_that_cannot_be_used(tmp_path: Path) -> None:
    """Missing directory, a directory, a device, too small a file system: nothing is created."""
    assert "does not exist" in refusal({"flash_path": str(tmp_path / "no" / "f"), "flash_bytes": 1 << 20})
    assert "is a directory" in refusal({"flash_path": str(tmp_path), "flash_bytes": 1 << 20})
    assert "not a regular file" in refusal({"flash_path": "/dev/null", "flash_bytes": 1 << 20})
    text = refusal({"flash_path": str(tmp_path / "f"), "flash_bytes": 1 << 60})
    assert "does not fit" in text and "Lower flash_bytes" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_flash_directory_without_write_permission(tmp_path: Path) -> None:
    """Said at start, not at the first write."""
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "cannot be written" in refusal({"flash_path": str(tmp_path / "f"), "flash_bytes": 1 << 20})


def test_flash_file_that_is_not_ours_or_in_use(tmp_path: Path) -> None:
    """Somebody's file is never overwritten, and two servers never share one."""
    path = tmp_path / "f"
    path.write_bytes(b"somebody's thesis")
    assert "not a flash file" in refusal({"flash_path": str(path), "flash_bytes": 1 << 20})
    assert path.read_bytes() == b"somebody's thesis"
    path.write_bytes(MAGIC + bytes(4096))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "in use by another process" in refusal({"flash_path": str(path), "flash_bytes": 1 << 20})
    assert parse_options({"flash_path": str(path), "flash_bytes": 1 << 20}, check_machine=True).flash_path == path


def test_the_machine_is_asked_only_once() -> None:
    """What the options ask for may be taken when another process reads them."""
    assert parse_options({"host_bytes": 1 << 60}, check_machine=False).host_bytes == 1 << 60


@pytest.mark.parametrize("index,expected", [(0, "kv.flash"), (1, "kv.flash.dp1-rank0")])
def test_engines_of_a_dense_model_under_data_parallel_have_files_of_their_own(index: int, expected: str) -> None:
    """vLLM tells each such engine that it is alone (data_parallel_size 1) and leaves only its index."""
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=index, rank=0)
    assert flash_file_path(Path("kv.flash"), SimpleNamespace(parallel_config=parallel)).name == expected
