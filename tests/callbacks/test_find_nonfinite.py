"""`FindNonfinite` names the rank, the batch, the module and the parameters where numbers stop being finite."""

from __future__ import annotations

import logging.handlers
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.callbacks import FindNonfinite
from lightning_d9d.log import logger
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import Plain, loader, rows, trainer

NAN = float("nan")


class Spoil(L.Callback):
    """Makes a module's output NaN in a batch, on a rank, in one of the microbatches."""

    def __init__(self, module: str, batch: int, rank: int = 0, microbatch: int = 0, num_microbatches: int = 1) -> None:
        self.module, self.batch, self.rank = module, batch, rank
        self.microbatch, self.num_microbatches = microbatch, num_microbatches
        self.num_calls = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trainer = trainer
        for name, each in pl_module.named_modules():
            if name.endswith(self.module) and trainer.global_rank == self.rank:
                each.register_forward_hook(self.spoil)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.num_calls = 0

    def spoil(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        call, self.num_calls = self.num_calls, self.num_calls + 1
        is_here = self.trainer.fit_loop.epoch_loop.batch_idx == self.batch
        is_here = is_here and call % self.num_microbatches == self.microbatch
        return output * NAN if is_here else output


def message(find: FindNonfinite, fit: Callable[[], Any]) -> str:
    with pytest.raises(FloatingPointError) as caught:
        fit()
    assert find.reports == [str(caught.value)]
    return find.reports[0]


def test_the_first_module_of_a_plain_module() -> None:
    find, module = FindNonfinite(), Plain()
    run = trainer(D9DStrategy(), callbacks=[find, Spoil("net.0", batch=3)])
    said = message(find, lambda: run.fit(module, loader(32)))
    assert "the gradients of step 3 (counted from 0) are not finite" in said
    assert "\nrank 0: the output of net.0 is not finite in microbatch 0 of batch 3, its inputs are finite\n" in said
    assert "gradients that are not finite, 6 in all: net.0.weight; net.0.bias; net.1.weight; and 3 more" in said
    assert said.endswith("where the backward comes first: net.3.bias")
    assert int(dict(module.named_buffers())["net.1.num_batches_tracked"]) == 4  # the second forward left buffers alone


def test_a_row_in_the_second_batch_of_a_window() -> None:
    find, data = FindNonfinite(), rows(32)
    data.tensors[0][14, 2] = float("inf")
    run = trainer(D9DStrategy(), callbacks=[find], accumulate_grad_batches=2)
    said = message(find, lambda: run.fit(Plain(), DataLoader(data, batch_size=4)))
    assert "the gradients of step 1 (counted from 0) are not finite" in said
    assert "rank 0: the output of net.0 is not finite in microbatch 0 of batch 3, its inputs are not finite" in said


def test_a_weight_that_is_not_finite() -> None:
    find, module = FindNonfinite(), Plain(batch_norm=False)
    with torch.no_grad():
        module.get_parameter("net.3.weight")[1, 2] = NAN
    said = message(find, lambda: trainer(D9DStrategy(), callbacks=[find]).fit(module, loader(8)))
    assert (
        "net.3 is not finite in microbatch 0 of batch 0, its inputs are finite; its parameters weight are not" in said
    )


def test_a_backward_alone() -> None:
    find, module = FindNonfinite(), Plain(batch_norm=False)
    module.get_parameter("net.0.bias").register_hook(lambda gradient: gradient * NAN)
    said = message(find, lambda: trainer(D9DStrategy(), callbacks=[find]).fit(module, loader(8)))
    assert "all modules have finite outputs: the loss, or its backward, is the first that is not finite" in said
    assert said.endswith("gradients that are not finite, 1 in all: net.0.bias")


def test_without_a_fault_a_fit_is_the_same() -> None:
    weights = []
    for callbacks in ([], [FindNonfinite()]):
        torch.manual_seed(1)
        module = Plain()
        trainer(D9DStrategy(), callbacks=callbacks, gradient_clip_val=0.1).fit(module, loader(16))
        weights.append(torch.cat([each.detach().flatten() for each in module.parameters()]))
    assert_bitwise_equal("weights", weights[1], weights[0])


def fit_stages(rank: RankContext, mesh: MeshConfig, spoil: Spoil, find: FindNonfinite, **options: Any) -> L.Trainer:
    torch.manual_seed(1)
    strategy = D9DStrategy(mesh=mesh, num_microbatches=2, **options)
    run = trainer(
        strategy, rank.world_size, rank.device.type, precision="64-true", callbacks=[find, spoil], max_epochs=1
    )
    run.fit(Pipelined(), DataLoader(token_rows(16), batch_size=4))  # type: ignore[arg-type]
    return run


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layer", [1, 5])
def test_a_stage_of_a_pipeline(rank: RankContext, layer: int) -> None:
    """Ranks behind it come after it: their inputs are not finite."""
    find, owner = FindNonfinite(), layer // 4
    spoil = Spoil(f"layers.{layer}.up", batch=1, rank=owner, microbatch=1, num_microbatches=2)
    mesh = MeshConfig(pipeline_parallel=2)
    said = message(find, lambda: fit_stages(rank, mesh, spoil, find))
    assert rank.all_gather_object(said) == [said] * 2
    lines = said.splitlines()
    assert lines[1] == (
        f"rank {owner}: the output of layers.{layer}.up is not finite in microbatch 1 of batch 1, its inputs are finite"
    )
    if owner == 0:
        assert lines[2] == (
            "rank 1: the output of layers.4.norm is not finite in microbatch 1 of batch 1, "
            "its inputs are not finite already"
        )
    assert ("rank 0: the output" in said) == (owner == 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "data_parallel_shard"])
def test_skipped_steps_are_logged_and_the_fit_goes_on(rank: RankContext, axis: str) -> None:
    find = FindNonfinite(max_reports=1)
    mesh = MeshConfig(**{axis: 2})
    handler = logging.handlers.BufferingHandler(1000)
    logger.addHandler(handler)
    try:
        run = fit_stages(
            rank, mesh, Spoil("layers.2.down", batch=0, rank=1, num_microbatches=2), find, skip_nonfinite=True
        )
    finally:
        logger.removeHandler(handler)
    assert run.strategy.num_skipped_steps == 1  # type: ignore[attr-defined]
    assert len(find.reports) == 1
    assert "rank 1: the output of layers.2.down is not finite in microbatch 0 of batch 0" in find.reports[0]
    assert "rank 0: the output" not in find.reports[0]
    assert [record.getMessage() for record in handler.buffer if "not finite" in record.getMessage()] == (
        [f"[dp0] {find.reports[0]}"] if rank.rank == 0 else []
    )
    assert all(bool(each.isfinite().all()) for each in run.lightning_module.parameters())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parallel": ParallelConfig(compile=True)}, "compile=True, where nothing looks into blocks"),
        ({"step_in_backward": True}, "step_in_backward=True, which frees gradients"),
    ],
)
def test_fits_in_which_nothing_is_found_are_refused(options: dict[str, Any], text: str) -> None:
    run = trainer(D9DStrategy(**options), callbacks=[FindNonfinite()])
    with pytest.raises(ConfigError, match=text):
        run.fit(Pipelined(), DataLoader(rows(4)))


def test_arguments() -> None:
    with pytest.raises(ConfigError, match=r"FindNonfinite\(max_reports=0\) must be at least 1"):
        FindNonfinite(0)
    with pytest.raises(ConfigError, match="FindNonfinite needs D9DStrategy"):
        trainer("auto", callbacks=[FindNonfinite()]).fit(Plain(), loader(8))
