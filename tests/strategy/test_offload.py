"""Weights that stay in the host's memory: what moves, and what stays one."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric

from lightning_d9d import MeshConfig, MeshDomains, ParallelConfig
from lightning_d9d.parallel import shard_data
from lightning_d9d.strategy.offload import move
from tests.harness.ranks import RankContext


class Tied(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.outside.weight
        self.mean = MeanMetric()


def test_all_moves_where_nothing_is_sharded() -> None:
    module = Tied()
    move(module, torch.device("meta"), offloads=True)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.device.type == "meta"


@pytest.mark.ranks(2)
def test_all_but_shards_moves(rank: RankContext) -> None:
    module = Tied()
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    shard_data(module.inside, [], domains, ParallelConfig(offload=True))
    move(module, torch.device("cpu"), offloads=True)
    assert module.head.weight is module.outside.weight
    move(module, torch.device("meta"), offloads=True)
    assert isinstance(module.inside.weight, DTensor)
    assert module.inside.weight.to_local().device.type == "cpu"
    assert module.outside.weight.is_meta
    assert module.mean.mean_value.is_meta
    assert module.device.type == "meta"
    domains.close()
