"""D9DStrategy in one process: Lightning's features, refusals, and several fits in a row."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import precision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import (
    CheckpointConfig,
    ConfigError,
    D9DStrategy,
    GradSyncConfig,
    MeshConfig,
    ParallelConfig,
    TimeoutConfig,
    env,
)
from lightning_d9d.ops import grouped_gemm
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.schedule import GPipe
from lightning_d9d.strategy.precision import check_precision
from tests.harness.compare import assert_bitwise_equal
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.staged import Staged, staged_rows


def fit(strategy: Any, make: Any = Plain, **options: Any) -> tuple[L.LightningModule, L.Trainer]:
    L.seed_everything(7, verbose=False)
    module = make()
    run = trainer(strategy, **options)
    run.fit(module, loader(24), loader(8))
    return module, run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.05},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed"},
        {"callbacks": lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)], "max_epochs": 4},
        {"callbacks": lambda: [EarlyStopping("val", patience=0, min_delta=10.0)], "max_epochs": 9},
    ],
    ids=["plain", "accumulate", "clip", "bf16-true", "bf16-mixed", "swa", "early stopping"],
)
def test_one_process_equals_stock_bitwise(options: dict[str, Any]) -> None:
    def fresh() -> dict[str, Any]:
        return {key: value() if callable(value) else value for key, value in options.items()}

    ours, our_run = fit(D9DStrategy(), **fresh())
    theirs, their_run = fit("auto", **fresh())
    for key, expected in theirs.state_dict().items():
        assert_bitwise_equal(key, ours.state_dict()[key], expected)
    assert our_run.global_step == their_run.global_step
    assert our_run.current_epoch == their_run.current_epoch
    assert not dist.is_initialized()


def test_top_k_and_last_checkpoints_and_resume(tmp_path: Path) -> None:
    """Three epochs in one go equal two and a resumed third."""
    whole, _ = fit(D9DStrategy(), max_epochs=3)
    checkpoint = ModelCheckpoint(tmp_path, monitor="val", save_top_k=2, save_last=True)
    fit(D9DStrategy(), max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True)
    assert len(list(tmp_path.glob("epoch*.ckpt"))) == 2
    L.seed_everything(1, verbose=False)
    resumed = Plain()
    run = trainer(D9DStrategy(), max_epochs=3, default_root_dir=tmp_path)
    run.fit(resumed, loader(24), loader(8), ckpt_path=str(tmp_path / "last.ckpt"))
    for key, expected in whole.state_dict().items():
        assert_bitwise_equal(key, resumed.state_dict()[key], expected)


def test_several_runs_in_a_row_with_one_strategy_and_with_fresh_ones() -> None:
    module = Plain()
    strategy = D9DStrategy()
    run = trainer(strategy, max_epochs=1)
    run.fit(module, loader(8))
    run.validate(module, loader(8), verbose=False)
    run.test(module, loader(8), verbose=False)
    assert len(run.predict(module, loader(8))) == 2
    trainer(D9DStrategy(), max_epochs=1).fit(module, loader(8))
    assert not dist.is_initialized()


def test_registered_by_import() -> None:
    assert "d9d" in StrategyRegistry.available_strategies()
    assert isinstance(trainer("d9d").strategy, D9DStrategy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "2f2b"}, r"schedule='2f2b' is unknown; choose one of \['1f1b', 'dual_pipe_v', 'gpipe', "),
        ({"schedule": "zero_buble"}, r"'zero_bubble_v'\]; did you mean 'zero_bubble'\?"),
        (
            {"schedule": "Auto"},
            "schedule='Auto' needs the shape of the batch: class_path: Auto with init_args: batch_size",
        ),
        ({"schedule": 3}, "schedule=3 is not a schedule"),
        ({"schedule": GPipe}, r"schedule=GPipe is a class; give an object, GPipe\(\)"),
        ({"microbatch_size": 0}, "microbatch_size=0 must be an integer of at least 1"),
        ({"num_microbatches": 2.0}, "num_microbatches=2.0 must be an integer"),
        ({"microbatch_size": 1, "num_microbatches": 1}, "are both given; set one"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        D9DStrategy(**arguments)


CONFIGURED = {
    "mesh": MeshConfig,
    "parallel": ParallelConfig,
    "grad_sync": GradSyncConfig,
    "checkpoint": CheckpointConfig,
    "timeouts": TimeoutConfig,
}


def test_every_argument_with_a_class_is_named_above() -> None:
    arguments = inspect.signature(D9DStrategy).parameters.values()
    assert {each.name for each in arguments if "Config" in str(each.annotation)} == {*CONFIGURED}


@pytest.mark.parametrize("given", [{}, {"no_such_field": 1}, "ParallelConfig()", ParallelConfig, 3], ids=repr)
@pytest.mark.parametrize("name", CONFIGURED)
def test_arguments_of_another_class_are_refused(name: str, given: Any) -> None:
    message = (
        f"D9DStrategy({name}={given!r}): it is of the type {type(given).__name__}, but {name} needs "
        f"{CONFIGURED[name].__name__}(...); "
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        D9DStrategy(**{name: given})


def test_bad_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"GradSyncConfig.dtype='float16'"):
        GradSyncConfig(dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"GradSyncConfig.bucket_mb=0"):
        GradSyncConfig(bucket_mb=0)
    with pytest.raises(ConfigError, match=r"TimeoutConfig.shutdown_seconds=-1"):
        TimeoutConfig(shutdown_seconds=-1)


def test_float16_mixed_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision='16-mixed'.*bf16-mixed"):
        trainer(D9DStrategy(), plugins=[precision.MixedPrecision("16-mixed", "cuda")])


WORKING = {"Precision": "32-true", "DoublePrecision": "64-true", "HalfPrecision": "16-true"}


@pytest.mark.parametrize("name", precision.__all__)
@pytest.mark.parametrize("own", [False, True], ids=["lightning's", "a subclass"])
def test_precision_plugins_that_are_not_known_to_work_are_refused(name: str, own: bool) -> None:
    """Each class is judged before it does anything. So this needs no packages of theirs, most of which are not
    installed."""
    cls = getattr(precision, name)
    cls = type("Own", (cls,), {}) if own else cls
    plugin = cls.__new__(cls)
    if name in WORKING:
        assert trainer(D9DStrategy(), plugins=[plugin]).precision == WORKING[name]
    elif name in ("BitsandbytesPrecision", "TransformerEnginePrecision"):
        strategy = D9DStrategy()
        strategy.precision_plugin = plugin  # may be for a plain module
        with pytest.raises(
            ConfigError, match=rf"plugin {name} does not support a D9DModule.*; use precision='bf16-mixed'"
        ):
            check_precision(plugin, is_d9d=True)
    elif name != "MixedPrecision":
        with pytest.raises(
            ConfigError, match=rf"plugin {name} does not support D9DStrategy.*; use precision='bf16-mixed'"
        ):
            D9DStrategy().precision_plugin = plugin


def test_a_d9d_module_keeps_its_layers() -> None:
    cls = precision.TransformerEnginePrecision
    plugin = cls.__new__(cls)
    with pytest.raises(ConfigError, match="TransformerEnginePrecision does not support a D9DModule"):
        trainer(D9DStrategy(), plugins=[plugin]).fit(Staged(), DataLoader(staged_rows(8), batch_size=4))


def test_a_precision_plugin_with_a_loss_scaler_is_refused() -> None:
    plugin = type("Scaled", (precision.HalfPrecision,), {"scaler": object()})("bf16-true")
    with pytest.raises(ConfigError, match=r"precision='bf16-true' scales the loss.*; use precision='bf16-mixed'"):
        trainer(D9DStrategy(), plugins=[plugin])


def test_microbatches_of_a_plain_module_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Plain is a plain LightningModule.*accumulate_grad_batches"):
        trainer(D9DStrategy(microbatch_size=2)).fit(Plain(), loader(8))


def lbfgs(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(module.parameters(), max_iter=3)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_plain_module_may_have_an_optimizer_that_runs_its_closure_often(dtype: str) -> None:
    make = type("Newton", (Plain,), {"configure_optimizers": lbfgs})
    ours, _ = fit(D9DStrategy(grad_sync=GradSyncConfig(dtype=dtype)), make)  # type: ignore[arg-type]
    theirs, _ = fit("auto", make)
    for key, expected in theirs.state_dict().items():
        assert_bitwise_equal(key, ours.state_dict()[key], expected)


def test_a_staged_module_may_not() -> None:
    module = type("Newton", (Staged,), {"configure_optimizers": lbfgs})()
    with pytest.raises(ConfigError, match=r"LBFGS runs its closure several times.*plain LightningModule"):
        trainer(D9DStrategy()).fit(module, DataLoader(staged_rows(8), batch_size=4))


def test_versions_that_were_not_tested_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "TESTED_VERSIONS", {"torch": "2.5", "lightning": "2.6.4", "triton": "99.0"})
    with pytest.warns(UserWarning, match="was not tested") as caught:
        fit(D9DStrategy())
    said = [str(each.message) for each in caught if "was not tested" in str(each.message)]
    assert said == [
        f"lightning_d9d was not tested with torch {torch.__version__} (tested up to 2.5), "
        f"lightning {L.__version__} (tested up to 2.6.4)"
    ]


def test_schedule_objects_are_taken() -> None:
    schedule = GPipe()
    assert D9DStrategy(schedule=schedule).schedule is schedule


def test_import_is_light_and_has_no_side_effects() -> None:
    """No optional package, no process group; everything imports with the optional packages hidden.

    Imported behind Lightning, the strategy has a name for Trainers.
    """
    code = """
