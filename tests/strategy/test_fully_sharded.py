"""Fully sharded stages and blocks through a Trainer: precision, evaluation, checkpoints, freezing, failures."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import (
    BlockSequence,
    ConfigError,
    D9DModule,
    D9DStrategy,
    MeshConfig,
    ParallelConfig,
    StageInfo,
    StageInputs,
    WeightedLoss,
)
from lightning_d9d.callbacks import HuggingFaceExport, TextSample
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoePretraining, load_huggingface
from lightning_d9d.modules import SparseMoE
from lightning_d9d.parallel import shard_experts
from lightning_d9d.state import read_tensors, save_tensors
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.meshes.equality import CONFIG, SMALL, Data, Watched, batch_of, on_mesh, on_one_process, whole
from tests.strategy.plain import trainer

SHARDED = {"data_parallel_shard": 2}
EXPERTS = {"data_parallel_shard": 2, "expert_parallel": 2}
TENSOR = {"tensor_parallel": 2}
CONTEXT = {"context_parallel_shard": 2, "expert_parallel": 2}


def rows_of(index: int, rank: RankContext) -> DataLoader:
    batch = batch_of(index)
    part = len(batch["labels"]) // rank.world_size
    mine = [{k: v[row] for k, v in batch.items()} for row in range(rank.rank * part, (rank.rank + 1) * part)]
    return DataLoader(mine, part)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [SHARDED, EXPERTS, TENSOR, CONTEXT], ids=["weights", "experts", "tensors", "contexts"])
def test_the_first_step_in_float32_is_that_of_one_process(rank: RankContext, mesh: dict[str, int]) -> None:
    data = Data(length=8)
    L.seed_everything(1, verbose=False)
    expected = on_one_process(SMALL, steps=1, dtype=torch.float32, data=data)
    L.seed_everything(1, verbose=False)
    actual = on_mesh(rank, D9DStrategy(mesh=MeshConfig(**mesh)), SMALL, steps=1, data=data, precision="32-true")
    assert_tensors_close(actual.gradients[0], expected.gradients[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [SHARDED, EXPERTS], ids=["weights", "experts"])
@pytest.mark.parametrize("size", [None, 2], ids=["one microbatch", "several"])
def test_narrow_weights_have_float32_gradients(rank: RankContext, mesh: dict[str, int], size: int | None) -> None:
    """bf16-true: shards in bfloat16; sums over microbatches and ranks in float32 up to the optimizer step."""
    L.seed_everything(1, verbose=False)
    expected = on_one_process(SMALL, steps=1, dtype=torch.bfloat16, device=rank.device)
    L.seed_everything(1, verbose=False)
    strategy = D9DStrategy(mesh=MeshConfig(**mesh), microbatch_size=size)
    actual = on_mesh(rank, strategy, SMALL, steps=2, precision="bf16-true")
    # With one microbatch those of experts are neither added up nor summed over ranks.
    dtypes = {name: gradient.dtype for name, gradient in actual.gradients[0].items()}
    alone = size is None and "expert_parallel" in mesh
    assert {dtype for name, dtype in dtypes.items() if not (alone and ".experts." in name)} == {torch.float32}
    assert {weight.dtype for weight in actual.weights[0].values()} == {torch.bfloat16}
    assert_tensors_close(actual.gradients[0], expected.gradients[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [SHARDED, EXPERTS], ids=["weights", "experts"])
def test_mixed_precision_gathers_in_bfloat16_without_autocast(rank: RankContext, mesh: dict[str, int]) -> None:
    L.seed_everything(1, verbose=False)
    expected = on_one_process(SMALL, steps=1, dtype=torch.bfloat16, device=rank.device)
    seen: set[Any] = set()

    class Looks(Watched):
        def microbatch_inputs(self, microbatch: Any) -> StageInputs:
            layer = self.stages[0].model.layers["0"].self_attn.o_proj
            layer.register_forward_hook(
                lambda _, args, y: seen.add((torch.is_autocast_enabled(rank.device.type), y.dtype))
            )
            return super().microbatch_inputs(microbatch)

    L.seed_everything(1, verbose=False)
    module = Looks(SMALL, 1)
    strategy = D9DStrategy(mesh=MeshConfig(**mesh))
    run = trainer(
        strategy,
        2,
        rank.device.type,
        precision="bf16-mixed",
        max_epochs=1,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
    )
    run.fit(module)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in module.seen.gradients[0].values()} == {torch.float32}
    assert seen == {(False, torch.bfloat16)}
    assert_tensors_close(module.seen.gradients[0], expected.gradients[0])


class Classifier(D9DModule):
    """Keeps what its hooks make of narrow outputs, by hook."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Tensor] = {}

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return BlockSequence([nn.Linear(8, 8), nn.Linear(8, 50)], stage)

    def microbatch_inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        return StageInputs(first={"input": microbatch["x"]})

    def _summed(self, hook: str, output: Tensor, microbatch: Mapping[str, Tensor]) -> WeightedLoss:
        name = f"{hook} {'train' if self.trainer.training else 'val'}"
        total = nn.functional.cross_entropy(output, microbatch["y"], reduction="sum")
        self.made[name] = total.detach()
        return WeightedLoss(total, torch.tensor(float(len(output)), device=output.device))

    def microbatch_loss(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> WeightedLoss:
        return self._summed("loss", output, microbatch)

    def microbatch_metrics(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> dict[str, WeightedLoss]:
        return {"sum": self._summed("metric", output, microbatch)}

    def predict_output(self, output: Tensor) -> Tensor:
        self.made["predict"] = nn.functional.cross_entropy(output, output.argmax(-1), reduction="sum")
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.ranks(2)
def test_losses_are_made_in_autocast_on_any_mesh(rank: RankContext) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"x": torch.randn(8, generator=generator), "y": torch.randint(50, (), generator=generator)} for _ in range(400)
    ]
    data: Any = DataLoader(rows, 400)  # type: ignore[arg-type]

    def made(mesh: dict[str, int]) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        module = Classifier()
        run = trainer(
            D9DStrategy(mesh=MeshConfig(**mesh)),
            2,
            rank.device.type,
            max_steps=1,
            precision="bf16-mixed",
            use_distributed_sampler=False,
        )
        run.validate(module, data, verbose=False)
        run.predict(module, data)
        run.fit(module, data)
        return module.made

    actual, expected = made(SHARDED), made({"data_parallel_replicate": 2})
    names = ["loss train", "loss val", "metric train", "metric val", "predict"]
    assert sorted(actual) == sorted(expected) == names
    assert {total.dtype for total in actual.values()} == {torch.float32}
    assert_tensors_close(actual, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [SHARDED, EXPERTS], ids=["weights", "experts"])
