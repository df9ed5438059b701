"""A model of twelve small layers, its parts on the ranks of a pipeline, and what one process makes of it."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.ops import linear
from lightning_d9d.ops.messages import give_way
from lightning_d9d.pipeline.executor import Executor, LossScale, SplitBatch
from lightning_d9d.pipeline.totals import BatchTotals
from lightning_d9d.pipeline.types import StageInfo, StageInputs, WeightedLoss
from lightning_d9d.schedule import Schedule
from lightning_d9d.strategy.data_parallel import DataParallelStages, bucket_groups_of
from lightning_d9d.strategy.module import share_equal_names
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.tied import TiedParameters
from lightning_d9d.sync.buckets import GradientBuckets
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind

NUM_LAYERS, WIDTH, VOCAB = 12, 4, 7
SCALE = 1 / 64
"""The factor on the loss before its backward. It is a power of two, so it changes no rounding, not in bfloat16
either."""
KINDS: dict[str, dict[str, Any]] = {
    "all trained": {},
    "half frozen": {"frozen": ("embedding", *(f"layers.{i}." for i in range(NUM_LAYERS // 2)))},
    "shared": {"shared": True},
    "tied": {"tied": True},
    "recompute": {"recompute": True},
}


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.bfloat16


class Layer(nn.Module):
    """A product whose weight gradient can wait, a gain whose gradient cannot; `shared` meets the weight both ways."""

    def __init__(self, shared: bool, recompute: bool, gives_way: bool) -> None:
        super().__init__()
        self.shared, self.recompute, self.gives_way = shared, recompute, gives_way
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias, self.gain = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.recompute else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        if self.gives_way:
            x = GivesWay.apply(x)
        x = x + linear(x * self.gain, self.weight, self.bias).tanh()
        return x + linear(x, self.weight).tanh() * (1 + self.weight.diagonal()) if self.shared else x


class GivesWay(torch.autograd.Function):
    """Lets the other action of a pair run, where a mixture of experts would send messages: forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        give_way()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        give_way()
        return gradient


class Part(nn.Module):
    """One stage; its weights follow from their names."""

    def __init__(
        self,
        stage: StageInfo,
        tied: bool = False,
        shared: bool = False,
        recompute: bool = False,
        frozen: tuple[str, ...] = (),
        gives_way: bool = False,
    ) -> None:
        super().__init__()
        self.stage = stage
        if stage.is_first or (tied and stage.is_last):
            self.embedding = nn.Embedding(VOCAB, WIDTH)
        first, last = (i * NUM_LAYERS // stage.num_stages for i in (stage.index, stage.index + 1))
        self.layers = nn.ModuleDict({str(i): Layer(shared, recompute, gives_way) for i in range(first, last)})
        if stage.is_last and not tied:
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator) * 0.2 + name.endswith("gain")
            parameter.data = drawn.bfloat16().float()
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))

    def forward(self, hidden: Tensor, scale: Tensor, positions: Tensor | None = None) -> Any:
        if self.stage.is_first:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            hidden = self.embedding(hidden)
        assert positions is not None
        for layer in self.layers.values():
            hidden = layer(hidden) * scale
        if not self.stage.is_last:
            return {"hidden": hidden, "positions": positions}
        weight = self.head.weight if hasattr(self, "head") else self.embedding.weight
        return linear(hidden + (positions.unsqueeze(-1) * 0.01).to(hidden), weight)


