"""The part of `D9DStrategy` that sees to equal numbers of batches on all data ranks; `uneven.py` has the loaders."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import lightning as L

from lightning_d9d.data import Filling
from lightning_d9d.pipeline.microbatch import MicrobatchCount
from lightning_d9d.strategy.checkpoints import CheckpointedStrategy
from lightning_d9d.strategy.display import adapt_display, resume_bar, silence, silence_hooks
from lightning_d9d.strategy.eval_step import run_filler
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.uneven import (
    Alignment,
    align_loaders,
    begin_evaluation_step,
    check_lengths,
    filling_of,
    leave_samplers,
)


class AlignedStrategy(CheckpointedStrategy):
    """Aligns loaders of D9DModules, and corrects what Lightning shows of a run.

    Args:
        options: For `CheckpointedStrategy`.
    """

    microbatch_count: MicrobatchCount
    """How many microbatches a batch makes; the subclass sets it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        silence()
        self.filling = Filling()
        """What data ranks have agreed on for the batch whose step is running."""

    def connect(self, model: L.LightningModule) -> None:
        """Take the module that is going to run. Local."""
        super().connect(model)
        silence_hooks(model)

    def setup_environment(self) -> None:
        """Join the other ranks. Loaders keep their own order where all ranks read the same. Collective."""
        super().setup_environment()
        assert self.lightning_module is not None
        adapt_display(self.lightning_module.trainer)
        if self.world_size > 1 and self.mesh.dp_size == 1:
            self._undo_loaders.append(leave_samplers(self.lightning_module.trainer))

    @property
    def needs_equal_batches(self) -> bool:
        """Whether forwards and backwards of a D9DModule may be collective over data ranks.

        Each then runs as many microbatches as the others, also in evaluation. Equal on all ranks.
        """
        return self.world_size > 1 and any(self.mesh.sizes[axis] > 1 for axis in ("dp_cp_shard", "ep_shard"))

    @property
    def is_filler(self) -> bool:
        """Whether this rank has no data for the current training batch, which is a copy that counts nothing.

        For hooks from `on_train_batch_start` to `on_train_batch_end` that count samples themselves.
        """
        return self.lightning_module is not None and filling_of(self.lightning_module.trainer.fit_loop).is_filler

    def align_loaders(self, trainer: L.Trainer) -> None:
        """Let data ranks of a D9DModule have the same number of batches in this run. Collective.

        A plain module's loaders are read as they are, with the states that they had before Lightning read ahead.
        """
        module = self.lightning_module
        is_d9d = isinstance(module, D9DModule)
        is_alone = self.world_size == 1 or self.mesh.dp_size == 1 or not is_d9d
        counts = is_d9d and self.needs_equal_batches and not self.microbatch_count.is_one
        alignment = Alignment(
            group=None if is_alone else self.mesh.group("dp", backend="gloo"),
            in_evaluation=is_d9d and self.needs_equal_batches,
            num_microbatches=module.num_microbatches_of if is_d9d and counts else None,
            run_filler=self._run_filler,
            resumes=self.has_place_to_take,
        )
        self._undo_loaders.append(align_loaders(trainer, alignment))

    def on_train_start(self) -> None:
        """Go on where a checkpoint was saved, and show it."""
        super().on_train_start()
        assert self.lightning_module is not None
        resume_bar(self.lightning_module.trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Refuse a loader without a batch on some rank. Collective.

        Lightning would warn and train on nothing, or leave an evaluation out on that rank while others wait at its end.

        Raises:
            ConfigError: A D9DModule is to train on a loader that has no batch on some rank, or an evaluation of several
                ranks has one on some of them only; on every rank.
        """
        module = self.lightning_module
        assert module is not None
        trainer, is_d9d = module.trainer, isinstance(module, D9DModule)
        meets_at_end = (self.world_size > 1 and not trainer.predicting) or self.needs_equal_batches
        if is_d9d if trainer.training else meets_at_end:
            what = f"{'training ' if trainer.training else ''}{type(dataloader).__name__} of {type(module).__name__}"
            check_lengths(dataloader, what, trainer.training, alone=self.world_size == 1)
        return super().process_dataloader(dataloader)

    def training_batch(self) -> AbstractContextManager[None]:
        """For the step of a training batch."""
        assert self.lightning_module is not None
        return self._filled(filling_of(self.lightning_module.trainer.fit_loop))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        with self.evaluation_batch(self._agreed_on(args[0])):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with self.evaluation_batch(self._agreed_on(args[0])):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with self.evaluation_batch(self._agreed_on(args[0])):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def evaluation_batch(self, filling: Filling) -> Generator[None]:
        """For the step of a batch of validation, test or prediction."""
        if self._shutdown is not None:
            self._shutdown.begin_evaluation_batch()
        if self._interruption is not None:
            self._interruption.check()
        with self._filled(filling):
            yield

    def _agreed_on(self, batch: Any) -> Filling:
        assert self.lightning_module is not None
        return begin_evaluation_step(self.lightning_module.trainer._active_loop, batch)

    def _run_filler(self, batch: Any, filling: Filling) -> None:
        """Forwards of a batch of evaluation that other ranks run alone."""
        with self.evaluation_batch(filling), self.precision_plugin.forward_context():
            run_filler(cast(D9DModule, self.lightning_module), batch)

    @contextmanager
    def _filled(self, filling: Filling) -> Generator[None]:
        self.filling = filling
        try:
            yield
        finally:
            self.filling = Filling()
