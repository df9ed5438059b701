"""A vocabulary whose rows lie on several ranks: its embedding, and where its labels are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def vocab_parallel_embedding(ids: Tensor, weight: Tensor, first: int, *, is_first: bool, is_last: bool) -> Tensor:
    """Looks up ids in the rows of one rank: the summand of an embedding whose rows lie on several ranks.

    No message: sum the results over the ranks.

    Args:
        ids: rows of the whole vocabulary, integers `[...]`.
        weight: this rank's rows `first` to `first + rows`, shape `[rows, hidden]`; perhaps none.
        first: which row of the vocabulary this rank's first one is.
        is_first: whether no other rank has rows before.
        is_last: whether no other rank has rows after.

    Returns:
        Shape `[..., hidden]`: zeros for ids of other ranks.

    Raises:
        IndexError: An id is negative and `is_first`, or beyond the vocabulary and `is_last`: on the CPU. On CUDA it
            fails in the kernel, as it does in torch.
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
    """Return each label's column, `[tokens, 1]`, and if it is this rank's, `[tokens]`; other columns are arbitrary."""
    num_columns = logits.shape[1]
    is_ours = (labels >= first) & (labels < first + num_columns)
    return (labels - first).clamp(0, max(0, num_columns - 1)).unsqueeze(1), is_ours


def check_labels(labels: Tensor, is_outside: Tensor) -> None:
    """Raise IndexError if a label is outside of the vocabulary: on the CPU. On CUDA a kernel fails."""
    if labels.device.type != "cpu":
        torch._assert_async(~is_outside.any(), "a label is outside of the vocabulary")
    elif is_outside.any():
        raise IndexError(f"label {labels[is_outside][0].item()} is outside of the vocabulary")