@pytest.mark.parametrize("size", [None, 2], ids=["one microbatch", "several"])
def test_losses_and_predictions_are_those_of_one_process(
    rank: RankContext, mesh: dict[str, int], size: int | None
) -> None:
    L.seed_everything(1, verbose=False)
    alone = Qwen3MoePretraining(SMALL).double()
    alone.configure_model()
    batch = batch_of(0)
    with torch.no_grad():
        model = alone.model.double()
        logits = model(batch["input_ids"]).logits
        loss = model(**batch, reduction="sum").loss / (batch["labels"] != -100).sum()

    L.seed_everything(1, verbose=False)
    strategy = D9DStrategy(mesh=MeshConfig(**mesh), microbatch_size=size)
    run = trainer(strategy, 2, rank.device.type, precision="32-true", use_distributed_sampler=False)
    module = Qwen3MoePretraining(SMALL)
    (result,) = run.validate(module, rows_of(0, rank), verbose=False)
    predicted = run.predict(module, rows_of(0, rank))
    mine = logits.chunk(2)[rank.rank].float()
    assert_close_named("logits", torch.cat(predicted), mine, kind=Kind.OUTPUT)  # type: ignore[arg-type]
    assert_close_named("val_loss", torch.tensor(result["val_loss"]), loss.float(), kind=Kind.LOSS)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())  # nothing stays gathered


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ({"pipeline_parallel": 2, "data_parallel_shard": 2}, "zero_bubble_v"),
        ({"data_parallel_replicate": 4, "expert_parallel": 2}, "1f1b"),
    ],
    ids=["pipeline", "other groups of parameters"],
)
def test_a_checkpoint_goes_on_on_another_mesh(rank: RankContext, mesh: dict[str, int], schedule: str) -> None:
    """Two steps on one mesh and one on another are three on one process."""
    L.seed_everything(1, verbose=False)
    expected = on_one_process(steps=3)
    options: dict[str, Any] = {
        "precision": "64-true",
        "gradient_clip_val": 0.5,
        "use_distributed_sampler": False,
        "enable_checkpointing": True,
    }
    path = rank.tmp_dir / "saved"
    first = D9DStrategy(mesh=MeshConfig(data_parallel_replicate=2, data_parallel_shard=2, expert_parallel=2))
    L.seed_everything(1, verbose=False)
    saving = ModelCheckpoint(path, "first", every_n_train_steps=2, save_on_train_epoch_end=False)
    run = trainer(first, 4, rank.device.type, max_steps=2, callbacks=[saving], **options)
    run.fit(Watched(CONFIG, 3))

    second = D9DStrategy(mesh=MeshConfig(**mesh), schedule=schedule)
    L.seed_everything(7, verbose=False)
    module = Watched(CONFIG, 3)
    run = trainer(second, 4, rank.device.type, max_steps=3, **(options | {"enable_checkpointing": False}))
    run.fit(module, ckpt_path=str(next(path.iterdir())))
    (weights,) = module.seen.weights
    assert_tensors_close(weights, {name: expected.weights[2][name] for name in weights})


