"""`RankWatch` is a daemon thread of each rank, which learns from the store about other ranks and reacts.

[Note: failing together] The first failure of the job is the key "failure": `compare_set` lets only one rank write it.
Every watchdog polls that key. A watchdog that finds it prints it and wakes a main thread that waits for it. The main
thread then has `shutdown_seconds` to end by itself (its collectives usually fail too). Then the watchdog prints the
main thread's stack and ends the process. A process that started ranks as child processes also publishes a child that
ended without a message.

A collective that failed or timed out does not name the peer, so its rank asks which ranks answer. A watchdog that finds
"failure" counts itself as informed. A rank that does not do so soon is named. If the network is down, a watchdog may be
stuck inside the store, whose requests have no time limit. Its main thread notices that its failure is not published. It
then reports that rank 0, next to the store, does not answer. A separate thread keeps the deadline.

A watchdog decides first and prints afterwards, from a thread that may block or fail. The disk behind stderr may be
full, or a pipe may have no reader. Anyone who reaches the port can write to the store, so a watchdog checks the values
that it reads there. A value that no rank wrote is treated as a failure of the job.

[Note: stopping before the same batch] A stop request (SIGTERM, Ctrl-C) may reach any ranks at any time. No collective
may be issued for it, because another rank may be inside a different one, so the ranks agree through the store:

1. Python's C handler writes the signal's number into a pipe (`signal.set_wakeup_fd`). It does so even while the main
   thread is blocked in a collective. The watchdog reads it and writes the key "stop"; the first writer wins.
2. A watchdog that finds "stop" publishes its rank's position, which is the number of batches begun. From then on its
   main thread waits at the start of a batch until the decision. Both happen under one lock with the main thread's own
   counting. So until the decision, a published position is exactly what its rank has begun.
3. Rank 0's watchdog takes the maximum of all positions. Every main thread continues up to that position and raises at
   the start of the next batch.

For the signal that requeues a SLURM job, the ranks continue to the end of an accumulation window. They stop before the
first batch after that position at which no window is open. This batch is the same on all ranks.

No batch after the maximum has begun on any rank, because all ranks waited. Every batch up to it has begun on some rank,
and the other ranks begin it as well. So no collective of these batches misses a rank. A position is (training batches,
evaluation batches since the last training batch), compared in this order. The end of an evaluation is a position after
its last batch, the same on every rank. So validation sets of unequal length cause no shift. Metrics are reduced at this
end, and ranks can stop there as well.

[Note: ending an epoch together] The ranks also meet through the store when a training epoch ends. They do so before
validation or other collectives, which could meet a gradient sum. The first rank there writes its number of batches. A
rank that ends at another point, or has passed this one, publishes a failure of the rank with less data. Evaluations may
differ in length, so ranks meet at their end, before metrics are reduced. A rank that waits there can still stop.

[Note: leaving] A rank whose run ends, well or not, counts itself as arrived. When all have arrived, rank 0 writes
"closed", with a stop request if there was one: either all ranks see it or none. That ends the watch, also after a
failure: a process may catch the same ConfigError as all others and continue. At a normal end ranks wait for "closed".
The store usually lives in rank 0's process. So rank 0 also waits until all others have read it or are exiting (they
count themselves as left). After a failure some ranks may not arrive: rank 0 waits for a moment.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from subprocess import Popen
from typing import Any

import torch.distributed as dist

from lightning_d9d.coordination.common_point import EARLY_STOP, CommonPoint
from lightning_d9d.coordination.hangs import HangWatch
from lightning_d9d.coordination.messages import (
    Failure,
    LateError,
    count,
    is_connection_error,
    is_end,
    is_position,
    is_signal,
    is_silence,
    is_stop,
    say,
    silence_text,
    value_of,
)
from lightning_d9d.coordination.processes import end_processes
from lightning_d9d.coordination.snapshots import Frame, frames_of, stack_text
from lightning_d9d.errors import RankError, note_first

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_SECONDS = 0.25  # how often a watchdog looks at the store
HURRY_SECONDS = 0.02  # while ranks agree on something
PATIENCE_SECONDS = 2.0  # how long, at most, a connection error waits for its cause, and rank 0 for readers of the store
KILL_SECONDS = 1.0  # how long launched ranks have when the process that launched them is ended
END_SECONDS = 5.0  # how long, at most, ending a process takes, with what is said and the end of launched ranks
END_OF_EVALUATION = 2**62  # more batches than any evaluation has

DOES_NOT_ANSWER = "it does not answer; its process or the network is down"
SAME_NUMBER = "give every rank the same number of batches: a DistributedSampler, drop_last, or limit_train_batches"


class RankWatch:
    """Watches one run (fit, validate, ...) of one rank. The public methods are for the thread that trains.

    Args:
        store: Prefix of the keys, only for this run and this object; the same on every rank.
        rank: Global rank.
        world_size: Number of ranks.
        shutdown_seconds: How long the main thread may continue after a failure or a stop request.
        wait_seconds: How long to wait for other ranks at the end of epochs, evaluations and the run; may be changed.
        children: Ranks that this process started, with their processes.
        stop_exception: Makes the exception of `begin_*_batch` from the signal's number.
        hangs: Reports where the ranks are, if given.
        points: What ranks may want to do at a common point: `EARLY_STOP` or `VALIDATION`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        shutdown_seconds: float,
        wait_seconds: float,
        children: Sequence[tuple[int, Popen]],
        stop_exception: Callable[[int], BaseException],
        hangs: HangWatch | None = None,
        points: Sequence[str] = (EARLY_STOP,),
    ) -> None:
        self.rank = rank
        self.hangs = hangs
        self._progress = (lambda: None) if hangs is None else hangs.progress
        self.reads_stops = True  # signals that stop ranks are heeded
        self.failure: Failure | None = None
        self.wait_seconds = wait_seconds
        self.requeue_signal: int | None = None
        """One more signal on which ranks stop together; they then have all the time that a checkpoint takes."""
        self.is_inside_of_window: Callable[[], bool] = lambda: False
        """Returns whether that signal must not stop ranks yet. Asked before a batch; all ranks must say the same."""
        self.last_words: Callable[[], str] = lambda: ""
        """Returns what a user is to read when the process is ended."""
        self._store = store
        self._world_size = world_size
        self._shutdown_seconds = shutdown_seconds
        self._patience = min(PATIENCE_SECONDS, shutdown_seconds / 4)
        self._children = children
        self._stop_exception = stop_exception
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="lightning_d9d watchdog", daemon=True)
        self._talking = threading.Lock()
        self._changed = threading.Condition()  # guards everything below that the main thread reads or writes
        self._pipe, self.signal_pipe = os.pipe()  # numbers of signals, or 0 to wake the thread
        for descriptor in (self._pipe, self.signal_pipe):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor).atexit = False
        common = (store, rank, world_size, self._changed, self._wake, lambda: self.failure is not None)
        self._points = {name: CommonPoint(name, *common, stays=name == EARLY_STOP) for name in points}
        self._requested: int | None = None
        self._position = (0, 0)
        self._stop: int | None = None
        self._last_position: tuple[int, int] | None = None
        self._stop_raised = False
        self._own_failure: Failure | None = None
        self._has_heard, self._asks_at = False, float("inf")
        self._silent_ranks: list[int] | None = None
        self.meets_at: str | None = None
        """The place at whose end the main thread waits for the other ranks."""
        self._num_met = {"epoch": 0, "evaluation": 0}
        self._counted_at = ""
        self._reached = (0, False)  # training batches with data, and whether there is more to do after the last of them
        self._epoch_ended_at: tuple[int, bool] | None = None
        self._has_data = self._has_begun = False
        self._reported = self._arrived = self._counted = self._closed = self._left = False
        self._closed_at = 0.0
        self._deadline = float("inf")
        self._was_at: list[Frame] = []

    def __deepcopy__(self, memo: dict[int, object]) -> RankWatch:
        """Return this object: a run has one thread, which copies of its Trainer share."""
        return self

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set_limit(self, seconds: float) -> None:
        """Set how long ranks wait for each other from now on."""
        self.wait_seconds = seconds
        if self.hangs is not None:
            self.hangs.limit_seconds = seconds

    # For the main thread

    def begin_train_batch(self) -> None:
        """Count a training batch, unless the ranks agreed to stop before it.

        Raises:
            RankError: Another rank has failed.
        """
        self._has_data, self._has_begun = False, True
        self._begin((self._position[0] + 1, 0))

    def begin_evaluation_batch(self) -> None:
        """Do what `begin_train_batch` does, for a batch of validation, test or prediction."""
        self._begin((self._position[0], self._position[1] + 1))

    def end_evaluation(self) -> None:
        """Wait until all ranks are at the end of a validation, test or prediction, or stop there. Collective.

        Raises:
            RankError: Another rank failed, or one did not arrive in time.
        """
        train_batches, evaluation_batches = self._position
        number = evaluation_batches // END_OF_EVALUATION + 1  # there may be several between two training batches
        position = (train_batches, number * END_OF_EVALUATION)
        with self._changed:
            self._meet("evaluation", lambda: self._stops_before(position))
        self._begin(position)

    def _begin(self, position: tuple[int, int]) -> None:
        self._progress()
        with self._changed:
            while self._stop is not None and self._last_position is None and self.failure is None:
                self._changed.wait()
            if self.failure is not None:
                raise RankError(str(self.failure))
            if self._stops_before(position):
                self._raise_stop()
            self._position = position

    def _stops_before(self, position: tuple[int, int]) -> bool:
        is_behind = self._last_position is not None and position > self._last_position
        return is_behind and not (self._stop == self.requeue_signal and self.is_inside_of_window())

    def _raise_stop(self) -> None:
        assert self._stop is not None
        self._stop_raised = True
        raise self._stop_exception(self._stop)

    def acts_here(self, what: str, wants: bool) -> bool:
        """Call `CommonPoint.is_here` of `EARLY_STOP` or `VALIDATION`.

        Raises:
            RankError: Another rank has failed.
        """
        acts = self._points[what].is_here(wants)
        if self.failure is not None:
            raise RankError(str(self.failure))
        return acts

    def begin_train_step(self) -> None:
        """Count a training batch whose data have been read."""
        self._progress()
        self._has_data = True
        self._reached = (self._reached[0] + 1, False)

    def end_train_step(self, is_last: bool) -> None:
        """End a training batch, after its collectives; with `is_last` the data and the epoch end here.

        Raises:
            RankError: This rank had no data: the other ranks wait in a gradient reduction that this one left out.
        """
        if not self._has_begun:  # a run that goes on with the validation after a batch, or after that validation
            return
        self._has_begun = False
        if not self._has_data:
            raise RankError(
                f"the DataLoader of rank {self.rank} returned None for training batch {self._position[0]} (counted "
                "from the start of the run). Every rank needs data for every batch: let collate_fn keep one row"
            )
        if is_last:
            self.end_epoch()
        else:
            self._reached = (self._reached[0], True)

    def begin_epoch(self) -> None:
        """Begin a training epoch: the next `end_epoch` ends this one, however few batches it had."""
        self._epoch_ended_at = None

    def end_epoch(self) -> None:
        """Wait until all ranks have ended a training epoch, unless they have just done so. Collective.

        Raises:
            RankError: The ranks had different numbers of batches, another rank failed, or one did not arrive in time.
        """
        with self._changed:
            if self._epoch_ended_at == self._reached:
                return
            self._epoch_ended_at = self._reached
            self._meet("epoch")

    def _meet(self, point: str, may_leave: Callable[[], bool] = lambda: False) -> None:
        """Wait at the end of an epoch or of an evaluation until all ranks arrive, unless this one `may_leave`."""
        self._progress()
        self.meets_at = point
        self._wake()
        if not self._changed.wait_for(
            lambda: self.meets_at is None or self.failure is not None or may_leave(), self.wait_seconds
        ):
            raise LateError(f"rank {self.rank} waited {self.wait_seconds:g} s for others at the end of an {point}")
        if self.failure is not None:
            raise RankError(str(self.failure))

    def report(self, error: BaseException) -> None:
        """Publish an exception that ends this rank, or add an earlier failure of another rank to it. Once."""
        if self._reported:
            return
        self._reported = True
        if self._stop_raised:
            return
        if self.hangs is not None and is_silence(error):
            self.hangs.leave(error)
        own = Failure.of(self.rank, error)
        with self._changed:
            if is_connection_error(error):  # most likely a consequence: the cause may be on its way
                self._changed.wait_for(lambda: self.failure is not None, self._patience)
            if self.failure is None:
                self._own_failure = own
                self._wake()
                self._changed.wait_for(lambda: self.failure is not None, self._shutdown_seconds)
        if self.failure is None:
            self._lose_store()
        first = self.failure
        assert first is not None
        if isinstance(error, RankError) and not isinstance(error, LateError):
            return
        if first.rank != self.rank and first.summary != own.summary:
            note_first(error, str(first))
        elif is_silence(error):
            error.add_note(self._who_is_silent())
        if self.hangs is not None and is_silence(error):
            wake = None if first.summary == DOES_NOT_ANSWER else self._wake
            self.hangs.explain(error, str(first), wake, self._shutdown_seconds / 2, first.rank == self.rank)

    def _lose_store(self) -> None:
        """Report that rank 0 does not answer: the thread, stuck inside the store, did not publish in time."""
        self._left = True
        self._fail(Failure(0, DOES_NOT_ANSWER))
        deadline = threading.Timer(self._shutdown_seconds, self._end_process)
        deadline.daemon = True
        deadline.start()

    def _who_is_silent(self) -> str:
        with self._changed:
            self._asks_at = time.monotonic() + self._patience  # until then all may have heard
            self._changed.wait_for(lambda: self._silent_ranks is not None, self._patience)
            self._wake()
            self._changed.wait_for(lambda: self._silent_ranks is not None or self._left, 4 * self._patience)
            return silence_text(self._silent_ranks)

    def close(self) -> None:
        """Wait for the other ranks unless one failed, and end the watch. Collective.

        Raises:
            RankError: Another rank failed and this one has not raised yet, or a rank did not arrive in time.
            BaseException: The `stop_exception`, if a stop was requested too late for a batch to notice.
        """
        with self._changed:
            self._arrived = True
            self._wake()
            if not self._changed.wait_for(lambda: self._closed or self.failure is not None, self.wait_seconds):
                late = LateError(f"rank {self.rank} waited {self.wait_seconds:g} s for others at the end of its run")
                self.report(late)  # the run's callback that reports is gone
                raise late
            if self.failure is not None:  # for the others to read it
                self._changed.wait_for(lambda: self._closed or (self._counted and self.rank != 0), self._patience)
                if self.rank == 0 != self.failure.rank:  # who failed may ask the store which ranks have heard
                    self._changed.wait_for(lambda: self._silent_ranks == [], self._patience)
        if self._closed:
            self._thread.join()
        if self.failure is not None and not self._reported:
            raise RankError(str(self.failure))
        if self.failure is None and not self._stop_raised:
            self._stop = self._stop or self._requested  # the latter came too late for the others
            if self._stop is not None:
                self._raise_stop()

    @property
    def ended_normally(self) -> bool:
        """True if, after `close`, no rank had failed or was asked to stop."""
        return self.failure is None and not self._stop_raised

    # The thread

    def _run(self) -> None:
        atexit.register(self._be_silent)
        while not (self._closed and self._left):
            with self._talking:
                if not self._left:
                    self._talk()
            if self.hangs is not None and self.hangs.is_writing:  # the main thread leaves with what it says
                self._deadline = max(self._deadline, time.monotonic() + self._shutdown_seconds)
            if time.monotonic() > self._deadline:
                self._end_process()
            self._was_at = frames_of(self._main_thread) if self._deadline < float("inf") else []
            asks = self._stop is not None or any(each.is_open for each in self._points.values())
            waits_for_others = self._arrived or self.meets_at is not None or asks
            self._sleep(max(HURRY_SECONDS if waits_for_others else POLL_SECONDS, self._world_size / 4000))
        atexit.unregister(self._be_silent)

    def _be_silent(self) -> None:
        """Silence the thread at exit: it would abort the process if the interpreter ended during a store call."""
        is_free = self._talking.acquire(timeout=self._patience)  # it is not where the store does not answer
        if is_free and self._counted and not (self._closed or self._left):
            with suppress(RuntimeError, ValueError):  # the store has gone, or no rank wrote what is there
                count(self._store, "num_left", 1)
        self._left = True
        if is_free:
            self._talking.release()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self.signal_pipe, b"\0")

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if poll.poll(1000 * seconds):
            for number in os.read(self._pipe, 4096):
                is_stop_signal = self.reads_stops and (number in STOP_SIGNALS or number == self.requeue_signal)
                if self._requested is None and is_stop_signal:
                    self._requested = number
                elif number and self.hangs is not None and number == self.hangs.signal_number:
                    self.hangs.ask()

    def _talk(self) -> None:
        point = self.meets_at  # read once, so that the end of an epoch is compared before it is counted
        try:
            if self.failure is None and not self._closed:
                self._look_for_failure()
            if self.failure is None and not self._closed:
                self._agree_on_places()
                self._compare_epochs(point == "epoch")
            if self.hangs is not None and not self._closed:
                self.hangs.talk(self._store)
            if self.failure is not None and not self._left:
                self._count_who_heard()
            if self.failure is None and point is not None and point == self.meets_at:
                self._agree_on_meeting(point)
            if self._arrived and not self._closed:
                self._agree_on_end()
            if self._closed:
                self._leave()
        except RuntimeError:  # the connection to the store
            with self._changed:
                self._left = True
                self._changed.notify_all()
            if self.failure is None and not self._closed:
                self._fail(self._own_failure or Failure(0, DOES_NOT_ANSWER))
        except Exception as error:  # a value that no rank wrote, say: the watch goes on
            if self.failure is None and not self._closed:
                failure = Failure.of(self.rank, error)
                with suppress(RuntimeError):
                    self._store.compare_set("failure", "", failure.to_store())
                self._fail(failure)

    def _look_for_failure(self) -> None:
        own = self._own_failure or self._ended_child() or (None if self.hangs is None else self.hangs.overdue)
        if own is not None:
            self._publish(own)
        elif self._store.check(["failure"]):
            self._fail(Failure.from_store("failure", self._store.get("failure")))

    def _publish(self, failure: Failure) -> None:
        """Publish a failure to all ranks, unless there was an earlier one."""
        self._fail(Failure.from_store("failure", self._store.compare_set("failure", "", failure.to_store())))

    def _count_who_heard(self) -> None:
        if not self._has_heard:
            self._store.set(f"heard/{self.rank}", "")
            count(self._store, "num_heard", 1)
            self._has_heard = True
        if self._silent_ranks is None and self.failure is not None and self.rank in (0, self.failure.rank):
            silent: list[int] | None = [] if count(self._store, "num_heard") == self._world_size else None
            if silent is None and time.monotonic() >= self._asks_at:
                silent = [rank for rank in range(self._world_size) if not self._store.check([f"heard/{rank}"])]
            with self._changed:
                self._silent_ranks = silent
                self._changed.notify_all()

    def _ended_child(self) -> Failure | None:
        for rank, process in self._children:
            if process.poll() is not None:
                return Failure(rank, f"its process ended with exit code {process.returncode}")
        return None

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            self.failure = failure
            self._deadline = min(self._deadline, time.monotonic() + self._shutdown_seconds)
            self._changed.notify_all()
        if failure.rank != self.rank and self._own_failure is None:
            self._say(f"{failure}\n{failure.traceback}" if failure.is_told_by(self.rank) else str(failure))

    def _agree_on_places(self) -> None:
        for point in self._points.values():
            point.agree()
        if self._stop is None:
            if self._requested is not None:
                self._store.compare_set("stop", "", json.dumps([self.rank, self._requested]))
            elif not self._store.check(["stop"]):
                return
            by, number = self._get("stop", is_stop)
            with self._changed:
                self._stop = number
                position = self._position
                if number != self.requeue_signal:
                    self._deadline = min(self._deadline, time.monotonic() + self._shutdown_seconds)
            self._store.set(f"position/{self.rank}", json.dumps(position))
            if self.rank == 0:
                self._say(f"{signal.Signals(number).name} on rank {by}: all ranks stop before the same batch")
        if self._last_position is None:
            positions = [f"position/{rank}" for rank in range(self._world_size)]
            if self.rank == 0 and self._store.check(positions):
                found = zip(positions, self._store.multi_get(positions), strict=True)
                last = max(value_of(key, content, is_position) for key, content in found)
                self._store.set("last_position", json.dumps(last))
            if self._store.check(["last_position"]):
                train_batches, evaluation_batches = self._get("last_position", is_position)
                with self._changed:
                    self._last_position = (train_batches, evaluation_batches)
                    self._changed.notify_all()

    def _compare_epochs(self, ends: bool) -> None:
        key = f"epoch_end/{self._num_met['epoch']}"
        if not ends and not self._store.check([key]):
            return
        with self._changed:
            own = (*self._reached, self.rank)
        found = self._store.compare_set(key, "", json.dumps(own)) if ends else self._store.get(key)
        first = tuple(value_of(key, found, is_end))
        (least, _, short), (_, _, long) = sorted([own, first])
        if own[:2] > first[:2] or (ends and own[:2] < first[:2]):
            text = f"its training data ended after {least} batches, those of rank {long} did not; {SAME_NUMBER}"
            self._publish(Failure(short, text))

    def _agree_on_meeting(self, point: str) -> None:
        key = f"meeting/{point}/{self._num_met[point]}"
        is_new, self._counted_at = self._counted_at != key, key
        num_here = count(self._store, key, int(is_new))
        if point == "evaluation":  # a rank without data leaves a prediction out
            num_here += count(self._store, "num_arrived")
        if num_here >= self._world_size:
            with self._changed:
                self._num_met[point] += 1
                self.meets_at = None
                self._changed.notify_all()

    def _agree_on_end(self) -> None:
        if not self._counted:
            count(self._store, "num_arrived", 1)
            with self._changed:
                self._counted = True
                self._changed.notify_all()
        if self.rank == 0 and count(self._store, "num_arrived") == self._world_size:
            stop = self._get("stop", is_stop)[1] if self._store.check(["stop"]) else None
            self._store.set("closed", json.dumps(stop))
        if self._store.check(["closed"]):
            stop = self._get("closed", lambda value: value is None or is_signal(value))
            with self._changed:
                self._stop, self._closed, self._closed_at = stop, True, time.monotonic()
                self._deadline = float("inf")
                self._changed.notify_all()
            count(self._store, "num_left", 1)

    def _leave(self) -> None:
        self._left = (
            self.rank != 0
            or time.monotonic() > self._closed_at + self._patience
            or count(self._store, "num_left") == self._world_size
        )

    def _get(self, key: str, is_valid: Callable[[Any], bool]) -> Any:
        return value_of(key, self._store.get(key), is_valid)

    def _end_process(self) -> None:
        reason, code = str(self.failure), 1
        if self._stop is not None:
            reason, code = signal.Signals(self._stop).name, 128 + self._stop
        limit = threading.Timer(END_SECONDS, os._exit, (code,))  # sources of the stack may lie where nobody answers
        limit.daemon = True
        try:
            limit.start()
            frames, before = frames_of(self._main_thread), self._was_at
            is_new = before not in ([], frames)  # what it was blocked in may have ended with another process
            self._say(
                f"not ended {self._shutdown_seconds:g} s after: {reason}. Ending the process with exit code {code} "
                f"(TimeoutConfig.shutdown_seconds sets the limit). Its main thread was at:\n{stack_text(frames)}"
                + (f"A moment before it was at:\n{stack_text(before)}" if is_new else "")
            )
            if words := self.last_words():
                self._say(words)
            end_processes([process for _, process in self._children], KILL_SECONDS)
            if self._asks_at < float("inf"):  # the main thread does not come to say it; the store may not answer
                self._asks_at = 0.0
                with suppress(RuntimeError):
                    self._count_who_heard()
                self._say(silence_text(self._silent_ranks))
        finally:
            os._exit(code)

    def _say(self, text: str) -> None:
        say(f"[rank {self.rank}] {text}")
