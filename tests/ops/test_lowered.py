"""Kernels compile, which the interpreter does not show: it accepts more of Python than Triton does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "options",
    [pytest.param([], id="to IR"), pytest.param(["--all"], marks=[pytest.mark.meshes, pytest.mark.timeout(1200)])],
)
def test_every_kernel_compiles(options: list[str]) -> None:
    """In a process without the interpreter. The exit code counts kernels that no call reached or that cannot run."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.lowered", *options]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
