from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.generation.cache import CachedDecoder
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 0.0
    """The divisor of the logits before a token is drawn; lower is more certain. 0 takes the most likely token."""

    top_k: int | None = None
    """Number of most likely tokens to draw from; None draws from all."""

    top_p: float | None = None
    """Draw from the fewest most likely tokens that have this probability together; None draws from all
    (https://arxiv.org/abs/1904.09751)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"Sampling.temperature={self.temperature} must be at least 0; 0 takes the most likely token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"Sampling.top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"Sampling.top_p={self.top_p} must be above 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ConfigError(
                "Sampling.top_k and top_p have no effect at temperature=0, which draws nothing; set it to 1.0"
            )

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the next token of each row, int64 `[batch]`, from logits `[batch, vocab]`."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            left_out = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before >= self.top_p)
            probabilities = probabilities.masked_fill(left_out, 0)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def generate(
    model: Qwen3MoeForCausalLM,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    stop: Collection[int] = (),
    seed: int = 0,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, one by one; each token is computed once. Local.

    Args:
        model: A whole model, on one device. It is put into `eval()` while it runs.
        prompt: Integers, shape `[seq]`, at least one.
        max_new_tokens: Maximum number of new tokens; at least 1.
        sampling: How tokens are chosen.
        stop: Tokens that end the text; they are not yielded.
        seed: Generator of the random draws.

    Raises:
        ConfigError: The prompt is empty, `max_new_tokens` is below 1, or both together exceed the positions of the
            model. The call itself raises it, before the first token is requested.
    """
    length, limit = len(prompt) + max_new_tokens, model.config.max_position_embeddings
    if len(prompt) == 0:
        raise ConfigError(
            "the prompt has no tokens; give at least one, such as the tokenizer's beginning-of-text token"
        )
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if length > limit:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={max_new_tokens} exceed "
            f"max_position_embeddings={limit} of the model; ask for at most {max(0, limit - len(prompt))}"
        )
    return _tokens(CachedDecoder(model, length), prompt, sampling, stop, seed)


@torch.no_grad()
def _tokens(
    decoder: CachedDecoder, prompt: Tensor, sampling: Sampling, stop: Collection[int], seed: int
) -> Iterator[int]:
    model = decoder.model
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = prompt.to(device)[None]
    was_training = model.training
    model.eval()
    try:
        for _ in range(decoder.max_length - len(prompt)):
            tokens = sampling.choose(decoder(tokens)[:, -1], generator)[None]
            if (token := int(tokens)) in stop:
                return
            yield token
    finally:
        model.train(was_training)
