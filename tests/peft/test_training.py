"""Runs with adapters under the strategy: of any module, from YAML, and what they cost."""

import copy
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.dtypes import default_dtype
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.peft import FullTune, LoRA, Stack, inject, merge, trainable_parameters
from tests.cli.test_cli import TINY, build
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance
from tests.meshes.cases import LAYERS, MATRICES
from tests.meshes.equality import CONFIG, on_mesh, whole
from tests.parallel.test_compiling import assert_same, compiler
from tests.parallel.test_recompute import make_qwen3, train
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import Plain, loader, trainer

DATA = [{"input_ids": torch.arange(6) + i, "labels": torch.arange(1, 7) + i} for i in range(4)]
NET = LoRA(rank=2, alpha=3, targets=[r"net\.0", r"net\.3"])


def trained(module: Pipelined, strategy: object, devices: int = 1) -> dict[str, torch.Tensor]:
    L.seed_everything(3, verbose=False)
    inject(module, Stack([LoRA(rank=2, alpha=3, targets=["up", "down"]), FullTune("head")]))
    trainer(strategy, devices, max_epochs=1).fit(module, DataLoader(token_rows(12), batch_size=4))
    return {name: p.detach().clone() for name, p in module.state_dict().items()}


def of_one_process() -> dict[str, torch.Tensor]:
    return trained(Pipelined(), "auto")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_stages_of_a_module_of_ones_own(rank: RankContext, schedule: str) -> None:
    expected = rank.from_first_rank(of_one_process)
    module = Pipelined()
    actual = trained(module, D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule=schedule), 2)
    assert_tensors_close(actual, {name: expected[name] for name in actual}, tolerance=Tolerance(relative=1e-9))
    names = {name.split(".", 2)[2] for name in trainable_parameters(module)}
    assert names == {name for name in actual if "lora" in name or name.startswith("head")}
    assert any(actual[name].any() for name in names if name.endswith("lora.b"))


def test_a_module_with_stages_is_asked_before_they_are_built() -> None:
    module = Pipelined()
    inject(module, LoRA(rank=2, targets=["uq"]))
    with pytest.raises(ConfigError, match=r"\['uq'\]\) matches no name of Part; the nearest are layers\.0\.up"):
        module.configure_model()
    module = Pipelined()
    module.configure_model()
    with pytest.raises(ConfigError, match="Pipelined has its stages already; call it once"):
        inject(module, LoRA(rank=2, targets=["up"]))


def test_a_module_without_adapters_is_not_merged() -> None:
    for peft, is_built in ((FullTune("norm"), True), (LAYERS, False)):
        module = Qwen3MoePretraining(CONFIG, peft=peft)
        if is_built:
            module.configure_model()
        with pytest.raises(ConfigError, match="merge: Qwen3MoePretraining has no adapters"):
            merge(module)


def test_a_module_has_one_method() -> None:
    with pytest.raises(ConfigError, match="Qwen3MoePretraining has a method already"):
        inject(Qwen3MoePretraining(CONFIG, peft=LAYERS), FullTune())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_trains_all_adapters(precision: str) -> None:
    L.seed_everything(1, verbose=False)
    module = Qwen3MoePretraining(CONFIG, peft=MATRICES, learning_rate=0.1, warmup_steps=1)
    trainer(D9DStrategy(), max_epochs=2, precision=precision).fit(module, DataLoader(DATA, batch_size=2))
    for name, parameter in trainable_parameters(module).items():
        assert parameter.isfinite().all(), name
        assert parameter.any(), name
        assert parameter.dtype == (torch.float32 if precision == "bf16-mixed" else torch.bfloat16)


