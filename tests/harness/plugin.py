"""The pytest side: the marker `ranks(n)` and those of `NEEDS`, the fixture `rank`, the option `--device`."""

import atexit
import gc
import importlib.metadata
import importlib.util
import os
import pickle
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness.messages import Assignment
from tests.harness.pool import PoolKey, RankPool
from tests.harness.state import restored_state

SECONDS_PER_RANK = 30.0
"""The default of a test's time limit, by rank. Ranks share two cores, on which eight need a minute of them for one
mesh."""
_RANKS = (
    "ranks(n, timeout_seconds=30 * n, record=True): the body runs on each of n rank processes (gloo; nccl with "
    "--device cuda or the marker gpu), its collectives are recorded and compared over the ranks"
)

_MESHES = (
    "meshes: one of the many meshes or numbers of microbatches that `nox -s tests` leaves out and `nox -s meshes` runs"
)

_JOBS = (
    "jobs: starts whole jobs, whose processes wait for each other; `python -m tests` runs it beside those that do not"
)


@dataclass(frozen=True)
class Need:
    """Something that not every machine has: where it is missing, tests with the marker are deselected."""

    is_met: Callable[[], bool]
    """Asked only where a test has the marker."""
    missing: str
    meaning: str


def _can_add_network_namespaces() -> bool:
    name = f"probe-{os.getpid()}"
    if shutil.which("ip") is None:
        return False
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    return added and subprocess.run(["ip", "netns", "del", name], check=False).returncode == 0


def _can_mount() -> bool:
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return (
        shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    )


def _has_mpi() -> bool:
    return importlib.util.find_spec("mpi4py") is not None and shutil.which("mpiexec") is not None


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that holds it
        return False


def _is_installed(distribution: str) -> bool:
    """Return whether the package itself is installed; other packages may have modules of that name."""
    return any(importlib.metadata.distributions(name=distribution))


NEEDS = {
    "gpu": Need(lambda: _count_gpus() > 0, "no CUDA device", "needs a CUDA device"),
    "two_gpus": Need(lambda: _count_gpus() > 1, "fewer than two CUDA devices", "needs two CUDA devices"),
    "network_namespaces": Need(
        _can_add_network_namespaces,
        "`ip netns add` is not there or not permitted",
        "needs Linux, iproute2 and the right to add network namespaces",
    ),
    "mounts": Need(
        _can_mount, "`unshare -Urm` is not permitted", "needs Linux and the right to mount in a namespace of its own"
    ),
    "mpi": Need(_has_mpi, "no mpi4py or no mpiexec", "needs mpi4py and mpiexec; `nox -s mpi` installs them"),
    "nv_grouped_gemm": Need(lambda: _has("grouped_gemm"), "no nv-grouped-gemm", "needs the package nv-grouped-gemm"),
    "quack": Need(lambda: _has("quack.gemm_interface"), "no quack-kernels", "needs the package quack-kernels"),
    "datasets": Need(lambda: _has("datasets"), "no datasets", "needs the package datasets, of the extra data"),
    "litdata": Need(lambda: _has("litdata"), "no litdata", "needs the package litdata; `nox -s litdata` installs it"),
    "loggers": Need(
        lambda: all(map(_has, ("tensorboard", "wandb", "mlflow", "aim"))),
        "not all of tensorboard, wandb, mlflow, aim",
        "needs tensorboard, wandb, mlflow and aim; `nox -s loggers` installs them",
    ),
    "flash_attn_4": Need(lambda: _is_installed("flash-attn-4"), "no flash-attn-4", "needs the package flash-attn-4"),
}


_IN_PYTESTS_PROCESS = {
    "monkeypatch": "with pytest.MonkeyPatch.context() as monkeypatch, or try/finally",
    **dict.fromkeys(["capsys", "capsysbinary", "capfd", "capfdbinary"], "with contextlib.redirect_stdout(...)"),
    "caplog": "with a logging.Handler of its own",
    "recwarn": "with pytest.warns(...) or warnings.catch_warnings(record=True)",
}
"""Fixtures that change or watch pytest's own process, not the ranks, and what a body does instead."""


class LeftoverWarning(UserWarning):
    """A test body left something behind in a rank process; the harness has put it back."""


@dataclass(frozen=True)
class RanksOptions:
    """The arguments of the marker `ranks`."""

    num_ranks: int
    timeout_seconds: float | None = None
    record: bool = True


