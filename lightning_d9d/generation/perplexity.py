from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM


class TextScore(NamedTuple):
    """How well a model predicts a text."""

    loss: float
    """The mean of -log of the probability of each predicted token, in nats."""
    num_tokens: int
    """The number of predicted tokens: all but the first."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)


@torch.no_grad()
def score(model: Qwen3MoeForCausalLM, tokens: Tensor, context_length: int = 2048, batch_size: int = 1) -> TextScore:
    """Predict each token of a text but the first, from up to `context_length` tokens before it. Local.

    The text is split into consecutive windows, as in training: a token sees only those of its window.

    Args:
        model: A whole model, on one device. It is put into `eval()` while it runs.
        tokens: Integers, shape `[seq]`, at least two.
        context_length: Number of tokens in a window.
        batch_size: Number of windows that run at the same time; at least 1.

    Raises:
        ConfigError: The text is too short, the windows are longer than the model has positions, or `batch_size` is
            below 1.
    """
    limit = model.config.max_position_embeddings
    if len(tokens) < 2:
        raise ConfigError(f"a text of {len(tokens)} tokens has none that can be predicted; give a longer one")
    if not 1 <= context_length <= limit:
        raise ConfigError(
            f"context_length={context_length} must be from 1 to max_position_embeddings={limit} of the model"
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    device = next(model.parameters()).device
    inputs, labels = tokens[:-1], tokens[1:]
    total = torch.zeros((), dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        for part, width in _batches(len(inputs), context_length, batch_size):
            ids, wanted = (each[part].view(-1, width).to(device) for each in (inputs, labels))
            total += model(ids, labels=wanted, reduction="sum").loss.double().cpu()
    finally:
        model.train(was_training)
    return TextScore(float(total) / len(inputs), len(inputs))


def _batches(num_tokens: int, context_length: int, batch_size: int) -> Iterator[tuple[slice, int]]:
    """Yield the tokens of each batch, and of the windows in it; remaining tokens make a last window."""
    whole, step = num_tokens // context_length * context_length, context_length * batch_size
    for begin in range(0, whole, step):
        yield slice(begin, min(begin + step, whole)), context_length
    if whole < num_tokens:
        yield slice(whole, num_tokens), num_tokens - whole
