"""Hand readers files that were changed at random: `python -m tests.fuzz --minutes 60 --jobs 16`.

Each job takes one file after the other, always with other changes. A reader may raise the package's own errors alone,
and has 2 seconds and 200 MB for a file. What else it does is printed, the file that made it do so is kept, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from lightning_d9d.errors import ConfigError, StateError
from tests.checkpoint import fuzz_targets as checkpoints
from tests.harness import warm
from tests.state import fuzz_targets as weights

TARGETS = {**checkpoints.TARGETS, **weights.TARGETS}
MAX_SECONDS = 2
MAX_BYTES = 200_000_000
MAX_FILE_BYTES = 2_000_000
FILES_OF_A_ROUND = 25
SECONDS_OF_A_ROUND = 120
"""How long jobs may take for the rounds that they are in when time is up."""


def peak_memory() -> int:
    """The most that this process has had since `forget_peak`, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Measure the peak from here, where the system can; else from the process's start, which finds less."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def outcome(read: Callable[[], object]) -> str:
    """The error that a reader raised, or "read".

    Raises:
        AssertionError: It took too long or too much memory.
        Exception: What a reader must not raise.
    """
    forget_peak()
    before, begin, result = peak_memory(), time.process_time(), "read"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except (StateError, ConfigError) as error:
        result = type(error).__name__
    seconds, num_bytes = time.process_time() - begin, peak_memory() - before
    assert seconds < MAX_SECONDS, f"{seconds:.1f} s of processor time"
    assert num_bytes < MAX_BYTES, f"{num_bytes / 1e6:.0f} MB"
    return result


def attack(name: str, folder: Path, seed: int) -> Counter[str]:
    """Read some changed files of one kind.

    Args:
        name: Of the target.
        folder: Gets the file that a reader failed with.
        seed: Other changes for each.

    Returns:
        How often each outcome was.

    Raises:
        Exception: A reader did what it must not; a note names the file.
    """
    target, outcomes, place = TARGETS[name], Counter[str](), folder / f"{name}-{seed}"
    content = target.valid(place)
    target.read(place, content)

    @seeded(seed)
    @settings(
        max_examples=FILES_OF_A_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],  # type: ignore[arg-type]
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        changed = data.draw(target.mutated(content))
        if len(changed) > MAX_FILE_BYTES:
            return
        try:
            outcomes[outcome(lambda: target.read(place, changed))] += 1
        except Exception as error:
            kept = place.with_suffix(".failed")
            kept.write_bytes(changed)
            error.add_note(f"{name}: the file is kept as {kept}")
            raise

    try:
        check()
    finally:
        shutil.rmtree(place)
    return outcomes


def work(names: list[str], number: int, num_jobs: int, seconds: float, folder: Path, at: Any, results: Any) -> None:
    """What one job does: rounds of one target after the other, until time is up. Sends outcomes and failures."""
    deadline = time.monotonic() + seconds
    for turn in itertools.count():
        if time.monotonic() > deadline:
            return
        at.value = (number + turn) % len(names)
        name, seed = names[at.value], turn * num_jobs + number
        try:
            results.put((name, attack(name, folder, seed), None))
        except Exception as error:
            notes = [note for note in getattr(error, "__notes__", []) if note.startswith(name)]
            text = f"{name}, seed {seed}: {type(error).__name__}: {str(error)[:1000]}; {'; '.join(notes)}"
            results.put((name, Counter({"failed": 1}), text))


def run(names: list[str], minutes: float, jobs: int, folder: Path) -> int:
    """Let jobs work for so long, and say how they ended.

    Returns:
        How many failures there were.
    """
    context = warm.context()
    results, totals, failures = context.Queue(), {name: Counter[str]() for name in names}, list[str]()
    at: list[Synchronized[int]] = [context.Value("i", -1) for _ in range(jobs)]  # -1: it has not begun
    processes = [
        context.Process(target=work, args=(names, i, jobs, 60 * minutes, folder, at[i], results)) for i in range(jobs)
    ]
    for process in processes:
        process.start()
    deadline = float("inf")
    while any(process.is_alive() for process in processes) or not results.empty():
        if deadline == float("inf") and all(place.value >= 0 for place in at):
            deadline = time.monotonic() + 60 * minutes + SECONDS_OF_A_ROUND
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        try:
            name, outcomes, failure = results.get(timeout=0.1)
        except queue.Empty:
            continue
        totals[name] += outcomes
        if failure is not None:
            failures.append(failure)
            print(f"FAILED {failure}", flush=True)
    for process, place in zip(processes, at, strict=True):
        process.join()
        if process.exitcode:
            failures.append(f"a job ended with exit code {process.exitcode} at {names[place.value]}")
            print(f"FAILED {failures[-1]}")
    for name, outcomes in totals.items():
        print(f"{name}: {outcomes.total()} files: {dict(outcomes)}")
    total = sum(outcomes.total() for outcomes in totals.values())
    print(f"{total} files in {minutes:g} minutes of {jobs} jobs, {len(failures)} failures")
    return len(failures)


def main() -> int:
    """Run the fuzzer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="by default all")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for files that failed; by default one that is named then")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    return int(run(options.targets or list(TARGETS), options.minutes, options.jobs, folder) > 0)


if __name__ == "__main__":
    sys.exit(main())
