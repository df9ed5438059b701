"""What `RunMetrics` logs against numbers worked out by hand, by a clock that stands still but for what a test does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.callbacks import RunMetrics
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig, ExpertBalance, TopKRouter
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.plain import Plain, loader, trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.3,
)
LENGTH, BATCH = 8, 4
"""Tokens of a row, and rows of a step on all ranks."""
ROW_SECONDS, MICROBATCH_SECONDS, HOOK_SECONDS, MESSAGE_SECONDS = 1.0, 2.0, 0.5, 0.125
WEIGHTS = 2 * (16 * 3 * 16 + 16 * 16 + 16 * 4 + 2 * 3 * 16 * 8) + 16 * 32
"""The weights that a token meets: in each layer queries, keys, values, output, router and two experts; and the head."""
CAUSAL_ATTENTION = 2 * (2 * LENGTH**2 * 16)
"""Operations of the forward of both layers: two products, each the half of a square, for 16 dims of all heads."""
FLOPS = {
    "causal": 6 * LENGTH * WEIGHTS + 3 * CAUSAL_ATTENTION,
    "full": 6 * LENGTH * WEIGHTS + 6 * CAUSAL_ATTENTION,
    "causal_recompute": 6 * LENGTH * WEIGHTS
    + 3 * CAUSAL_ATTENTION
    + 2 * LENGTH * (WEIGHTS - 16 * 32)
    + CAUSAL_ATTENTION,
    "full_recompute": 6 * LENGTH * WEIGHTS
    + 6 * CAUSAL_ATTENTION
    + 2 * LENGTH * (WEIGHTS - 16 * 32)
    + 2 * CAUSAL_ATTENTION,
}
MESHES = {
    "rep2": {"data_parallel_replicate": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel_shard": 2},
    "tp2": {"tensor_parallel": 2},
    "shard2 ep2": {"data_parallel_shard": 2, "expert_parallel": 2},
    "pp2 rep2 ep2": {"pipeline_parallel": 2, "data_parallel_replicate": 2, "expert_parallel": 2},
    "cp2 tp2": {"context_parallel_shard": 2, "tensor_parallel": 2},
}
GROUPS = {"ends": "*embed*", "head": "lm_head.*", "layers": "*.layers.*", "norm": "model.norm.*"}
"""Each parameter is in one of them."""
CLOCKS = ("callbacks.run_metrics", "loop.uneven", "metrics.step_clock", "metrics.wait_clock")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Dataset):
    """Takes its time for each row, of which the last one or two tokens are padding."""

    def __init__(self, clock: Clock, first: int = 0, each: int = 1) -> None:
        self.clock, self.first, self.each = clock, first, each
        self.ids = torch.randint(32, (4 * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids) // self.each

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.clock.now += ROW_SECONDS
        row = index * self.each + self.first
        mask = torch.ones(LENGTH, dtype=torch.int64)
        mask[LENGTH - 1 - row % 2 :] = 0
        return {"input_ids": self.ids[row, :-1], "labels": self.ids[row, 1:], "attention_mask": mask}


class Ticking(Qwen3MoePretraining):
    """Takes its time for each microbatch on each rank."""

    def __init__(self, clock: Clock, **kwargs: Any) -> None:
        super().__init__(CONFIG, warmup_steps=10, learning_rate=0.01, **kwargs)
        self.clock = clock

    def microbatch_inputs(self, microbatch: Any) -> Any:
        self.clock.now += MICROBATCH_SECONDS
        return super().microbatch_inputs(microbatch)

    def train_dataloader(self) -> DataLoader:
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        each = ranks["num_replicas"]
        return DataLoader(Slow(self.clock, ranks["rank"], each), batch_size=BATCH // each)


class Seeing(Callback):
    """Takes its time between steps, and keeps what is logged by the end of each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        self.clock.now += HOOK_SECONDS
        values = {name: float(value) for name, value in run.callback_metrics.items()}
        values.pop("tokens_per_s", None)  # the module's own, by the real clock of each rank
        self.seen.append(values)


