"""Checks the configuration before anything is built: degrees, and agreement of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import cast

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging

from lightning_d9d import env
from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.mesh.collectives import first_difference
from lightning_d9d.pipeline.microbatch import MicrobatchCount
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.stage_names import parameter_names

_OF_D9D_MODULES = ("pipeline_parallel", "context_parallel_shard", "context_parallel_replicate")
_OF_SEQUENCES = ("context_parallel_shard", "context_parallel_replicate", "tensor_parallel")
"""Degrees whose ranks share sequences."""
_SPREAD = ("pipeline_parallel", "data_parallel_shard", "context_parallel_shard", "tensor_parallel", "expert_parallel")
"""Degrees above 1 with which no rank has the whole module."""
_TRAINER_SETTINGS = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "log_every_n_steps",
    "val_check_interval",
    "check_val_every_n_epoch",
)


def check_classes(**settings: tuple[object, type]) -> None:
    """Raise `ConfigError` for an argument of `D9DStrategy` that is not an object of its class, such as a dict.

    Args:
        settings: The given value and the class, by the name of the argument.
    """
    for name, (given, expected) in settings.items():
        if not isinstance(given, expected):
            raise ConfigError(
                f"D9DStrategy({name}={given!r}): it is of the type {type(given).__name__}, but {name} needs "
                f"{expected.__name__}(...); import that from lightning_d9d, or leave {name} out"
            )


def check_degrees_of(module: L.LightningModule, config: MeshConfig) -> None:
    """Raise `ConfigError` for a degree that the module cannot use."""
    is_d9d = isinstance(module, D9DModule)
    for name in _OF_D9D_MODULES:
        degree = getattr(config, name)
        if degree != 1 and not is_d9d:
            raise ConfigError(
                f"MeshConfig.{name}={degree}: {type(module).__name__} is a plain LightningModule, which has neither "
                "stages nor sequence_dims. Make it a D9DModule, or give these ranks to data_parallel_replicate"
            )
    for name in _OF_SEQUENCES:
        degree = getattr(config, name)
        if degree != 1 and is_d9d and not cast(D9DModule, module).sequence_dims:
            rows = "give these ranks to data_parallel_shard"
            if name == "tensor_parallel":
                rows += ", or make it a plain LightningModule that calls torch's parallelize_module in configure_model"
            raise ConfigError(
                f"MeshConfig.{name}={degree}: {type(module).__name__}.sequence_dims is empty, so the dim of tokens in "
                f'its batches is unknown. Set it, such as to {{"input_ids": 1, "labels": 1}}. If its batches have no '
                f"sequences of tokens, {rows}"
            )


def check_before_joining(trainer: L.Trainer, config: MeshConfig, world_size: int) -> None:
    """Refuse mistakes that can be found before ranks wait for each other. Local.

    Raises:
        ConfigError: The degrees do not fit the number of ranks, no batch is accumulated, validations are 0 batches
            apart, or a callback supports only one rank.
    """
    config.resolve(world_size)
    if trainer.accumulate_grad_batches < 1:
        raise ConfigError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} must be at least 1, the batches of a step"
        )
    if getattr(trainer, "val_check_interval", None) == 0 and trainer.enable_validation:  # left out if a time
        raise ConfigError("val_check_interval=0 must be above 0; limit_val_batches=0 leaves validation out")
    if (warning := env.untested()) is not None:
        rank_zero_warn(warning)
    callbacks: Iterable[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        raise ConfigError(
            f"the batch size cannot be tuned on {world_size} ranks, because one of them may run out of memory alone; "
            "tune it on one rank"
        )


def check_module(module: L.LightningModule, pipeline: Pipeline | None, count: MicrobatchCount) -> None:
    """Check that a module can run with its configuration. Collective over the pipeline.

    Args:
        module: Module with its stages built.
        pipeline: This rank's place in the pipeline.
        count: Number of microbatches of a batch.

    Raises:
        ConfigError: The module cannot run with its configuration.
    """
    if isinstance(module, D9DModule):
        module.check_overrides()
        if len(module.stages) == 0:
            raise ConfigError(
                f"{type(module).__name__} has no stages: its configure_model must call super().configure_model()"
            )
        assert pipeline is not None
        pipeline.check_stages(module.names_of_stages, lambda: parameter_names(module.whole_on_meta().stages[0]))
    elif not count.is_one:
        raise ConfigError(
            f"microbatch_size={count.microbatch_size}, num_microbatches={count.num_microbatches}: "
            f"{type(module).__name__} is a plain LightningModule, whose training_step takes whole batches; use "
            "accumulate_grad_batches, or make it a D9DModule"
        )


def check_callbacks(callbacks: Iterable[L.Callback], config: MeshConfig) -> None:
    """Raise `ConfigError` for callbacks that copy the module, which is not whole on any rank."""
    degrees = {field.name: getattr(config, field.name) for field in fields(config)}
    spread = [f"{name}={degree}" for name, degree in degrees.items() if degree != 1 and name in _SPREAD]
    for callback in callbacks:
        if spread and isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(
                f"the callback {type(callback).__name__} makes a deep copy of the module, but with "
                f"MeshConfig({', '.join(spread)}) each rank has a part of it, which cannot be copied. Use "
                "lightning_d9d.callbacks.WeightAverages, or train with data_parallel_replicate alone"
            )


def check_saving_callbacks(callbacks: Iterable[L.Callback]) -> None:
    """Raise `ConfigError` for callbacks that fail if checkpoints appear only some time after they are saved."""
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if any(saver.save_last == "link" for saver in savers):
        raise ConfigError(
            "ModelCheckpoint(save_last='link') with CheckpointConfig(asynchronous=True) would link to checkpoints "
            "that are not complete yet. Set save_last=True, for which training does not wait either"
        )


def check_equal_configuration(settings: Mapping[str, object], trainer: L.Trainer) -> None:
    """Compare settings over all ranks whose differences would show as a hang or as wrong numbers. Collective.

    Raises:
        ConfigError: Raised on every rank, with the first setting that differs.
    """
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"Trainer.{name}={getattr(trainer, name, None)}" for name in _TRAINER_SETTINGS]
    lines += [f"{package.__name__} {package.__version__}" for package in (torch, L)]
    if difference := first_difference(lines):
        raise ConfigError(
            f"ranks were started with different configurations: {difference}; start all of them with the same one"
        )
