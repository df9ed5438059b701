"""Loaders of a `D9DModule` that give data ranks different numbers of batches.

Forward and backward of a batch may be collective over data ranks, so all ranks must run equally many batches. If
lengths are known and equal, nothing is done. Otherwise ranks read one batch ahead and agree (`coordination/ahead.py`):

- In training a rank whose data have ended trains on dummy batches, copies of its last one, until all have ended. Dummy
  batches pass through Lightning's loop, because an optimizer step follows.
- In evaluation and prediction Lightning's loop sees only a rank's own batches. At the end, before ranks meet, ranks
  that had fewer batches run the rest. These are forwards of their last batch, without hooks, loss or result.

Replicas that mix their weights send each other nothing in a batch. They compare lengths when an epoch begins. One with
fewer batches trains on dummy batches until the longest has ended. So hooks, validations and checkpoints come at the
same batch everywhere, and mixing goes on. Streams without a length must end together.

A training batch that has been read ahead is copied to the GPU at once, after the step of the batch before it. For this
purpose, loaders whose worker processes read into pinned memory are read one batch ahead even without such an agreement.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time  # by name: a test of a callback may replace that of the module
from typing import Any, NamedTuple

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES
from torch.utils.data import BatchSampler, DataLoader, default_collate

from lightning_d9d.coordination.ahead import END, NOTHING, Agreement, BatchPlan
from lightning_d9d.data import end_resuming, is_place_of_sampler, without_resuming
from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.patches import Patches
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.pipeline.trees import copy_containers

_REMEDY = "give every data rank at least one batch: more data, or fewer data ranks"


@dataclass(frozen=True)
class Alignment:
    """How the loaders of a run give all data ranks equally many batches."""

    group: dist.ProcessGroup | None
    """The data ranks, on a backend for the CPU; None if there is only one."""
    in_evaluation: bool
    """True if evaluation is aligned, too, because forwards are collective."""
    num_microbatches: Callable[[Any], int] | None
    """Returns the number for a batch, if it must be equal on all ranks and follows from the batch."""
    run_dummy: Callable[[Any, BatchPlan], None]
    """Runs the forwards of a batch that counts nothing."""

    resumes: Callable[[], bool]
    """Returns whether loaders have yet to take their place in a checkpoint, and begin then."""
    copy_ahead: Callable[[Any], None] | None = None
    """Begins to copy a batch to the device before its turn; None if it brings no gain."""
    replica: int | None = None
    """This rank's replica, where replicas mix their weights; None where gradients are summed over all ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Alignment:
        """Return this object: nothing in it changes, and process groups cannot be copied."""
        return self


def align_loaders(patches: Patches, trainer: L.Trainer, alignment: Alignment) -> None:
    """Make the loops of a Trainer read through `TrainingLoader` and `EvaluationLoader` in this run. Local.

    Loaders that the run has already set up stay.
    """
    fit_loop: Any = trainer.fit_loop
    kinds: list[tuple[Any, Callable[[CombinedLoader], CombinedLoader], str]] = [
        (fit_loop, lambda loader: TrainingLoader(loader, fit_loop, alignment), "max_size_cycle")
    ]
    if alignment.in_evaluation and alignment.group is not None:
        for loop in (fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            by_loader = loop is not trainer.predict_loop
            kinds.append((loop, lambda loader, by=by_loader: EvaluationLoader(loader, alignment, by), "sequential"))
    for loop, kind, mode in kinds:
        patches.replace(loop._data_source, "dataloader", partial(_read_through, loop._data_source, kind, mode))


def _read_through(source: Any, kind: Callable[[CombinedLoader], CombinedLoader], mode: Any) -> CombinedLoader:
    loader = type(source).dataloader(source)
    return kind(loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, mode))


def data_wait_seconds(trainer: L.Trainer) -> float:
    """Return how long this rank's loop has waited for training batches; 0 without a `D9DStrategy`. Local."""
    return getattr(trainer.fit_loop._combined_loader, "wait_seconds", 0.0)


def data_processor_seconds(trainer: L.Trainer) -> float:
    """Return the processor time that this rank's main thread has used in that wait, in seconds. Local."""
    return getattr(trainer.fit_loop._combined_loader, "processor_seconds", 0.0)