class Unfreezes(L.Callback):
    """Trains the embedding, the last norm and the head alone at first."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad_("layers" not in name or trainer.current_epoch > 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [None, 2], ids=["let go", "kept"])
def test_layers_can_be_frozen_and_unfrozen(rank: RankContext, size: int | None) -> None:
    module = Watched(SMALL, 1)
    strategy = D9DStrategy(mesh=MeshConfig(**EXPERTS), microbatch_size=size)
    options: dict[str, Any] = {"gradient_clip_val": 1.0, "use_distributed_sampler": False, "precision": "64-true"}
    run = trainer(strategy, 2, rank.device.type, max_epochs=2, callbacks=[Unfreezes()], **options)
    run.fit(module)
    trained = [{name for name, gradient in step.items() if gradient.any()} for step in module.seen.gradients]
    assert trained[0]
    assert not any("layers" in name for name in trained[0])
    assert trained[1] == {name for name, _ in module._named()}


class Branches(D9DModule):
    """A block that rank 0 uses in part."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.used: dict[str, Tensor] = {}

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: Tensor, both: Tensor) -> Tensor:
                return self.always(x) + (self.sometimes(x) if bool(both.all()) else 0)

        class Stage(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Block(), Block()])

            def forward(self, x: Tensor, both: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x, both)
                return x

        return Stage()

    def microbatch_inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        if self.fails:
            self.fails = False
            raise ValueError("on purpose")
        return StageInputs(first={"x": microbatch["x"]}, shared={"both": microbatch["both"]})

    def microbatch_loss(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> WeightedLoss:
        return WeightedLoss(output.square().sum(), torch.tensor(float(len(output)), device=output.device))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.used = {name.split(".", 2)[2]: whole(p.grad) for name, p in self.named_parameters()}  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def branch_batches(rank: RankContext) -> DataLoader:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank.rank))
    both = torch.full((4,), bool(rank.rank))
    return DataLoader([{"x": row, "both": flag} for row, flag in zip(x, both, strict=True)], 4)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [None, 2], ids=["let go", "kept"])
def test_a_rank_may_use_a_part_of_a_block(rank: RankContext, size: int | None) -> None:
    module = Branches()
    strategy = D9DStrategy(mesh=MeshConfig(**SHARDED), microbatch_size=size)
    run = trainer(strategy, 2, rank.device.type, max_steps=1, use_distributed_sampler=False)
    L.seed_everything(1, verbose=False)
    run.fit(module, branch_batches(rank))
    gradients = rank.all_gather_object(module.used)
    assert_tensors_close(gradients[0], gradients[1])
    assert all(gradient.any() for gradient in module.used.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [None, 2], ids=["let go", "kept"])
def test_a_module_goes_on_after_a_batch_that_broke(rank: RankContext, size: int | None) -> None:
    def gradients(fails: bool) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        module = Branches(fails)
        for _ in range(1 + fails):
            strategy = D9DStrategy(mesh=MeshConfig(**SHARDED), microbatch_size=size)
            run = trainer(strategy, 2, rank.device.type, max_steps=1, use_distributed_sampler=False)
            if module.fails:
                with pytest.raises(ValueError, match="on purpose"):
                    run.fit(module, branch_batches(rank))
            else:
                run.fit(module, branch_batches(rank))
        return module.used

    assert_tensors_close(gradients(True), gradients(False))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.layer(x).tanh())


