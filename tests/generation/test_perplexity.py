"""The loss of a text is the mean over its windows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_d9d import ConfigError
from lightning_d9d.generation import score
from tests.generation.test_cache import model_of


@pytest.mark.parametrize(("num_tokens", "batch_size"), [(2, 1), (9, 1), (10, 3), (42, 1), (42, 3)])
def test_each_token_but_the_first_is_predicted_once(num_tokens: int, batch_size: int) -> None:
    model = model_of()
    tokens = torch.randint(64, (num_tokens,), generator=torch.Generator().manual_seed(3))
    losses = []
    for begin in range(0, num_tokens - 1, 8):
        window = tokens[begin : begin + 9]
        with torch.no_grad():
            losses.append(F.cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none"))
    expected = torch.cat(losses).double().mean()
    found = score(model, tokens, context_length=8, batch_size=batch_size)
    assert found.num_tokens == num_tokens - 1
    assert found.loss == pytest.approx(float(expected), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="a text of 1 tokens"):
        score(model_of(), torch.tensor([1]))
    with pytest.raises(ConfigError, match="context_length=65 must be from 1 to max_position_embeddings=64"):
        score(model_of(), torch.arange(3), context_length=65)
    with pytest.raises(ConfigError, match="batch_size=0 must be at least 1"):
        score(model_of(), torch.arange(3), context_length=2, batch_size=0)
