import faulthandler
import threading

from tests.harness.failures import describe, main_thread_frames, name_ranks
from tests.harness.messages import Died, Passed, Raised, Stuck


def raised(text: str, at_seconds: float, type_name: str = "AssertionError") -> Raised:
    traceback = f"Traceback (most recent call last):\n  ...\n{type_name}: {text}\n"
    return Raised(at_seconds=at_seconds, type_name=type_name, text=text, traceback=traceback)


def test_first_failing_rank_is_shown_in_full_and_equal_ones_in_one_line():
    lines = describe([Passed(), raised("a != b", 2.0), raised("a != b", 1.0), raised("a != b", 3.0), Passed()])
    assert lines.splitlines() == [
        "rank 2 of 5 raised AssertionError: a != b",
        "Traceback (most recent call last):",
        "  ...",
        "AssertionError: a != b",
        "ranks 0, 4: finished",
        "ranks 1, 3: same AssertionError",
    ]


def test_different_errors_are_told_apart():
    lines = describe([raised("a", 1.0, "ValueError"), raised("a", 2.0, "KeyError"), raised("b\nc", 2.0, "KeyError")])
    assert lines.splitlines()[-2:] == ["rank 1: KeyError: a", "rank 2: KeyError: b c"]


def test_a_dead_rank_comes_before_its_peers_errors():
    lines = describe([raised("Connection closed by peer", 1.0, "RuntimeError"), Died(at_seconds=1.1, exit_code=-9)])
    assert lines.splitlines() == [
        "rank 1 of 2 was killed by SIGKILL",
        "rank 0: RuntimeError: Connection closed by peer",
        "Traceback (most recent call last):",
        "  ...",
        "RuntimeError: Connection closed by peer",
    ]


def test_a_stuck_rank_is_named_by_its_collective_and_the_line_that_called_it():
    frames = [
        ("/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce"),
        ("/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper"),
        ("/project/sync/buckets.py", 55, "reduce"),
        ("/project/tests/test_x.py", 7, "test_x"),
    ]
    lines = describe([Passed(), Stuck(waited="after 60 s", frames=frames)]).splitlines()
    assert lines[:2] == ["rank 1 of 2 is still in all_reduce (buckets.py:55) after 60 s", "rank 0: finished"]
    assert lines[3] == '  File "/project/tests/test_x.py", line 7 in test_x'
    assert "native code" in describe([Stuck(waited="after 1 s", frames=[])])


def test_frames_of_one_thread_are_found_in_a_real_dump(tmp_path):
    ready, done = threading.Event(), threading.Event()

    def blocked():
        ready.set()
        done.wait()

    thread = threading.Thread(target=blocked)
    thread.start()
    ready.wait()
    with open(tmp_path / "dump", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    done.set()
    thread.join()
    dump = (tmp_path / "dump").read_text()
    assert thread.ident is not None
    assert "blocked" in [function for _, _, function in main_thread_frames(dump, thread.ident)]
    mine = main_thread_frames(dump, threading.get_ident())
    assert mine[0][2] == "test_frames_of_one_thread_are_found_in_a_real_dump"


def test_names_of_ranks():
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([5, 0, 3, 4]) == "ranks 0, 3-5"
