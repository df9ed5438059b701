"""Modules that ask other ranks for tokens in ways of their own are believed if they do; ours are unless changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.modules import GroupedQueryAttention
from lightning_d9d.ops import gather_dim
from lightning_d9d.parallel import TokenShard, shard_context
from lightning_d9d.parallel.context import SequenceShard
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer
from tests.strategy.test_token_mixing import HIDDEN, TOKENS, Model, Sdpa, data, fit, fit_module


class Asking(Sdpa):
    """Attends to the tokens of all ranks, in an order that is not theirs."""

    takes_sharded_sequences = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        world = dist.group.WORLD
        assert world is not None
        k, v = (gather_dim(x, 2, world.group_name) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class Claiming(Sdpa):
    """Says that it asks other ranks, and does not."""

    takes_sharded_sequences = True


@pytest.mark.ranks(2)
def test_a_module_that_asks_other_ranks_itself_is_believed_if_it_does(rank: RankContext) -> None:
    assert fit(rank, Asking, context_parallel_shard=2).global_step == 2
    text = r"layers\.1 \(Claiming\) has takes_sharded_sequences = True and mixes the tokens of its own rank alone"
    with pytest.raises(ConfigError, match=text):
        fit(rank, Claiming, context_parallel_shard=2)


class ClaimingBackwards(Claiming):
    """Attends to later tokens alone: what is in the first one reaches no other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu()
        return F.scaled_dot_product_attention(q, k, v, mask)


class Halo(nn.Module):
    """Adds a token and the ones beside it, of which those at the edges of chunks are on other ranks."""

    takes_sharded_sequences = True

    def forward(self, x: Tensor) -> Tensor:
        world = dist.group.WORLD
        assert world is not None
        shard = SequenceShard(world.rank(), world.size())
        whole = F.pad(shard.join(gather_dim(x, 1, world.group_name), 1), (0, 0, 1, 1))
        return shard.take(whole[:, :-2] + whole[:, 1:-1] + whole[:, 2:], 1)


class Windowed(GroupedQueryAttention):
    """Attention with its own forward, which sees only the tokens of its rank."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, 2, 2, HIDDEN // 2, norm_eps=1e-6, initializer_range=0.1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o_proj(out.transpose(1, 2).flatten(2))


class Replaced(Windowed):
    """Attends in a way of its own, which is set where it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = attend_alone


def attend_alone(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Spread(Model):
    def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
        shard_context(stage, mesh.group("cp"), "gather")
        super().parallelize_stage(stage, mesh, parallel)


@pytest.mark.ranks(2)
def test_ours_with_a_forward_or_attention_of_a_users_own_are_looked_at(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"layers\.1 \(Windowed\) has a forward of its own and mixes the tokens of"):
        fit_module(rank, Spread(Windowed), context_parallel_shard=2)
    with pytest.raises(
        ConfigError, match=r"layers\.1\.attend was replaced by <function attend_alone.*ContextAttention"
    ):
        fit_module(rank, Spread(Replaced), context_parallel_shard=2)


@pytest.mark.ranks(2)
def test_whoever_asks_other_ranks_at_edges_alone_is_believed(rank: RankContext) -> None:
    assert fit(rank, Halo, context_parallel_shard=2).global_step == 2
    with pytest.raises(ConfigError, match=r"\(ClaimingBackwards\) has takes_sharded_sequences = True and mixes"):
        fit(rank, ClaimingBackwards, context_parallel_shard=2)


class Together(nn.Module):
    """Adds the mean over the tokens of all ranks, in steps that have as many numbers as a rank has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = TokenShard()
        self.sums, self.last = Sums(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        total = self.tokens.sum(self.sums(x))
        return x + self.last(total / TOKENS).unsqueeze(1)


class Sums(nn.Module):
    """A layer that sums over the tokens of the rank, shape `[batch, hidden]`."""

    def forward(self, x: Tensor) -> Tensor:
        return TokenShard.summand(x.sum(1))


class TogetherModel(Model):
    def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
        for module in stage.modules():
            if isinstance(module, Together):
                module.tokens = TokenShard.of(mesh)
        super().parallelize_stage(stage, mesh, parallel)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"context_parallel_shard": 2}, {"tensor_parallel": 2}], ids=["cp2", "tp2"])
@pytest.mark.parametrize("num_tokens", [TOKENS, 2 * HIDDEN])
def test_what_ranks_make_together_is_believed(rank: RankContext, num_tokens: int, mesh: dict[str, int]) -> None:
    """It is also believed if a sum has as many numbers as a rank has tokens, 8."""
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_epochs=1)
    run.fit(TogetherModel(Together), data(num_tokens))
    assert run.global_step == 2