import sys
import lightning.pytorch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "datasets", "deep_ep", "grouped_gemm", "plotly", "matplotlib", "aim"}:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)
sys.meta_path.insert(0, Hidden())
import time
start = time.process_time()
import lightning_d9d
seconds = time.process_time() - start
import importlib, pkgutil
import torch.distributed as dist
assert not dist.is_initialized()
assert seconds < 3, seconds
print(type(lightning.Trainer("cpu", "d9d", logger=False).strategy).__name__)
for module in pkgutil.walk_packages(lightning_d9d.__path__, "lightning_d9d."):
    importlib.import_module(module.name)
print("imported")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["D9DStrategy", "imported"], result.stderr


def test_gradients_are_visible_after_the_step() -> None:
    """`.grad` stays until the next zero_grad, as under stock Lightning."""
    present: list[bool] = []

    class Watch(Staged):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            present.append(all(p.grad is not None for p in self.parameters()))

    trainer(D9DStrategy(), max_epochs=1).fit(Watch(), DataLoader(staged_rows(8), batch_size=4))
    assert present == [True, True]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(data_parallel_replicate=2), "data_parallel_replicate=2 does not divide 1 rank"),
        (MeshConfig(tensor_parallel=2), "tensor_parallel=2"),
        (MeshConfig(context_parallel_shard=2), "context_parallel_shard=2"),
        (MeshConfig(pipeline_parallel=2), "pipeline_parallel=2"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(mesh: MeshConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(D9DStrategy(mesh=mesh)).fit(Plain(), loader(8))


def test_one_process_has_a_mesh_only_if_asked() -> None:
    seen = []

    class Asks(Plain):
        def on_train_start(self) -> None:
            assert not dist.is_initialized()
            mesh = self.trainer.strategy.mesh  # type: ignore[attr-defined]
            seen.append((mesh.dp_rank, mesh.dp_size, mesh.batch.mesh_dim_names))

    for _ in range(2):
        trainer(D9DStrategy(mesh=MeshConfig(data_parallel_replicate=-1))).fit(Asks(), loader(8))
        assert not dist.is_initialized()
    assert seen == [(0, 1, ("pp", "dp", "cp", "tp"))] * 2


def test_kernels_are_chosen_for_a_run() -> None:
    class Watch(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.append(runs_triton(torch.ones(1)))
            return super().training_step(batch, batch_idx)

    seen: list[bool] = []
    for kernels in ("triton", "torch", "auto"):
        strategy = D9DStrategy(parallel=ParallelConfig(kernels=kernels))
        trainer(strategy, max_steps=1).fit(Watch(), loader(8))
        assert not runs_triton(torch.ones(1))
    assert seen == [True, False, False]  # on the CPU
    with pytest.raises(ConfigError, match="kernels='fast' must be one of 'auto', 'torch', 'triton'"):
        ParallelConfig(kernels="fast")  # type: ignore[arg-type]


def test_backend_of_grouped_products_is_chosen_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_float64() -> bool:
        x, offsets = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, dtype=torch.int32)
        try:
            grouped_gemm(x, x.view(1, 1, 2), offsets)
        except ConfigError:
            return False
        return True

    class Watch(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.append(takes_float64())
            return super().training_step(batch, batch_idx)

    seen: list[bool] = []
    for backend in ("torch", "eager", "auto"):
        strategy = D9DStrategy(parallel=ParallelConfig(grouped_gemm=backend))
        trainer(strategy, max_steps=1).fit(Watch(), loader(8))
        assert takes_float64()
    assert seen == [False, True, True]
    with pytest.raises(ConfigError, match="grouped_gemm='fast' must be one of 'auto', 'torch', 'quack', 'nv', 'eager'"):
        ParallelConfig(grouped_gemm="fast")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "grouped_gemm", None)
    with pytest.raises(ConfigError, match=r"needs nv-grouped-gemm, .* pip install 'lightning-d9d\[grouped-gemm\]'"):
        trainer(D9DStrategy(parallel=ParallelConfig(grouped_gemm="nv")), max_steps=1).fit(Watch(), loader(8))
