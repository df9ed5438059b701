"""Processes that begin with the long imports made: they are forked from one that has made them.

To import torch, Lightning and this package takes several seconds. One process of a test run does so, when the first
test needs it. Its forks begin at once.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

PRELOADED = "LIGHTNING_D9D_TESTS_PRELOADED"
"""Names the variable with the module whose imports are made, for tests whose ranks need less than most."""
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def context() -> ForkServerContext:
    """Return what starts such processes: `context().Process(...)`, as in `multiprocessing`."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([os.environ.get(PRELOADED, "tests.harness.preloaded")])
    return forking


def fork_server() -> None:
    """Start the server of `context` as a fork of this process, which has made the imports and has started nothing."""

    def fork(path: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
        if process := os.fork():
            return process
        try:
            for number in map(int, os.listdir("/dev/fd")):  # as where another program starts
                with suppress(OSError):
                    if number not in passed and not os.get_inheritable(number):
                        os.close(number)
            exec(arguments[-1], {})
        finally:
            os._exit(0)

    context()
    resource_tracker.ensure_running()
    with patch("multiprocessing.util.spawnv_passfds", fork):
        forkserver.ensure_running()


def run_rank(connection: Connection, environment: Mapping[str, str], output: Path | None) -> None:
    """Be a rank of the pool until it is killed: the target of a process.

    Args:
        connection: To the pool.
        environment: All its variables.
        output: Gets what it prints; None where the other process's streams do.
    """
    os.setsid()
    start_as_usual()
    _end_with_pytest()
    _take(environment)
    if output is not None:
        _redirect(output, output)
    from tests.harness import worker

    worker.main(connection)


def python_path() -> str:
    """Return what PYTHONPATH is to be for a process that imports the tests, wherever it runs."""
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


def start_as_usual() -> None:
    """Let this process start others as if it were no fork of the server: workers of a dataloader are forked from it."""
    multiprocessing.set_start_method(None, force=True)


def fork_pythons() -> None:
    """Let each `python -m MODULE` that this process starts from here on be a fork of it, with its imports made.

    For launchers: their ranks would make the imports again. A fork begins as a program does: with no other descriptors,
    handlers of signals, exit functions or modules of tests than it would have.
    """
    begin = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork(arguments: Sequence[Any], *how: Any) -> int:
        words = [os.fsdecode(word) for word in arguments if os.fsdecode(word) != "-u"]
        if words[:2] != [sys.executable, "-m"]:
            return begin(arguments, *how)
        _, _, kept, folder, variables, *streams = how[:11]
        status, starts_session = how[12], how[14]
        if process := os.fork():
            return process
        code = 1
        try:
            for number, stream in enumerate((streams[0], streams[3], streams[5])):
                if stream != -1:
                    os.dup2(stream, number)
            for number in map(int, os.listdir("/dev/fd")):
                if number > 2 and (number not in kept or number == status):
                    with suppress(OSError):
                        os.close(number)
            if starts_session:
                os.setsid()
            if folder is not None:
                os.chdir(folder)
            if variables is not None:
                pairs = (os.fsdecode(variable).partition("=") for variable in variables)
                _take({name: value for name, _, value in pairs})
            code = _begin_again(words[2], words[3:])
        finally:
            os._exit(code)

    subprocess._fork_exec = fork  # type: ignore[attr-defined]


def _begin_again(name: str, arguments: Sequence[str]) -> int:
    """Run `python -m NAME ARGUMENTS` in a fork of a process that has run others. Return the exit code."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for module in [module for module in sys.modules if module.startswith("tests.")]:
        del sys.modules[module]
    launch = sys.modules["lightning_d9d.loop.launch"]
    launch._launcher = os.environ.pop(launch._LAUNCHED_BY, None)  # as at its import
    sys.argv = [name, *arguments]
    code = 0
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


def run_command(
    *arguments: str,
    folder: Path,
    variables: Mapping[str, str],
    module: str = "lightning_d9d.cli",
    text: str = "",
    seconds: float = 120,
    forks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` in a process that does not begin with the imports.

    Args:
        arguments: Of the command.
        folder: Where it runs, and looks for modules first.
        variables: Of its environment, beside those of this process.
        module: What runs.
        text: What it can read.
        seconds: When it is killed.
        forks: Whether what it launches begins with its imports made; see `fork_pythons`.
    """
    with tempfile.TemporaryDirectory() as directory:
        streams = [Path(directory, name) for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(text)
        command = (module, arguments, folder, {**os.environ, **variables}, *streams)
        process = context().Process(target=run_module, args=command, kwargs={"forks": forks})
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        texts = [stream.read_text() for stream in streams[1:]]
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


def run_module(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    stdin: Path,
    stdout: Path,
    stderr: Path,
    forks: bool = False,
) -> None:
    """Run `python -m NAME ARGUMENTS`: the target of a process.

    Args:
        name: Of a module.
        arguments: Of its command line.
        folder: Where it runs, and looks for modules first.
        environment: All its variables.
        stdin: What it reads.
        stdout: Gets what it prints.
        stderr: Gets its errors.
        forks: Whether what it launches begins with its imports made; see `fork_pythons`.
    """
    start_as_usual()
    if forks:
        fork_pythons()
    _take(environment)
    with stdin.open() as file:
        os.dup2(file.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _redirect(stdout, stderr)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    warnings.simplefilter("default")
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which are left out where a fork ends


def _end_with_pytest() -> None:
    """Let the kernel kill this process when its parent ends, and that one end with pytest, however all are blocked."""
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:  # the server would live as long as its forks
        os.close(server._forkserver_alive_fd)
        server.__init__()  # for forks of this one
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _redirect(stdout: Path, stderr: Path) -> None:
    """Write to files from here on, at once."""
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
