"""Updates inside the backward: equal to ordinary steps, with fewer gradients; refused where they cannot be right."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_module
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import ConfigError, D9DStrategy, GradSyncConfig, MeshConfig, ParallelConfig, StageInfo, StateError
from lightning_d9d.mesh.sharding import local
from lightning_d9d.optim import MuonAdamW, StochasticAdamW
from lightning_d9d.strategy.step_in_backward import StepInBackward
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged, staged_rows

SMALL_PARTS = GradSyncConfig(bucket_mb=0.0005)
"""About a layer of `Deep`."""
NUM_LAYERS, WIDTH = 8, 8
ROWS = staged_rows(27)[4:]
"""Something counts in the first batch: a first step that is left out updates nothing inside."""


class Deep(Staged):
    """Eight layers, and what was logged and held at most."""

    def __init__(self, make: Any = None, schedules: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"known_weight": not kwargs.get("mean", False), **kwargs})
        self.make, self.schedules = make, schedules
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.peak_bytes = 0

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        layers = [each for _ in range(NUM_LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01) if self.make is None else self.make(self.parameters())
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._measure)
        if not self.schedules:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _measure(self, _: Tensor) -> None:
        self.peak_bytes = max(self.peak_bytes, self._gradient_bytes())

    def _gradient_bytes(self) -> int:
        storages = [local(p.grad).untyped_storage() for p in self.parameters() if p.grad is not None]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])
        if "grad_norm" in self.trainer.callback_metrics:
            self.norms.append(self.trainer.callback_metrics["grad_norm"])


def built(**kwargs: Any) -> Deep:
    L.seed_everything(7, verbose=False)
    module = Deep(**kwargs)
    module.configure_model()
    return module.double()


def fit(module: L.LightningModule, inside: bool = True, cut: Any = None, rows: Any = None, **options: Any) -> L.Trainer:
    strategy = D9DStrategy(step_in_backward=inside, grad_sync=SMALL_PARTS, **(cut or {}))
    run = trainer(strategy, **{"precision": "64-true", "max_epochs": 1, **options})
    run.fit(module, DataLoader(ROWS if rows is None else rows, batch_size=4))
    return run


def check_equal(ours: Deep, theirs: Deep) -> None:
    assert_tensors_close(ours.state_dict(), theirs.state_dict())
    for name in ("losses", "norms"):
        assert len(getattr(ours, name)) == len(getattr(theirs, name)) > 0
        torch.testing.assert_close(torch.stack(getattr(ours, name)), torch.stack(getattr(theirs, name)))


OPTIMIZERS = {
    "AdamW": None,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "two groups": lambda parameters: torch.optim.AdamW(
        [{"params": p, "weight_decay": 0.1 * (p.ndim > 1)} for p in parameters], lr=0.01
    ),
}


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("accumulate", "cut"), [(1, {}), (1, {"microbatch_size": 2}), (3, {"microbatch_size": 2})])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equal_to_ordinary_steps(optimizer: str, accumulate: int, cut: dict[str, Any], mean: bool) -> None:
    modules = []
    for inside in (True, False):
        module = built(make=OPTIMIZERS[optimizer], schedules=True, mean=mean)
        run = fit(module, inside, cut, accumulate_grad_batches=accumulate)
        assert run.lr_scheduler_configs[0].scheduler._step_count == run.global_step + 1
        modules.append(module)
    check_equal(*modules)
    ours, theirs = modules
    assert ours.peak_bytes <= theirs.peak_bytes
    if accumulate == 1 and not cut:
        assert theirs.peak_bytes > 3 * ours.peak_bytes


@pytest.mark.ranks(2)
def test_buffers_of_buckets_are_freed(rank: RankContext) -> None:
    rows, modules = ROWS[:16], []
    for inside in (True, False):
        module = built()
        strategy = D9DStrategy(step_in_backward=inside, grad_sync=SMALL_PARTS)
        run = trainer(strategy, 2, rank.device.type, precision="64-true", max_epochs=1)
        run.fit(module, DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, 2, rank.rank, shuffle=False)))  # type: ignore[arg-type]
        modules.append(module)
    check_equal(*modules)
    ours, theirs = modules
    assert theirs.peak_bytes > 2 * ours.peak_bytes


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_stochastic_rounding_gives_the_same_bits(state_dtype: torch.dtype) -> None:
    rows = [{"x": row["x"].float(), "y": row["y"]} for row in staged_rows(16)]
    weights = []
    for inside in (True, False):
        L.seed_everything(7, verbose=False)
        module = Deep(make=lambda parameters: StochasticAdamW(parameters, lr=0.01, state_dtype=state_dtype))
        fit(module, inside, {"microbatch_size": 2}, rows, precision="bf16-true")
        assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


class Reads(TorchDispatchMode):
    """Counts values of tensors that the host reads, for which it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.uint8])
