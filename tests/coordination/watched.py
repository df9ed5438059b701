"""What the processes of `test_watchdog.py` run: a watch whose messages go nowhere, and watches that read garbage."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from lightning_d9d.coordination.watchdog import RankWatch
from lightning_d9d.errors import RankError

SHUTDOWN_SECONDS = 1.0
STREAMS = ("full", "closed", "none", "blocked", "no descriptor")
GARBAGE = (
    *("\xff", "", "[0, 0, 0, 0]", "[-1, 15]", "[0, 15.0]", "[1e999, 0]", "[" * 100_000, "9" * 5000),
    '{"rank": "0", "summary": "", "traceback": ""}',
)
STOP = {"stop": "[1, 15]"}
BEFORE: dict[str, dict[str, str]] = {
    "failure": {},
    "stop": {},
    "epoch_end/0": {},
    "last_position": STOP,
    "position/1": STOP,
    "early_stop/0/at": {"early_stop/0": ""},
    "early_stop/0/1": {"early_stop/0": ""},
    "closed": {},
}
"""What else is in the store when a key is read."""
COUNTERS: dict[str, Callable[[RankWatch], None]] = {
    "num_arrived": RankWatch.close,
    "meeting/epoch/0": RankWatch.end_epoch,
    "meeting/evaluation/0": RankWatch.end_evaluation,
    "num_left": RankWatch.close,
    "num_heard": lambda watch: watch.report(dist.DistNetworkError("a connection broke")),
}
"""What reads a number of ranks."""


def wait_with_streams(streams: str, port: int) -> None:
    """Rank 0 of 2, whose main thread does nothing any more and whose messages cannot be written."""
    print("what was printed before", end="")
    if streams == "full":
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.dup2(full, 2)
    elif streams == "closed":
        sys.stdout.close()
        sys.stderr.close()
    elif streams == "none":
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
    elif streams == "no descriptor":
        os.close(1)
        os.close(2)
    else:
        _, entry = os.pipe()
        os.set_blocking(entry, False)
        try:
            while True:
                os.write(entry, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(entry, True)
        os.dup2(entry, 1)
        os.dup2(entry, 2)
    store = dist.TCPStore("127.0.0.1", port)
    RankWatch(store, 0, 2, SHUTDOWN_SECONDS, 30, [], lambda _: SystemExit()).start()
    store.set("ready", "")
    threading.Event().wait()


def lose_the_other_rank(file: Path, port: int) -> None:
    """Rank 0 of 2, which loses its connection to the other and does not come to its last words."""
    with file.open("w") as output:
        sys.stderr = output
        store = dist.TCPStore("127.0.0.1", port)
        watch = RankWatch(store, 0, 2, SHUTDOWN_SECONDS, 30, [], lambda _: SystemExit())
        watch.start()
        watch.report(dist.DistNetworkError("a connection broke"))
        threading.Event().wait()


def leave_just_before_the_end(file: Path, port: int) -> None:
    """Rank 0 of 2, whose main thread is blocked until the watch is about to end the process."""
    with file.open("w") as output:
        os.dup2(output.fileno(), 2)
    leaves, has_left, end_process = threading.Event(), threading.Event(), RankWatch._end_process

    def end_after_it_left(watch: RankWatch) -> None:
        leaves.set()
        has_left.wait()
        end_process(watch)

    RankWatch._end_process = end_after_it_left  # type: ignore[method-assign]
    store = dist.TCPStore("127.0.0.1", port)
    watch = RankWatch(store, 0, 2, SHUTDOWN_SECONDS, 30, [], lambda _: SystemExit())
    watch.last_words = lambda: "To go on: the same command"
    watch.start()
    be_blocked(store, leaves)
    has_left.set()
    threading.Event().wait()


def be_blocked(store: dist.Store, leaves: threading.Event) -> None:
    """Wait, with a name of its own in a stack."""
    store.set("ready", "")
    leaves.wait()


def read_garbage(file: Path) -> None:
    """Writes by key and garbage what the main thread of a rank hears of it."""
    heard: dict[str, dict[str, str]] = {key: {} for key in BEFORE}
    for key, before in BEFORE.items():
        for garbage in GARBAGE:
            store = dist.HashStore()
            for name, value in {**before, key: garbage}.items():
                store.set(name, value.encode("latin1"))
            watch = RankWatch(store, 0, 2, 600, 2, [], lambda _: SystemExit("stopped"))
            watch.start()
            try:
                if key == "closed":
                    watch.close()
                end = time.monotonic() + 5
                while time.monotonic() < end:
                    watch.begin_train_batch()
                    time.sleep(0.01)
                heard[key][garbage] = "nothing"
            except (RankError, SystemExit) as error:
                heard[key][garbage] = str(error)
    file.write_text(json.dumps(heard))
    sys.stdout.flush()
    os._exit(0)


def count_garbage(file: Path) -> None:
    """Writes by key what is heard of garbage in place of a number; the server hangs up on who adds to that."""
    heard: dict[str, str] = {}
    for key, reads in COUNTERS.items():
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = dist.TCPStore("127.0.0.1", server.port)
        store.set("num_arrived", "1")  # the other rank
        store.set(key, "x")
        watch = RankWatch(store, 0, 2, 600, 2, [], lambda _: SystemExit("stopped"))
        watch._patience = 0.2
        watch.start()
        with suppress(RankError, SystemExit):
            reads(watch)
        heard[key] = str(watch.failure)
    file.write_text(json.dumps(heard))
    sys.stdout.flush()
    os._exit(0)
