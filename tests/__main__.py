"""The tests that need no GPU: `python -m tests`, all of them. Arguments of pytest may follow.

- `python -m tests quick` runs the tests that are quick, and ten of two ranks.
- `python -m tests meshes` runs the rows of grids that the others leave out.
- `python -m tests changed` runs the tests that the changes of this branch can break; `--base` is where it began, "main"
  if nothing is said.

Tests of ranks, of jobs and of one process run side by side, jobs and those of one process in two streams each. Ranks
wait for each other often, and jobs for their time limits: together they fill the cores. Jobs begin first, as their
waits would be all that is left at the end. Each stream is a fork of this process, which makes the long imports once.
What runs beside prints when all is over.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import pytest

from tests.changed import changed_files, files_above
from tests.harness import warm
from tests.harness.quick import SPINE, may_have

WITHOUT_GPU = "not gpu and not meshes"
RANKS, JOBS, ONE_PROCESS = "ranks", "jobs and not ranks", "not ranks and not jobs"
QUICK_WALL_SECONDS = 120
FOLDERS = Path(__file__).parent
STARTUP = FOLDERS / "harness" / "startup"
"""The folder of the start of Python in every process; `sitecustomize.py` there describes it."""
FIRST_HALF = ("benchmarks", "callbacks", "checkpoint", "cli", "generation", "ops", "optim", "peft", "state")
"""The folders whose tests of one process take about half of the time of all."""
FIRST_JOBS = ("coordination", "loop", "strategy")
"""The folders whose jobs take about half of the time of all, waits included."""


def run(arguments: list[str], kinds: Sequence[tuple[str, list[str]]] = ()) -> int:
    """Run pytest once for each kind of test, side by side. Return the exit status of what failed, or 0.

    Args:
        arguments: Go to all.
        kinds: The markers of each kind, with more arguments for it; by default all. The output of the last one is seen
            while it runs.
    """
    *beside, (last, more) = kinds or [(kind, []) for kind in (RANKS, JOBS, ONE_PROCESS)]

    def command(kind: str, more: list[str]) -> list[str]:
        return [*arguments, "-m", f"{kind} and {WITHOUT_GPU}", *more]

    make_imports()
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in beside]
        started = [start(command(*each), output.fileno()) for each, output in zip(beside, outputs, strict=True)]
        ended = {exit_code(start(command(last, more)))}
        for process, output in zip(started, outputs, strict=True):
            ended.add(exit_code(process))
            output.seek(0)
            print(output.read())
    # What was asked for may be of one kind.
    return max(ended - {pytest.ExitCode.NO_TESTS_COLLECTED} if len(ended) > 1 else ended)


def make_imports() -> None:
    """Import what most tests need, with the interpreter of Triton where there is no GPU."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])
    import_module("tests.harness.startup.sitecustomize")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the other way of asking leaves forks without CUDA
        if not import_module("torch").cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"
    import_module("tests.harness.preloaded")
    atexit.register(gc.unfreeze)  # or extensions report at the end that their objects were not freed


def start(arguments: list[str], output: int | None = None) -> int:
    """Run pytest in a fork of this process, which writes to `output`. Return its number."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        warm.fork_server()
        for name in [name for name in sys.modules if name.startswith("tests.")]:
            del sys.modules[name]  # pytest imports them with its own asserts
        sys.argv = ["pytest", *arguments]
        status = int(
            pytest.main([*arguments, "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"])
        )
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def exit_code(process: int) -> int:
    """Wait for a process, and return how it ended."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def everything(arguments: list[str]) -> int:
    """Run all tests, or those of the paths among the arguments. Return the exit status."""
    if has_paths(arguments):
        return run(arguments)
    jobs = files_with("jobs")
    first = [file for file in jobs if Path(file).relative_to(FOLDERS).parts[0] in FIRST_JOBS]
    others = [file for file in jobs if file not in first]
    return run(arguments, [(JOBS, first), (JOBS, others), (RANKS, files_with("ranks")), *halves()])


def halves() -> list[tuple[str, list[str]]]:
    """Return two kinds of tests that take about equally long: together those of one process."""
    folders = [str(FOLDERS / folder) for folder in FIRST_HALF]
    return [(ONE_PROCESS, folders), (ONE_PROCESS, [f"--ignore={folder}" for folder in folders])]


def has_paths(arguments: list[str]) -> bool:
    return any(Path(argument.split("::")[0]).exists() for argument in arguments)


def files_with(marker: str) -> list[str]:
    """Return the files of tests that may have the marker: to import the others takes long."""
    return sorted(str(file) for file in FOLDERS.rglob("test_*.py") if may_have(marker, file))


def quick(arguments: list[str]) -> int:
    """Run the quick tests, and say so if they were not. Return the exit status."""
    start = time.monotonic()
    spine = sorted({name.split("::")[0] for name in SPINE})
    alone = [(ONE_PROCESS, [])] if has_paths(arguments) else halves()
    status = run(["--quick", *arguments], [(RANKS, spine), *alone])
    took = time.monotonic() - start
    late = (
        f": more than {QUICK_WALL_SECONDS} s, on a busy machine or for slow tests" if took > QUICK_WALL_SECONDS else ""
    )
    print(f"quick tests: {took:.0f} s{late}")
    return status


def meshes(arguments: list[str]) -> int:
    """Run the rows of grids that the others leave out, in one process. Return the exit status."""
    make_imports()
    return exit_code(start([*arguments, "-m", "meshes and not gpu"]))


def changed(arguments: list[str]) -> int:
    """Run the tests that changes since `--base` can break. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests changed")
    parser.add_argument("--base", default="main", help="the branch or commit where the changes begin")
    options, others = parser.parse_known_args(arguments)
    files = files_above(changed_files(options.base))
    print(f"{len(files)} files of tests:", *files)
    return run([*others, *files]) if files else 0


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it; tests send it
    match arguments:
        case ["quick", *others]:
            return quick(others)
        case ["meshes", *others]:
            return meshes(others)
        case ["changed", *others]:
            return changed(others)
    return everything(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
