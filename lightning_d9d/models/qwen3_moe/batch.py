"""Batches as Qwen3-MoE takes them, made from the batches of data loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.modules import document_positions
from lightning_d9d.ops.linear_cross_entropy import IGNORED
from lightning_d9d.pipeline.host_copy import HostCopy
from lightning_d9d.pipeline.trees import described, with_children

_IDS = ("input_ids", "labels", "position_ids", "document_ids")
_OF_TOKENS = (*_IDS, "attention_mask", "pooling_mask")
"""Tensors of a batch that have a number for each token."""
_ID_DTYPES = (torch.int64, torch.int32)
_COLLATE = "in the DataLoader's collate_fn"


def check_form(batch: Any, where: str, needed: Sequence[str]) -> None:
    """Check that a batch is a mapping of tensors as Qwen3-MoE takes them, without a host sync.

    Args:
        batch: Anything.
        where: Description of the batch, for error messages.
        needed: Names that the batch must have.

    Raises:
        ConfigError: The batch is not a mapping, or lacks a needed tensor. Or a value is not a tensor, is empty, or has
            another shape or dtype. The message describes the batch and the remedy.
    """
    names = " and ".join(repr(name) for name in needed)
    if not isinstance(batch, Mapping):
        if isinstance(batch, tuple | list) and list(map(type, batch)) == [Tensor] * len(needed):
            form = "{" + ", ".join(f"{name!r}: batch[{place}]" for place, name in enumerate(needed)) + "}"
        else:
            form = f"a dict with {names}"
        raise ConfigError(f"{where} is {described(batch)}, but it must be a mapping: make {form} of it {_COLLATE}")
    if missing := [name for name in needed if batch.get(name) is None]:
        raise ConfigError(f"{where} has no {missing[0]!r}: it is {described(batch)}. {_remedy(missing[0], batch)}")
    for name in _OF_TOKENS:
        if batch.get(name) is not None:
            _check_tensor(name, batch[name], where, batch)


def _remedy(name: str, batch: Mapping[str, Any]) -> str:
    if name == "labels":
        return (
            "Add labels, [batch, seq], the input_ids one place further on; or a copy of input_ids as labels, with "
            "Qwen3MoePretraining(shift_labels=True)"
        )
    texts = [key for key, value in batch.items() if _is_text(value)]
    if texts:
        return f"Tokenize {texts[0]!r} {_COLLATE}: give its tokens as input_ids, integers [batch, seq]"
    return f"Give the tokens under this name {_COLLATE}, integers [batch, seq]"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and len(value) > 0 and isinstance(value[0], str))


def _check_tensor(name: str, value: Any, where: str, batch: Mapping[str, Any]) -> None:
    """Check that one entry of a batch is a tensor with a number for each token."""
    problem = ""
    if not isinstance(value, Tensor):
        problem = f"it must be a tensor [batch, seq]: {_how_to_make_tensor(name, value)}"
    elif value.ndim != 2:
        problem = f"it must be [batch, seq]: {'add a dim in front' if value.ndim == 1 else 'reshape it'} {_COLLATE}"
    elif value.numel() == 0:
        problem = "it has no token: leave empty batches and rows out of the data"
    elif name in _IDS and value.dtype not in _ID_DTYPES:
        problem = f"it must be int64 or int32: give {name}.long() {_COLLATE}"
    elif value.shape != batch["input_ids"].shape:
        problem = f"input_ids are {list(batch['input_ids'].shape)}: give a number for each token, [batch, seq] of both"
    if problem:
        raise ConfigError(f"in {where}, {name} is {described(value)}, but {problem}. The batch is {described(batch)}")


def _how_to_make_tensor(name: str, value: Any) -> str:
    if name == "input_ids" and _is_text(value):
        return f"tokenize it {_COLLATE}"
    if isinstance(value, list) and value and isinstance(value[0], Tensor) and value[0].ndim == 1:
        return "make the lists tensors in the dataset's __getitem__, as default_collate turns lists round"
    return f"make one of its rows, padded to one length, {_COLLATE}"


def prepared(batch: Mapping[str, Any], shift_labels: bool) -> Mapping[str, Any]:
    """Return the batch with shifted labels, and with `document_ids` for its `attention_mask`.

    The mapping keeps its class. Padding, where the mask is 0, becomes a separate document, and labels there do not
    count.

    Args:
        batch: A batch with whole sequences.
        shift_labels: Whether each label is at its own token; it is then moved to the token before.
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
    """Return document ids in which padding has an id that no document has."""
    return torch.where(mask == 0, document_ids.min() - 1, document_ids)


