"""Python's garbage is collected at chosen steps of a fit, and afterwards by Python itself again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_d9d import ConfigError, D9DStrategy
from lightning_d9d.callbacks import GarbageCollection
from tests.strategy.plain import Plain, loader, trainer


class Cyclic:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


class Littering(Callback):
    """Makes more garbage in each batch than Python leaves lying, and counts what is there when the batch ends."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.counts: list[int] = []

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fails_at:
            raise RuntimeError("fails")
        frozen = gc.get_freeze_count()
        assert frozen > 0
        assert not gc.isenabled()
        for _ in range(3000):
            Cyclic()
        self.counts.append(sum(isinstance(each, Cyclic) for each in gc.get_objects()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_garbage_is_collected_at_the_chosen_steps_alone(accumulate: int) -> None:
    litter = Littering()
    callbacks = [litter, GarbageCollection(every_n_steps=2)]
    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": accumulate}
    trainer(D9DStrategy(), callbacks=callbacks, **options).fit(Plain(), loader(24))
    lasts = 2 * accumulate
    assert litter.counts == [3000 * (1 + index % lasts) for index in range(6)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_python_collects_again_after_a_failure() -> None:
    with pytest.raises(RuntimeError, match="fails"):
        trainer(D9DStrategy(), callbacks=[Littering(fails_at=1), GarbageCollection()]).fit(Plain(), loader(12))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"GarbageCollection\(every_n_steps=0\)"):
        GarbageCollection(every_n_steps=0)