class Visits(Callback):
    """Notes which experts tokens visit: by layer and step, all ranks together."""

    def __init__(self) -> None:
        self.of_ranks: list[dict[tuple[int, int], list[int]]] = []
        self._own: dict[tuple[int, int], list[int]] = {}

    def on_train_start(self, run: Any, module: Any) -> None:
        def note(router: TopKRouter, inputs: Any, outputs: Any) -> None:
            self._own.setdefault((layers[router], run.global_step), []).extend(outputs[0].flatten().tolist())

        layers = {}
        for name, part in module.named_modules():
            if isinstance(part, TopKRouter):
                layers[part] = int(name.partition("layers.")[2].partition(".")[0])
                part.register_forward_hook(note)

    def on_train_end(self, run: Any, module: Any) -> None:
        self.of_ranks = Ranks().all_gather(self._own)

    def load(self, layer: int, steps: Sequence[int]) -> tuple[float, float]:
        """The tokens of the busiest expert over the mean, and the entropy over that of an even load."""
        visits = [expert for own in self.of_ranks for step in steps for expert in own.get((layer, step), ())]
        shares = [visits.count(expert) / len(visits) for expert in range(4)]
        return 4 * max(shares), -sum(share * math.log(share) for share in shares if share) / math.log(4)


def check_loads(logged: dict[str, float], visits: Visits, steps: Sequence[int]) -> None:
    for layer in range(2):
        found = (logged[f"expert_load/layer_{layer}"], logged[f"expert_entropy/layer_{layer}"])
        assert found == pytest.approx(visits.load(layer, steps), rel=1e-6)


def fit(
    degrees: dict[str, int] | None = None,
    world_size: int = 1,
    every: int = 2,
    accumulate: int = 1,
    metrics: dict[str, Any] | None = None,
    others: Sequence[Callback] = (),
    **options: Any,
) -> tuple[list[dict[str, float]], list[float]]:
    """What is logged in four steps, and the clock at the beginning and end of each batch's all-reduces."""
    clock = Clock()
    seeing, messages = Seeing(clock), []
    all_reduce = dist.all_reduce

    def slow(*args: Any, **kwargs: Any) -> Any:
        messages.append(clock.now)
        clock.now += MESSAGE_SECONDS
        return all_reduce(*args, **kwargs)

    watching = RunMetrics(peak_tflops=1e-6, **(metrics or {}))
    strategy = D9DStrategy(mesh=MeshConfig(**(degrees or {})), **options)
    run = trainer(
        strategy,
        world_size,
        callbacks=[watching, seeing, *others],
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        log_every_n_steps=every,
        use_distributed_sampler=False,
        precision="64-true",
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in CLOCKS:
            monkeypatch.setattr(f"lightning_d9d.{module}.perf_counter", clock)
        monkeypatch.setattr(dist, "all_reduce", slow)
        run.fit(Ticking(clock))
    return seeing.seen, messages


def check_counts(logged: dict[str, float], seconds: float, steps: int, world_size: int, rows: int = 0) -> None:
    """What follows from the data alone, of an interval of so many steps."""
    rows = rows or steps * BATCH
    tokens = rows * LENGTH
    padding = rows // 2 * 3
    expected = {
        "speed/tokens_per_s": tokens / seconds,
        "speed/counted_tokens_per_s": (tokens - padding) / seconds,
        "speed/samples_per_s": rows / seconds,
        "step/seconds": seconds / steps,
        "data/padding_share": padding / tokens,
        "data/counted_share": 1 - padding / tokens,
        "tflops/causal": rows * FLOPS["causal"] / seconds / world_size / 1e12,
        "tflops/full": rows * FLOPS["full"] / seconds / world_size / 1e12,
        "mfu/causal": rows * FLOPS["causal"] / seconds / world_size / 1e6,
        "mfu/full": rows * FLOPS["full"] / seconds / world_size / 1e6,
        "skipped_steps": 0.0,
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, rel=1e-6), name


def check_mesh(rank: RankContext, mesh: str) -> None:
    visits = Visits()
    seen, _ = fit(MESHES[mesh], rank.world_size, metrics={"norm_groups": GROUPS}, others=[visits])
    assert rank.from_first_rank(lambda: seen) == seen
    first, second = seen[1], seen[3]
    check_counts(first, 1 * first["step/seconds"], 1, rank.world_size)
    check_counts(second, 2 * second["step/seconds"], 2, rank.world_size)
    check_loads(first, visits, [0])
    check_loads(second, visits, [1, 2])
    norms = [second[f"grad_norm/{name}"] for name in GROUPS]
    assert_close_named("norm", torch.tensor(norms).norm(), torch.tensor(second["grad_norm"]), kind=Kind.LOSS)
    assert min(norms) > 0
    parts = [second[f"step/{name}_seconds"] for name in ("data", "host", "compute", "communication")]
    degrees = MESHES[mesh]
    rows_read = BATCH // degrees.get("data_parallel_replicate", degrees.get("data_parallel_shard", 1))
    assert parts[0] == ROW_SECONDS * rows_read
    assert parts[1] == HOOK_SECONDS
    assert parts[2] >= MICROBATCH_SECONDS
    assert parts[3] >= MESSAGE_SECONDS
    assert second["learning_rate"] == pytest.approx(0.01 * 4 / 10)


def others(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.meshes) for name in names]