class PlainBlocks(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_blocks_of_a_plain_module_are_sharded(rank: RankContext, accumulated: int) -> None:
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))

    def trained(mesh: MeshConfig, parallel: ParallelConfig) -> tuple[PlainBlocks, dict[str, Tensor]]:
        torch.manual_seed(5 + rank.rank)  # rank 0's values are everyone's
        module = PlainBlocks()
        run = trainer(
            D9DStrategy(mesh=mesh, parallel=parallel),
            2,
            rank.device.type,
            max_epochs=2,
            gradient_clip_val=0.1,
            accumulate_grad_batches=accumulated,
        )
        run.fit(module, DataLoader(data, 2, shuffle=False))
        return module, {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}

    module, actual = trained(MeshConfig(**SHARDED), ParallelConfig(shard_blocks=("Block",), recompute="full"))
    assert isinstance(module.net.blocks[0], FSDPModule)
    assert isinstance(module.net.blocks[0].layer.weight, DTensor)
    assert not isinstance(module.net.first.weight, DTensor)
    save_tensors(module, rank.tmp_dir / "export", max_shard_bytes=200)
    assert_tensors_close(dict(read_tensors(rank.tmp_dir / "export")), actual)
    _, expected = trained(MeshConfig(data_parallel_replicate=2), ParallelConfig())
    assert_tensors_close(actual, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "blocks", "match"),
    [
        (SHARDED, ["Other"], "has no Other; its parts are of the classes Block, "),
        ({"data_parallel_replicate": 2}, ["Block"], "nothing to shard over, .*; set MeshConfig.data_parallel_shard"),
        (SHARDED, None, "data_parallel_shard=2, but no parameter of PlainBlocks is a DTensor"),
        ({}, None, "recompute='full': PlainBlocks is a plain LightningModule"),
    ],
)
def test_blocks_that_cannot_be_sharded(rank: RankContext, mesh: dict[str, int], blocks: Any, match: str) -> None:
    parallel = ParallelConfig(shard_blocks=blocks, recompute="none" if mesh else "full")
    mesh = mesh or {"data_parallel_replicate": 2}
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh), parallel=parallel), 2, rank.device.type, max_steps=1)
    with pytest.raises(ConfigError, match=match):
        run.fit(PlainBlocks(), DataLoader(TensorDataset(torch.randn(16, 4)), 2))


@pytest.mark.ranks(2)
def test_blocks_that_share_a_parameter_are_not_sharded_apart(rank: RankContext) -> None:
    module: Any = PlainBlocks()
    module.net.blocks[1].layer.weight = module.net.blocks[0].layer.weight
    parallel = ParallelConfig(shard_blocks=("Block",))
    run = trainer(D9DStrategy(mesh=MeshConfig(**SHARDED), parallel=parallel), 2, rank.device.type, max_steps=1)
    with pytest.raises(ConfigError, match="names Block, of which one shares a parameter with another part"):
        run.fit(module, DataLoader(TensorDataset(torch.randn(16, 4)), 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("callback", [StochasticWeightAveraging, WeightAveraging])
@pytest.mark.parametrize("mesh", [SHARDED, {"pipeline_parallel": 2}], ids=["sharded", "staged"])
def test_callbacks_that_copy_the_module_are_refused(rank: RankContext, callback: Any, mesh: dict[str, int]) -> None:
    callbacks = [callback(0.1) if callback is StochasticWeightAveraging else callback()]
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_steps=1, callbacks=callbacks)
    with pytest.raises(ConfigError, match=f"{callback.__name__} makes a deep copy"):
        run.fit(Watched(copy.deepcopy(SMALL), 1))


@pytest.mark.ranks(2)
def test_a_mixed_group_of_parameters_is_refused_where_torch_cannot_step_it(rank: RankContext) -> None:
    class Fused(Watched):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)

    mesh = MeshConfig(data_parallel_replicate=2, expert_parallel=2)
    run = trainer(D9DStrategy(mesh=mesh), 2, rank.device.type, max_steps=1, use_distributed_sampler=False)
    with pytest.raises(ConfigError, match="plain parameters and DTensors"):
        run.fit(Fused(SMALL, 1))


@pytest.mark.ranks(2)
def test_weights_that_stay_in_the_hosts_memory_train_as_others(rank: RankContext) -> None:
    L.seed_everything(1, verbose=False)
    expected = on_one_process(SMALL, steps=2)
    L.seed_everything(1, verbose=False)
    parallel = ParallelConfig(offload=True)
    actual = on_mesh(rank, D9DStrategy(mesh=MeshConfig(**EXPERTS), parallel=parallel), SMALL, steps=2)
    for weights, theirs in zip(actual.weights, expected.weights, strict=True):
        assert_tensors_close(weights, theirs)


@pytest.mark.ranks(2)
def test_a_sharded_module_stays_where_it_is(rank: RankContext) -> None:
    """The same strategy goes on with it; another cannot."""
    module = Watched(SMALL, 1)
    options: dict[str, Any] = {"gradient_clip_val": 1.0, "use_distributed_sampler": False, "max_steps": 1}
    for _ in range(2):
        trainer(D9DStrategy(mesh=MeshConfig(**EXPERTS)), 2, rank.device.type, **options).fit(module)
    assert len(module.seen.weights) == 2
    run = trainer(D9DStrategy(mesh=MeshConfig(data_parallel_replicate=2)), 2, rank.device.type, **options)
    with pytest.raises(ConfigError, match=r"data_parallel_shard=2, .*run has .*new module"):
        run.fit(module)


