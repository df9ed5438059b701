"""Real processes that fail or are asked to stop: all of them end, soon, and say why."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_d9d.coordination.processes import end_processes
from lightning_d9d.coordination.watchdog import RankWatch
from lightning_d9d.errors import RankError
from tests.harness import warm

pytestmark = pytest.mark.jobs

SHUTDOWN_SECONDS = 2.0  # as in shutdown_job.py, which only the jobs import
ENDING_SECONDS = SHUTDOWN_SECONDS + 58.0  # a busy machine may take long to notice, print and exit; a hang takes 300 s
JOB_SECONDS = 180.0
MARKER = "SHUTDOWN_TEST_JOB"

JOB = "tests.loop.shutdown_job"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


@dataclass
class Ended:
    """A job that has ended, and what its ranks recorded (see `shutdown_job.py`)."""

    exit_codes: list[int]
    outputs: list[str]
    records: list[list[list[Any]]]
    at: float

    @staticmethod
    def of(directory: Path, exit_codes: list[int], outputs: list[str]) -> "Ended":
        at = time.time()
        records = [[json.loads(line) for line in (directory / f"{r}.jsonl").open()] for r in range(2)]
        return Ended(exit_codes, outputs, records, at)

    def values(self, case: str, kind: str) -> list[list[Any]]:
        """Return by rank the first values of the records of this kind."""
        return [[record[2] for record in rank if record[:2] == [case, kind]] for rank in self.records]

    def check_quick(self, case: str) -> None:
        """The last case's accident was soon followed by the job's end."""
        seconds = self.at - max(moment for rank in self.values(case, "acts") for moment in rank)
        print(f"{case}: ended after {seconds:.1f} s")
        assert seconds < ENDING_SECONDS

    def check_stopped(self, case: str, kind: str, raised: str) -> None:
        """Both ranks stopped before the same batch after the request, could still meet, and left nothing behind."""
        batches = self.values(case, kind)
        assert batches[0] == batches[1] != []
        steps, *_ = self.values(case, "saved")[0]
        assert self.values(case, "saved") == [[steps], [steps]]
        assert steps[0] == steps[1]
        assert [record[2:] for rank in self.records for record in rank if record[:2] == [case, "end"]] == [
            [raised, []]
        ] * 2


def run_job(
    directory: Path, *cases: str, launcher: Sequence[str] = (), when_ready: Callable[[int], None] | None = None
) -> Ended:
    """A job whose launcher has made its imports, in a session of its own. Checks that it leaves no process.

    Args:
        directory: Of the records.
        cases: What it runs.
        launcher: A module and its arguments; by default the job's first rank launches the other.
        when_ready: Gets the launcher when a rank says so.
    """
    module, *arguments = (*launcher, JOB, str(directory), *cases)
    output, errors = directory / "output", directory / "errors.txt"
    os.mkfifo(output)
    with watched_job() as environment:
        command = (module, arguments, directory, environment, Path(os.devnull), output, errors)
        job = warm.context().Process(target=start_launcher, args=command)
        job.start()
        assert job.pid is not None
        limit = threading.Timer(JOB_SECONDS, os.killpg, (job.pid, signal.SIGKILL))
        limit.start()
        try:
            with output.open() as lines:
                if when_ready is not None:
                    assert any("ready" in line for line in lines)
                    when_ready(job.pid)
                job.join()
        finally:
            limit.cancel()
            limit.join()
            print(said := errors.read_text())
    assert job.exitcode is not None
    return Ended.of(directory, [job.exitcode], [said])


def start_launcher(*command: Any) -> None:
    """`warm.run_module` in a session of its own."""
    os.setsid()
    warm.run_module(*command, forks=True)


@contextmanager
def watched_job() -> Iterator[dict[str, str]]:
    """The environment of a job, which is to have ended with all of its processes at the end."""
    marker = uuid.uuid4().hex
    variables = {MARKER: marker, "OMP_NUM_THREADS": "1", "PYTHONPATH": warm.python_path(), "PYTHONUNBUFFERED": "1"}
    try:
        yield {**os.environ, **variables}
        assert not processes_with(marker)
    finally:
        for process in processes_with(marker):
            os.kill(process, signal.SIGKILL)


def request_end(process: int) -> None:
    os.kill(process, signal.SIGTERM)


def processes_with(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile, or another user's
            pass
    return found


def run_forked(directory: Path, *cases: str) -> Ended:
    """Two ranks forked from a process that has imported everything, with a group they joined before the Trainer."""
    ranks = [warm.context().Process(target=start_rank, args=(number, str(directory), cases)) for number in range(2)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + JOB_SECONDS
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()
    outputs = [(directory / f"{number}.txt").read_text() for number in range(2)]
    print(*outputs, sep="\n" + 80 * "=" + "\n")
    return Ended.of(directory, [rank.exitcode or 0 for rank in ranks], outputs)


def start_rank(number: int, directory: str, cases: tuple[str, ...]) -> None:
    from tests.loop.shutdown_job import forked_rank

    forked_rank(number, directory, cases)


@pytest.mark.parametrize("case", ["raise_in_train", "raise_in_setup", "raise_in_dataloader"])
def test_rank_that_raises_ends_the_other(tmp_path, case):
    ended = run_forked(tmp_path, case)
    assert ended.exit_codes == [1, 1]
    assert ended.outputs[1].rstrip().endswith("ValueError: bad row on rank 1")
    assert "[rank 0] rank 1 failed: ValueError: bad row on rank 1\nTraceback" in ended.outputs[0]
    assert ended.outputs[0].rstrip().endswith("before that, rank 1 failed: ValueError: bad row on rank 1")
    ended.check_quick(case)


def test_a_learning_rate_finder_that_fails_on_one_rank_ends_all(tmp_path):
    """Lightning restores a checkpoint before it says what happened: other ranks must have heard by then."""
    ended = run_forked(tmp_path, "raise_in_tuner")
    assert ended.exit_codes == [1, 1]
    assert "ValueError: bad row on rank 1\n\nDuring handling" in ended.outputs[1]
    assert ended.outputs[1].rstrip().endswith("RankError: rank 1 failed: ValueError: bad row on rank 1")
    assert "[rank 0] rank 1 failed: ValueError: bad row on rank 1\nTraceback" in ended.outputs[0]
    ended.check_quick("raise_in_tuner")


def test_ranks_ignore_ctrl_c_and_a_process_waits_for_threads_of_gloo_at_its_exit(tmp_path):
    """A shell starts what its script runs in the background without Ctrl-C.

    A thread that let go of a tensor while the interpreter ends would abort it.
    """
    without_ctrl_c = f"trap '' INT; exec {sys.executable} -m {JOB} {tmp_path} interrupt_ignored busy_at_exit"
    command = ["bash", "-c", without_ctrl_c]
    with watched_job() as environment:  # rank 0 does not wait for one that has trained to the end; this does
        job = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=JOB_SECONDS
        )
    print(job.stderr)
    ended = Ended.of(tmp_path, [job.returncode], [job.stderr])
    assert ended.exit_codes == [0]
    assert ended.values("interrupt_ignored", "train") == [[0, 1, 2, 3]] * 2
    assert ended.values("interrupt_ignored", "end") == [[None]] * 2
    assert [record[:2] for record in ended.records[1]][-2:] == [["busy_at_exit", "left"], ["busy_at_exit", "end"]]
    assert "terminate called" not in ended.outputs[0]


def test_failing_rank_whose_callback_blocks_is_ended(tmp_path):
    ended = run_forked(tmp_path, "raise_and_block")
    assert ended.exit_codes == [1, 1]
    assert "[rank 0] rank 1 failed: ValueError: bad row on rank 1\nTraceback" in ended.outputs[0]
    assert "on_exception\n    dist.barrier()" in ended.outputs[1]
    ended.check_quick("raise_and_block")


@pytest.mark.parametrize(
    ("case", "train", "validate"), [("data_end", [0, 1, 2], []), ("data_end_at_validation", [0, 1], [0])]
)
def test_data_that_end_early_on_one_rank(tmp_path, case, train, validate):
    """The other one is in a gradient sum or in validation; nothing of the short rank's validation may meet it."""
    ended = run_forked(tmp_path, case)
    assert ended.exit_codes == [1, 1]
    text = "rank 0 failed: its training data ended after 2 batches, those of rank 1 did not; give every rank"
    assert all(text in output for output in ended.outputs)
    assert ended.values(case, "train") == [[0, 1], train]
    assert ended.values(case, "validate") == [[], validate]
    ended.check_quick(case)


