"""Whole matrices of which ranks have parts: results are those of one process, and each is computed once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lightning_d9d.optim.muon import orthogonalized
from lightning_d9d.optim.whole_matrices import on_whole_matrices
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext

PLACED: list[tuple[tuple[int, ...], Placement]] = [
    ((5, 3), Shard(0)),  # 3 and 2 rows
    ((1, 4), Shard(0)),  # one row, and none
    ((4, 6), Shard(1)),
    ((2, 3, 4), Shard(-1)),
    ((2, 3, 4), Shard(0)),  # whole matrices
    ((3, 3), Replicate()),
]
CUT = 4
"""So many of the first ones are cut."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_are_those_of_one_process(rank: RankContext, dtype: torch.dtype) -> None:
    device_mesh = init_device_mesh(rank.device.type, (2,))
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator).to(rank.device, dtype) for shape, _ in PLACED]
    placed = [
        distribute_tensor(whole, device_mesh, [placement]) for whole, (_, placement) in zip(wholes, PLACED, strict=True)
    ]
    computed: list[int] = []

    def function(index: int, whole: Tensor) -> Tensor:
        computed.append(index)
        return orthogonalized(whole)

    parts = on_whole_matrices([each.to_local() for each in placed], placed, function)
    for index, (part, whole) in enumerate(zip(parts, wholes, strict=True)):
        expected = distribute_tensor(orthogonalized(whole), device_mesh, [PLACED[index][1]]).to_local()
        assert_bitwise_equal(str(index), part.contiguous(), expected.contiguous())
    assert [index for index in sorted(computed) if index < CUT] == [rank.rank, rank.rank + 2]  # in turn
    assert [index for index in sorted(computed) if index >= CUT] == [CUT, CUT + 1]
