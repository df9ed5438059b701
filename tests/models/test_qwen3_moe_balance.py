"""Load balance in training: the same biases, losses and gradients as one process, on any mesh and schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.cli import D9DCLI
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig, ExpertBalance
from lightning_d9d.schedule import DualPipeV
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.plain import trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=(1,),
    initializer_range=0.3,
)
BALANCE = BalanceConfig(bias_rate=0.01, sequence_loss=0.2, z_loss=0.1)
LEARNING_RATE, SEED = 0.1, 3
_OF_STRATEGY = ("mesh", "schedule", "microbatch_size", "skip_nonfinite")
Batch = dict[str, Tensor]


def rows(count: int, length: int = 5) -> list[Batch]:
    """Return rows; in every other row two labels do not count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32, (count, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[::2, :2] = -100
    return [{"input_ids": i, "labels": row} for i, row in zip(ids[:, :-1], labels, strict=True)]


class Balanced(Qwen3MoePretraining):
    """Plain SGD; keeps gradients before each step, and what it is after each batch."""

    def __init__(self, balance: BalanceConfig | None = BALANCE, recompute: bool = False, **options: Any) -> None:
        super().__init__(**{"config": CONFIG, "balance": balance, **options})
        self.recompute = recompute
        self.gradients: list[dict[str, Tensor]] = []
        self.biases: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.logged: list[dict[str, float]] = []

    def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
        super().parallelize_stage(stage, mesh, parallel)
        if self.recompute:
            layers = stage.model.layers  # type: ignore[union-attr]
            for name, layer in layers.items():  # type: ignore[operator]
                layers[name] = checkpoint_wrapper(layer)  # type: ignore[index, operator]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, foreach=False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = {name.split(".", 2)[2]: p.grad for name, p in self.named_parameters()}
        self.gradients.append({_plain(name): _whole(g).clone() for name, g in named.items() if g is not None})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.biases.append(biases_of(self))
        self.losses.append(outputs["loss"] * self.trainer.accumulate_grad_batches)  # Lightning divides it

    def on_train_epoch_end(self) -> None:
        self.logged.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def biases_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the biases by layer."""
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, ExpertBalance) and part.bias is not None:
            found[name.split("layers.")[1].split(".")[0]] = part.bias.clone()
    return found


class Steps(NamedTuple):
    gradients: list[dict[str, Tensor]]
    biases: list[dict[str, Tensor]]
    """The biases after each window."""
    losses: list[Tensor]
    """The cross-entropy of each batch."""
    router_losses: list[Tensor]
    loads: list[dict[str, float]]
    """The loads of each window."""


def plain_steps(
    windows: Iterable[list[list[list[Batch]]]],
    device: torch.device,
    balance: BalanceConfig = BALANCE,
    config: Qwen3MoeConfig = CONFIG,
) -> Steps:
    """One process in plain torch, with a loop over experts. A window has batches of microbatches of rows."""
    L.seed_everything(SEED, verbose=False)
    module = Qwen3MoePretraining(config, balance=balance)
    torch.set_default_dtype(torch.float64)
    module.configure_model()
    torch.set_default_dtype(torch.float32)
    model = module.model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    steps = Steps([], [], [], [], [])
    for window in windows:
        optimizer.zero_grad()
        window_weight = 0
        for batch in window:
            sums, batch_weight = [torch.zeros(()), torch.zeros(())], 0
            for microbatch in batch:
                joined = {
                    name: value.to(device) for name, value in torch.utils.data.default_collate(microbatch).items()
                }
                weight = int((joined["labels"] != -100).sum())
                output = model(**joined, reduction="sum")
                router_loss = torch.zeros(()) if output.router_loss is None else output.router_loss * weight
                (output.loss + router_loss).backward()
                sums = [sums[0] + output.loss.detach().cpu(), sums[1] + router_loss.detach().cpu()]
                batch_weight += weight
            steps.losses.append(sums[0] / batch_weight)
            steps.router_losses.append(sums[1] / batch_weight)
            window_weight += batch_weight
        for parameter in model.parameters():
            parameter.grad /= window_weight
        steps.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        steps.loads.append({})
        for layer in filter(config.is_sparse, range(config.num_hidden_layers)):
            part: Any = model.model.layers[str(layer)].mlp.gate.balance  # type: ignore[union-attr]
            counts = part.tokens_per_expert.tolist()
            steps.loads[-1][f"expert_load/layer_{layer}"] = max(counts) / (sum(counts) / len(counts))
            shares = torch.tensor([count / sum(counts) for count in counts if count])
            entropy = -(shares * shares.log()).sum() / torch.tensor(float(len(counts))).log()
            steps.loads[-1][f"expert_entropy/layer_{layer}"] = entropy.item()
            part.tokens_per_expert.zero_()
            for expert, count in enumerate(counts):
                if part.bias is not None:
                    mean = sum(counts) / len(counts)
                    part.bias[expert] += balance.bias_rate * ((count < mean) - (count > mean))
        steps.biases.append(biases_of(model))
    return steps


def fit(rank: RankContext | None, module: Balanced, data: list[Batch], batch_size: int, **options: Any) -> L.Trainer:
    """Data ranks get rows by turns."""
    L.seed_everything(SEED, verbose=False)
    num_ranks = 1 if rank is None else rank.world_size
    strategy = {key: options.pop(key) for key in _OF_STRATEGY if key in options}
    data_ranks = strategy["mesh"].resolve(num_ranks).domains()["batch"]["dp"] if "mesh" in strategy else num_ranks
    run = trainer(
        D9DStrategy(**strategy),
        num_ranks,
        "cpu" if rank is None else rank.device.type,
        **{"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False, **options},
    )
    sampler = DistributedSampler(data, data_ranks, 0 if rank is None else rank.rank % data_ranks, shuffle=False)  # type: ignore[arg-type]
    run.fit(module, DataLoader(data, batch_size, sampler=sampler))  # type: ignore[arg-type]
    return run


def check(module: Balanced, expected: Steps, accumulated: int = 1) -> None:
    """What this rank holds is that of one process; the biases bit by bit."""
    assert len(module.gradients) == len(expected.gradients)
    for ours, theirs in zip(module.gradients, expected.gradients, strict=True):
        assert_tensors_close(ours, {name: theirs[name] for name in ours})
    for index, (ours, theirs) in enumerate(zip(module.losses, expected.losses, strict=True)):
        assert_close_named(f"loss {index}", ours, theirs, kind=Kind.LOSS)
    for index, ours in enumerate(module.biases):
        num_steps = (index + 1) // accumulated
        for layer, bias in ours.items():
            expected_bias = expected.biases[num_steps - 1][layer] if num_steps else torch.zeros(CONFIG.num_experts)
            assert_bitwise_equal(f"bias of layer {layer} after batch {index}", bias, expected_bias)
    logged = module.logged[-1]
    assert logged["train_router_loss"] == pytest.approx(float(expected.router_losses[-1]))
    loads = {name: value for name, value in logged.items() if name.startswith("expert_")}
    assert loads == pytest.approx(expected.loads[-1])
    assert any(bias.any() for bias in expected.biases[-1].values())


def in_microbatches(data: list[Batch], batch_size: int) -> list[list[list[list[Batch]]]]:
    """Windows of one batch, each row a microbatch."""
    return [[[[row] for row in data[i : i + batch_size]]] for i in range(0, len(data), batch_size)]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_one_process_equals_plain_torch(recompute: bool) -> None:
    data = rows(8)
    module = Balanced(recompute=recompute)
    fit(None, module, data, 4, microbatch_size=1)
    check(module, plain_steps(in_microbatches(data, 4), torch.device("cpu")))
    assert len(module.losses) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        (MeshConfig(data_parallel_replicate=2), False),
        (MeshConfig(data_parallel_replicate=2), True),
        (MeshConfig(data_parallel_replicate=2, expert_parallel=2), False),
        (MeshConfig(data_parallel_shard=2, expert_parallel=2), False),
        (MeshConfig(tensor_parallel=2), False),
        (MeshConfig(tensor_parallel=2, expert_parallel=2), True),
        (MeshConfig(context_parallel_shard=2), True),
        (MeshConfig(context_parallel_replicate=2, expert_parallel=2), False),
    ],
    ids=[
        "replicas",
        "replicas recomputed",
        "experts",
        "sharded",
        "tensor",
        "tensor recomputed",
        "context recomputed",
        "context",
    ],
)
def test_two_ranks_equal_one_process(rank: RankContext, mesh: MeshConfig, recompute: bool) -> None:
    """The run has 2 steps of 2 accumulated batches, with 2 microbatches each."""
    data = rows(16, length=8)
    module = Balanced(recompute=recompute)
    batch_size = 4 // mesh.domains()["batch"]["dp"]
    fit(rank, module, data, batch_size, mesh=mesh, microbatch_size=1, accumulate_grad_batches=2)
    windows = [[[[row] for row in data[i : i + 4]] for i in (start, start + 4)] for start in (0, 8)]
    check(module, plain_steps(windows, rank.device), accumulated=2)
    seen = {name: value for name, value in module.logged[-1].items() if name != "tokens_per_s"}
    assert all(theirs == seen for theirs in rank.all_gather_object(seen))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("schedule", "dense"), [("1f1b", (1,)), ("1f1b", (0, 1)), ("interleaved_1f1b", (1,)), ("zero_bubble_v", (1,))]
)
def test_pipelines_equal_one_process(rank: RankContext, schedule: str, dense: tuple[int, ...]) -> None:
    """They also do if the first rank has no mixture."""
    data = rows(8)
    config = dataclasses.replace(CONFIG, mlp_only_layers=dense)
    balance = dataclasses.replace(BALANCE, global_batch_loss=0.3)
    module = Balanced(balance, config=config)
    fit(rank, module, data, 4, mesh=MeshConfig(pipeline_parallel=2), schedule=schedule)
    check(module, plain_steps(in_microbatches(data, 4), rank.device, balance, config))
    held = rank.all_gather_object(set(module.biases[-1]))
    assert set().union(*held) == {"0", "1", "2", "3"} - {str(layer) for layer in dense}
    assert ("0" in held[0], "0" in held[1]) == (0 not in dense, False)
    seen = {name: value for name, value in module.logged[-1].items() if name != "tokens_per_s"}
    assert all(theirs == seen for theirs in rank.all_gather_object(seen))


@pytest.mark.ranks(2)
def test_dummies_do_not_count(rank: RankContext) -> None:
    """The second batch has one row, and this schedule takes no less than four microbatches."""
    data = rows(5)
    module = Balanced()
    fit(rank, module, data, 4, mesh=MeshConfig(pipeline_parallel=2), schedule="dual_pipe_v")
    assert not DualPipeV().takes(2, 1)
    check(module, plain_steps(in_microbatches(data, 4), rank.device))
    assert all(part.counts_tokens for part in module.modules() if isinstance(part, ExpertBalance))


@pytest.mark.ranks(4)
def test_replicas_of_pipelines_hold_equal_biases(rank: RankContext) -> None:
    data = rows(16)
    module = Balanced()
    fit(rank, module, data, 4, mesh=MeshConfig(pipeline_parallel=2, data_parallel_replicate=2))
    check(module, plain_steps(in_microbatches(data, 8), rank.device))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(
            MeshConfig(context_parallel_shard=2, tensor_parallel=2), marks=pytest.mark.meshes, id="context, tensor"
        ),
        pytest.param(MeshConfig(pipeline_parallel=2, tensor_parallel=2, expert_parallel=2), id="pipeline, tensor"),
    ],
)
def test_ranks_that_share_sequences_have_all_losses_of_one_process(rank: RankContext, mesh: MeshConfig) -> None:
    data = rows(8, length=8)
    balance = dataclasses.replace(BALANCE, global_batch_loss=0.3)
    module = Balanced(balance)
    fit(rank, module, data, 4, mesh=mesh, microbatch_size=1)
    check(module, plain_steps(in_microbatches(data, 4), rank.device, balance))


@pytest.mark.ranks(2)
def test_the_global_batch_has_the_tokens_of_both_ranks(rank: RankContext) -> None:
    """Equal tokens on both ranks are those of one."""
    data = rows(4)
    balance = BalanceConfig(bias_rate=0.01, global_batch_loss=0.5)
    module = Balanced(balance)
    fit(rank, module, [row for row in data for _ in range(2)], 2, microbatch_size=1)
    check(module, plain_steps(in_microbatches(data, 2), rank.device, balance))
    assert all(part.group is None for part in module.modules() if isinstance(part, ExpertBalance))


def test_a_stock_strategy_balances_and_validation_counts_nothing() -> None:
    data = rows(4)
    L.seed_everything(SEED, verbose=False)
    module = Balanced()
    run = trainer("auto", precision="64-true", max_epochs=1, val_check_interval=1)
    loader: Any = DataLoader(data, 1)  # type: ignore[arg-type]
    run.validate(module, loader, verbose=False)
    run.fit(module, loader, loader)
    check(module, plain_steps([[[[row]]] for row in data], torch.device("cpu")))
    assert "val_router_loss" not in run.callback_metrics


class LeavesOut(Balanced):
    """No label counts in the second batch; keeps what this rank has counted before each step."""

    def __init__(self, fused: bool = False, by_itself: bool = False) -> None:
        super().__init__(BalanceConfig(bias_rate=0.1))
        self.fused, self.by_itself = fused, by_itself
        self.counts: list[dict[str, Tensor]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, fused=self.fused)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        if self.by_itself and batch_idx == 1:
            assert optimizer_closure is not None
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parts = {name: part for name, part in self.named_modules() if isinstance(part, ExpertBalance)}
        self.counts.append(
            {n.split("layers.")[1].split(".")[0]: part.tokens_per_expert.clone().cpu() for n, part in parts.items()}
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["on the host", "on the device", "by the module"])
def test_a_step_that_is_left_out_moves_no_bias(rank: RankContext, way: str) -> None:
    """Nor do its tokens, unless it was the module that left it out; ranks count their own."""
    by_itself = way == "by the module"
    module = LeavesOut(fused=way == "on the device", by_itself=by_itself)
    data = rows(12)
    for row in data[4:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    run = fit(rank, module, data, 2, mesh=MeshConfig(data_parallel_replicate=2))
    strategy = run.strategy
    assert isinstance(strategy, D9DStrategy)
    assert strategy.num_skipped_steps == (not by_itself)
    counts = rank.all_gather_object(module.counts)
    for layer in ("0", "2", "3"):
        summed = [sum(each[layer] for each in of_ranks) for of_ranks in zip(*counts, strict=True)]
        copies_of_batch = 2 * (2 * 5) * CONFIG.num_experts_per_tok
        copies = [copies_of_batch, 2 * copies_of_batch] if by_itself else [copies_of_batch] * 3
        assert [int(each.sum()) for each in summed] == copies  # type: ignore[union-attr]
        first, last = (0.1 * (each.float().mean() - each).sign() for each in (summed[0], summed[-1]))  # type: ignore[union-attr, operator]
        for index, expected in enumerate([first, first, first + last]):
            assert_bitwise_equal(f"layer {layer}, batch {index}", module.biases[index][layer].cpu(), expected)
        assert not torch.equal(counts[0][0][layer], counts[1][0][layer])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("skips", [False, True], ids=["not asked for", "skip_nonfinite"])
def test_a_router_that_is_no_number_shows(value: float, skips: bool, recwarn: pytest.WarningsRecorder) -> None:
    """NaN shows in the loss, and a warning tells of it; or the step is left out, and so are its counts."""

    class Broken(Balanced):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            if batch_idx == 1:
                self.before = {name: p.detach().clone() for name, p in self.named_parameters()}
                with torch.no_grad():
                    self.get_parameter("stages.0.model.layers.0.mlp.gate.weight")[0, 0] = value

    module = Broken(BalanceConfig(bias_rate=0.1))
    run = fit(None, module, rows(4), 2, skip_nonfinite=skips)
    strategy = run.strategy
    assert isinstance(strategy, D9DStrategy)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, module.before[name])}
    warned = [str(each.message) for each in recwarn if "train_loss is NaN or infinite" in str(each.message)]
    assert not module.losses[1].isfinite()
    assert strategy.num_skipped_steps == skips
    assert len(warned) == (not skips)
    if skips:
        assert changed == {"stages.0.model.layers.0.mlp.gate.weight"}
        for layer, bias in module.biases[1].items():
            assert_bitwise_equal(layer, bias, module.biases[0][layer])
    else:
        assert len(changed) > 1


def test_without_balance_there_is_nothing() -> None:
    module = Balanced(None)
    fit(None, module, rows(4), 2)
    assert not list(module.buffers())
    assert set(module.logged[-1]) == {"train_loss", "tokens_per_s", "grad_norm"}


def test_counts_alone_are_logged_every_n_steps() -> None:
    class Watched(Balanced):
        names: list[tuple[int, str]] = []  # noqa: RUF012

        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            super().log(name, *args, **kwargs)
            if name.startswith("expert_"):
                self.names.append((self.trainer.global_step, name))

    module = Watched(BalanceConfig())
    fit(None, module, rows(4), 1, log_every_n_steps=2)
    names = [f"expert_{kind}/layer_{layer}" for layer in (0, 2, 3) for kind in ("load", "entropy")]
    assert module.names == [(step, name) for step in (2, 4) for name in names]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_the_bias_is_resumed(tmp_path: Path, mode: Any, precision: Any) -> None:
    """The checkpoint is one that a callback saves after a batch."""

    def run(module: Balanced, path: str | None = None) -> None:
        L.seed_everything(SEED, verbose=False)
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": save} if path is None else {}
        strategy = D9DStrategy(checkpoint=CheckpointConfig(mode=mode))
        run = trainer(strategy, max_epochs=1, precision=precision, **options)
        run.fit(module, DataLoader(rows(8), 2), ckpt_path=path)  # type: ignore[arg-type]

    whole, resumed = Balanced(), Balanced()
    run(whole)
    run(resumed, str(tmp_path / "step=2.ckpt"))
    assert (len(whole.biases), len(resumed.biases)) == (4, 2)
    loaded = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "step=2.ckpt")
    assert loaded.balance == BALANCE
    for layer, bias in whole.biases[-1].items():
        assert bias.dtype == torch.float32
        assert_bitwise_equal(f"bias of layer {layer}", resumed.biases[-1][layer], bias)
    for layer, bias in biases_of(loaded).items():
        assert bias.any()
        assert_bitwise_equal(f"loaded bias of layer {layer}", bias, whole.biases[1][layer])


def test_counts_of_a_broken_off_fit_are_forgotten() -> None:
    biases = []
    for broken_off in (False, True):
        module = Balanced()
        fit(None, module, rows(2), 2)
        for part in module.modules():
            if isinstance(part, ExpertBalance) and broken_off:
                part.tokens_per_expert += 1000 * torch.arange(CONFIG.num_experts)
        fit(None, module, rows(2), 2)
        biases.append(module.biases[-1])
    for layer, bias in biases[0].items():
        assert_bitwise_equal(layer, biases[1][layer], bias)


def test_balance_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Built(D9DCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            pass

    monkeypatch.setattr("sys.argv", ["lightning-d9d"])
    config = tmp_path / "balance.yaml"
    config.write_text("model: {init_args: {balance: {bias_rate: 0.001, sequence_loss: 1.0e-4}}}\n")
    tiny = str(Path(__file__).parents[2] / "examples" / "qwen3_moe" / "tiny.yaml")
    arguments = ["fit", "--config", tiny, "--config", str(config), "--model.balance.z_loss", "0.01"]
    cli = Built(args=[*arguments, "--trainer.accelerator", "cpu"])
    assert cli.model.balance == BalanceConfig(bias_rate=0.001, sequence_loss=1e-4, z_loss=0.01)


def test_balance_of_dense_layers_alone_is_refused() -> None:
    config = dataclasses.replace(CONFIG, num_experts=0, mlp_only_layers=())
    with pytest.raises(ConfigError, match=r"balance=.* has no effect: no layer .*\(num_experts=0\); leave balance out"):
        Qwen3MoePretraining(config, balance=BalanceConfig())