def test_error_of_all_ranks_may_be_caught(tmp_path):
    ended = run_forked(tmp_path, "raise_everywhere", "normal", "raise_everywhere")
    assert ended.exit_codes == [1, 1]
    assert ended.values("normal", "end") == [[None], [None]]
    for output in ended.outputs:
        assert output.rstrip().endswith("ConfigError: field=3 must be 4")


def test_the_store_is_there_until_all_ranks_have_left(tmp_path):
    """The store's client writes a native stack where it goes away, behind the error that a user is to read."""
    ended = run_forked(tmp_path, "raise_everywhere_slowly")
    assert ended.exit_codes == [1, 1]
    assert ended.outputs[1].rstrip().endswith("ConfigError: field=3 must be 4")
    assert "TCPStore" not in ended.outputs[1]


def test_rank_that_holds_the_store_raises(tmp_path):
    ended = run_forked(tmp_path, "raise_in_train_on_0")
    assert ended.exit_codes == [1, 1]
    assert "[rank 1] rank 0 failed: ValueError: bad row on rank 0\nTraceback" in ended.outputs[1]
    ended.check_quick("raise_in_train_on_0")


@pytest.mark.parametrize(("case", "exit_code"), [("exit", 3), ("kill", -signal.SIGKILL)])
def test_rank_that_ends_without_a_word(tmp_path, case, exit_code):
    ended = run_forked(tmp_path, case)
    assert ended.exit_codes == [1, exit_code]
    assert "no answer from rank 1: a process ended" in ended.outputs[0]
    ended.check_quick(case)


