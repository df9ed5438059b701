"""Optimizers as settings: groups and schedule train on a mesh as in one process, also after a resume on another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.dtypes import default_dtype
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining
from lightning_d9d.optim import OptimizerSettings, ParameterGroup, Phase, PiecewiseLR
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance
from tests.meshes.equality import CONFIG, EPS, LEARNING_RATE, WEIGHT_DECAY, Watched, batch_of, whole
from tests.strategy.plain import trainer

TIED = replace(CONFIG, tie_word_embeddings=True)
STEPS, SAVED_AFTER, SEED = 4, 2, 1
EXPERTS_RATE = LEARNING_RATE / 4
SETTINGS = OptimizerSettings(
    partial(AdamW, lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY),
    partial(PiecewiseLR, phases=[Phase(0.0)], initial=1.0),
    [ParameterGroup("*.experts.*", lr=EXPERTS_RATE)],
)


class Configured(Watched):
    """Takes its optimizer from settings; saves inside of its epoch."""

    configure_optimizers = Qwen3MoePretraining.configure_optimizers

    def __init__(self, settings: OptimizerSettings, config: Qwen3MoeConfig, steps: int, save_to: str | None) -> None:
        super().__init__(config, steps)
        self.save_to = save_to
        self.optimizer_settings = settings

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.save_to is not None and self.global_step == SAVED_AFTER:
            self.trainer.save_checkpoint(self.save_to)
            self.trainer.should_stop = True


def fitted(
    rank: RankContext,
    mesh: MeshConfig,
    settings: OptimizerSettings = SETTINGS,
    config: Qwen3MoeConfig = TIED,
    steps: int = STEPS,
    save_to: str | None = None,
    load_from: str | None = None,
) -> dict[str, Tensor]:
    """The weights that this rank holds after the last step."""
    L.seed_everything(SEED, verbose=False)
    module = Configured(settings, config, steps, save_to)
    options = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
    run = trainer(D9DStrategy(mesh=mesh), rank.world_size, rank.device.type, **options)
    run.fit(module, ckpt_path=load_from)
    return {name: whole(parameter.detach()) for name, parameter in module._named()}


def built(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    """The model of one process, in float64."""
    L.seed_everything(SEED, verbose=False)
    module = Qwen3MoePretraining(config)
    with default_dtype(torch.float64):
        module.configure_model()
    return module.model


def train_step(model: Qwen3MoeForCausalLM, optimizer: Optimizer, step: int) -> None:
    """One step of plain torch."""
    batch = batch_of(step)
    optimizer.zero_grad()
    (model(**batch, reduction="sum").loss / (batch["labels"] != -100).sum()).backward()
    optimizer.step()


def on_one_process() -> dict[str, Tensor]:
    """Plain torch, with groups and learning rates by hand."""
    model = built(TIED)
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    plain = {name for name, p in model.named_parameters() if p.ndim < 2} | {"model.embed_tokens.weight"}
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[n] for n in experts], "peak": EXPERTS_RATE},
        {"params": [named[n] for n in plain], "peak": LEARNING_RATE, "weight_decay": 0.0},
        {"params": [named[n] for n in named.keys() - experts - plain], "peak": LEARNING_RATE},
    ]
    optimizer = AdamW(groups, lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * (1 - step / STEPS)
        train_step(model, optimizer, step)
    return {name: parameter.detach() for name, parameter in named.items()}


MESHES = {
    "pp2": MeshConfig(pipeline_parallel=2),
    "shard2": MeshConfig(data_parallel_shard=2),
    "rep2-ep2": MeshConfig(data_parallel_replicate=2, expert_parallel=2),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("first", "second"), [("pp2", "shard2"), ("shard2", "rep2-ep2"), ("rep2-ep2", "pp2")])
def test_groups_and_schedule_on_two_meshes(rank: RankContext, first: str, second: str) -> None:
    saved = str(rank.tmp_dir / "saved")
    fitted(rank, MESHES[first], save_to=saved)
    weights = fitted(rank, MESHES[second], load_from=saved)
    expected = rank.from_first_rank(on_one_process)
    assert_tensors_close(weights, {name: expected[name] for name in weights}, tolerance=Tolerance(relative=1e-9))
    held = rank.all_gather_object(set(weights))
    assert set().union(*held) == expected.keys()