def shift(labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Move each label to the token before it; the last token of a row, and of a document, gets none.

    Args:
        labels: Integers, shape `[batch, seq]`.
        document_ids: Shape of `labels`.
    """
    result = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if document_ids is not None:
        is_end = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1))
        result = result.masked_fill(is_end, IGNORED)
    return result


def place_in_data(index: int, kind: str) -> str:
    """Return the description of a batch for error messages."""
    return f"batch {index} of {kind}"


class BatchCheck:
    """Checks the ids and labels of every batch of one kind (training, validation, ...), after `check_form`.

    On the CPU, and in the first batch, a wrong value is refused at once. On an accelerator the host does not wait for
    the check of later batches. An id outside of the vocabulary is replaced there, because it would make the device
    fail, and recorded on the device. It is refused when the record has reached the host: a few batches later, or in
    `finish`.

    Args:
        kind: Name of this kind of batches, for error messages.
        vocab_size: Size of the model's vocabulary.
        window: The longest document that the model supports, in tokens.
        shift_labels: Whether labels must be shifted.
    """

    def __init__(self, kind: str, vocab_size: int, window: int, shift_labels: bool) -> None:
        self.kind = kind
        self.vocab_size = vocab_size
        self.window = window
        self.shift_labels = shift_labels
        self._note: Tensor | None = None
        """The first wrong value: its index in `_KEYS` plus 1, the value, the batch. Zeros if nothing was wrong."""
        self._copy = HostCopy()
        self._num_untold = 0
        """Number of batches so far that did not show if labels are shifted; `_MOST_UNTOLD` once one did."""

    def __call__(self, batch: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        """Check a batch and return it; on an accelerator, ids outside of the vocabulary are replaced.

        Args:
            batch: A batch with whole sequences.
            index: Index of the batch in its epoch.

        Raises:
            ConfigError: An id or a label is outside of the vocabulary, or a document is too long. Or labels contradict
                `shift_labels`, in the first batch that shows it.
        """
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
        if batch["input_ids"].shape[1] > self.window or batch.get("position_ids") is not None:
            longest = longest_document(batch).long().view(1)
            self._add("document", longest, longest > self.window, index)
        note = self._note if is_first else self._copy.exchange(self._note)
        if note is not None:
            self._refuse(note)
        if self._num_untold < _MOST_UNTOLD:
            self._num_untold = _MOST_UNTOLD if check_shifted(batch, self.shift_labels) else self._num_untold + 1
        return batch if self._note.device.type == "cpu" else with_children(batch, {**batch, **replaced})

    def finish(self) -> None:
        """Wait for the records about the last batches.

        Raises:
            ConfigError: A value of these batches is refused, as in a call.
        """
        if self._note is not None:
            self._refuse(self._note)

    def _add(self, name: str, values: Tensor, is_wrong: Tensor, index: int) -> None:
        """Record the first wrong value unless there is one already, without a host sync."""
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
        name, where = _KEYS[key - 1], place_in_data(index, self.kind)
        if name == "document":
            raise ConfigError(
                f"{where} has a document of {value} tokens, but max_position_embeddings={self.window}. Shorten the "
                "data's sequences, or give the borders of their documents as document_ids. Or raise "
                "max_position_embeddings of the config, and train: the model has not learned the new positions"
            )
        more = f", and labels that do not count are {IGNORED}" if name == "labels" else ""
        raise ConfigError(
            f"{where} has the value {value} in {name}, but vocab_size={self.vocab_size}: ids go from 0 to "
            f"{self.vocab_size - 1}{more}. Raise vocab_size, or use data of this vocabulary"
        )


_KEYS = ("input_ids", "labels", "document")
_MOST_UNTOLD = 100
"""Maximum number of batches whose labels are checked until one shows whether they are shifted. Each check makes the
host wait."""


def longest_document(batch: Mapping[str, Any]) -> Tensor:
    """Return the length of the longest document of a batch, on the device."""
    for name, positions_of in (
        ("position_ids", lambda ids: ids),
        ("document_ids", document_positions),
        ("attention_mask", document_positions),
    ):
        if batch.get(name) is not None:
            return 1 + positions_of(batch[name]).max()
    input_ids = batch["input_ids"]
    return torch.full((), input_ids.shape[1], device=input_ids.device)


def check_shifted(batch: Mapping[str, Any], shift_labels: bool) -> bool:
    """Check that labels agree with `shift_labels`. The host waits for the device.

    Labels that equal their own tokens would be learned at once, because each token sees itself.

    Returns:
        True if the batch decides this: it has labels that count, and tokens that differ. Also True without labels.

    Raises:
        ConfigError: All labels that count are their own tokens but are not shifted, or they are the next tokens but are
            shifted again.
    """
    input_ids, labels = batch["input_ids"], batch.get("labels")
    if labels is None:
        return True
    counts = labels != IGNORED
    are_own = bool(((labels == input_ids) | ~counts).all())
    are_next = bool(((labels[:, :-1] == input_ids[:, 1:]) | ~counts[:, :-1]).all())
    if are_own and not are_next and not shift_labels:
        raise ConfigError(
            "the labels of a batch are its input_ids: each token would be predicted from itself. Set "
            "Qwen3MoePretraining(shift_labels=True), which shifts the labels of batches from Hugging Face's "
            "collators. Or make labels[:, i] equal to input_ids[:, i + 1]"
        )
    if are_next and not are_own and shift_labels:
        raise ConfigError(
            "the labels of a batch are the tokens that follow, already shifted, but shift_labels=True shifts "
            "them once more; leave shift_labels out"
        )
    return not (are_own and are_next)
