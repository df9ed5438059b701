"""What the report says of ranks that wait: from snapshots as ranks make them."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_d9d.coordination import snapshots
from lightning_d9d.coordination.hang_report import Known, Silent, diagnose, ranks_in_words, report_text
from lightning_d9d.coordination.hangs import Cause, HangWatch, Question
from lightning_d9d.coordination.messages import ForeignValueError
from lightning_d9d.coordination.snapshots import NUM_CALLS, Call, Snapshot, Stack, calls_of, last_calls
from lightning_d9d.coordination.watchdog import RankWatch
from lightning_d9d.errors import RankError

WAITS = Stack("main", [("/lib/torch/distributed/distributed_c10d.py", 9, "all_reduce"), ("/job/train.py", 5, "step")])
LOOPS = Stack("main", [("/job/train.py", 7, "loop")])
GROUPS = {"0": ("world", [0, 1, 2]), "1": ("dp", [0, 1]), "2": ("pp", [1, 2])}


def call(group: str, number: int, *, pending: bool = True, seconds: float = 4.0, size: int = 3) -> Call:
    return Call(group, number, "gloo:all_reduce", [[size]], ["Float"], pending, seconds)


def known(*snapshots: Snapshot, silent: dict[int, Silent] | None = None) -> Known:
    return Known([f"node, process {rank}" for rank in range(3)], {each.rank: each for each in snapshots}, silent or {})


def snapshot(rank: int, main: Stack, *calls: Call, busy: float | None = None) -> Snapshot:
    return Snapshot(rank, main, [], list(calls), GROUPS, None, busy)


def test_a_rank_in_a_loop_is_named() -> None:
    lines = diagnose(
        known(
            snapshot(0, WAITS, call("0", 12)),
            snapshot(1, WAITS, call("0", 12, seconds=5.5)),
            snapshot(2, LOOPS, call("0", 11, pending=False), busy=0.9),
        )
    )
    assert lines == [
        "rank 2 (node, process 2) did not come to gloo:all_reduce(Float[3]), number 12 of group 'world' (ranks 0 to "
        "2), in which ranks 0, 1 wait since 5.5 s: it is at /job/train.py:7 in loop, its main thread computes"
    ]


def test_a_rank_that_waits_for_the_one_at_fault_is_not_named() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is stopped."""
    lines = diagnose(
        known(
            snapshot(0, WAITS, call("1", 4)),
            snapshot(1, WAITS, call("1", 3, pending=False), call("2", 8)),
            silent={2: Silent("its process is stopped (SIGSTOP)")},
        )
    )
    assert lines == [
        "rank 2 (node, process 2) did not come to gloo:all_reduce(Float[3]), number 8 of group 'pp' (ranks 1, 2), in "
        "which rank 1 waits since 4.0 s: its process is stopped (SIGSTOP)"
    ]


def test_ranks_that_wait_for_each_other() -> None:
    lines = diagnose(
        known(
            snapshot(0, WAITS, call("1", 4, seconds=5)),
            snapshot(1, WAITS, call("0", 9), call("1", 3, pending=False)),
            snapshot(2, WAITS, call("0", 9)),
        )
    )
    assert [line.partition(", in which")[0] for line in lines[:2]] == [
        "rank 1 did not come to gloo:all_reduce(Float[3]), number 4 of group 'dp' (ranks 0, 1)",
        "rank 0 did not come to gloo:all_reduce(Float[3]), number 9 of group 'world' (ranks 0 to 2)",
    ]
    assert lines[2].startswith("ranks wait for each other")


def test_another_shape_of_the_same_collective() -> None:
    lines = diagnose(known(*(snapshot(rank, WAITS, call("0", 9, size=3 + (rank == 1))) for rank in range(3))))
    assert lines[0] == (
        "number 9 of group 'world' (ranks 0 to 2) is not the same on all ranks: ranks 0, 2 gloo:all_reduce(Float[3]); "
        "rank 1 gloo:all_reduce(Float[4])"
    )


