"""Failing tests: pytest runs them in a process of its own, its output is what counts."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import warm

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).parents[2]

FAILING = """
import faulthandler, os, signal
import pytest, torch, torch.distributed as dist

def passes(rank):
    assert rank.all_gather_object(rank.rank) == list(range(rank.world_size))

test_at_first = pytest.mark.ranks(2)(passes)

@pytest.mark.ranks(2, timeout_seconds=4)
def test_hangs_in_a_collective(rank):
    if rank.rank == 1:
        dist.all_reduce(torch.ones(3))

test_after_a_hang_in_a_collective = pytest.mark.ranks(2)(passes)

@pytest.mark.ranks(2, timeout_seconds=2)
def test_hangs_in_python(rank):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # as Lightning does after a fit
        signal.signal(number, signal.getsignal(number))
    faulthandler.register(signal.SIGUSR2, chain=True)  # as a fit does with its report_signal
    while rank.rank == 0:
        pass

test_after_a_hang_in_python = pytest.mark.ranks(2)(passes)

@pytest.mark.ranks(2)
def test_crashes(rank):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # as Lightning does after a fit
        signal.signal(number, signal.getsignal(number))
    if rank.rank == 1:
        signal.raise_signal(signal.SIGSEGV)
    rank.barrier()

test_after_a_crash = pytest.mark.ranks(2)(passes)

@pytest.mark.ranks(2)
def test_exits(rank):
    if rank.rank == 1:
        os._exit(3)
    rank.barrier()

test_after_an_exit = pytest.mark.ranks(2)(passes)

@pytest.mark.ranks(2)
def test_is_killed(rank):
    print("about to end", rank.rank)
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.barrier()

test_after_a_kill = pytest.mark.ranks(2)(passes)

@pytest.mark.ranks(2)
def test_leaves_things_behind(rank):
    torch.set_default_dtype(torch.float64)
    dist.new_group([0, 1])

@pytest.mark.ranks(2)
def test_skips(rank):
    pytest.skip("not today")

def swap_groups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups[::1 - 2 * rank.rank]]
    for work in works:
        work.wait()

test_swaps_groups_unrecorded = pytest.mark.ranks(2, record=False)(swap_groups)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", ["spam"])
def test_raises(rank, value):
    if rank.rank == 1:
        raise ValueError(f"no {value}")
    rank.barrier()

@pytest.mark.ranks(2)
def test_swaps_groups(rank):
    swap_groups(rank)
"""

MISUSED = """
import pytest

def test_takes_rank_unmarked(rank):
    pass

@pytest.mark.ranks(2)
def test_does_not_take_rank():
    pass

@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [lambda: 0])
def test_value_does_not_travel(rank, value):
    pass

@pytest.mark.ranks(2)
@pytest.mark.usefixtures("capfd")
def test_watches_another_process(rank):
    pass

@pytest.fixture
def patched(monkeypatch):
    return 1

@pytest.mark.ranks(2)
def test_patches_another_process(rank, patched):
    pass
"""

GPU = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    assert False

@pytest.mark.ranks(2)
def test_on_ranks(rank):
    pass
"""

BLOCKED = """
import ctypes
import pytest

@pytest.mark.ranks(2)
def test_blocked(rank):
    fifo = open("{fifo}", "w")
    fifo.write("blocked\\n")
    fifo.flush()
    if rank.rank == 0:
        rank.barrier()
    ctypes.PyDLL(None).pause()  # with the interpreter lock, so that no Python thread of this process runs again
"""


def command(directory: Path, source: str, *arguments: str) -> list[str]:
    (directory / "test_inner.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\n")
    pytest_itself = [sys.executable, "-m", "pytest", "-p", "tests.harness.plugin", "-p", "no:cacheprovider"]
    return [*pytest_itself, "--import-mode=importlib", "-v", "-rA", *arguments, f"--basetemp={directory / 'base'}"]


def environment(directory: Path) -> dict[str, str]:
    variables = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "TMPDIR": str(directory)}
    return os.environ | variables | {warm.PRELOADED: "tests.harness.worker"}


def run(directory: Path, source: str, *arguments: str) -> str:
    words = command(directory, source, *arguments)
    finished = subprocess.run(
        words, cwd=directory, env=environment(directory), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return finished.stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("failing"), FAILING)


