"""Modules that mix or count the tokens of their own rank are refused by name; those that do not, and ours, train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DModule, D9DStrategy, MeshConfig, StageInfo, StageInputs, WeightedLoss
from lightning_d9d.modules import LMHead, TokenEmbedding
from lightning_d9d.parallel import TokenShard, parallelize, shard_tensors
from lightning_d9d.pipeline import BlockSequence
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer

VOCABULARY, HIDDEN, TOKENS = 16, 8, 24


class Heads(nn.Module):
    """Attention written around what mixes values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Sdpa(Heads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Flex(Heads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)  # type: ignore[return-value]


class Written(Heads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return (q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ v


class ZeroAtFirst(Sdpa):
    """A layer whose result does not count yet: numbers alone would not show that it mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.along(x.mT).mT


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.along = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.along(x)[0]


class Running(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


class LessMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Normed(nn.Module):
    """Mixes in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class Flat(nn.Module):
    """Sees each token for itself, in a matrix with a row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x.flatten(0, 1)).view_as(x)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device))


class Alone(nn.Module):
    """Sees each token for itself, with dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("num_calls", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.get_buffer("num_calls").zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("num_calls").add_(1)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


MIXING = {
    "Sdpa": Sdpa,
    "Flex": Flex,
    "Written": Written,
    "ZeroAtFirst": ZeroAtFirst,
    "MultiheadAttention": Torchs,
    "Conv1d": Convolution,
    "GRU": Recurrent,
    "Running": Running,
    "LessMean": LessMean,
    "BatchNorm1d": Normed,
}


class Stage(nn.Module):
    def __init__(self, stage: StageInfo, block: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(VOCABULARY, HIDDEN, initializer_range=1.0) if stage.is_first else None
        self.layers = BlockSequence([Alone(), block()], stage)
        self.head = LMHead(VOCABULARY, HIDDEN, initializer_range=0.1) if stage.is_last else None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.layers(x if self.embedding is None else self.embedding(x))
        return x if self.head is None else self.head(x, labels, "sum")


class Model(D9DModule):
    sequence_dims: ClassVar = {"ids": 1, "labels": 1}

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.block = block
        self.drawn: list[Tensor] = []

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Stage(stage, self.block)

    def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
        if mesh is not None:
            shard_tensors(stage, mesh)
        parallelize(stage, mesh, parallel)

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        return StageInputs(first={"x": microbatch["ids"]}, shared={"labels": microbatch["labels"]})

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> Tensor | WeightedLoss:
        return WeightedLoss(output, (microbatch["labels"] >= 0).sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.drawn.append(torch.rand(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logits(nn.Module):
    """A stage whose loss is made elsewhere; it may get positions, and may hand over a dataclass."""

    def __init__(self, stage: StageInfo, block: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if stage.is_first else None
        self.layers = BlockSequence([Alone(), block()], stage)
        self.head = nn.Linear(HIDDEN, VOCABULARY) if stage.is_last else None

    def forward(self, x: Any, positions: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.layers(x.x if self.embedding is None else self.embedding(x))
        if self.head is None:
            return Between(x)
        logits = self.head(x)
        return logits if labels is None else shifted_loss(logits, labels)


@dataclass
class Between:
    x: Tensor


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def shifted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return summed_loss(logits[:, :-1], ids[:, 1:])


def ignored(labels: Tensor) -> Tensor:
    return labels.masked_fill(labels % 3 == 0, -100)


LOSSES: dict[str, Callable[[Tensor, Any], Tensor | WeightedLoss]] = {
    "shifted": lambda x, b: WeightedLoss(shifted_loss(x, b["ids"]), torch.tensor(b["ids"][:, 1:].numel())),
    "mean of shifted": lambda x, b: shifted_loss(x, b["ids"]) / b["ids"][:, 1:].numel(),
    "shifted weight": lambda x, b: WeightedLoss(
        summed_loss(x, b["labels"]), (b["labels"][:, 1:] > b["labels"][:, :-1]).sum()
    ),
    "of a mean": lambda x, b: F.cross_entropy(x.mean(1), b["labels"][:, 0]),
    "mean of what counts": lambda x, b: F.cross_entropy(x.flatten(0, 1), ignored(b["labels"]).flatten()),
    "of the first": lambda x, b: F.cross_entropy(x[:, 0], b["labels"][:, 0]),
    "of the last": lambda x, b: F.cross_entropy(x[:, -1], b["labels"][:, -1]),
}
RIGHT_LOSSES: dict[str, Callable[[Tensor, Any], Tensor | WeightedLoss]] = {
    "sum": lambda x, b: WeightedLoss(summed_loss(x, b["labels"]), torch.tensor(b["labels"].numel())),
    "mean": lambda x, b: F.cross_entropy(x.flatten(0, 1), b["labels"].flatten()),
    "sum of what counts": lambda x, b: WeightedLoss(
        summed_loss(x, ignored(b["labels"])), (ignored(b["labels"]) >= 0).sum()
    ),
}


class WithLoss(Model):
    def __init__(self, loss: Any = RIGHT_LOSSES["sum"], block: type[nn.Module] = Alone) -> None:
        super().__init__(block)
        self.loss = loss

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Logits(stage, self.block)

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        return StageInputs(first={"x": microbatch["ids"]})

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> Tensor | WeightedLoss:
        return self.loss(output, microbatch)


METRICS: dict[str, Callable[[Tensor, Any], Tensor | WeightedLoss]] = {
    "squares of rows": lambda x, b: (x.argmax(-1) == b["labels"]).float().mean(1).square().mean(),
    "largest": lambda x, b: x.max(),
    "next": lambda x, b: WeightedLoss((x.argmax(-1)[:, :-1] == b["ids"][:, 1:]).sum(), torch.tensor(2.0)),
}


class Measured(WithLoss):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        built = super().configure_stage(stage)
        assert isinstance(built, Logits)
        if built.head is not None:
            nn.init.normal_(built.head.weight)  # tokens differ in what is likely next
        return built

    def microbatch_metrics(self, output: Tensor, microbatch: Any) -> dict[str, Any]:
        return {"tokens": WeightedLoss(torch.tensor(0.0), torch.tensor(1.0)), "a": self.metric(output, microbatch)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_sees_several_tokens_is_refused(rank: RankContext, name: str) -> None:
    text = r"the metric 'a' that Measured.microbatch_metrics makes (is not a sum|depends on the places).*WeightedLoss"
    with pytest.raises(ConfigError, match=text):
        fit_module(rank, Measured(METRICS[name]), context_parallel_shard=2)


def right(output: Tensor, microbatch: Any) -> WeightedLoss:
    hits = output.argmax(-1) == microbatch["labels"]
    return WeightedLoss(hits.sum(), torch.tensor(hits.numel()))


@pytest.mark.ranks(2)
def test_a_metric_that_adds_up_tokens_is_that_of_one_process(rank: RankContext) -> None:
    run = fit_module(rank, Measured(right), context_parallel_shard=2)
    assert run.global_step == 2
    assert 0 <= float(run.callback_metrics["train_a"]) <= 1


class ShiftsInStage(WithLoss):
    """A stage whose forward makes the loss, as in models of transformers."""

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        return StageInputs(first={"x": microbatch["ids"]}, shared={"labels": microbatch["ids"]})

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> WeightedLoss:
        return WeightedLoss(output, torch.tensor(microbatch["ids"][:, 1:].numel()))


class PlacesInInputs(WithLoss):
    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        places = torch.arange(microbatch["ids"].shape[1], device=microbatch["ids"].device)
        return StageInputs(first={"x": microbatch["ids"]}, shared={"positions": places})


class PlacesOfAll(WithLoss):
    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        ids = microbatch["ids"]
        places = TokenShard.of(self.pipeline.mesh).positions(ids.shape[1], ids.device)
        return StageInputs(first={"x": ids}, shared={"positions": places})


def fit_module(rank: RankContext, module: Model, num_tokens: int = TOKENS, **mesh: int) -> L.Trainer:
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), rank.world_size, rank.device.type, max_epochs=1)
    run.fit(module, data(num_tokens))
    return run


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_sees_several_tokens_is_refused(rank: RankContext, name: str) -> None:
    text = r"the loss that WithLoss.microbatch_loss or the last stage makes (is not a sum|depends on the places).*Shift"
    with pytest.raises(ConfigError, match=text):
        fit_module(rank, WithLoss(LOSSES[name]), context_parallel_shard=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_a_loss_that_adds_up_tokens_trains(rank: RankContext, name: str) -> None:
    assert fit_module(rank, WithLoss(RIGHT_LOSSES[name]), context_parallel_shard=2).global_step == 2


@pytest.mark.ranks(2)
def test_a_loss_that_is_shifted_in_the_stage_is_refused(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"or the last stage makes is not a sum over pairs of a token"):
        fit_module(rank, ShiftsInStage(), context_parallel_shard=2)


@pytest.mark.ranks(2)
def test_positions_of_a_hook_are_those_of_whole_sequences_or_refused(rank: RankContext) -> None:
    text = r"'positions', which PlacesInInputs.microbatch_inputs makes, counts the places.*TokenShard\.of"
    with pytest.raises(ConfigError, match=text):
        fit_module(rank, PlacesInInputs(), context_parallel_shard=2)
    assert fit_module(rank, PlacesOfAll(), context_parallel_shard=2).global_step == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"context_parallel_shard": 2}, {"tensor_parallel": 2}], ids=["cp2", "tp2"])
@pytest.mark.parametrize("num_tokens", [TOKENS, 2 * HIDDEN])
def test_a_matrix_with_a_row_for_each_token_trains(rank: RankContext, num_tokens: int, mesh: dict[str, int]) -> None:
    """It also trains if the matrix is as wide as a rank has tokens, 8."""
    assert fit_module(rank, Model(Flat), num_tokens, **mesh).global_step == 2


@pytest.mark.ranks(2)
def test_what_mixes_in_training_alone_is_refused_after_an_evaluation(rank: RankContext) -> None:
    module = WithLoss(block=Normed)
    run = trainer(D9DStrategy(mesh=MeshConfig(context_parallel_shard=2)), 2, rank.device.type, max_epochs=1)
    run.num_sanity_val_steps = 1
    with pytest.raises(ConfigError, match=r"layers\.1\.norm \(BatchNorm1d\) mixes"):
        run.fit(module, data(), data())
    assert run.global_step == 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("block", [Sdpa, Alone])
def test_stages_that_hand_over_dataclasses_are_looked_at(rank: RankContext, block: type[nn.Module]) -> None:
    module, mesh = WithLoss(block=block), {"pipeline_parallel": 2, "context_parallel_shard": 2}
    if block is Alone:
        assert fit_module(rank, module, **mesh).global_step == 2
        return
    with pytest.raises(ConfigError, match=r"ranks 2, 3: layers\.1 \(Sdpa\) mixes"):
        fit_module(rank, module, **mesh)


def data(num_tokens: int = TOKENS) -> DataLoader:
    ids = torch.randint(VOCABULARY, (4, num_tokens + 1), generator=torch.Generator().manual_seed(2))
    return DataLoader([{"ids": row[:-1], "labels": row[1:]} for row in ids], batch_size=2)  # type: ignore[arg-type]


def fit(rank: RankContext, block: type[nn.Module], **mesh: int) -> L.Trainer:
    strategy = D9DStrategy(mesh=MeshConfig(**mesh))
    L.seed_everything(3, verbose=False)
    run = trainer(strategy, rank.world_size, rank.device.type, max_epochs=1, use_distributed_sampler=False)
    run.fit(Model(block), data())
    return run


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"context_parallel_shard": 2}, {"tensor_parallel": 2}], ids=["cp2", "tp2"])
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused(rank: RankContext, name: str, mesh: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=rf"layers\.1.* \({name}\) mixes the tokens of its own rank alone.*shard_context"
    ):
        fit(rank, MIXING[name], **mesh)


class Pooled(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool
        self.embedding = TokenEmbedding(VOCABULARY, HIDDEN, initializer_range=1.0)
        self.layers, self.head = nn.ModuleList([Alone()]), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.layers[0](self.embedding(x))))


class Classifier(Model):
    """A model with one label for each row."""

    sequence_dims: ClassVar = {"ids": 1}

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__(Alone)
        self.pool = pool

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Pooled(self.pool)

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        return StageInputs(first={"x": microbatch["ids"]})

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> Tensor:
        return F.cross_entropy(output, microbatch["labels"][:, 0] % 3)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1),
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"context_parallel_shard": 2}, {"tensor_parallel": 2}], ids=["cp2", "tp2"])
@pytest.mark.parametrize("name", POOLS)
def test_what_pools_tokens_is_refused(rank: RankContext, name: str, mesh: dict[str, int]) -> None:
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_epochs=1)
    with pytest.raises(ConfigError, match=r"the stage \(Pooled\) makes a vector for each row.*TokenShard"):
        run.fit(Classifier(POOLS[name]), data())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"context_parallel_shard": 2}, {"tensor_parallel": 2}], ids=["cp2", "tp2"])