def test_messages_without_numbers() -> None:
    lines = diagnose(known(snapshot(0, WAITS), snapshot(1, LOOPS), snapshot(2, WAITS)))
    assert lines == [
        "rank 1 (node, process 1) waits for no other rank: it is at /job/train.py:7 in loop; ranks 0, 2 wait"
    ]


def test_ranks_that_get_on() -> None:
    assert diagnose(known(*(snapshot(rank, LOOPS) for rank in range(3)))) == ["no rank waits for another one now"]


def entry(name: str, number: int, *, state: str, retired: bool, group: str = "0") -> dict[str, object]:
    """As torch's recorder dumps a call on NCCL."""
    return {
        "process_group": [group, "world"],
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "is_p2p": name in ("nccl:send", "nccl:recv"),
        "profiling_name": name,
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
        "state": state,
        "retired": retired,
        "time_created_ns": 0,
        "timeout_ms": 4000,
    }


@pytest.mark.parametrize("ended", [True, False])
def test_calls_that_were_coalesced_end_with_their_set(ended: bool) -> None:
    """torch leaves them as scheduled for ever."""
    calls = calls_of(
        [
            entry("nccl:all_reduce", 6, state="scheduled", retired=False),
            entry("nccl:send", 7, state="scheduled", retired=False),
            entry("nccl:recv", 7, state="scheduled", retired=False),
            entry("nccl:send", 7, state="scheduled", retired=False, group="1"),
            entry("nccl:coalesced", 7, state="completed" if ended else "started", retired=ended),
        ]
    )
    assert [each.is_pending for each in calls] == [True, not ended, not ended, True, not ended]
    assert calls[0].limit_seconds == 4


