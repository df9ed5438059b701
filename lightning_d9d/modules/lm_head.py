from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_d9d.modules.adapters import adapter_of
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.ops import LossOptions, linear, linear_cross_entropy
from lightning_d9d.ops.linear_cross_entropy import Reduction


class LMHead(DrawnByRows):
    """Projects hidden states to the vocabulary, and computes losses if there are labels.

    Losses are computed without all logits at a time, see `lightning_d9d.ops.linear_cross_entropy`.

    Args:
        vocab_size: Rows of the weight; None makes a head without a weight, which is passed in each call, for tied
            embeddings.
        hidden_size: Columns of the weight.
        initializer_range: Standard deviation of the initial weight.
        loss_options: Soft cap of the logits, z-loss, label smoothing and the ignored label.

    Raises:
        ConfigError: An option of the loss is outside of its range.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        vocab_size: int | None,
        hidden_size: int,
        *,
        initializer_range: float,
        loss_options: LossOptions = LossOptions(),
    ) -> None:
        super().__init__()
        loss_options.check()
        self.initializer_range, self.loss_options = initializer_range, loss_options
        weight = None if vocab_size is None else nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return a normal weight, if there is one."""
        return {} if self.weight is None else {"weight": Normal(self.initializer_range)}

    def forward(
        self, x: Tensor, labels: Tensor | None = None, reduction: Reduction = "none", weight: Tensor | None = None
    ) -> Tensor:
        """Return logits, or with labels the cross-entropy of each label.

        Args:
            x: Hidden states, shape `[..., hidden]`.
            labels: The id to predict at each position (already shifted), shape `[...]`; -100 is ignored, or the label
                named by `loss_options`.
            reduction: "none" for one loss for each label, 0 where ignored; "sum" for their sum.
            weight: Shape `[vocab, hidden]`, used instead of the head's own.

        Returns:
            Logits `[..., vocab]` in the model's dtype, within the soft cap if there is one. With labels, losses in
            float32 (float64 for a float64 model), in the shape of `labels` or a scalar.
        """
        whole = self.weight if weight is None else weight
        assert whole is not None, "a head without a weight needs one in the call"
        adapter = adapter_of(self)
        x, whole = (x, whole) if adapter is None else adapter.extend(x, whole)
        return _logits_or_loss(x, whole, labels, reduction, self.loss_options)


class SplitLMHead(nn.ModuleDict):
    """A head with one weight for each part of the vocabulary (`<name>.weight`), called like `LMHead`."""

    def __init__(
        self,
        vocab_splits: Mapping[str, int],
        hidden_size: int,
        *,
        initializer_range: float,
        loss_options: LossOptions = LossOptions(),
    ) -> None:
        loss_options.check()
        super().__init__(
            {
                name: LMHead(size, hidden_size, initializer_range=initializer_range)
                for name, size in vocab_splits.items()
            }
        )
        self.loss_options = loss_options

    def forward(self, x: Tensor, labels: Tensor | None = None, reduction: Reduction = "none") -> Tensor:
        """Return the result of `LMHead.forward` over the parts in order."""
        weight = torch.cat([part.get_parameter("weight") for part in self.values()])
        return _logits_or_loss(x, weight, labels, reduction, self.loss_options)


def _logits_or_loss(
    x: Tensor, weight: Tensor, labels: Tensor | None, reduction: Reduction, options: LossOptions
) -> Tensor:
    if labels is None:
        return options.capped(linear(x, weight))
    return linear_cross_entropy(x, weight, labels, options=options, reduction=reduction)
