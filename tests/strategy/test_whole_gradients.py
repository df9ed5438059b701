"""Parameters that see all tokens on each tensor rank are refused: their gradients would be summed once too often."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_d9d import ConfigError, StageInfo
from lightning_d9d.modules import TokenEmbedding
from lightning_d9d.parallel import parallelize, shard_tensors
from lightning_d9d.parallel.tokens import TokenShard
from tests.harness.ranks import RankContext
from tests.strategy.test_token_mixing import HIDDEN, VOCABULARY, WithLoss, fit_module


class Whole(nn.Module):
    """A model as in torch's plans: sharded matrices, between layers that see all tokens on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
        self.between = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.between(self.embedding(x))).tanh())


class OfTorchsPlan(WithLoss):
    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Whole()

    def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(stage, mesh.for_axes("tp", domain="dense"), plan)
        parallelize(stage, mesh, parallel)


class Behind(nn.Module):
    """A layer of one's own behind whole sequences, which are made of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = TokenShard()
        self.embedding = TokenEmbedding(VOCABULARY, HIDDEN, initializer_range=1.0)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens.whole(self.norm(self.embedding(x)), 1))


class WithHead(WithLoss):
    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Behind()

    def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
        assert isinstance(stage, Behind)
        stage.tokens = TokenShard.of(mesh)
        shard_tensors(stage, mesh)
        parallelize(stage, mesh, parallel)


TEXT = r"each of the 2 ranks of tensor parallelism has the whole gradient of {}; .* 2 times as large.*shard_tensors"


@pytest.mark.ranks(2)
def test_a_layer_between_torchs_cut_matrices_is_refused(rank: RankContext) -> None:
    module = OfTorchsPlan()
    with pytest.raises(ConfigError, match=TEXT.format(r"between\.weight; between\.bias")):
        fit_module(rank, module, tensor_parallel=2)
    assert module.trainer.global_step == 0


@pytest.mark.ranks(4)
def test_fully_sharded_it_is_refused_too(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match=TEXT.format(r"between\.weight; between\.bias")):
        fit_module(rank, OfTorchsPlan(), tensor_parallel=2, data_parallel_shard=2)


@pytest.mark.ranks(2)
def test_a_head_behind_whole_sequences_is_refused_unless_it_is_frozen(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match=TEXT.format(r"head\.weight; head\.bias")):
        fit_module(rank, WithHead(), tensor_parallel=2)

    class Frozen(WithHead):
        def configure_stage(self, stage: StageInfo) -> nn.Module:
            whole = Behind()
            whole.head.requires_grad_(False)
            return whole

    assert fit_module(rank, Frozen(), tensor_parallel=2).global_step == 2
