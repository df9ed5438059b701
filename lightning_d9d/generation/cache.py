from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM
from lightning_d9d.modules import GroupedQueryAttention
from lightning_d9d.ops import attention


class CachedDecoder:
    """A whole model that processes a text in pieces, and keeps the keys and values of earlier tokens. Local.

    Its logits equal those of one call with all tokens. Between its calls the model is unchanged.

    Args:
        model: Model with all stages, on one device, in `eval()`.
        max_length: Maximum number of tokens in all. Memory for keys and values is allocated at the first call.

    Raises:
        ConfigError: The model is a single stage, or its attention runs over several ranks.
    """

    def __init__(self, model: Qwen3MoeForCausalLM, max_length: int) -> None:
        if model.stage.num_stages > 1:
            raise ConfigError(
                f"a CachedDecoder runs a whole model, not stage {model.stage.index} of {model.stage.num_stages}; load "
                "the checkpoint in one process"
            )
        self.model = model
        self.max_length = max_length
        self.length = 0
        """The number of tokens that it was given."""
        self._attentions = [part for part in model.modules() if isinstance(part, GroupedQueryAttention)]
        if any(part.attend is not attention for part in self._attentions):
            raise ConfigError("attention of this model is spread over ranks; load the checkpoint in one process")
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the logits after each of these tokens, which follow those of earlier calls.

        Args:
            input_ids: Integers, shape `[batch, new]`; the same batch in all calls.

        Returns:
            Shape `[batch, new, vocab]`.

        Raises:
            ConfigError: The tokens together with earlier ones exceed `max_length`.
        """
        end = self.length + input_ids.shape[1]
        if end > self.max_length:
            raise ConfigError(f"{end} tokens exceed max_length={self.max_length} of the CachedDecoder")
        positions = torch.arange(self.length, end, device=input_ids.device)[None]
        with self._attending_to_all():
            logits = self.model(input_ids, position_ids=positions).logits
        self.length = end
        return logits

    @contextmanager
    def _attending_to_all(self) -> Generator[None]:
        for index, part in enumerate(self._attentions):
            part.attend = partial(self._attend, index)
        try:
            yield
        finally:
            for part in self._attentions:
                part.attend = attention

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        if index == len(self._kept):
            shape = (*k.shape[:2], self.max_length, k.shape[3])
            self._kept.append((k.new_empty(shape), v.new_empty(shape)))
        keys, values = self._kept[index]
        end = self.length + q.shape[2]
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        if self.length == 0:
            return attention(q, k, v, documents)
        places = torch.arange(end, device=q.device)
        mask = places <= places[self.length :, None]  # shape [new, all]
        return F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], mask, enable_gqa=True)