def check_lengths(loader: object, what: str, trains: bool, alone: bool) -> None:
    """Refuse a loader that has no batch or that has, on some ranks only, a length.

    Collective over all ranks unless `alone`.

    Args:
        loader: This rank's.
        what: Name of the loader, for messages.
        trains: Whether to refuse also if no rank has a batch.
        alone: Whether this is the only rank.

    Raises:
        ConfigError: Raised on every rank.
    """
    lengths = Ranks(alone=alone).all_gather(sized_len(loader))
    empty = [rank for rank, length in enumerate(lengths) if length == 0]
    if None in lengths and lengths.count(None) < len(lengths):
        sized = next(rank for rank, length in enumerate(lengths) if length is not None)
        raise ConfigError(
            f"the {what} has a length on rank {sized} and none on rank {lengths.index(None)}; give every rank the same "
            "kind of dataset"
        )
    if empty and (trains or len(empty) < len(lengths)):
        raise ConfigError(
            f"the {what} has no batch on rank {first_of(list(map(str, empty)))}: its dataset is empty, or drop_last "
            "drops all of it; give more data or lower batch_size"
        )


class _Described(NamedTuple):
    """Facts that a rank knows about its loaders before it reads from them."""

    length: int | None
    """The number of its batches, or its limit; None if it is unknown."""
    known: Any
    """A value that, if equal on all ranks, makes numbers of batches and microbatches equal; None if there is none."""


class _AlignedLoader(CombinedLoader):
    """A CombinedLoader that takes other ranks into account.

    Args:
        loader: The loaders, which Lightning has not set up yet, and their mode.
        alignment: The way in which ranks are aligned.
    """

    def __init__(self, loader: CombinedLoader, alignment: Alignment) -> None:
        super().__init__(loader.iterables, loader._mode)  # type: ignore[arg-type]
        self.alignment = alignment
        self.is_even = True
        """True if nothing is to be done in this iteration."""
        self._agreement = None if alignment.group is None else Agreement(alignment.group, self._check)
        self._next: Any = None  # the item that has been read ahead: (batch, batch_idx, dataloader_idx), or None

    def _begin(self) -> list[_Described]:
        """Begin an iteration and exchange the facts that ranks know about it. Collective over the data ranks."""
        super().__iter__()
        ours = _Described(sized_len(self._iterator), self._known())
        if self._agreement is None:
            self.is_even = ours.length is not None
            return [ours]
        self._agreement.restart()
        theirs = all_gather_object(ours, self._agreement.group)
        self.is_even = ours.known is not None and all(each.known == ours.known for each in theirs)
        return theirs

    def _known(self) -> Any:
        """Return `_Described.known`. Return the known lengths; lengths of an IterableDataset are not reliable."""
        if any(has_iterable_dataset(loader) for loader in self.flattened):
            return None
        lengths = [sized_len(loader) for loader in self.flattened]
        if None in lengths:
            return None
        length = (lengths, self.limits) if self._mode == "sequential" else sized_len(self._iterator)
        rows = [] if self.alignment.num_microbatches is None else [_rows(loader) for loader in self.flattened]
        return None if None in rows else (length, rows)

    def _read(self) -> Any:
        """Return this rank's next item, or None at the end."""
        try:
            return super().__next__()
        except StopIteration:
            return None

    def _size(self, item: Any) -> int:
        count = self.alignment.num_microbatches
        return 0 if count is None or item is None or item[0] is None else count(item[0])

    def _check(self, places: list[int]) -> None:
        """Raise `ConfigError` if some rank cannot make a dummy batch."""
        raise NotImplementedError

    def _refuse(self, indices: list[int]) -> None:
        assert self._agreement is not None
        ranks = [str(self._agreement.rank_of(index)) for index in indices]
        raise ConfigError(
            f"rank{'s' * (len(ranks) > 1)} {first_of(ranks)} had no batch, but other data ranks had one; {_REMEDY}"
        )


@dataclass
class _HandedOut:
    plan: BatchPlan
    states: list[Any]
    """The states from which the batch after this one is read; None for loaders without a state."""


class _ReadAhead(NamedTuple):
    item: Any
    error: Exception | None
    """The exception of the loader, `StopIteration` at its end; it is raised when it is the batch's turn."""
    states: list[Any]
    """The states from which this item is read; None for loaders without a state."""


