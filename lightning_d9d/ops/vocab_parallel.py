"""A vocabulary whose rows are on several ranks: its embedding, and the places of its labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def vocab_parallel_embedding(ids: Tensor, weight: Tensor, first: int, *, is_first: bool, is_last: bool) -> Tensor:
    """Look up ids in the rows of one rank: the summand of an embedding whose rows are on several ranks.

    No message is sent: sum the results over the ranks.

    Args:
        ids: Rows of the whole vocabulary, integers `[...]`.
        weight: This rank's rows `first` to `first + rows`, shape `[rows, hidden]`; there may be none.
        first: Index of this rank's first row in the vocabulary.
        is_first: Whether no other rank has rows before.
        is_last: Whether no other rank has rows after.

    Returns:
        Shape `[..., hidden]`: zeros for ids of other ranks.

    Raises:
        IndexError: On the CPU: an id is negative and `is_first`, or beyond the vocabulary and `is_last`. On CUDA it
            fails in the kernel, as in torch.
    """
    is_ours = (ids >= first) & (ids < first + len(weight))
    if not len(weight):  # others' ids need a row: before `first`, unless that would be that of id -1
        weight, first = F.pad(weight, (0, 0, 0, 1)), first if is_first else first - 1
    # Ids of other ranks look up a border row. The vocabulary's own borders stay open, so that an id beyond them fails.
    local = ids - first
    local = local if is_first else local.clamp(min=0)
    local = local if is_last else local.clamp(max=len(weight) - 1)
    return F.embedding(local, weight).masked_fill(~is_ours.unsqueeze(-1), 0)


def own_columns(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return each label's column, `[tokens, 1]`, and whether it is this rank's, `[tokens]`; others are arbitrary."""
    num_columns = logits.shape[1]
    is_ours = (labels >= first) & (labels < first + num_columns)
    return (labels - first).clamp(0, max(0, num_columns - 1)).unsqueeze(1), is_ours


def check_labels(labels: Tensor, is_outside: Tensor) -> None:
    """Raise IndexError if a label is outside of the vocabulary: on the CPU. On CUDA a kernel fails instead."""
    if labels.device.type != "cpu":
        torch._assert_async(~is_outside.any(), "a label is outside of the vocabulary")
    elif is_outside.any():
        raise IndexError(f"label {labels[is_outside][0].item()} is outside of the vocabulary")