class RankTests:
    """Hooks that need the pool: one at a time, started when the first test asks for it."""

    def __init__(self, config: pytest.Config) -> None:
        self._device_type = str(config.getoption("device"))
        self._show_output = config.getoption("capture") == "no"
        self._pool: RankPool | None = None
        self._deselected: dict[str, int] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Tests of one process first, then by what pool they need, so that each pool starts once."""
        for marker, need in NEEDS.items():
            marked = [item for item in items if item.get_closest_marker(marker)]
            if marked and not need.is_met():
                config.hook.pytest_deselected(items=marked)
                self._deselected[marker] = len(marked)
                items[:] = [item for item in items if item not in marked]
        keys = {item: self._key(item) for item in items}
        pools = sorted({key for key in keys.values() if key})
        items.sort(key=lambda item: pools.index(key) + 1 if (key := keys[item]) else 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._deselected:
            terminalreporter.section("deselected")
        for marker, number in self._deselected.items():
            terminalreporter.line(f"deselected: {NEEDS[marker].missing} for {number} tests marked {marker}")

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        key = self._key(item)
        if key and key.device_type == "cuda" and key.num_ranks > (num_gpus := _count_gpus()):
            pytest.skip(f"needs {key.num_ranks} GPUs, {num_gpus} visible")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        options, key = _options(pyfuncitem), self._key(pyfuncitem)
        if options is None or key is None:
            return None
        assignment = _assignment(pyfuncitem, options)
        if self._pool is None or not self._pool.alive or self._pool.key != key:
            self.close()
            self._pool = RankPool(key, show_output=self._show_output)
        timeout = SECONDS_PER_RANK * options.num_ranks if options.timeout_seconds is None else options.timeout_seconds
        verdict = self._pool.run(assignment, timeout)
        for rank, output in verdict.outputs.items():
            pyfuncitem.add_report_section("call", f"rank {rank} output", output)
        if verdict.failure:
            pytest.fail(verdict.failure, pytrace=False)
        if verdict.leftovers:
            warnings.warn(f"left behind on a rank: {', '.join(verdict.leftovers)}", LeftoverWarning, stacklevel=1)
        if verdict.skip_reason is not None:
            pytest.skip(verdict.skip_reason)
        return True

    def close(self) -> None:
        if self._pool:
            self._pool.kill()

    def _key(self, item: pytest.Item) -> PoolKey | None:
        options = _options(item)
        if options is None:
            return None
        return PoolKey(
            device_type="cuda" if item.get_closest_marker("gpu") else self._device_type,
            num_ranks=options.num_ranks,
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported from the garbage collector, which would look at all of torch again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or extensions report at the end that their objects were not freed
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where tests marked ranks(n) run: gloo or nccl"
    )


def pytest_configure(config: pytest.Config) -> None:
    markers = [f"{name}: {need.meaning}; deselected where that is missing" for name, need in NEEDS.items()]
    for marker in (_RANKS, _MESHES, _JOBS, *markers):
        config.addinivalue_line("markers", marker)
    rank_tests = RankTests(config)
    config.pluginmanager.register(rank_tests, "rank-tests")
    config.add_cleanup(rank_tests.close)


@pytest.fixture
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a `RankContext` in the body; in pytest's own process return the folder that all ranks share."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("a test that takes `rank` is marked with @pytest.mark.ranks(n)", pytrace=False)
    return tmp_path


@pytest.fixture(autouse=True)
def _restored_state() -> Iterator[None]:
    with restored_state() as leftovers:
        yield
    if leftovers:
        warnings.warn(f"left behind: {', '.join(leftovers)}", LeftoverWarning, stacklevel=1)


def _options(item: pytest.Item) -> RanksOptions | None:
    marker = item.get_closest_marker("ranks")
    if marker is None:
        return None
    try:
        return RanksOptions(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}; the marker is {_RANKS}") from error


def _assignment(item: pytest.Function, options: RanksOptions) -> Assignment:
    arguments: dict[str, Any] = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    if "rank" not in arguments:
        pytest.fail("a test marked ranks(n) takes `rank: RankContext`", pytrace=False)
    directory = arguments.pop("rank")
    for name in item.fixturenames:  # also those that other fixtures take
        if name in _IN_PYTESTS_PROCESS:
            pytest.fail(
                f"fixture {name!r} acts on pytest's own process, where a test marked ranks(n) does not run: do it in "
                f"the body, {_IN_PYTESTS_PROCESS[name]}",
                pytrace=False,
            )
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"argument {name!r} does not travel to the ranks ({error}): parametrize over names or module-level "
                "functions, and build the value in the body",
                pytrace=False,
            )
    name = item.originalname or item.name
    assert item.module is not None
    return Assignment(
        module_name=item.module.__name__,
        path=item.path,
        qualified_name=f"{item.cls.__qualname__}.{name}" if item.cls else name,
        arguments=pickle.dumps(arguments),
        directory=directory,
        record=options.record,
    )


@cache
def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
