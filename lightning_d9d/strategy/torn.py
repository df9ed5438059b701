"""Weights that are only partly updated, and the uses of them that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_d9d.errors import StateError, printable
from lightning_d9d.loop.interrupt import Saved
from lightning_d9d.strategy.saving import Saves


class TornWeights:
    """Records whether the weights are torn: some are of one step and some of the next. Local.

    They are torn from the first update inside a backward to the end of its step. A failure in between leaves them torn,
    also for later fits of the same Trainer.

    Args:
        saves: Saves of the run, which know the last checkpoint.
    """

    def __init__(self, saves: Saves) -> None:
        self.are_torn = False
        self._saves = saves
        self._last: Saved | None = None
        self._are_loaded = False
        self._refuse_saves: Callable[[], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TornWeights:
        """Return this object: copies of a Trainer train the same weights."""
        return self

    def open(self, refuse_saves: Callable[[], None]) -> None:
        """Record that a fit begins.

        Args:
            refuse_saves: Patches, which keep its callbacks from saving because of an exception.
        """
        self._refuse_saves = refuse_saves

    def close(self) -> None:
        """Record the end of a fit; weights stay torn."""
        self._refuse_saves = None

    def begin(self) -> None:
        """Record that a part of the weights is about to be updated."""
        self.are_torn, self._last = True, self._saves.last

    def end(self) -> None:
        """Record that the last part has been updated."""
        self.are_torn = False

    def loaded(self) -> None:
        """Record that the starting fit has read all weights from a checkpoint."""
        self._are_loaded = True

    def check_fit(self) -> None:
        """Raise `StateError` if a fit begins with torn weights."""
        are_loaded, self._are_loaded = self._are_loaded, False
        self.are_torn = self.are_torn and not are_loaded
        if self.are_torn:
            self._let_callbacks_save_nothing()
            raise StateError(f"the weights cannot be trained on: {self._reason()}")

    def note(self, error: BaseException) -> None:
        """Add to the error of a backward that the weights are torn, if they are; no callback then saves them."""
        if self.are_torn:
            self._let_callbacks_save_nothing()
            error.add_note(printable(f"the weights are not to be used: {self._reason()}"))

    def check_save(self) -> None:
        """Raise `StateError` if torn weights would be saved."""
        if self.are_torn:
            raise StateError(self._reason())

    def _let_callbacks_save_nothing(self) -> None:
        if self._refuse_saves is not None:
            self._refuse_saves()

    def _reason(self) -> str:
        last = self._last
        if last is None:
            remedy = "this run has no checkpoint to resume from: begin again with a new module"
        else:
            of = "from which this run went on" if last.step is None else f"of step {last.step}"
            remedy = f"resume from the last good checkpoint, {of}: Trainer.fit(..., ckpt_path={last.path!r})"
        return (
            "D9DStrategy(step_in_backward=True) had updated a part of them when the backward failed, so they are torn "
            f"between two steps; {remedy}"
        )