@pytest.mark.ranks(2)
def test_a_sharded_model_is_exported_whole_and_writes_text(rank: RankContext) -> None:
    config = dataclasses.replace(SMALL, vocab_size=256)

    class Bytes(Watched):
        def train_dataloader(self) -> DataLoader:
            return rows_of(0, rank)

    module = Bytes(config, 1)
    sample = TextSample(prompt="a = ", num_tokens=3, context_length=8)
    callbacks = [HuggingFaceExport(rank.tmp_dir / "model"), sample]
    options: dict[str, Any] = {"gradient_clip_val": 1.0, "use_distributed_sampler": False, "max_steps": 1}
    trainer(D9DStrategy(mesh=MeshConfig(**EXPERTS)), 2, rank.device.type, callbacks=callbacks, **options).fit(module)
    loaded = Qwen3MoeForCausalLM(config)
    load_huggingface(loaded, rank.tmp_dir / "model")
    for name, weight in module.seen.weights[-1].items():
        assert_bitwise_equal(name, loaded.get_parameter(name).detach(), weight)


class PlainExperts(L.LightningModule):
    """A mixture that spreads its experts itself."""

    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.moe = SparseMoE(8, 4, num_experts=4, top_k=2, normalize=True, initializer_range=0.5)
        strategy = self.trainer.strategy
        assert isinstance(strategy, D9DStrategy)
        if strategy.mesh.sizes["ep_shard"] > 1:
            shard_experts(self.moe, strategy.mesh, ParallelConfig())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.moe(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_a_plain_module_spreads_experts_with_ddps_results(rank: RankContext, ep: int) -> None:
    data = TensorDataset(torch.randn(32, 3, 8, generator=torch.Generator().manual_seed(0)))

    def trained(mesh: MeshConfig) -> dict[str, Tensor]:
        module = PlainExperts()
        run = trainer(D9DStrategy(mesh=mesh), 4, rank.device.type, max_epochs=1, gradient_clip_val=0.1)
        run.fit(module, DataLoader(data, 4))
        return {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}

    expected = trained(MeshConfig(data_parallel_replicate=4))
    assert_tensors_close(trained(MeshConfig(data_parallel_replicate=4, expert_parallel=ep)), expected)


@pytest.mark.ranks(4)
def test_a_plain_module_may_not_shard_experts_fully(rank: RankContext) -> None:
    mesh = MeshConfig(data_parallel_shard=4, expert_parallel=2)
    run = trainer(D9DStrategy(mesh=mesh), 4, rank.device.type, max_steps=1)
    with pytest.raises(ConfigError, match="Make it a D9DModule"):
        run.fit(PlainExperts(), DataLoader(TensorDataset(torch.randn(8, 3, 8)), 2))


class FreezesOnRank0(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_rank == 0:
            next(pl_module.parameters()).requires_grad_(False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [SHARDED, {"data_parallel_replicate": 2}], ids=["sharded", "replicas"])
def test_ranks_train_the_same_parameters(rank: RankContext, mesh: dict[str, int]) -> None:
    options: dict[str, Any] = {"use_distributed_sampler": False, "max_steps": 1, "callbacks": [FreezesOnRank0()]}
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, **options)
    with pytest.raises(ConfigError, match="ranks with the same stages train different parameters"):
        run.fit(Watched(SMALL, 1))


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0)


class PlainSometimes(L.LightningModule):
    """Rank 0 alone uses all of its block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Sometimes()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.block(batch[0], self.trainer.global_rank == 0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.ranks(2)
def test_a_rank_may_use_a_part_of_a_plain_modules_block(rank: RankContext) -> None:
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))

    def trained(mesh: MeshConfig, parallel: ParallelConfig) -> dict[str, Tensor]:
        torch.manual_seed(5)
        module = PlainSometimes()
        run = trainer(D9DStrategy(mesh=mesh, parallel=parallel), 2, rank.device.type, max_epochs=1)
        run.fit(module, DataLoader(data, 2))
        return {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}

    actual = trained(MeshConfig(**SHARDED), ParallelConfig(shard_blocks=("Sometimes",)))
    assert_tensors_close(actual, trained(MeshConfig(data_parallel_replicate=2), ParallelConfig()))