class Tokens:
    """Hooks: token losses of ids `[rows, seq]`, weighted by the labels that count."""

    def microbatch_inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        return StageInputs(first={"hidden": microbatch["ids"]}, shared={"scale": microbatch["scale"]})

    def microbatch_loss(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> WeightedLoss:
        logits, labels = output.flatten(0, 1), microbatch["labels"].flatten()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return WeightedLoss(nn.functional.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

    def microbatch_metrics(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> dict[str, WeightedLoss]:
        labels = microbatch["labels"]
        return {"logits": WeightedLoss(output.double().abs().sum(), (labels != -100).sum())}


def microbatches(count: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Return microbatches of 1 or 2 rows and 3 to 5 tokens, the same for any count."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for i in range(count):
        shape = (1 + i % 2, 3 + i % 3)
        ids = torch.randint(VOCAB, shape, generator=generator)
        labels = torch.where(torch.rand(shape, generator=generator) < 0.3, -100, ids.roll(-1))
        labels[0, 0] = 1
        scale = 1 + 0.1 * torch.randn(*shape, 1, generator=generator)
        made.append({"ids": ids.to(device), "labels": labels.to(device), "scale": scale.to(device, dtype_on(device))})
    return made


def cut_of(count: int, device: torch.device, num_dummies: int = 0) -> SplitBatch:
    made = microbatches(count - num_dummies, device)
    made += made[-1:] * num_dummies
    return SplitBatch(made, [len(each["ids"]) for each in made], num_dummies)


class Expected(NamedTuple):
    """The expected values of the first microbatches of a batch together."""

    gradients: dict[str, Tensor]
    norm: Tensor
    loss: Tensor
    weight: int
    metric: Tensor


def of_one_process(kind: str, count: int, device: torch.device) -> list[Expected]:
    """Return the values of plain autograd for 1, 2, ... microbatches, summed in float64."""
    whole = Part(StageInfo(0, 1), **KINDS[kind]).to(device, dtype_on(device))
    hooks, sums = Tokens(), []
    total, weight, metric = torch.zeros((), device=device, dtype=torch.float64), 0, torch.zeros((), device=device)
    gradients = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in whole.named_parameters() if p.requires_grad}
    for each in microbatches(count, device):
        whole.zero_grad()
        output = whole(each["ids"], each["scale"])
        loss = hooks.microbatch_loss(output, each)
        loss.value_sum.backward()
        total, weight = total + loss.value_sum.detach(), weight + int(loss.weight)
        metric = metric + hooks.microbatch_metrics(output.detach(), each)["logits"].value_sum
        for name, parameter in whole.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad * SCALE
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        sums.append(Expected(gradients.copy(), norm, total / weight, weight, metric / weight))
    return sums


@contextmanager
def pipeline_mesh(rank: RankContext) -> Iterator[MeshDomains]:
    """All ranks as one pipeline."""
    mesh = MeshDomains.build(MeshConfig(pipeline_parallel=rank.world_size), rank.device.type)
    yield mesh
    mesh.close()


class Rig:
    """This rank's stages under an executor, as the strategy combines them. Making one is collective."""

    def __init__(
        self,
        schedule: Schedule,
        mesh: MeshDomains | None,
        device: torch.device,
        options: Mapping[str, Any],
        *,
        overlaps_pairs: bool = False,
    ) -> None:
        self.device = device
        self.pipeline = Pipeline(schedule, mesh, device)
        self.stages = {info.index: Part(info, **options).to(device, dtype_on(device)) for info in self.pipeline.stages}
        share_equal_names(self.stages.values())
        self.names = {p: name for stage in self.stages.values() for name, p in stage.named_parameters()}
        self.tied = TiedParameters.find(self.names, lambda parameter: ["dp"], mesh)
        trained = [parameter for parameter in self.names if parameter.requires_grad]
        bucket_groups, groups_of_stage = bucket_groups_of(trained, self.stages, self.tied, lambda _: None)
        dtype = None if device.type == "cpu" else torch.float32
        self.buckets = GradientBuckets(bucket_groups, dtype=dtype, bucket_mb=1e-4)
        self.data_parallel = DataParallelStages(self.buckets, groups_of_stage, {}, {})
        num_stages = len(self.pipeline.placement)
        pairs_on = device if overlaps_pairs else None
        self.executor = Executor(
            self.stages, num_stages, Tokens(), nullcontext, self.pipeline.messages, pairs_on=pairs_on
        )
        self.outputs: list[weakref.ref[Tensor]] = []
        """Every tensor that a stage put out in the last run."""
        for stage in self.stages.values():
            stage.register_forward_hook(self._note)

    def _note(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.outputs += [weakref.ref(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]

    def train(self, actions: Sequence[Any], cut: SplitBatch) -> BatchTotals:
        """Gradients of the sum times `SCALE`, summed over tied parameters."""
        self.outputs.clear()
        for parameter in self.names:
            parameter.grad = None
        self.data_parallel.begin(is_first=True, reduces=True, splits_backward=False)
        totals = self.executor.train(actions, cut, LossScale(of_sum=SCALE), self.data_parallel)
        self.data_parallel.finish()
        return totals

    def check(self, num_microbatches: int, expected: Expected, num_dummies: int = 0) -> None:
        """Train on so many microbatches and dummies; compare, and see that nothing is left."""
        cut = cut_of(num_microbatches + num_dummies, self.device, num_dummies)
        totals = self.train(self.pipeline.program(len(cut.microbatches)), cut)
        ours = {name: self._rounded(p.grad) for p, name in self.names.items() if p.requires_grad}
        assert_tensors_close(ours, {name: expected.gradients[name] for name in ours})
        assert_close_named("norm", self._rounded(self.tied.norm(self.names)), expected.norm)
        self.check_totals(totals, expected)
        self.check_nothing_left()

    def _rounded(self, value: Tensor | None) -> Tensor:
        """Sums are in a wider dtype than what they are made of."""
        assert value is not None
        return value.to(dtype_on(self.device))

    def check_totals(self, totals: BatchTotals, expected: Expected) -> None:
        if self.pipeline.rank != self.pipeline.last_rank:
            assert totals == BatchTotals()
            return
        assert totals.loss is not None
        value, weight = totals.loss
        assert int(weight) == expected.weight
        assert_close_named("loss", value / weight, expected.loss, kind=Kind.LOSS)
        value, weight = totals.metrics["logits"]
        assert int(weight) == expected.weight
        assert_close_named("metric", self._rounded(value / weight), expected.metric, kind=Kind.OUTPUT)

    def check_nothing_left(self) -> None:
        assert all(not stage._live for stage in self.executor.stages.values())
        assert all(output() is None for output in self.outputs)
        messages = self.pipeline.messages
        assert messages is None or not (messages._sent or messages._forward or messages._backward)

    def close(self) -> None:
        self.buckets.remove()