def test_the_host_reads_nothing_in_a_part(state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is far ahead of the device, where a tensor says whether the step is skipped."""
    step, reads = StepInBackward._step, []

    def watched(self: StepInBackward, parameters: Any) -> None:
        with Reads() as mode:
            step(self, parameters)
        reads.append(mode.count)

    monkeypatch.setattr(StepInBackward, "_step", watched)
    rows = [{"x": row["x"].float(), "y": row["y"]} for row in staged_rows(12)[4:]]
    L.seed_everything(7, verbose=False)
    module = Deep(make=partial(StochasticAdamW, lr=0.01, state_dtype=state_dtype))
    fit(module, cut={"parallel": ParallelConfig(kernels="triton")}, rows=rows, precision="bf16-true")
    assert len(reads) == 2 * 2  # parts of two steps; the second step is left out or not on the device
    assert sum(reads) == 0


class Wide(Deep):
    """Layers of 2 MiB in bfloat16, and the memory that a step takes beside what was there."""

    def __init__(self) -> None:
        super().__init__(make=partial(StochasticAdamW, lr=0.01))
        self.most_bytes: list[int] = []

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        layers = [each for _ in range(NUM_LAYERS) for each in (nn.Linear(1024, 1024), nn.Tanh())]
        return nn.Sequential(nn.Linear(WIDTH, 1024), *layers, nn.Linear(1024, 4))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() - self._gradient_bytes()  # those of the last batch go next

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.most_bytes.append(torch.cuda.max_memory_allocated() - self.before)


@pytest.mark.gpu
def test_gradients_are_kept_until_a_slow_update_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is far ahead of updates, and the backward takes the memory that they free."""
    step, modules = StepInBackward._step, []

    def slow_step(self: StepInBackward, parameters: Any) -> None:
        torch.cuda._sleep(10_000_000)
        step(self, parameters)

    monkeypatch.setattr(StepInBackward, "_step", slow_step)
    for inside in (True, False):
        L.seed_everything(7, verbose=False)
        modules.append(Wide())
        strategy = D9DStrategy(step_in_backward=inside, grad_sync=GradSyncConfig(bucket_mb=2.0))
        run = trainer(strategy, 1, "cuda", precision="bf16-true", max_epochs=1)
        run.fit(modules[-1], DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    ours, theirs = modules
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    assert max(theirs.most_bytes[1:]) > 2 * max(ours.most_bytes[1:])


def test_elements_are_clipped_in_parts() -> None:
    modules = []
    for inside in (True, False):
        modules.append(built())
        fit(modules[-1], inside, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    check_equal(*modules)
    unclipped = built()
    fit(unclipped)
    assert not torch.equal(unclipped.stages[0][0].weight, modules[0].stages[0][0].weight)


@pytest.mark.parametrize("optimizer", ["AdamW", "fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_window_without_tokens_is_skipped(optimizer: str, accumulate: int) -> None:
    """The first on the host, later ones of a fused optimizer on the device."""
    counted, empty = staged_rows(8, ignored_every=None)[3:7], staged_rows(8 * accumulate, ignored_every=1)
    rows = [*empty[: 4 * accumulate], *counted * accumulate, *empty[: 4 * accumulate], *counted * accumulate]
    modules = []
    for inside in (True, False):
        modules.append(built(make=OPTIMIZERS[optimizer]))
        run = fit(modules[-1], inside, rows=rows, accumulate_grad_batches=accumulate)
        assert isinstance(run.strategy, D9DStrategy)
        assert run.strategy.num_skipped_steps == 2
    check_equal(*modules)


def test_bytes_of_accumulated_gradients_are_said(caplog: pytest.LogCaptureFixture) -> None:
    module = built()
    with caplog.at_level("INFO", rank_zero_module.log.name):  # other tests may have left another level
        fit(module, accumulate_grad_batches=2)
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    (said,) = [record.message for record in caplog.records if "accumulated" in record.message]
    assert f"{num_bytes:,} bytes" in said
    assert module.peak_bytes == num_bytes


class Thaws(BaseFinetuning):
    """Begins with the last layer alone."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.stages[0][:-1])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.stages[0][:-1], optimizer)


def test_layers_that_are_unfrozen_later() -> None:
    modules = []
    for inside in (True, False):
        modules.append(built(make=lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1)))
        fit(modules[-1], inside, max_epochs=2, callbacks=[Thaws()])
    check_equal(*modules)


class Looks(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class Counting(torch.optim.AdamW):
    """An optimizer with its own step, which may do anything."""


def with_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "norm": ({}, {}, {"gradient_clip_val": 1.0}, r'gradient_clip_val=1.0.*norm.*gradient_clip_algorithm="value"'),
    "nonfinite": ({}, {"skip_nonfinite": True}, {}, "skip_nonfinite=True needs the norm"),
    "callback": ({}, {}, {"callbacks": [Looks()]}, "Looks.on_before_optimizer_step may look at gradients"),
    "offload": ({}, {"parallel": ParallelConfig(offload=True)}, {}, "offload"),
    "hook": ({"make": with_hook}, {}, {}, "AdamW has hooks before or after its step"),
    "unknown": ({"make": Counting}, {}, {}, "not known that Counting .* updates_each_alone = True"),
    "Muon": ({"make": MuonAdamW}, {}, {}, "not known that MuonAdamW .*take AdamW, SGD or StochasticAdamW"),
    "closure": ({"make": torch.optim.LBFGS}, {}, {}, "LBFGS runs its closure several times"),
    "weight": (
        {"known_weight": False},
        {},
        {},
        "needs the weight of a step before its backward.*Implement microbatch_weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    module_options, strategy_options, trainer_options, message = REFUSED[name]
    module = built(**module_options)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        fit(module, cut=strategy_options, **trainer_options)
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


@pytest.mark.ranks(2, record=False)
def test_weights_in_the_hosts_memory_are_refused(rank: RankContext) -> None:
    mesh, parallel = MeshConfig(data_parallel_shard=2), ParallelConfig(offload=True)
    strategy = D9DStrategy(mesh=mesh, parallel=parallel, step_in_backward=True)
    L.seed_everything(7, verbose=False)
    with pytest.raises(ConfigError, match="offload=True keeps gradients in the host's memory"):
        trainer(strategy, 2, rank.device.type).fit(Deep(), DataLoader(staged_rows(8), batch_size=4))  # type: ignore[arg-type]


class Reentrant(Deep):
    """A layer that gets its gradient in two goes."""

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

            def forward(self, input: Tensor) -> Tensor:
                x = self.first(input)
                for _ in range(2):
                    x = checkpoint(self.layer, x, use_reentrant=True)
                return self.last(x)

        return Twice()


def test_a_second_gradient_is_refused() -> None:
    module = Reentrant()
    module.configure_model()
    with pytest.raises(RuntimeError, match=r"received a second gradient .*use_reentrant=False"):
        fit(module.double())


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.module.fails:
            raise ValueError("the node is gone")
        return gradients[0], None


class Breaks(Deep):
    """Fails in the backward of a step, between the layers."""

    def __init__(self, at_step: int | None = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at_step = at_step

    @property
    def fails(self) -> bool:
        return self.global_step == self.at_step

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        module, whole = self, super().configure_stage(stage)

        class Break(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return _Fails.apply(x, module)  # type: ignore[no-untyped-call]

        assert isinstance(whole, nn.Sequential)
        whole[NUM_LAYERS - 1] = Break()  # instead of a Tanh
        return whole


def breaking(at_step: int | None) -> Breaks:
    L.seed_everything(7, verbose=False)
    module = Breaks(at_step)
    module.configure_model()
    return module.double()


@pytest.mark.parametrize("kind", ["on exception", "checkpoint"])
def test_torn_weights_are_not_saved(tmp_path: Path, kind: str) -> None:
    every_step = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    last: Callback = OnExceptionCheckpoint(tmp_path / "last")
    if kind == "checkpoint":
        last = ModelCheckpoint(tmp_path / "last", every_n_epochs=1, save_on_exception=True)
    module = breaking(at_step=2)
    strategy = D9DStrategy(step_in_backward=True, grad_sync=SMALL_PARTS)
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "enable_checkpointing": True}
    run = trainer(strategy, callbacks=[every_step, last], **options)
    loader: Any = DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the node is gone") as failure:
        run.fit(module, loader)
    (note,) = (note for note in failure.value.__notes__ if "torn" in note)
    assert re.search(r"resume from the last good checkpoint, of step 2: .*ckpt_path=.*step=2", note)
    assert not (tmp_path / "last").exists() or not [*(tmp_path / "last").iterdir()]
    with pytest.raises(StateError, match=r"torn between two steps; resume from .* of step 2: .*step=2"):
        run.save_checkpoint(tmp_path / "by hand")
    assert not (tmp_path / "by hand").exists()

    module.at_step = None
    with pytest.raises(StateError, match=r"cannot be trained on: .* torn .*ckpt_path=.*step=2"):
        run.fit(module, loader)
    (saved,) = (tmp_path / "steps").glob("*step=2*")
    run.fit(module, loader, ckpt_path=saved)
    straight = breaking(at_step=None)
    fit(straight, inside=False)
    assert_tensors_close(module.state_dict(), straight.state_dict())


@pytest.mark.ranks(2, record=False)
def test_one_torn_rank_is_enough(rank: RankContext) -> None:
    """The other one has updated nothing when it fails: both refuse to save and to go on, and resume together."""
    module, strategy = breaking(at_step=2), D9DStrategy(step_in_backward=True, grad_sync=SMALL_PARTS)
    every_step = ModelCheckpoint(rank.tmp_dir, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "enable_checkpointing": True}
    run = trainer(strategy, 2, rank.device.type, callbacks=[every_step], **options)
    rows: Any = DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the node is gone"):
        run.fit(module, rows)
    torn = strategy._checkpoints.torn
    assert torn is not None
    assert torn.are_torn
    torn.are_torn = rank.rank == 0
    with pytest.raises(StateError, match="resume from the last good checkpoint, of step 2"):
        run.save_checkpoint(rank.tmp_dir / "torn")
    module.at_step = None
    with pytest.raises(StateError, match="torn between two steps"):
        run.fit(module, rows)
    (saved,) = rank.tmp_dir.glob("*step=2*")
    run.fit(module, rows, ckpt_path=saved)
    assert run.global_step == 3
    assert not torn.are_torn


def test_a_run_without_checkpoints_begins_again() -> None:
    module = breaking(at_step=1)
    with pytest.raises(ValueError, match="gone") as failure:
        fit(module)
    assert any("no checkpoint to resume from" in note for note in failure.value.__notes__)


def test_a_failure_before_the_first_update_tears_nothing(tmp_path: Path) -> None:
    """One part is as large as the model: nothing is updated before the end."""
    module = breaking(at_step=1)
    run = trainer(D9DStrategy(step_in_backward=True), precision="64-true", max_epochs=1)
    loader: Any = DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gone"):
        run.fit(module, loader)
    module.at_step = None
    run.fit(module, loader)
    assert run.global_step > 1
