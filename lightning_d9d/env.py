"""Versions, optional packages, devices and disk space of the machine. No other module asks for them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import Version

MINIMUM_VERSIONS = {"python": "3.11", "torch": "2.11", "lightning": "2.6.4", "triton": "3.6"}
"""The minimums of pyproject.toml."""
TESTED_VERSIONS = {"python": "3.12", "torch": "2.15", "lightning": "2.6.6", "triton": "3.9"}
"""The newest version of each package with which all tests have been run. pyproject.toml excludes later minor versions
of torch."""

_OPTIONAL = {
    "grouped_gemm": ("nv-grouped-gemm", "grouped-gemm"),
    "flash_attn": ("flash-attn-4", "flash-attn"),
    "quack": ("quack-kernels", "quack"),
    "transformers": ("transformers", "hf"),
    "datasets": ("datasets", "data"),
    "pyarrow": ("pyarrow", "parquet"),
    "litdata": ("litdata", "litdata"),
    "plotly": ("plotly", "viz"),
    "matplotlib": ("matplotlib", "viz"),
}
"""Optional packages by import name: the distribution, and the extra of lightning-d9d that installs it."""

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class OptionalPackage:
    """A package that some features need."""

    name: str
    """The name for `import`."""
    version: str | None
    """The version; None if it is not installed."""
    extra: str
    """`pip install 'lightning-d9d[extra]'` installs it."""


@dataclass(frozen=True)
class Device:
    """A CUDA device."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@cache
def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of Python, of the packages in `MINIMUM_VERSIONS`, and of torch's CUDA."""
    packages = {name: _installed_version(name) for name in MINIMUM_VERSIONS if name not in ("python", "torch")}
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        **packages,
    }


def newest_tested(name: str, version: str | None) -> str | None:
    """Return the newest tested version of a package if this one is newer; None if it was tested or is not installed."""
    tested = TESTED_VERSIONS.get(name)
    if tested is None or version is None:
        return None
    newest = Version(tested).release
    return tested if Version(version).release[: len(newest)] > newest else None


def untested() -> str | None:
    """Return one line on the packages of this machine that are newer than the tested versions, or None."""
    pairs = [(name, version, newest_tested(name, version)) for name, version in versions().items()]
    found = [f"{name} {version} (tested up to {tested})" for name, version, tested in pairs if tested is not None]
    return f"lightning_d9d was not tested with {', '.join(found)}" if found else None


def optional_packages() -> list[OptionalPackage]:
    """Return the packages that extras of lightning-d9d install."""
    return [
        OptionalPackage(name, _installed_version(distribution), extra)
        for name, (distribution, extra) in _OPTIONAL.items()
    ]


def num_cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use.

    CUDA is not initialized, so the process can still be forked.
    """
    return torch.cuda.device_count()


def cuda_devices() -> list[Device]:
    """Return every CUDA device that torch can use. Initializes CUDA."""
    properties = [torch.cuda.get_device_properties(index) for index in range(num_cuda_devices())]
    return [Device(found.name, found.total_memory, (found.major, found.minor)) for found in properties]


def nvidia_smi(*arguments: str) -> str | None:
    """Return the output of `nvidia-smi`, or None if the program is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.rstrip()