class TrainingLoader(_AlignedLoader):
    """Gives all data ranks the same number of training batches; if data are short, the last ones are dummy batches.

    It keeps the states that loaders had before batches were read ahead. This is needed with one data rank, too:
    Lightning itself reads ahead if a loader has no length. Batches that were read ahead do not count in a checkpoint.

    Args:
        loader: As for `_AlignedLoader`.
        loop: The fit loop that reads from it.
        alignment: Likewise.
    """

    def __init__(self, loader: CombinedLoader, loop: Any, alignment: Alignment) -> None:
        super().__init__(loader, alignment)
        self._loop = loop
        self._agreed_length: int | None = None
        self._num_microbatches = 0
        """The number of microbatches of the batch that was agreed on last."""
        self._num_handed_out = 0
        self._dummy: Any = None
        self._has_ended = False
        self._waits = False
        """True if the loaders begin later."""
        self._has_read = False
        """True if this iteration has given a batch."""
        self._reads_ahead = False
        """True if it reads a batch ahead although lengths are known and equal."""
        self._fills_up = False
        """True if another replica has more batches than this one."""
        self._ahead: _ReadAhead | None = None
        self.wait_seconds = self.processor_seconds = 0.0
        """The time for which the loop has waited for batches."""
        self._history: deque[_HandedOut] = deque(
            maxlen=4
        )  # Lightning has one ahead, and may save before a batch is done

    def __iter__(self) -> TrainingLoader:
        if self._has_read:  # so that this is another epoch than the one that goes on
            for loader in self.flattened:
                end_resuming(loader)
        self._has_read, self._reads_ahead, self._ahead, self._fills_up = False, False, None, False
        if self._agreement is None and self.alignment.resumes() and any(map(_is_stream, self.flattened)):
            # The loop asks for the length alone. Streams that began here would lose what nobody trains on.
            self._iterator = _SUPPORTED_MODES[self._mode]["iterator"](self.flattened, self._limits)
            self.is_even, self._waits = False, True
            self._compare_replicas(None)
            return self
        self._waits = False
        described = self._begin()
        lengths = [each.length for each in described]
        self._agreed_length = None if None in lengths else max(lengths)  # type: ignore[type-var]
        self._compare_replicas(self._agreed_length)
        self._num_handed_out, self._has_ended = 0, False
        self._history.clear()
        if not self.is_even:
            self._look_ahead(BatchPlan())
        elif self.alignment.copy_ahead is not None and hasattr(self._loop._data_fetcher, "batches"):
            self._reads_ahead = all(map(_is_read_by_workers, self.flattened))
        return self

    def _compare_replicas(self, length: int | None) -> None:
        """Fill up with dummy batches where another replica has more. Collective over all ranks, of replicas that mix.

        Nothing is filled where some length is unknown, or differs inside of a replica without an agreement.

        Raises:
            ConfigError: The epoch goes on from a checkpoint, and a replica has trained on all its batches. So it has
                none to make dummy batches of.
        """
        if self.alignment.replica is None:
            return
        is_known = length is not None and not any(has_iterable_dataset(loader) for loader in self.flattened)
        progress = self._loop.epoch_loop.batch_progress
        num_read = 0 if progress.is_last_batch or self.alignment.resumes() else progress.current.processed
        gathered = all_gather_object((self.alignment.replica, length if is_known else None, num_read))
        lengths = {(replica, number) for replica, number, _ in gathered}
        numbers = {replica: number for replica, number in lengths if number is not None}
        if len(lengths) > len(numbers) or 0 in numbers.values():
            return
        most = max(numbers.values())
        ended = [replica for replica, _, num_read in gathered if numbers[replica] <= num_read < most]
        if ended:
            raise ConfigError(
                f"replica {ended[0]} has trained on all its {numbers[ended[0]]} batches of an epoch of {most}; resume "
                "from an earlier checkpoint or the end of an epoch"
            )
        self._fills_up = numbers[self.alignment.replica] < most
        if self._fills_up:
            self.is_even, self._agreed_length = False, most

    def __len__(self) -> int:
        """Return the largest number of batches of a data rank, if all ranks know theirs."""
        if self._iterator is not None and self._waits:
            return super().__len__()
        if self._iterator is None:  # Lightning asks at the end, where an error of a loader must not be hidden
            raise TypeError("the number of batches is known only after an iteration has begun")
        if self.is_even:
            return super().__len__()
        if self._agreed_length is None:
            raise TypeError("some data ranks do not know how many batches they have")
        return self._agreed_length

    def __next__(self) -> Any:
        start, used = perf_counter(), thread_time()
        try:
            return self._next_item()
        finally:
            self.wait_seconds += perf_counter() - start
            self.processor_seconds += thread_time() - used

    def _next_item(self) -> Any:
        if self._waits:
            raise StopIteration
        self._has_read = True
        if self.is_even:
            item = self._next_even()
            if self._reads_ahead:
                self._read_ahead()
            return item
        item, plan = (self._read(), BatchPlan()) if self._agreement is None else self._agreed(self._agreement)
        if self._agreement is None:
            self._copy_ahead(item)  # Lightning reads it ahead
            self._dummy = item if self._fills_up and item is not None and item[0] is not None else self._dummy
        if item is None and self._fills_up:
            item, plan = self._dummy, BatchPlan(True, self._num_microbatches, 0)
            assert item is not None, "resumed behind its last batch"
        self._has_ended = item is None
        if item is None:
            raise StopIteration
        self._look_ahead(plan)
        self._num_handed_out += 1
        batch = copy_containers(item[0])  # hooks may change them
        return batch, self._num_handed_out - 1, 0

    def _next_even(self) -> Any:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return super().__next__()
        if ahead.error is not None:
            raise ahead.error
        return ahead.item

    def _read_ahead(self) -> None:
        """Read the next batch and begin to copy it, unless this one is the epoch's last."""
        fetcher = self._loop._data_fetcher
        if fetcher.fetched + 1 >= fetcher.length:  # it counts this one when it has it
            return
        states = self._own_states()
        try:
            item, error = super().__next__(), None
        except Exception as raised:
            item, error = None, raised
        self._ahead = _ReadAhead(item, error, states)
        self._copy_ahead(item)

    def _copy_ahead(self, item: Any) -> None:
        if item is not None and self.alignment.copy_ahead is not None:
            self.alignment.copy_ahead(item[0])

    def _own_states(self) -> list[Any]:
        states = super()._state_dicts()
        return [None if is_place_of_sampler(each) else copy.deepcopy(each) for each in states]

    def _agreed(self, agreement: Agreement) -> tuple[Any, BatchPlan]:
        """Return the next item, if some rank has one; None if no rank has."""
        agreed = agreement.hear()
        if agreed.has_ended:
            return None, BatchPlan()
        self._num_microbatches = agreed.num_microbatches
        return self._next or self._dummy, BatchPlan(self._next is None, agreed.num_microbatches, agreed.num_ranks)

    def plan(self) -> BatchPlan:
        """Return the plan of the current batch."""
        return BatchPlan() if self.is_even else self._history[-1 - self._num_ahead()].plan

    def num_own(self, num_batches: int) -> int:
        """Return the number of an epoch's batches for which this rank has its own data; all if lengths are unknown."""
        length = None if self._iterator is None else sized_len(type(self._iterator)(self.flattened))
        return num_batches if length is None else min(num_batches, length)

    def _look_ahead(self, plan: BatchPlan) -> None:
        """Keep the states of loaders and read the next batch, unless the end has been read."""
        states = self._own_states()
        self._history.append(_HandedOut(plan, self._history[-1].states if plan.is_dummy else states))
        if self._agreement is None or plan.is_idle:
            return
        if not plan.is_dummy:
            self._next = self._read()
            self._copy_ahead(self._next)
        if self._next is not None and self._next[0] is not None:
            self._dummy = self._next
        place = 0 if self._next is not None else END if self._dummy is not None else NOTHING
        self._agreement.tell(place, self._size(self._next))

    def _check(self, places: list[int]) -> None:
        if min(places) < END and NOTHING in places:
            self._refuse([index for index, place in enumerate(places) if place == NOTHING])

    # States of loaders

    def _state_dicts(self) -> list[dict[str, Any]]:
        """Return the states after the batches that were trained on, although more were read."""
        states = super()._state_dicts()
        if self._ahead is not None:
            return _as_then(states, self._ahead.states)
        progress = self._loop.epoch_loop.batch_progress
        is_at_end = self._next is None and (self._agreement is not None or self._fills_up)
        if self.is_even or not self._history or self._has_ended or (is_at_end and progress.is_last_batch):
            return states  # where the epoch is over, those from which the next one begins
        is_open = progress.current.ready - progress.current.processed
        earlier = self._history[-1 - min(self._num_ahead() + is_open, len(self._history) - 1)].states
        return _as_then(states, earlier)

    def _num_ahead(self) -> int:
        """Return the number of batches that Lightning has taken but not trained on."""
        fetcher = self._loop._data_fetcher  # None after a run, from which the strategy keeps the states
        return 0 if fetcher is None else len(fetcher.batches)


