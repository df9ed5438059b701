"""Without a GPU, kernels run in Triton's interpreter, which must be on before anybody imports Triton.

Ctrl-C works in here and in the processes of tests, also where a shell started all of this in the background.
"""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.harness.interpreter import quicken_interpreter

STARTS_WITHOUT_TORCH = Path(__file__).with_name("schedule")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "LIGHTNING_D9D_CACHE" not in os.environ:  # else the folder of the process that started this one
    os.environ["LIGHTNING_D9D_CACHE"] = tempfile.mkdtemp(prefix="cache-of-tests-")

    @atexit.register
    def remove_cache(folder: str = os.environ["LIGHTNING_D9D_CACHE"], owner: int = os.getpid()) -> None:
        """Remove the cache, but not in forks of this process."""
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


pytest_plugins = ["tests.harness.plugin", "tests.harness.thinned", "tests.harness.quick"]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Turn the interpreter on before a module of tests is imported that may import Triton."""
    if not isinstance(collector, pytest.Module) or collector.path.parent == STARTS_WITHOUT_TORCH:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        quicken_interpreter()
