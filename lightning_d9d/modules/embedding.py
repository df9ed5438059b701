from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal


class TokenEmbedding(DrawnByRows, nn.Embedding):
    """`torch.nn.Embedding` whose initial weight is normal with a given standard deviation."""

    def __init__(self, vocab_size: int, hidden_size: int, *, initializer_range: float) -> None:
        self.initializer_range = initializer_range  # nn.Embedding's constructor resets the parameters
        super().__init__(vocab_size, hidden_size)

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return a normal weight."""
        return {"weight": Normal(self.initializer_range)}


class SplitTokenEmbedding(nn.ModuleDict):
    """One embedding for each part of the vocabulary; ids count over the parts in order.

    Parts have separate parameters (`<name>.weight`), so that one may be trained and another frozen.
    """

    def __init__(self, vocab_splits: Mapping[str, int], hidden_size: int, *, initializer_range: float) -> None:
        super().__init__(
            {
                name: TokenEmbedding(size, hidden_size, initializer_range=initializer_range)
                for name, size in vocab_splits.items()
            }
        )

    @property
    def weight(self) -> Tensor:
        """The matrix of the whole vocabulary, `[vocab, hidden]`: a copy, through which gradients reach the parts."""
        return torch.cat([part.get_parameter("weight") for part in self.values()])

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids of shape `[...]`, result `[..., hidden]`; an id beyond the vocabulary fails as in one matrix."""
        parts = cast("list[TokenEmbedding]", list(self.values()))
        result, start = None, 0
        for part in parts:
            # Ids of another part look up a border row, whose place the right part takes. The vocabulary's own borders
            # stay open, so that an id beyond them fails.
            local = ids if part is parts[0] else (ids - start).clamp(min=0)
            local = local if part is parts[-1] else local.clamp(max=part.num_embeddings - 1)
            rows = part(local)
            result = rows if result is None else torch.where((ids >= start).unsqueeze(-1), rows, result)
            start += part.num_embeddings
        assert result is not None, "a vocabulary has at least one part"
        return result