class EvaluationLoader(_AlignedLoader):
    """Tells other data ranks about this rank's batches, and runs dummy batches with them.

    Args:
        loader: As for `_AlignedLoader`.
        alignment: Likewise.
        by_loader: Ranks also meet at the end of each of several loaders in a row.
    """

    def __init__(self, loader: CombinedLoader, alignment: Alignment, by_loader: bool) -> None:
        super().__init__(loader, alignment)
        self.by_loader = by_loader
        self._handed_out: deque[tuple[int, int]] = deque()  # what was not run yet: places and microbatches
        self._batch: Any = None

    def __iter__(self) -> EvaluationLoader:
        self._begin()
        self._handed_out.clear()
        self._batch = None
        if not self.is_even:
            self._next = self._read()
            self._agree()
        return self

    def __next__(self) -> Any:
        if self.is_even:
            return super().__next__()
        if self._next is None:
            raise StopIteration
        item = self._next
        self._handed_out.append(self._message(item))
        self._next = self._read()
        return item

    def begin_step(self, batch: Any) -> BatchPlan:
        """Begin a batch, before it runs on the device. Collective over the data ranks, without waiting for a device."""
        if self.is_even:
            return BatchPlan()
        assert self._agreement is not None
        agreed = self._agreement.hear()
        self._handed_out.popleft()
        self._agree()
        self._batch = batch
        return BatchPlan(num_microbatches=agreed.num_microbatches)

    def catch_up(self) -> None:
        """Run dummy batches until it is this rank's turn, or no rank has more. Collective."""
        if self.is_even or self._agreement is None:
            return
        while not (agreed := self._agreement.hear()).has_ended:
            if self._handed_out and self._handed_out[0][0] == agreed.place:
                return
            if not self._handed_out:
                self._next = None  # beyond a limit
            self._agree()
            self.alignment.run_dummy(self._batch, BatchPlan(True, agreed.num_microbatches))
        self._batch = None

    def _agree(self) -> None:
        assert self._agreement is not None
        self._agreement.tell(*(self._handed_out[0] if self._handed_out else self._message(self._next)))

    def _message(self, item: Any) -> tuple[int, int]:
        place = END if item is None else item[2] if self.by_loader else 0
        return place, self._size(item)

    def _check(self, places: list[int]) -> None:
        if missing := [index for index, place in enumerate(places) if place != min(places)]:
            self._refuse(missing)