def test_one_process() -> None:
    """The interval of the first values is the first step alone, as the second one is under way when they are sent."""
    visits = Visits()
    seen, _ = fit(every=2, others=[visits])
    check_loads(seen[1], visits, [0])
    check_loads(seen[3], visits, [1, 2])
    assert "step/seconds" not in seen[0]
    assert "step/data_seconds" not in seen[1]
    step = BATCH * ROW_SECONDS + MICROBATCH_SECONDS + HOOK_SECONDS
    check_counts(seen[1], step, 1, 1)
    check_counts(seen[3], 2 * step, 2, 1)
    assert [seen[3][f"step/{name}_seconds"] for name in ("data", "host", "compute", "communication")] == [
        BATCH * ROW_SECONDS,
        HOOK_SECONDS,
        MICROBATCH_SECONDS,
        0.0,
    ]
    assert not [name for name in seen[3] if name.startswith("hfu/")]


def test_accumulated_batches_make_one_step_and_recomputation_is_counted_where_it_happens() -> None:
    seen, _ = fit(every=1, accumulate=2, parallel=ParallelConfig(recompute="full"))
    assert "step/seconds" not in seen[1]
    step = 2 * (BATCH * ROW_SECONDS + MICROBATCH_SECONDS + HOOK_SECONDS)
    check_counts(seen[3], step, 1, 1, rows=2 * BATCH)
    assert seen[3]["step/seconds"] == step
    for name in ("causal", "full"):
        flops = 2 * BATCH * FLOPS[f"{name}_recompute"] / step
        assert seen[3][f"tflops/{name}_recompute"] == pytest.approx(flops / 1e12, rel=1e-6)
        assert seen[3][f"hfu/{name}"] == pytest.approx(flops / 1e6, rel=1e-6)
        assert seen[3][f"hfu/{name}"] > seen[3][f"mfu/{name}"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["pp2", "tp2", *others("rep2", "cp2", "shard2 ep2")])
def test_two_ranks(rank: RankContext, mesh: str) -> None:
    check_mesh(rank, mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["pp2 rep2 ep2", *others("cp2 tp2")])
def test_four_ranks(rank: RankContext, mesh: str) -> None:
    check_mesh(rank, mesh)


def test_every_norm() -> None:
    seen, _ = fit(every=2, metrics={"norm_every_step": True})
    plain, _ = fit(every=1)
    assert [each["grad_norm"] for each in seen] == [each["grad_norm"] for each in plain]


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"peak_tflops=0"):
        RunMetrics(peak_tflops=0)
    with pytest.raises(ConfigError, match="needs a D9DModule under D9DStrategy, but Plain"):
        trainer(D9DStrategy(), callbacks=[RunMetrics()]).fit(Plain(), loader(4))
    with pytest.raises(ConfigError, match=r"'none': 'nothing'}\): no trained parameter"):
        fit(metrics={"norm_groups": {"none": "nothing"}})
    with pytest.raises(ConfigError, match="frees gradients"):
        fit(metrics={"norm_groups": {"all": "*"}}, step_in_backward=True)


def test_the_load_of_experts_is_the_balance_s_own_where_there_is_one() -> None:
    """Routers are unchanged afterwards."""
    clock = Clock()
    module = Ticking(clock, balance=BalanceConfig())
    trainer(D9DStrategy(), callbacks=[RunMetrics()], max_epochs=1, max_steps=2, log_every_n_steps=1).fit(module)
    assert all(isinstance(part.balance, ExpertBalance) for part in module.modules() if isinstance(part, TopKRouter))
    plain = Ticking(clock)
    trainer(D9DStrategy(), callbacks=[RunMetrics()], max_epochs=1, max_steps=2, log_every_n_steps=1).fit(plain)
    assert not any(part.balance for part in plain.modules() if isinstance(part, TopKRouter))


class Clashing(Callback):
    def on_train_batch_start(self, run: Any, module: Any, *_: Any) -> None:
        module.log("step/seconds", 1.0)


def test_a_name_that_somebody_else_logs_is_refused() -> None:
    with pytest.raises(ConfigError, match="RunMetrics logs step/seconds, and so does"):
        fit(others=[Clashing()])
