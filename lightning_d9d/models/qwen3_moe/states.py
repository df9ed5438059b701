"""The hidden states of every layer of a model in stages: of this rank's tokens, of all tokens, or means.

[Note: which states] The states are the embeddings, then the output of each layer, the last one after the final norm. So
there is one more state than layers, as in `transformers`. Each stage adds the inputs of its layers, and the last stage
its result.

[Note: sums on the way] For means a stage sums the states of the tokens that it has, and passes on `[batch, layers so
far, hidden]`. The last stage sums over the ranks with other tokens, once for all layers, and divides.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.parallel.tokens import TokenShard
from lightning_d9d.pipeline.types import StageInfo

OutputHiddenStates = bool | Literal["whole"]
"""A model returns no hidden states (False), those of this rank's tokens (True) or those of all ("whole")."""


class LayerStates:
    """Collects hidden states while a stage runs: the states themselves, their sums over a mask, or both.

    Args:
        stage: The stage that runs.
        tokens: The tokens that this rank holds.
        shape: Shape of the stage's hidden states, `[batch, seq, hidden]`.
        output_hidden_states: Mask as the stage received it.
        pooling_mask: The mask that the stage got.
        snapshots: States of earlier stages; None if they were not requested, and on the first stage.
        sums: Sums of earlier stages, in the same way, shape `[batch, layers so far, hidden]`.

    Raises:
        ConfigError: The requested hidden states are unknown or do not fit, or were requested on only some of the
            stages.
    """

    def __init__(
        self,
        stage: StageInfo,
        tokens: TokenShard,
        shape: torch.Size,
        output_hidden_states: OutputHiddenStates,
        pooling_mask: Tensor | None,
        snapshots: tuple[Tensor, ...] | None,
        sums: Tensor | None,
    ) -> None:
        _check_asked(stage, output_hidden_states, pooling_mask, snapshots, sums)
        self._tokens = tokens
        self._is_whole = output_hidden_states == "whole"
        self._snapshots = () if stage.is_first and output_hidden_states else snapshots
        self._mask: Tensor | None = None
        self._sums: list[Tensor] = [] if sums is None else [sums]
        if pooling_mask is not None:
            _check_mask(pooling_mask, (shape[0], shape[1] * tokens.num_slices))
            self._mask = tokens.own_slice(pooling_mask != 0, 1).unsqueeze(-1)

    def add(self, x: Tensor) -> None:
        """Take the hidden states of one layer, shape `[batch, seq, hidden]`."""
        if self._snapshots is not None:
            self._snapshots = (*self._snapshots, x)
        if self._mask is not None:
            # Filled, not multiplied: what padding has, NaN perhaps, stays out.
            counted, dtype = x.masked_fill(~self._mask, 0), torch.promote_types(x.dtype, torch.float32)
            self._sums.append(TokenShard.summand(counted.sum(1, keepdim=True, dtype=dtype)))

    def for_next_stage(self) -> dict[str, Any]:
        """Return the arguments for the next stage, by name."""
        handed: dict[str, Any] = {}
        if self._snapshots is not None:
            handed["snapshots"] = self._snapshots
        if self._is_whole:
            handed["output_hidden_states"] = "whole"
        if self._mask is not None:
            handed["state_sums"] = torch.cat(self._sums, 1)
        return handed

    def results(self) -> dict[str, Any]:
        """Return the last stage's `snapshots` and `pooled_states`, if they were requested.

        Collective over the ranks that share sequences, for whole states and for means.
        """
        found: dict[str, Any] = {}
        if self._snapshots is not None:
            whole = tuple(self._tokens.whole(each, 1) for each in self._snapshots) if self._is_whole else None
            found["snapshots"] = self._snapshots if whole is None else whole
        if self._mask is not None:
            found["pooled_states"] = self._means(torch.cat(self._sums, 1), self._mask)
        return found

    def _means(self, sums: Tensor, mask: Tensor) -> Tensor:
        """Divide the sums over the tokens of all ranks by their number; both are sent in one message."""
        count = mask.sum(1, dtype=sums.dtype)
        totals = self._tokens.sum(torch.cat([sums.flatten(1), count], 1))
        return totals[:, :-1].unflatten(1, sums.shape[1:]) / totals[:, -1].detach().clamp(min=1)[:, None, None]


def _check_asked(
    stage: StageInfo,
    output_hidden_states: OutputHiddenStates,
    pooling_mask: Tensor | None,
    snapshots: tuple[Tensor, ...] | None,
    sums: Tensor | None,
) -> None:
    if output_hidden_states not in (False, True, "whole"):
        raise ConfigError(
            f"output_hidden_states={output_hidden_states!r} must be False, True (hidden states of this rank's tokens) "
            "or 'whole' (those of all tokens). For means over tokens use pooling_mask"
        )
    where = f"stage {stage.index} of {stage.num_stages}"
    if output_hidden_states and not stage.is_first and snapshots is None:
        raise ConfigError(
            f"{where} got output_hidden_states={output_hidden_states!r}, but no hidden states of earlier layers: give "
            "it to the first stage, in StageInputs.first"
        )
    if not stage.is_first and (pooling_mask is None) != (sums is None):
        got, lacks = ("state_sums", "pooling_mask") if pooling_mask is None else ("pooling_mask", "state_sums")
        raise ConfigError(
            f"{where} got {got} without {lacks}: give pooling_mask to all stages, in StageInputs.shared, or to none"
        )


def _check_mask(mask: Tensor, expected: tuple[int, int]) -> None:
    if mask.is_floating_point() or mask.is_complex():
        raise ConfigError(
            f"pooling_mask has dtype {mask.dtype}, but it must say whether each token counts, not how much: use bool "
            "or integers, such as mask != 0"
        )
    if tuple(mask.shape) != expected:
        raise ConfigError(
            f"pooling_mask has shape {list(mask.shape)}, but the tokens of this rank have {list(expected)}, [batch, "
            "seq]: give one number for each token. Context parallelism shards the tensors of a batch that "
            "D9DModule.sequence_dims names"
        )
