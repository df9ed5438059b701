"""A fit that cannot hold its weights, gradients and states ends before any are made or read."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy, ParallelConfig, memory
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.memory import HostMemory
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.strategy import module as d9d_module
from tests.strategy.plain import trainer
from tests.strategy.test_fit_memory import give

WEIGHTS = 4 * 1_837_000
"""Bytes of the preset `tiny`, about."""


class Loads(Qwen3MoePretraining):
    """Begins with weights of others, which it may not have the memory for."""

    has_loaded = False
    runs_out = False

    def load_pretrained(self) -> None:
        self.has_loaded = True
        if self.runs_out:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Freezes(Loads):
    """Trains norms alone, which nobody knows before."""

    def on_stages_built(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" in name)


def fit(module: Qwen3MoePretraining, callbacks: Any = (), **options: Any) -> None:
    data = ByteTextDataModule(sequence_length=64, batch_size=8)
    quiet = {"max_steps": 1, "limit_val_batches": 0, "callbacks": [*callbacks], "enable_checkpointing": bool(callbacks)}
    run = trainer(D9DStrategy(**options), **quiet)
    run.fit(module, data)


def test_it_ends_before_weights_are_made_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(d9d_module, "materialize", lambda *_: made.append(1))
    module = Loads(preset="tiny")
    give(monkeypatch, int(3.9 * WEIGHTS))  # of four
    with pytest.raises(ConfigError, match=r"the fit cannot begin: a training step needs .* states 14\.\d MiB"):
        fit(module)
    assert not made
    assert not module.has_loaded
    assert len(module.stages) == 0


def test_activations_count_where_the_data_module_knows_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(d9d_module, "materialize", lambda *_: made.append(1))
    give(monkeypatch, 4 * WEIGHTS + 2 * 2**20)
    with pytest.raises(ConfigError, match=r"activations 8\.\d MiB.*; by arithmetic it fits with "):
        fit(Loads(preset="tiny"), microbatch_size=4)
    assert not made


def test_what_is_frozen_later_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, int(1.5 * WEIGHTS))
    module = Freezes(preset="tiny")
    fit(module, microbatch_size=1)
    assert module.has_loaded


def test_memory_runs_out_while_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 20 * WEIGHTS)
    module = Loads(preset="tiny")
    module.runs_out = True
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        fit(module)
    text = "".join(traceback.format_exception(caught.value))
    assert "memory ran out while the model was made or loaded\nby arithmetic a step needs" in text
    assert "; by arithmetic it fits with " in text


def test_the_host_has_too_little_for_copies_of_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: (2 * WEIGHTS, 2 * WEIGHTS))
    give(monkeypatch, 20 * WEIGHTS)
    saves = ModelCheckpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"of the host's memory, .* checkpoint 21\..*asynchronous=False"):
        fit(Loads(preset="tiny"), [saves], checkpoint=CheckpointConfig(asynchronous=True))
    fit(Loads(preset="tiny"), [saves])


def test_inputs_of_blocks_take_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[HostMemory] = []
    monkeypatch.setattr(memory, "host_bytes", lambda: (WEIGHTS, WEIGHTS))
    monkeypatch.setattr(memory, "check_host", lambda needed, *_: seen.append(needed))
    give(monkeypatch, 20 * WEIGHTS)
    module = Loads(preset="tiny")
    fit(module, parallel=ParallelConfig(recompute="offload"))
    config = module.config
    of_block = 8 * 64 * config.hidden_size * 4
    assert seen == [HostMemory(inputs=config.num_hidden_layers * of_block)]
