"""A pytest plugin for Lightning's own tests. With `--d9d`, a test that leaves the strategy open gets `D9DStrategy()`.

It is loaded in both runs, so that whatever else it changes is the same in both.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

LOOKS_FOR_FILES = "leave_no_artifacts_behind"
"""A fixture of Lightning's tests, around each of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--d9d", action="store_true", help="give D9DStrategy() to tests that leave the strategy open")


def pytest_configure(config: pytest.Config) -> None:
    _hide_second_lightning()
    _skip_spawned_processes()
    if config.getoption("--d9d"):
        _take_strategy()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> bool | None:
    """Leave out the fixture that looks for new files after each test: workers share the folder, and see each other's.

    The gate looks for files once, after each run.
    """
    if fixturedef.argname != LOOKS_FOR_FILES:
        return None
    fixturedef.cached_result = (None, fixturedef.cache_key(request), None)  # type: ignore[arg-type]
    return True


def _hide_second_lightning() -> None:
    """The package `pytorch_lightning` is installed beside `lightning` and redirects its loggers when it is imported."""
    sys.modules["pytorch_lightning"] = None  # type: ignore[assignment]


def _skip_spawned_processes() -> None:
    """Tests that spawn or fork processes all name another strategy, and would not see this plugin's there."""
    from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher as OfFabric
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    def launch(*_: object, **__: object) -> None:
        pytest.skip("spawns processes, with another strategy")

    OfFabric.launch = _MultiProcessingLauncher.launch = launch  # type: ignore[method-assign, assignment]


def _take_strategy() -> None:
    """Exchange the choice "auto" of a Trainer, except on TPUs, which other strategies are for."""
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    from lightning_d9d import D9DStrategy

    init = _AcceleratorConnector.__init__

    @functools.wraps(init)
    def with_d9d(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("strategy", "auto") == "auto" and kwargs.get("accelerator") != "tpu":
            kwargs["strategy"] = D9DStrategy()
        init(self, *args, **kwargs)

    _AcceleratorConnector.__init__ = with_d9d  # type: ignore[method-assign]