class Beginning(L.Callback):
    """Keeps the values of adapters before the first step, whole."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values = {name.split(".", 2)[2]: whole(each) for name, each in trainable_parameters(pl_module).items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mesh",
    [
        {"data_parallel_shard": 2},
        {"data_parallel_shard": 2, "expert_parallel": 2},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
    ],
    ids=str,
)
def test_adapters_start_with_the_same_bits_on_any_mesh(rank: RankContext, mesh: dict[str, int]) -> None:
    L.seed_everything(1, verbose=False)
    beginning = Beginning()
    on_mesh(rank, D9DStrategy(mesh=MeshConfig(**mesh)), steps=1, peft=MATRICES, callbacks=[beginning])
    L.seed_everything(1, verbose=False)
    alone = Qwen3MoePretraining(CONFIG, peft=MATRICES)
    with default_dtype(torch.float64):
        alone.configure_model()
    assert beginning.values
    for name, value in beginning.values.items():
        assert_bitwise_equal(name, value, alone.model.get_parameter(name))


@pytest.mark.ranks(2)
def test_a_plain_module_trains_its_adapters_alone(rank: RankContext) -> None:
    L.seed_everything(1, verbose=False)
    module = Plain(batch_norm=False)
    inject(module, NET)
    before = copy.deepcopy(module.state_dict())
    trainer(D9DStrategy(), 2, max_epochs=1).fit(module, loader(32))
    after = module.state_dict()
    for name, value in before.items():
        assert ("lora" not in name) == torch.equal(value, after[name]), name
    sums = rank.all_gather_object({name: value.sum().item() for name, value in after.items()})
    assert sums[0] == sums[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_tuning_everything_is_the_run_without(rank: RankContext, mesh: dict[str, int]) -> None:
    runs = []
    for peft in (None, FullTune(".*")):
        L.seed_everything(1, verbose=False)
        runs.append(on_mesh(rank, D9DStrategy(mesh=MeshConfig(**mesh)), steps=3, peft=peft))
    for plain, tuned in zip(zip(*runs[0], strict=False), zip(*runs[1], strict=False), strict=True):
        for ours, theirs in zip(tuned, plain, strict=True):
            ours, theirs = ({"": each} if isinstance(each, torch.Tensor) else each for each in (ours, theirs))
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                assert_bitwise_equal(name, value, theirs[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_frozen_weights_cost_no_gradients_and_no_states(rank: RankContext, mesh: dict[str, int]) -> None:
    class Looking(Qwen3MoePretraining):
        held: tuple[int, int, int]

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            frozen = [p for p in self.parameters() if not p.requires_grad]
            buckets = self.trainer.strategy._fit.gradients.num_bucket_bytes
            of_groups = sum(len(group["params"]) for group in optimizer.param_groups)
            self.held = (sum(p.grad is not None for p in frozen), buckets, of_groups)

    L.seed_everything(1, verbose=False)
    module = Looking(CONFIG, peft=LAYERS)
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, max_epochs=1)
    run.fit(module, DataLoader(DATA, batch_size=2))
    own = trainable_parameters(module).values()
    num_gradients, bucket_bytes, num_stepped = module.held
    assert num_gradients == 0
    assert num_stepped == len(own)
    is_sharded = "data_parallel_shard" in mesh
    assert bucket_bytes == (0 if is_sharded else 4 * (sum(p.numel() for p in own) + len(own)))
    assert len(run.optimizers[0].state) == len(own)


def test_compiled_blocks_train_adapters() -> None:
    gradients = []
    for parallel in (ParallelConfig(), ParallelConfig(compile=True)):
        L.seed_everything(1, verbose=False)
        module = Qwen3MoePretraining(replace(CONFIG, num_hidden_layers=2), peft=LAYERS)
        run = trainer(D9DStrategy(parallel=parallel), max_epochs=1, precision="64-true")
        with compiler():
            run.fit(module, DataLoader(DATA, batch_size=2))
            assert (counters["stats"]["unique_graphs"] >= 1) == parallel.compile
        gradients.append({name: p.detach() for name, p in module.state_dict().items()})
    assert_tensors_close(gradients[1], gradients[0], tolerance=Tolerance(relative=1e-9))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_with_adapters_share_compilations(recompute: str) -> None:
    """There are more layers than torch's limit of compilations."""
    results = []
    with compiler():
        for parallel in (ParallelConfig(), ParallelConfig(compile=True, recompute=recompute)):
            model, inputs = make_qwen3(num_hidden_layers=10)
            inject(model, LoRA(rank=2))
            with torch.no_grad():
                for parameter in trainable_parameters(model).values():
                    parameter.normal_(std=0.1)
            parallelize_qwen3_moe(model, None, parallel)
            results.append(train(model, inputs))
        assert counters["stats"]["unique_graphs"] == 2  # the first layer's input needs no gradient
    assert_same(results[1], results[0])


def test_the_method_is_a_setting_of_a_file(tmp_path: Path) -> None:
    config = tmp_path / "peft.yaml"
    method = {
        "class_path": "Stack",
        "init_args": {
            "methods": [
                {"class_path": "LoRA", "init_args": {"rank": 4, "targets": ["q_proj"]}},
                {"class_path": "FullTune", "init_args": {"targets": ["norm"]}},
            ]
        },
    }
    for given, expected in (
        (method, Stack([LoRA(rank=4, targets=["q_proj"]), FullTune("norm")])),
        ({"class_path": "lightning_d9d.peft.LoRA", "init_args": {"rank": 8}}, LoRA(rank=8)),
    ):
        config.write_text(yaml.safe_dump({"model": {"init_args": {"peft": given}}}))
        assert build("--config", TINY, "--config", str(config)).model.peft == expected


def test_a_checkpoint_has_the_method(tmp_path: Path) -> None:
    module = Qwen3MoePretraining(CONFIG, peft=LAYERS)
    run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode="consolidated")), max_epochs=1)
    run.fit(module, DataLoader(DATA, batch_size=2))
    run.save_checkpoint(tmp_path / "saved.ckpt")
    loaded = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "saved.ckpt")
    assert loaded.peft == LAYERS
    assert trainable_parameters(loaded).keys() == trainable_parameters(module).keys()
    for name, value in module.state_dict().items():
        assert_bitwise_equal(name, loaded.state_dict()[name], value)