def plan_of(fit_loop: Any) -> BatchPlan:
    """Return the plan of the current training batch."""
    loader = fit_loop._combined_loader
    return loader.plan() if isinstance(loader, TrainingLoader) else BatchPlan()


def begin_evaluation_step(loop: Any, batch: Any) -> BatchPlan:
    """Begin a batch of the loop, before it is run. Collective over the data ranks."""
    loader = loop._combined_loader
    return loader.begin_step(batch) if isinstance(loader, EvaluationLoader) else BatchPlan()


def catch_up(loop: Any) -> None:
    """Run the missing batches at the end of one of the loop's loaders, before ranks meet there.

    Collective over the data ranks.
    """
    if isinstance(loop._combined_loader, EvaluationLoader):
        loop._combined_loader.catch_up()


def _as_then(states: list[Any], earlier: list[Any]) -> list[Any]:
    """Return earlier states, and the present ones of loaders whose place the loop counts; none if a run is over."""
    return [now if then is None else then for now, then in zip(states, earlier, strict=False)]


def _is_read_by_workers(loader: object) -> bool:
    """Return whether worker processes read the loader into pinned memory: reading ahead draws no random number here."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.pin_memory


def _is_stream(loader: object) -> bool:
    """Return whether the loader reads data that cannot be read again.

    Persistent workers are excluded: each beginning sets another seed for them.
    """
    return sized_len(loader) is None and not getattr(loader, "persistent_workers", False)


def _rows(loader: object) -> tuple[int, int] | None:
    """Return the number of all rows, and of rows in a batch, if these determine the rows of each batch."""
    if not isinstance(loader, DataLoader) or loader.collate_fn is not default_collate:
        return None
    batches: Any = without_resuming(loader.batch_sampler)
    batches = getattr(batches, "_batch_sampler", batches)  # Lightning's, around that of a prediction
    num_rows = sized_len(batches.sampler) if type(batches) is BatchSampler else None
    return None if num_rows is None else (num_rows, batches.batch_size)