def test_what_counts_places_from_its_own_first_token_is_refused(rank: RankContext, mesh: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"layers\.1 \(Places\) counts the places of tokens.*TokenShard\.of"):
        fit(rank, Places, **mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"context_parallel_shard": 2}, {"tensor_parallel": 2}], ids=["cp2", "tp2"])
def test_what_sees_each_token_for_itself_trains(rank: RankContext, mesh: dict[str, int]) -> None:
    """Nothing else shows the probe: buffers and random numbers are the same as without it."""
    run = fit(rank, Alone, **mesh)
    module = run.lightning_module
    assert run.global_step == 2
    calls = [buffer for name, buffer in module.named_buffers() if name.endswith("num_calls")]
    assert [int(count) for count in calls] == [2, 2]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_d9d.strategy.sequence_check.SequenceCheck.check", lambda *_, **__: None)
        without = fit(rank, Alone, **mesh).lightning_module
    for (name, ours), theirs in zip(module.named_parameters(), without.parameters(), strict=True):
        assert_bitwise_equal(name, ours, theirs)
    assert torch.equal(torch.cat(module.drawn), torch.cat(without.drawn))  # type: ignore[arg-type]


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("x has NaN")
        return x


@pytest.mark.ranks(2)
def test_a_module_that_refuses_nan_is_told_where_it_comes_from(rank: RankContext) -> None:
    with pytest.raises(ValueError, match="x has NaN") as raised:
        fit(rank, Refusing, context_parallel_shard=2)
    assert any("ran with NaN in one token" in note for note in raised.value.__notes__)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", ["validate", "predict"])
def test_an_evaluation_that_comes_first_is_refused(rank: RankContext, loop: str) -> None:
    run = trainer(D9DStrategy(mesh=MeshConfig(context_parallel_shard=2)), 2, rank.device.type)
    with pytest.raises(ConfigError, match=r"layers\.1 \(Sdpa\) mixes"):
        getattr(run, loop)(Model(Sdpa), data())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("block", [Sdpa, Places])
def test_stages_that_get_hidden_states_are_looked_at(rank: RankContext, block: type[nn.Module]) -> None:
    """The ranks of the stage in front, which is in order, hear of it."""
    with pytest.raises(ConfigError, match=rf"ranks 2, 3: layers\.1 \({block.__name__}\)"):
        fit(rank, block, pipeline_parallel=2, context_parallel_shard=2)