def story(output: str, name: str) -> list[str]:
    """The failure section of one test."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip("_ ") == name and line.startswith("_"))
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith(("____", "====")))
    return lines[start + 1 : end]


def test_outcomes(output):
    outcomes = dict(re.findall(r"^test_inner.py::(\S+) (\w+)", output, re.MULTILINE))
    assert outcomes == {
        "test_at_first": "PASSED",
        "test_hangs_in_a_collective": "FAILED",
        "test_after_a_hang_in_a_collective": "PASSED",
        "test_hangs_in_python": "FAILED",
        "test_after_a_hang_in_python": "PASSED",
        "test_crashes": "FAILED",
        "test_after_a_crash": "PASSED",
        "test_exits": "FAILED",
        "test_after_an_exit": "PASSED",
        "test_is_killed": "FAILED",
        "test_after_a_kill": "PASSED",
        "test_leaves_things_behind": "PASSED",
        "test_skips": "SKIPPED",
        "test_swaps_groups_unrecorded": "PASSED",
        "test_raises[spam]": "FAILED",
        "test_swaps_groups": "FAILED",
    }


def test_hang_in_a_collective(output):
    lines = story(output, "test_hangs_in_a_collective")
    assert lines[0].startswith("rank 1 of 2 is still in all_reduce (test_inner.py:")
    assert lines[0].endswith(") after 4 s")
    assert lines[1] == "rank 0: finished"
    assert lines[2] == "stack of rank 1, innermost last:"
    assert lines[3].endswith("in test_hangs_in_a_collective")
    assert lines[-2:] == [
        "the ranks issued collectives that do not fit together:",
        "  group 0 of ranks [0, 1], collective 0: rank 0: nothing more; rank 1: allreduce float32[3]",
    ]


def test_hang_in_python(output):
    lines = story(output, "test_hangs_in_python")
    assert lines[0].startswith("rank 0 of 2 is still in test_hangs_in_python (test_inner.py:")
    assert lines[0].endswith(") after 2 s")


def test_crash(output):
    lines = story(output, "test_crashes")
    assert lines[0] == "rank 1 of 2 was killed by SIGSEGV"
    dump = lines[[line.strip("-") for line in lines].index(" Captured rank 1 output call ") + 1 :]
    assert dump[0] == "Fatal Python error: Segmentation fault"
    assert any(line.endswith("in test_crashes") for line in dump)


def test_exit_and_kill(output):
    assert story(output, "test_exits")[0] == "rank 1 of 2 exited with code 3"
    lines = story(output, "test_is_killed")
    assert lines[0] == "rank 0 of 2 was killed by SIGKILL"
    assert lines[1].startswith("rank 1: RuntimeError: ")
    assert lines[-2].strip("-") == " Captured rank 1 output call "
    assert lines[-1] == "about to end 1"


def test_error_while_another_rank_waits(output):
    lines = story(output, "test_raises[spam]")
    assert lines[:2] == ["rank 1 of 2 raised ValueError: no spam", "Traceback (most recent call last):"]
    assert lines[2].endswith("in test_raises")
    assert lines[4] == "ValueError: no spam"
    assert lines[5].startswith("rank 0: is still in barrier (test_inner.py:")
    assert lines[5].endswith(") 2 s after rank 1 failed")


def test_recorded_mismatch(output):
    lines = story(output, "test_swaps_groups")
    assert lines[0] == "the ranks issued collectives that do not fit together:"
    assert lines[1].startswith("  order between groups, collective 0 of ranks 0 and 1: rank 0: allreduce float32[1]")


def test_leftovers_and_skips(output):
    assert "LeftoverWarning: left behind on a rank: process groups, the default dtype torch.float64" in output
    assert "not today" in output


def test_misuse_is_explained(tmp_path):
    output = run(tmp_path, MISUSED)
    assert "a test that takes `rank` is marked with @pytest.mark.ranks(n)" in output
    assert "a test marked ranks(n) takes `rank: RankContext`" in output
    assert "argument 'value' does not travel to the ranks" in output
    assert "fixture 'capfd' acts on pytest's own process" in output
    assert "fixture 'monkeypatch' acts on pytest's own process, where a test marked ranks(n) does not run: do" in output
    assert "in the body, with pytest.MonkeyPatch.context() as monkeypatch, or try/finally" in output
    assert "4 failed, 1 error" in output


def test_unknown_marker_option_is_explained(tmp_path):
    output = run(tmp_path, "import pytest\n@pytest.mark.ranks(2, timeout=3)\ndef test_x(rank):\n    pass\n")
    assert "test_inner.py::test_x: RanksOptions.__init__() got an unexpected keyword argument 'timeout'" in output


def test_without_a_gpu(tmp_path):
    output = run(tmp_path, GPU, "--device=cuda")
    assert "deselected: no CUDA device for 1 tests marked gpu" in output
    assert "needs 2 GPUs, 0 visible" in output
    assert "1 skipped, 1 deselected" in output


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_the_session(tmp_path, ending):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        command(tmp_path, BLOCKED.format(fifo=fifo)), cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL
    )
    with open(fifo) as ranks:
        assert [ranks.readline(), ranks.readline()] == ["blocked\n"] * 2
        process.send_signal(ending)
        assert ranks.read() == ""  # the end of the pipe: no rank holds it open any more
    assert process.wait() == (2 if ending == signal.SIGINT else -signal.SIGKILL)