def test_rank_that_holds_the_store_is_killed(tmp_path):
    ended = run_forked(tmp_path, "kill_0")
    assert ended.exit_codes == [-signal.SIGKILL, 1]
    assert "[rank 1] rank 0 failed: it does not answer" in ended.outputs[1]
    ended.check_quick("kill_0")


def test_ranks_stop_before_the_same_batch(tmp_path):
    ended = run_forked(tmp_path, "term_on_1", "term_in_validation", "interrupt", "term_in_last_batch", "normal")
    ended.check_stopped("term_on_1", "train", "SIGTERMException(143)")
    ended.check_stopped("term_in_validation", "validate", "SIGTERMException(143)")
    ended.check_stopped("interrupt", "train", "SystemExit(1)")
    assert ended.values("term_in_last_batch", "train") == [[0, 1, 2]] * 2
    ends = [record for rank in ended.records for record in rank if record[1] == "end"]
    assert [end[2] for end in ends if end[0] == "term_in_last_batch"] == ["SIGTERMException(143)"] * 2
    assert [end[2] for end in ends if end[0] == "normal"] == [None, None]
    assert all(left == [] for *_, left in ends)
    assert ended.exit_codes == [0, 0]


def test_a_trainer_inside_another_gives_signals_back(tmp_path):
    """A signal after the inner run reaches the outer one's watch, which leaves Python's wakeup descriptor unset."""
    ended = run_forked(tmp_path, "nested", "normal")
    ends = [record[2:] for rank in ended.records for record in rank if record[:2] == ["nested", "end"]]
    assert ends == [["SIGTERMException(143)", []]] * 2
    assert ended.exit_codes == [0, 0]


def test_ranks_stop_together_in_validations_of_unequal_length(tmp_path):
    """Rank 0 has no more batches and is at the end of its validation, before metrics are reduced."""
    ended = run_forked(tmp_path, "term_in_long_validation", "normal")
    short, long = ended.values("term_in_long_validation", "validate")
    assert short == [0, 1, 0, 1]  # the sanity check and one validation
    assert long[:8] == [0, 1, 0, 1, 2, 3, 4, 5]  # and what it began before it heard of the signal
    assert ended.values("term_in_long_validation", "saved") == [[[1, 1]], [[1, 1]]]
    assert ended.values("term_in_long_validation", "end") == [["SIGTERMException(143)"]] * 2
    assert ended.exit_codes == [0, 0]


def test_rank_blocked_in_a_collective_is_ended(tmp_path):
    ended = run_forked(tmp_path, "blocked")
    assert ended.exit_codes == [128 + signal.SIGTERM] * 2
    assert "dist.barrier()" in ended.outputs[1]
    ended.check_quick("blocked")


def test_launched_ranks_stop_then_fail(tmp_path):
    ended = run_job(tmp_path, "term", "interrupt_group", "raise_in_train")
    ended.check_stopped("term", "train", "SIGTERMException(143)")
    ended.check_stopped("interrupt_group", "train", "SystemExit(1)")
    assert ended.exit_codes == [1]
    assert "[rank 0] rank 1 failed: ValueError: bad row on rank 1\nTraceback" in ended.outputs[0]
    ended.check_quick("raise_in_train")


