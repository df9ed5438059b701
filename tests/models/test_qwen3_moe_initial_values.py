"""A model that starts with our normal values trains as one that starts with NumPy's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.modules import Normal
from lightning_d9d.pipeline.initial_weights import materialize

SEEDS = (0, 1, 2)
STEPS, LAST = 60, 10
VOCAB, ROWS, LENGTH = 48, 8, 24
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.05,
)


def numpys(self: Normal, target: Tensor, shape: Sequence[int], ranges: Sequence[range], key: int) -> None:
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(tuple(shape), dtype=np.float32)
    target.copy_(torch.from_numpy(values).mul_(self.std))


def batches() -> list[Tensor]:
    """Return batches of a chain in which three tokens may follow each, with chances of 70, 20 and 10 percent: 0.80 nats
    a token."""
    random = np.random.default_rng(0)
    followers = np.stack([random.permutation(VOCAB)[:3] for _ in range(VOCAB)])
    ids = random.integers(VOCAB, size=(STEPS * ROWS, LENGTH + 1))
    choices = random.choice(3, p=[0.7, 0.2, 0.1], size=ids.shape)
    for column in range(1, ids.shape[1]):
        ids[:, column] = followers[ids[:, column - 1], choices[:, column]]
    return list(torch.from_numpy(ids).split(ROWS))


def train(seed: int) -> float:
    """The mean loss of the last steps."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(CONFIG)
    materialize(model, torch.device("cpu"), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for ids in batches():
        loss = model(ids[:, :-1], ids[:, 1:]).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return mean(losses[-LAST:])


def same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether means differ by less than two standard errors of their difference."""
    error = math.sqrt(stdev(one) ** 2 / len(one) + stdev(other) ** 2 / len(other))
    return abs(mean(one) - mean(other)) < 2 * error


def test_ours_train_as_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are four times as wide do not: the comparison would notice."""
    ours = [train(seed) for seed in SEEDS]
    fill = Normal.fill_slice_
    monkeypatch.setattr(Normal, "fill_slice_", lambda self, *args: fill(Normal(4 * self.std), *args))
    wide = [train(seed) for seed in SEEDS]
    monkeypatch.setattr(Normal, "fill_slice_", numpys)
    theirs = [train(seed) for seed in SEEDS]
    assert same(ours, theirs), (ours, theirs)
    assert not same(wide, theirs), (wide, theirs)
