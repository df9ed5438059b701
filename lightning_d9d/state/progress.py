from __future__ import annotations

from types import TracebackType
from typing import Self


class Progress:
    """A progress bar of bytes on stderr, or nothing.

    Args:
        shown: If True, show the bar; on one rank of a job.
        what: Text in front of it.
        num_bytes: Total number of bytes.
    """

    def __init__(self, shown: bool, what: str, num_bytes: int) -> None:
        self._bar = None
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=num_bytes, desc=what, unit="B", unit_scale=True)

    def add(self, num_bytes: int) -> None:
        """Count this many more bytes as done."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