def test_launching_rank_fails(tmp_path):
    ended = run_job(tmp_path, "raise_in_train_on_0")
    assert ended.exit_codes == [1]
    assert "[rank 1] rank 0 failed: ValueError: bad row on rank 0\nTraceback" in ended.outputs[0]
    ended.check_quick("raise_in_train_on_0")


def test_launched_rank_is_killed(tmp_path):
    ended = run_job(tmp_path, "kill")
    assert ended.exit_codes == [1]
    assert "rank 1 failed: its process ended with exit code -9" in ended.outputs[0]
    ended.check_quick("kill")


def test_sigterm_to_the_launching_rank(tmp_path):
    ended = run_job(tmp_path, "endless", when_ready=request_end)
    ended.check_stopped("endless", "train", "SIGTERMException(143)")
    assert ended.exit_codes == [128 + signal.SIGTERM]
    ended.check_quick("endless")


def test_torchrun_ranks_stop_then_fail(tmp_path):
    ended = run_job(tmp_path, "term_on_1", "interrupt", "raise_in_train", launcher=TORCHRUN)
    ended.check_stopped("term_on_1", "train", "SIGTERMException(143)")
    ended.check_stopped("interrupt", "train", "SystemExit(1)")
    assert ended.exit_codes == [1]
    assert "rank 1 failed: ValueError: bad row on rank 1" in ended.outputs[0]
    ended.check_quick("raise_in_train")


def test_sigterm_to_torchrun(tmp_path):
    ended = run_job(tmp_path, "endless", when_ready=request_end, launcher=TORCHRUN)
    ended.check_stopped("endless", "train", "SIGTERMException(143)")
    assert ended.exit_codes != [0]
    ended.check_quick("endless")


class StopError(Exception):
    pass


