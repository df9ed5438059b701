"""What the pool and its rank processes say to each other."""

import signal
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 8
"""The signal on which a rank writes its stacks. Neither Lightning nor `TimeoutConfig.report_signal` uses it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Pool to rank, once: who it is and where to meet."""

    rank: int
    world_size: int
    device_type: str
    directory: Path
    """Shared by the pool: stack dumps, output, records."""
    store_port: int
    """The port of the store at which the ranks meet, in the pool's process."""
    group_timeout: timedelta

    @property
    def stack_path(self) -> Path:
        return self.directory / f"rank{self.rank}.stack"

    @property
    def output_path(self) -> Path:
        return self.directory / f"rank{self.rank}.output"

    @property
    def record_path(self) -> Path:
        return self.directory / f"rank{self.rank}.record"


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Rank to pool, once: its process group stands."""

    main_thread: int
    """`threading.get_ident()` of the thread that runs the bodies, to find it in a stack dump."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Pool to rank: run this body."""

    module_name: str
    path: Path
    qualified_name: str
    """Within the module, `TestClass.test_method` for a method."""
    arguments: bytes
    """Pickled keyword arguments; a pickle of its own, since unpickling may need the test's module."""
    directory: Path
    record: bool


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Rank to pool: the body returned."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Rank to pool: the body called `pytest.skip`."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Raised:
    """Rank to pool: the body, or the check after it, raised."""

    at_seconds: float
    """`time.monotonic()`, one clock for all processes of a machine."""
    type_name: str
    text: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Pool to rank: every rank's body returned, clean up."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Rank to pool: ready for the next body."""

    leftovers: list[str] = field(default_factory=list)
    reusable: bool = True
    """False when the default process group is gone."""


@dataclass(frozen=True, kw_only=True)
class Died:
    """The pool's own finding: the rank's process ended."""

    at_seconds: float
    exit_code: int
    """Negative for a signal, as in `subprocess`."""


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """The pool's own finding: no answer within the limit."""

    waited: str
    """How long, as words: "after 60 s"."""
    frames: list[tuple[str, int, str]]
    """The stack of its main thread, innermost first: (path, line, function)."""


Result = Passed | Skipped | Raised | Finished | Died | Stuck
