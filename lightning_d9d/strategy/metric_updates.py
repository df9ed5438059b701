"""Metrics of torchmetrics in a pipeline: ranks update them together, or not at all."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

from lightning_d9d.errors import ConfigError


@contextmanager
def no_metric_updated(module: nn.Module) -> Generator[None]:
    """Refuse updates of a module's metrics in the body, which is the schedule of a pipeline. Local.

    Raises:
        ConfigError: A metric was updated. Hooks for microbatches run on the last stage's ranks alone.
    """
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    num_updates = [metric.update_count for metric in metrics]
    yield
    for metric, before in zip(metrics, num_updates, strict=True):
        if metric.update_count != before:
            raise ConfigError(
                f"a {type(metric).__name__} was updated in a microbatch hook, which in a pipeline runs on the last "
                "stage's ranks alone. Return values from microbatch_metrics, or update it in on_train_batch_end, "
                "on_validation_batch_end, ..., which run on all"
            )