def run_watches(
    body: Callable[[RankWatch, int], None], num_ranks: int, after_close: Callable[[int], None] = lambda rank: None
) -> list[RankWatch]:
    """`body` with a started watch in one thread a rank, then `close`."""
    store = dist.HashStore()
    watches: dict[int, RankWatch] = {}

    def run(rank: int) -> None:
        watch = watches[rank] = RankWatch(store, rank, num_ranks, 30, 30, [], lambda _: StopError())
        watch.start()
        with suppress(StopError):
            body(watch, rank)
        with suppress(StopError, RankError):
            watch.close()
        after_close(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [watches[rank] for rank in range(num_ranks)]


def request_stop(watch: RankWatch) -> None:
    os.write(watch.signal_pipe, bytes([signal.SIGTERM]))  # what Python's own handler does


@pytest.mark.parametrize("seed", range(5))
def test_ranks_of_unequal_speed_agree_on_one_batch(seed):
    """Nothing couples these ranks but the watches: some are many batches ahead when the request comes."""
    draw = random.Random(seed)
    pauses = [[draw.uniform(0.001, 0.001 * (rank + 1)) for _ in range(7)] for rank in range(4)]
    requests = {draw.randrange(4): draw.randrange(40) for _ in range(2)}
    begun = [0] * 4

    def body(watch: RankWatch, rank: int) -> None:
        while True:
            (watch.begin_evaluation_batch if begun[rank] % 5 > 2 else watch.begin_train_batch)()
            begun[rank] += 1
            if begun[rank] - 1 == requests.get(rank):
                request_stop(watch)
            time.sleep(pauses[rank][begun[rank] % 7])  # a batch's work

    watches = run_watches(body, 4)
    assert len(set(begun)) == 1
    assert not any(watch.ended_normally for watch in watches)


@pytest.mark.parametrize(("number", "end"), [(signal.SIGUSR1, 4), (signal.SIGTERM, 2)])
def test_a_job_that_is_requeued_first_ends_its_window(number, end):
    """The window has four batches, with a validation before the last. Other jobs have less time, and end at once."""
    begun = [0] * 3

    def body(watch: RankWatch, rank: int) -> None:
        watch.requeue_signal = signal.SIGUSR1
        watch.is_inside_of_window = lambda: begun[rank] % 4 != 0
        while True:
            watch.begin_train_batch()
            begun[rank] += 1
            if begun == [2] * 3:
                os.write(watch.signal_pipe, bytes([number]))
            if begun[rank] == 2:
                with watch._changed:
                    watch._changed.wait_for(lambda: watch._last_position is not None)
            if begun[rank] == 3:
                watch.begin_evaluation_batch()
                watch.end_evaluation()

    run_watches(body, 3)
    assert begun == [end] * 3


def test_rank_that_ends_early_waits_for_the_others():
    events = []

    def body(watch: RankWatch, rank: int) -> None:
        for _ in range(1000 * rank):
            watch.begin_train_batch()
        events.append("ran")

    watches = run_watches(body, 3, after_close=lambda rank: events.append("closed"))
    assert events == ["ran"] * 3 + ["closed"] * 3
    assert all(watch.ended_normally for watch in watches)


def test_request_after_the_last_batch_stops_every_rank():
    def body(watch: RankWatch, rank: int) -> None:
        watch.begin_train_batch()
        if rank == 1:
            request_stop(watch)

    assert not any(watch.ended_normally for watch in run_watches(body, 3))


def test_rank_between_collectives_raises_at_its_next_batch():
    messages = []

    def body(watch: RankWatch, rank: int) -> None:
        if rank == 1:
            watch.report(ValueError("bad row"))
            return
        try:
            while True:
                watch.begin_train_batch()
                time.sleep(0.01)
        except RankError as error:
            watch.report(error)
            messages.append(str(error))

    run_watches(body, 3)
    assert messages == ["rank 1 failed: ValueError: bad row"] * 2


def test_rank_that_is_late_at_the_end_of_an_epoch():
    """The rank answers, so it is slow rather than gone. The first rank that has waited too long says so."""
    errors = {}
    all_failed = threading.Barrier(3)

    def body(watch: RankWatch, rank: int) -> None:
        watch.wait_seconds = 0.2
        if rank != 1:
            watch.begin_train_step()
            try:
                watch.end_epoch()
            except RankError as error:
                watch.report(error)
                errors[rank] = "\n".join([str(error), *getattr(error, "__notes__", [])])
        all_failed.wait()

    run_watches(body, 3)
    first = next(error for error in errors.values() if "all ranks still answer" in error)
    assert re.match(r"rank [02] waited 0.2 s for others at the end of an epoch\nall ranks still answer: one", first)
    assert len(errors) == 2


def test_an_epoch_is_compared_before_its_end_is_counted():
    """The thread of rank 1 compares just before rank 1 comes to the end; rank 0 ends with a batch less meanwhile."""
    errors = []
    has_compared, is_here, has_counted = (threading.Event() for _ in range(3))

    def body(watch: RankWatch, rank: int) -> None:
        compare, agree, wake = watch._compare_epochs, watch._agree_on_meeting, watch._wake

        def compare_too_early(ends: bool) -> None:
            compare(ends)
            has_compared.set()
            assert is_here.wait(20)
            assert has_counted.wait(20)

        if rank == 0:
            watch._agree_on_meeting = lambda point: (agree(point), has_counted.set())
        else:
            watch._wake = lambda: (wake(), watch.meets_at and is_here.set())
            watch._compare_epochs = compare_too_early
        for _ in range(2 + rank):
            watch.begin_train_step()
        assert has_compared.wait(20)
        try:
            watch.end_epoch()
        except RankError as error:
            watch.report(error)
            errors.append(str(error))

    run_watches(body, 2)
    text = "rank 0 failed: its training data ended after 2 batches, those of rank 1 did not; "
    assert [error[: len(text)] for error in errors] == [text] * 2


def test_counting_batches_is_cheap():
    seconds = []

    def body(watch: RankWatch, rank: int) -> None:
        for _ in range(20):  # other processes may get their turns meanwhile, but not each time
            start = time.perf_counter()
            for _ in range(50):
                watch.begin_train_batch()
            seconds.append((time.perf_counter() - start) / 50)

    run_watches(body, 1)
    print(f"{1e6 * min(seconds):.2f} us a batch")
    assert min(seconds) < 1e-4  # a store would take longer


def test_who_presses_ctrl_c_while_ranks_are_awaited_leaves_none_behind() -> None:
    """No rank is waited for any longer, and none goes on."""
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); signal.pause()"
    processes = [subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) for _ in range(2)]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        end_processes(processes, 600)
        assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for process in processes:
            process.kill()
            process.communicate()
