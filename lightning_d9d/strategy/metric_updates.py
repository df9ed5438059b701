"""Metrics of torchmetrics in a pipeline: either all ranks update them, or none."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

from lightning_d9d.errors import ConfigError


@contextmanager
def no_metric_updated(module: nn.Module) -> Generator[None]:
    """Refuse updates of a module's metrics inside the block, which is the schedule of a pipeline. Local.

    Raises:
        ConfigError: A metric was updated. Hooks for microbatches run only on the ranks of the last stage.
    """
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    num_updates = [metric.update_count for metric in metrics]
    yield
    for metric, before in zip(metrics, num_updates, strict=True):
        if metric.update_count != before:
            raise ConfigError(
                f"a {type(metric).__name__} was updated in a microbatch hook, which in a pipeline runs only on the "
                "ranks of the last stage. Return values from microbatch_metrics, or update it in on_train_batch_end, "
                "on_validation_batch_end, ..., which run on all"
            )
