"""`schedule=Auto(...)` in a run: one choice on all ranks, trained with, saved, and kept on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.checkpoint import open_directory
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.schedule import Auto, Choice, Machine
from lightning_d9d.strategy.auto import CHOICE
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import Plain, loader, trainer

FREE_ACTIONS = Machine(action_seconds=0.0, link_latency=0.0)


def rows(count: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (count, 17), generator=generator)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]


STEPS, SAVED_STEP = 4, 2


def fit(rank: RankContext, auto: Auto, name: str, path: Path | None = None) -> dict[str, Any]:
    """What the run took, and the weights after it; saved in the middle under `name`."""
    L.seed_everything(3, verbose=False)
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule=auto)
    run = trainer(strategy, 2, rank.device.type, max_steps=STEPS)
    module = Qwen3MoePretraining(preset="tiny", warmup_steps=0)
    taken: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert strategy.pipeline is not None
            taken["schedule"], taken["stages"] = strategy.pipeline.schedule, strategy.pipeline.stages
            taken["microbatch_size"] = strategy.microbatch_count.microbatch_size

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == SAVED_STEP:
                trainer.save_checkpoint(rank.tmp_dir / name)

    run.callbacks.append(Look())  # type: ignore[attr-defined]
    run.fit(module, DataLoader(rows(16), batch_size=4), ckpt_path=path)
    run.validate(
        module, DataLoader(rows(4), batch_size=4), verbose=False
    )  # with the same stages, a checkpoint's or not
    return {"weights": module.state_dict(), **taken}


@pytest.mark.ranks(2)
def test_ranks_choose_together_and_go_on_with_the_choice(rank: RankContext) -> None:
    auto = Auto(batch_size=4, sequence_length=4096, machine=FREE_ACTIONS)
    whole = fit(rank, auto, "saved")
    choice = Choice.from_dict(open_directory(rank.tmp_dir / "saved").values[CHOICE])
    assert type(whole["schedule"]) is type(choice.schedule)
    assert whole["microbatch_size"] == choice.microbatch_size
    assert [stage.layers for stage in whole["stages"]] == [choice.layers_of_stage[s.index] for s in whole["stages"]]

    # With shorter rows and actions that cost something others would be taken; the run goes on with its own.
    other = Auto(batch_size=4, sequence_length=16)
    fresh = fit(rank, other, "other")
    assert (type(fresh["schedule"]), fresh["microbatch_size"]) != (type(whole["schedule"]), whole["microbatch_size"])
    resumed = fit(rank, other, "resumed", rank.tmp_dir / "saved")
    assert type(resumed["schedule"]) is type(whole["schedule"])
    assert resumed["microbatch_size"] == whole["microbatch_size"]
    assert resumed["stages"] == whole["stages"]
    assert_tensors_close(resumed["weights"], whole["weights"])


def tiny() -> Qwen3MoePretraining:
    return Qwen3MoePretraining(preset="tiny")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "auto", "message"),
    [
        (Plain, Auto(batch_size=4, sequence_length=16), r"pipeline_parallel=2: Plain is a plain LightningModule"),
        (Pipelined, Auto(batch_size=4, sequence_length=16), r"rank 0: .*implement model_costs\(sequence_length"),
        (
            tiny,
            Auto(batch_size=4, sequence_length=16, memory_gib=1e-6),
            "no schedule fits into",
        ),
    ],
    ids=["plain module", "no costs", "no memory"],
)
def test_what_cannot_be_chosen_for(rank: RankContext, make: Any, auto: Auto, message: str) -> None:
    run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule=auto), 2, rank.device.type, max_steps=1)
    data = loader(4) if make is Plain else DataLoader(token_rows(4), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        run.fit(make(), data)


def test_one_process_chooses_microbatches() -> None:
    strategy = D9DStrategy(schedule=Auto(batch_size=4, sequence_length=16))
    run = trainer(strategy, max_steps=1)
    run.fit(Qwen3MoePretraining(preset="tiny", warmup_steps=0), DataLoader(rows(4), batch_size=4))
    assert run.global_step == 1
    with pytest.raises(ConfigError, match=r"microbatch_size=2, num_microbatches=None cannot be set with schedule=Auto"):
        D9DStrategy(schedule=Auto(batch_size=4, sequence_length=16), microbatch_size=2)
    with pytest.raises(ConfigError, match=r"schedule=.*Auto.* Plain is a plain LightningModule"):
        trainer(D9DStrategy(schedule=Auto(batch_size=4, sequence_length=16))).fit(Plain(), loader(4))
