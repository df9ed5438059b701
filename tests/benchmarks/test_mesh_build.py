"""Both ways to build the meshes must build the same ones."""

from __future__ import annotations

import torch

from tests.benchmarks.frame import measure
from tests.benchmarks.mesh_build import cases


def test_both_ways_build_the_same_meshes() -> None:
    (case,) = cases("cpu", quick=True)
    checksums = [values["warmup_loss"] for values in measure(case, torch.device("cpu")).values()]
    assert checksums[0] == checksums[1] > 0