@pytest.mark.parametrize(
    ("operation", "limit_seconds", "is_overdue"),
    [("nccl:all_reduce", 0.2, True), ("gloo:all_reduce", 0.2, False), ("nccl:all_reduce", 900.0, False)],
)
def test_a_wait_on_nccl_longer_than_its_limit_fails_the_job(
    operation: str, limit_seconds: float, is_overdue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives no error there; a group of the user's own may have a longer limit."""
    begin = time.monotonic()

    def take(rank: int, main_thread: int, **_: object) -> Snapshot:
        seconds = time.monotonic() - begin
        late = replace(call("0", 12, seconds=seconds), operation=operation, limit_seconds=limit_seconds)
        return replace(snapshot(rank, LOOPS, late), groups={"0": ("world", [0])})

    monkeypatch.setattr(snapshots, "take", take)
    watch = HangWatch(0, 0.2, tmp_path, several_nodes=False, signal_number=0)
    store = dist.HashStore()
    ranks = RankWatch(store, 0, 1, 600, 600, [], lambda number: SystemExit(number), watch)
    watch.places = [watch.place]
    watch.start()
    ranks.start()
    try:
        while watch.written is None or (is_overdue and ranks.failure is None):
            assert time.monotonic() < begin + 20
            threading.Event().wait(0.02)
        assert (ranks.failure is not None) == is_overdue
        if is_overdue:
            assert json.loads(store.get("failure"))["summary"] == (
                "waited more than the 0.2 s of the group for other ranks in nccl:all_reduce(Float[3]), number 12"
            )
    finally:
        with suppress(RankError):
            ranks.close()
        watch.close()


@pytest.mark.parametrize("first", Cause)
def test_a_rank_does_not_ask_again_for_what_another_has_reported(
    first: Cause, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wait grows late while the job ends. An error that ends the wait is explained by the report of the wait."""
    late = replace(call("0", 12), seconds=5.0)
    monkeypatch.setattr(snapshots, "take", lambda *_, **__: snapshot(0, WAITS, late))
    watch = HangWatch(0, 4, tmp_path, several_nodes=False, signal_number=0)
    watch.places = [watch.place, watch.place]
    store = dist.HashStore()
    store.set("hang/1", Question(1, first, "in any words").to_json())
    watch.talk(store)
    assert store.check(["hang/1/0"])
    watch._look_at_stall(snapshots.take(0, 0))
    watch.talk(store)
    assert not store.check(["hang/2"])
    watch.explain(RuntimeError(), "RuntimeError: timed out", lambda: None, 1, True)
    assert (watch._asked is None) == (first is Cause.WAIT)


@pytest.mark.parametrize("content", [b'[1, "error"]', b'[1, "boredom", "x"]', b'[-1, "error", "x"]', b'[1, [], "x"]'])
def test_a_request_of_another_program_is_refused(content: bytes) -> None:
    assert Question.from_json("hang/1", Question(1, Cause.WAIT, "x").to_json().encode()) == Question(1, Cause.WAIT, "x")
    with pytest.raises(ForeignValueError, match="under 'hang/1', which no rank of this job wrote"):
        Question.from_json("hang/1", content)


def test_the_report_has_the_stacks_of_all_ranks() -> None:
    ranks = known(snapshot(0, WAITS, call("0", 12)), snapshot(1, LOOPS), silent={2: Silent("gone", "written by C")})
    text = report_text(ranks, "SIGUSR2 came to rank 1", diagnose(ranks), "now")
    assert "Written because SIGUSR2 came to rank 1" in text
    assert (
        "  rank 0: number 12, gloo:all_reduce(Float[3]), under way since 4.0 s\n  rank 1: none\n  rank 2: no answer"
        in text
    )
    assert (
        "rank 1 (node, process 1): it is at /job/train.py:7 in loop\n  thread main\n    /job/train.py:7 in loop" in text
    )
    assert text.endswith("rank 2 (node, process 2): gone\nwritten by C\n")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 5], "ranks 0 to 2, 5"),
        ([2, 4, 5, 6, 9], "ranks 2, 4 to 6, 9"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_in_words(ranks) == text


def test_the_last_calls_are_kept_and_all_that_are_pending() -> None:
    calls = [call("0", 1), *(call("0", number, pending=False) for number in range(2, 30)), call("1", 1, pending=False)]
    assert [each.number for each in last_calls(calls)] == [1, *range(30 - NUM_CALLS, 30), 1]


def test_a_snapshot_is_the_same_behind_the_store() -> None:
    sent = snapshot(0, WAITS, call("0", 12), busy=0.5)
    assert Snapshot.from_json("hang/1/0", sent.to_json().encode()) == sent
    assert replace(sent, meets_at="epoch").waits_for_ranks


@pytest.mark.parametrize("change", [{"rank": -1}, {"main": []}, {"calls": [{}]}, {"groups": {"0": 1}}, {"busy": "x"}])
def test_a_snapshot_that_no_rank_wrote(change: dict[str, object]) -> None:
    content = json.dumps({**json.loads(snapshot(0, WAITS).to_json()), **change}).encode()
    with pytest.raises(ForeignValueError, match="under 'hang/1/0', which no rank of this job wrote"):
        Snapshot.from_json("hang/1/0", content)


def test_the_stacks_of_a_rank_that_has_ended_are_removed(tmp_path: Path) -> None:
    """Stacks of a rank that writes the report are removed when it closes; files that others name elsewhere stay."""
    watches = [HangWatch(rank, 60, tmp_path, several_nodes=True, signal_number=0) for rank in range(2)]
    (tmp_path / "foreign").touch()
    gone = replace(watches[1].place, host="another")
    foreign = replace(gone, stacks=str(tmp_path / "foreign"))
    watches[0].places = [watches[0].place, gone, foreign]
    assert len(list(tmp_path.glob(".stacks-*"))) == 2
    watches[0]._write(1, "rank 0 waits", None, 0.1)
    assert "rank 1" in next(tmp_path.glob("hang-*.txt")).read_text()
    assert [*tmp_path.glob(".stacks-*")] == [Path(watches[0].place.stacks)]
    assert (tmp_path / "foreign").exists()
    for watch in watches:
        watch._thread.start()
        watch.close()
    assert not [*tmp_path.glob(".stacks-*")]
