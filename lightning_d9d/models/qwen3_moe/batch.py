"""Batches as Qwen3-MoE takes them, made of what data loaders give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.modules import document_positions
from lightning_d9d.pipeline.host_copy import HostCopy
from lightning_d9d.pipeline.trees import with_children

IGNORED = -100
"""The label that does not count."""


def prepared(batch: Mapping[str, Any], shift_labels: bool) -> Mapping[str, Any]:
    """The batch with shifted labels and, for its `attention_mask`, `document_ids`; a mapping of the same class.

    Padding, where the mask is 0, becomes a document of its own, and labels there do not count.

    Args:
        batch: With whole sequences.
        shift_labels: Whether its labels stand at the tokens that they are, and are to be moved to those before.
    """
    labels, mask, documents = (batch.get(name) for name in ("labels", "attention_mask", "document_ids"))
    changed: dict[str, Any] = {}
    if mask is not None:
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


class BatchCheck:
    """Looks at the ids, labels and lengths of every batch of one kind (training, validation, ...).

    On the CPU, and in the first batch, what is wrong is refused at once. Later ones on an accelerator do not wait for
    it: an id that is outside of the vocabulary is replaced, as it would end the device's work, is noted on the device,
    and is refused when the note has reached the host, a few batches later or in `finish`.

    Args:
        kind: Of batches, for people.
        vocab_size: Of the model.
        window: The longest document that the model takes.
        shift_labels: Whether labels are to be shifted.
    """

    def __init__(self, kind: str, vocab_size: int, window: int, shift_labels: bool) -> None:
        self.kind = kind
        self.vocab_size = vocab_size
        self.window = window
        self.shift_labels = shift_labels
        self._note: Tensor | None = None
        """Of the first thing that was wrong: which of `_KEYS` has it, plus 1, its value, the batch. Else zeros."""
        self._copy = HostCopy()

    def __call__(self, batch: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        """The batch, on an accelerator without ids that are outside of the vocabulary.

        Args:
            batch: With whole sequences.
            index: Of the batch in its epoch.

        Raises:
            ConfigError: An id or a label is outside of the vocabulary, a length does not agree, a document is too long,
                or the first batch's labels are not as `shift_labels` says.
        """
        check_lengths(batch, index, self.kind)
        is_first = self._note is None
        if self._note is None:
            self._note = torch.zeros(3, dtype=torch.int64, device=batch["input_ids"].device)
        replaced = {}
        for name, replacement in (("input_ids", 0), ("labels", IGNORED)):
            values = batch.get(name)
            if values is not None:
                is_outside = (values < 0) | (values >= self.vocab_size)
                is_outside = is_outside & (values != IGNORED) if name == "labels" else is_outside
                self._add(name, values, is_outside, index)
                replaced[name] = values.masked_fill(is_outside, replacement)
        if batch["input_ids"].shape[1] > self.window:
            longest = longest_document(batch).long().view(1)
            self._add("document", longest, longest > self.window, index)
        note = self._note if is_first else self._copy.exchange(self._note)
        if note is not None:
            self._refuse(note)
        if is_first:
            check_shifted(batch, self.shift_labels)
        return batch if self._note.device.type == "cpu" else with_children(batch, {**batch, **replaced})

    def finish(self) -> None:
        """Wait for what is noted about the last batches.

        Raises:
            ConfigError: As in a call.
        """
        if self._note is not None:
            self._refuse(self._note)

    def _add(self, name: str, values: Tensor, is_wrong: Tensor, index: int) -> None:
        """Note the first wrong value unless something is noted. Asks no device."""
        assert self._note is not None
        if values.numel() == 0:
            return
        place = is_wrong.flatten().int().argmax().view(1)
        value = values.flatten().index_select(0, place)
        constants = [torch.full_like(value, number, dtype=torch.int64) for number in (1 + _KEYS.index(name), index)]
        note = torch.cat([constants[0], value.long(), constants[1]])
        self._note = torch.where((self._note[0] == 0) & is_wrong.any(), note, self._note)

    def _refuse(self, note: Tensor) -> None:
        key, value, index = note.tolist()
        if key == 0:
            return
        name, where = _KEYS[key - 1], f"batch {index} of {self.kind}"
        if name == "document":
            raise ConfigError(
                f"{where} has a document of {value} tokens, but max_position_embeddings={self.window}: shorten the "
                "data's sequences, give the borders of their documents as document_ids, or raise "
                "max_position_embeddings of the config (a model that was trained for fewer positions has to learn the "
                "others)"
            )
        more = f", and labels that do not count are {IGNORED}" if name == "labels" else ""
        raise ConfigError(
            f"{where} has the value {value} in {name}, but vocab_size={self.vocab_size}: ids go from 0 to "
            f"{self.vocab_size - 1}{more}; raise vocab_size, or give the data of this vocabulary"
        )


_KEYS = ("input_ids", "labels", "document")


def check_lengths(batch: Mapping[str, Any], index: int, kind: str) -> None:
    """See that all tensors of a batch have a number for each token.

    Raises:
        ConfigError: They do not.
    """
    expected = list(batch["input_ids"].shape)
    for name in ("labels", "position_ids", "document_ids", "attention_mask", "pooling_mask"):
        tensor = batch.get(name)
        if tensor is not None and list(tensor.shape) != expected:
            raise ConfigError(
                f"batch {index} of {kind} has {name} of shape {list(tensor.shape)}, but input_ids of "
                f"{expected}: give a number for each token, [batch, seq] of both"
            )


def longest_document(batch: Mapping[str, Any]) -> Tensor:
    """The length of the longest document of a batch, on the device."""
    for name, positions_of in (
        ("position_ids", lambda ids: ids),
        ("document_ids", document_positions),
        ("attention_mask", document_positions),
    ):
        if batch.get(name) is not None:
            return 1 + positions_of(batch[name]).max()
    input_ids = batch["input_ids"]
    return torch.full((), input_ids.shape[1], device=input_ids.device)


def check_shifted(batch: Mapping[str, Any], shift_labels: bool) -> None:
    """See that labels are as `shift_labels` says they are. Reads the device.

    Labels that are the tokens themselves would be learned at once, as each token sees itself. Where a batch does not
    tell (all its tokens are the same, say) it passes.

    Raises:
        ConfigError: All labels that count are their own tokens and shall not be shifted, or the tokens that follow and
            shall be shifted once more.
    """
    input_ids, labels = batch["input_ids"], batch.get("labels")
    if labels is None:
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
