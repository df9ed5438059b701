"""Batches as Qwen3-MoE takes them, made of what data loaders give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.pipeline.trees import with_children

IGNORED = -100
"""The label that does not count."""


def prepared(batch: Mapping[str, Any], shift_labels: bool) -> Mapping[str, Any]:
    """The batch with shifted labels and, for its `attention_mask`, `document_ids`; a mapping of the same class.

    Padding, where the mask is 0, becomes a document of its own, and labels there do not count.

    Args:
        batch: With whole sequences.
        shift_labels: Whether its labels stand at the tokens that they are, and are to be moved to those before.

    Raises:
        ConfigError: The mask has another shape than the tokens.
    """
    labels, mask, documents = (batch.get(name) for name in ("labels", "attention_mask", "document_ids"))
    changed: dict[str, Any] = {}
    if mask is not None:
        if mask.shape != batch["input_ids"].shape:
            raise ConfigError(
                f"attention_mask has shape {list(mask.shape)}, but input_ids {list(batch['input_ids'].shape)}: give 1 "
                "for each token and 0 for padding; which tokens see each other, document_ids say"
            )
        documents = changed["document_ids"] = mask.long() if documents is None else apart(documents, mask)
    if labels is not None and shift_labels:
        labels = changed["labels"] = shift(labels, documents)
    if labels is not None and mask is not None:
        changed["labels"] = labels.masked_fill(mask == 0, IGNORED)
    if not changed:
        return batch
    kept = {name: value for name, value in batch.items() if name != "attention_mask"}
    return with_children(batch, {**kept, **changed})


def apart(document_ids: Tensor, mask: Tensor) -> Tensor:
    """Document ids of which padding has one that no document has."""
    return torch.where(mask == 0, document_ids.min() - 1, document_ids)


def shift(labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Each token's label moved to the token before it; the last one of a row, and of a document, has none.

    Args:
        labels: Integers, shape `[batch, seq]`.
        document_ids: Shape of `labels`.
    """
    result = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if document_ids is not None:
        is_end = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1))
        result = result.masked_fill(is_end, IGNORED)
    return result


def check_shifted(batch: Mapping[str, Any], shift_labels: bool) -> None:
    """See that labels are as `shift_labels` says they are. Reads the device.

    Labels that are the tokens themselves would be learned at once, as each token sees itself. Where a batch does not
    tell (all its tokens are the same, say) it passes.

    Raises:
        ConfigError: All labels that count are their own tokens and shall not be shifted, or the tokens that follow and
            shall be shifted once more.
    """
    input_ids, labels = batch["input_ids"], batch.get("labels")
    if labels is None or labels.shape != input_ids.shape:
        return
    counts = labels != IGNORED
    are_own = bool(((labels == input_ids) | ~counts).all())
    are_next = bool(((labels[:, :-1] == input_ids[:, 1:]) | ~counts[:, :-1]).all())
    if are_own and not are_next and not shift_labels:
        raise ConfigError(
            "the labels of the first batch are its input_ids: each token would be predicted from itself. Set "
            "Qwen3MoePretraining(shift_labels=True), which moves labels to the token before, for batches as Hugging "
            "Face's collators make them; or let labels[:, i] be input_ids[:, i + 1]"
        )
    if are_next and not are_own and shift_labels:
        raise ConfigError(
            "the labels of the first batch are the tokens that follow, already shifted, but shift_labels=True shifts "
            "them once more; leave shift_labels out"
        )
