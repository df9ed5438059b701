"""The pytest side: the markers `ranks(n)` and `gpu`, the fixture `rank`, the option `--device`."""

import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness.messages import Assignment
from tests.harness.pool import PoolKey, RankPool
from tests.harness.state import restored_state

DEFAULT_TIMEOUT_SECONDS = 60.0
_RANKS = (
    "ranks(n, timeout_seconds=60, record=True): the body runs on each of n rank processes (gloo; nccl with "
    "--device cuda or the marker gpu), its collectives are recorded and compared over the ranks"
)
_GPU = "gpu: needs a CUDA device; deselected where there is none"


class LeftoverWarning(UserWarning):
    """A test body left something behind in a rank process; the harness has put it back."""


@dataclass(frozen=True)
class RanksOptions:
    """The arguments of the marker `ranks`."""

    num_ranks: int
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    record: bool = True


class RankTests:
    """Hooks that need the pool: one at a time, started when the first test asks for it."""

    def __init__(self, config: pytest.Config) -> None:
        self._device_type = str(config.getoption("device"))
        self._show_output = config.getoption("capture") == "no"
        self._pool: RankPool | None = None
        self._num_deselected = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Tests of one process first, then by what pool they need, so that each pool starts once."""
        if not _num_gpus(items):
            deselected = [item for item in items if item.get_closest_marker("gpu")]
            self._num_deselected = len(deselected)
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        keys = {item: self._key(item) for item in items}
        pools = sorted({key for key in keys.values() if key})
        items.sort(key=lambda item: pools.index(key) + 1 if (key := keys[item]) else 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._num_deselected:
            terminalreporter.section("gpu")
            terminalreporter.line(f"deselected: no CUDA device for {self._num_deselected} tests marked gpu")

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
        verdict = self._pool.run(assignment, options.timeout_seconds)
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
            # Later than the pool's own limit, which can show where every rank is; a group's timeout only raises.
            group_timeout_seconds=1.5 * max(options.timeout_seconds, DEFAULT_TIMEOUT_SECONDS),
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where tests marked ranks(n) run: gloo or nccl"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in (_RANKS, _GPU):
        config.addinivalue_line("markers", marker)
    rank_tests = RankTests(config)
    config.pluginmanager.register(rank_tests, "rank-tests")
    config.add_cleanup(rank_tests.close)


@pytest.fixture
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """In the body a `RankContext`; in pytest's own process the folder that all ranks share."""
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


def _num_gpus(items: list[pytest.Item]) -> int:
    """The visible GPUs, looked for (torch takes seconds to import) only where a test asks."""
    return _count_gpus() if any(item.get_closest_marker("gpu") for item in items) else 0


@cache
def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
