"""What stages may hand over, and what they may not: trees, dtypes, shapes, and who has gradients."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_d9d import ConfigError
from lightning_d9d.ops import linear
from lightning_d9d.pipeline.executor import Executor, LossScale, SplitBatch
from lightning_d9d.pipeline.types import StageInputs, WeightedLoss
from lightning_d9d.schedule import GPipe, Interleaved1F1B, LoopedBFS, Schedule, ZeroBubble, ZeroBubbleV
from lightning_d9d.strategy.pipeline import Pipeline
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.pipeline.layered import pipeline_mesh

NUM_STAGES, WIDTH = 4, 4
SCHEDULES: list[Schedule] = [Interleaved1F1B(2), ZeroBubble(2), ZeroBubbleV(), LoopedBFS(2)]
"""Schedules of four stages on two ranks, with hops there and back, and from a stage to one of the same rank."""


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class Inner:
    mask: Tensor
    note: str = "a text"


@dataclass
class Outer:
    pair: Pair
    many: Mapping[str, list[Tensor]]
    inner: Inner | None = None
    count: int = 0
    made: str = field(init=False, default="made")


@dataclass
class Box:
    """What the first stage gets: its shapes tell microbatches apart."""

    x: Tensor


Transform = Callable[["Link", Any, Tensor], Any]


class Link(nn.Module):
    """One stage: a function of what it gets, and weights, of which it uses the first or all."""

    def __init__(self, index: int, transform: Transform, device: torch.device) -> None:
        super().__init__()
        self.index, self.transform = index, transform
        values = (torch.linspace(0.5, 1.5, WIDTH) + 0.1 * index).to(device, torch.float64)
        self.weight, self.more = nn.Parameter(values), nn.Parameter(values.sin())
        self.square = nn.Parameter(values.outer(values).cos())

    def forward(self, *received: Any, scale: Tensor, box: Box | None = None, **named: Any) -> Any:
        if box is not None:
            named = {"x": box.x}
        return self.transform(self, received[0] if received else named, scale)


# One function a case: what stage `link.index` makes of what it gets. The first gets {"x": [rows, length, WIDTH]}, the
# last one puts out a tensor of any shape.


def nested(link: Link, got: Any, scale: Tensor) -> Any:
    """A dataclass of everything, of which parts are None for microbatches of odd length."""
    if link.index == 0:
        x = got["x"] * link.weight
        odd = x.shape[1] % 2 == 1
        inner = None if odd else Inner(x.detach() > 0)
        return Outer(
            Pair(x, None if odd else x.sin()), OrderedDict(a=[x.cos(), x.exp()], b=[]), inner, count=x.shape[1]
        )
    assert isinstance(got, Outer)
    assert isinstance(got.pair, Pair)
    assert got.made == "made"
    assert got.count == got.pair.left.shape[1]
    assert (got.inner is None) == (got.pair.right is None) == (got.count % 2 == 1)
    assert link.index > 1 or type(got.many) is OrderedDict
    left, (cosine, exponential) = got.pair.left * link.weight * scale, got.many["a"]
    if got.inner is not None:
        assert got.inner.note == "a text"
        assert got.pair.right is not None
        left = torch.where(got.inner.mask, left, got.pair.right)
    if link.index < 3:
        return replace(got, pair=got.pair._replace(left=left), many=defaultdict(list, a=[cosine * left, exponential]))
    return left * cosine + exponential


def dtypes(link: Link, got: Any, scale: Tensor) -> Any:
    """Each tensor keeps its dtype; some have no elements or no dim."""
    if link.index == 0:
        x = got["x"] * link.weight
        ids = torch.arange(x.shape[1], device=x.device)
        return {
            "x": x,
            "single": x.to(torch.float32),
            "half": x.to(torch.bfloat16),
            "ids": ids,
            "short": ids.to(torch.int32),
            "even": ids % 2 == 0,
            "number": ids.sum(),
            "empty": x[:, :0],
            "scalar": x.mean(),
        }
    kinds = [got[name].dtype for name in ("single", "half", "ids", "short", "even", "number")]
    assert kinds == [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.int64]
    assert got["empty"].shape == (got["x"].shape[0], 0, WIDTH)
    assert got["number"].shape == got["scalar"].shape == ()
    x = got["x"] * link.weight + got["empty"].sum() + got["scalar"] * got["number"] + got["single"] + got["half"]
    x = x + (got["ids"] + got["short"] * got["even"]).unsqueeze(-1)
    return got | {"x": x} if link.index < 3 else x


def strided(link: Link, got: Any, scale: Tensor) -> Any:
    """Outputs that are views: transposed, expanded, every other element."""
    x, every_other, expanded = (got["x"], 0.0, 0.0) if link.index == 0 else got
    x = (x if link.index == 0 else x.transpose(1, 2)) * link.weight * scale + every_other + expanded
    if link.index == 3:
        return x
    return x.transpose(1, 2), torch.cat([x, x], -1)[..., ::2], x.mean(1, keepdim=True).expand(x.shape)


def twice(link: Link, got: Any, scale: Tensor) -> Any:
    """One tensor at three places, once as a view."""
    x = got["x"] if link.index == 0 else got[0] * scale + got[1]["again"].sin() + got[1]["view"].view(got[0].shape)
    x = x * link.weight
    return (x, {"again": x, "view": x.view(-1)}) if link.index < 3 else x


def passed_through(link: Link, got: Any, scale: Tensor) -> Any:
    """What comes in goes out as it is, beside something new and a view of it."""
    if link.index == 0:
        got = {"first": got["x"] * link.weight, "x": got["x"] * 2, "view": got["x"]}
    x = got["x"] * link.weight + got["first"] + got["view"]
    return {"first": got["first"], "x": x, "view": got["first"][:, :, :]} if link.index < 3 else x


def unused(link: Link, got: Any, scale: Tensor) -> Any:
    """Outputs of which nobody makes anything."""
    x = got["x"] * link.weight
    return {"x": x, "unused": x.sin(), "unused_too": link.weight * 2} if link.index < 3 else x


def cut_off(link: Link, got: Any, scale: Tensor) -> Any:
    """The third stage lets no gradient through, so the stages before it get none."""
    x = (got["x"] if link.index == 0 else got).detach() if link.index == 2 else got["x"] if link.index == 0 else got
    x = x * link.weight
    return x


def weightless(link: Link, got: Any, scale: Tensor) -> Any:
    """Stages that have parameters and use none, and one that hands on what it gets."""
    x = got["x"] if link.index == 0 else got
    return [x * scale, x, x.sin() * link.weight, x][link.index]


def one_memory(link: Link, got: Any, scale: Tensor) -> Any:
    """Autograd gives the weights, the input and the product views of one tensor as their gradients."""
    x = (got["x"] if link.index == 0 else got).view(1, WIDTH)
    weights = link.weight.view(1, WIDTH) + link.more.view(1, WIDTH)
    return (linear(x.sin(), link.square) + x + weights).view(1, 1, WIDTH) * scale


CASES = [nested, dtypes, strided, twice, passed_through, unused, cut_off, weightless]


class Hooks:
    """The microbatch's rows into the first stage, a scale for all; the loss is a sum of squares."""

    def microbatch_inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        return StageInputs(first={"box": Box(microbatch["x"])}, shared={"scale": microbatch["scale"]})

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> WeightedLoss:
        return WeightedLoss(output.square().sum(), torch.ones((), device=output.device))

    def microbatch_metrics(self, output: Tensor, microbatch: Any) -> dict[str, Tensor | WeightedLoss]:
        return {}


def batch(shapes: Sequence[tuple[int, int]], device: torch.device) -> SplitBatch:
    """A microbatch for each (rows, length)."""
    generator = torch.Generator().manual_seed(len(shapes))
    made = []
    for rows, length in shapes:
        x, scale = torch.randn(rows, length, WIDTH, generator=generator), torch.tensor(0.9)
        made.append({key: value.to(device, torch.float64) for key, value in {"x": x, "scale": scale}.items()})
    return SplitBatch(made, [rows for rows, _ in shapes])


STEPS = [
    [(2, 3)] * 4,
    [(2, 3), (1, 4), (2, 3), (3, 2), (1, 4)],
    [(1, 1), (2, 3), (1, 4), (2, 5)],
    [(2, 3)] * 4,
]
"""Rows and lengths of the microbatches of each step: some were seen before, some are new."""


class Chain:
    """This rank's links of a chain of four, and the whole chain of one process in float64."""

    def __init__(self, rank: RankContext, pipeline: Pipeline, transform: Transform, frozen: Sequence[int] = ()) -> None:
        self.device = rank.device
        self.pipeline = pipeline
        self.links = {info.index: Link(info.index, transform, rank.device) for info in pipeline.stages}
        self.whole = nn.ModuleList(Link(index, transform, rank.device).double() for index in range(NUM_STAGES))
        for index, link in [*self.links.items(), *enumerate(self.whole)]:
            link.requires_grad_(index not in frozen)
        self.executor = Executor(self.links, NUM_STAGES, Hooks(), nullcontext, pipeline.messages)

    def check(self, shapes: Sequence[tuple[int, int]]) -> None:
        cut = batch(shapes, self.device)
        total = torch.zeros((), device=self.device)
        gradients = {name: torch.zeros_like(p) for name, p in self.whole.named_parameters()}
        for link in self.links.values():
            link.zero_grad()
        for each in cut.microbatches:
            value: Any = {"box": Box(each["x"].double())}
            for link in self.whole:
                named = dict(value) if isinstance(value, Mapping) else {}
                value = link(*([] if named else [value]), **named, scale=each["scale"].double())
            loss = Hooks().microbatch_loss(value, each).value_sum
            trained = {name: p for name, p in self.whole.named_parameters() if p.requires_grad}
            for name, part in zip(
                trained, torch.autograd.grad(loss, [*trained.values()], allow_unused=True), strict=True
            ):
                if part is not None:  # not by `backward`: that would add to gradients that are one memory
                    gradients[name] = gradients[name] + part
            total = total + loss.detach()
        with torch.no_grad():
            evaluated = self.executor.evaluate(self.pipeline.forward_only(len(shapes)), cut)
        totals = self.executor.train(self.pipeline.program(len(shapes)), cut, LossScale())
        for each in (evaluated, totals):
            assert (each.loss is not None) == (self.pipeline.rank == self.pipeline.last_rank)
            if each.loss is not None:
                count = len(shapes)
                assert_close_named("loss", each.loss[0] / count, total / count, kind=Kind.LOSS)
        ours = {f"{i}.{name}": p for i, link in self.links.items() for name, p in link.named_parameters()}
        for parameter in ours.values():
            if parameter.grad is None:  # its stage's output was not used
                parameter.grad = torch.zeros_like(parameter)
            assert parameter.requires_grad or not parameter.grad.any()
        assert_tensors_close({name: p.grad for name, p in ours.items()}, {name: gradients[name] for name in ours})


@pytest.mark.ranks(2)
def test_trees_of_every_form_go_from_stage_to_stage(rank: RankContext) -> None:
    with pipeline_mesh(rank) as mesh:
        for schedule in SCHEDULES[::2]:  # the others have the same hops
            pipeline = Pipeline(schedule, mesh, rank.device)
            for transform in CASES:
                chain = Chain(rank, pipeline, transform)
                assert pipeline.messages is not None
                pipeline.messages.forget()
                for shapes in STEPS:
                    try:
                        chain.check(shapes)
                    except BaseException as error:
                        error.add_note(f"{transform.__name__}, {type(schedule).__name__}, {shapes}")
                        raise


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(slice(0, None, 2), id="some"),
        pytest.param(slice(1, None, 2), marks=pytest.mark.meshes, id="others"),  # of the same hops and backwards
    ],
)
def test_any_stages_may_be_frozen_and_thawed_between_epochs(rank: RankContext, schedules: slice) -> None:
    with pipeline_mesh(rank) as mesh:
        for schedule in SCHEDULES[schedules]:
            pipeline = Pipeline(schedule, mesh, rank.device)
            for frozen in ([0], [1], [3], [0, 1], [1, 2], [0, 3], [0, 1, 2], [1, 2, 3], []):
                pipeline.begin_epoch()
                chain = Chain(rank, pipeline, passed_through, frozen)
                for shapes in STEPS[:2]:
                    chain.check(shapes)


def test_gradients_in_one_memory_stay_apart() -> None:
    """What waits for the stage before is not what the next microbatch's gradient is added to."""
    rank = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", tmp_dir=Path())
    for schedule in (LoopedBFS(NUM_STAGES), Interleaved1F1B(NUM_STAGES), ZeroBubble(NUM_STAGES)):
        Chain(rank, Pipeline(schedule, None, rank.device), one_memory).check([(1, 1)] * 6)


@pytest.mark.ranks(2)
def test_a_layout_travels_once(rank: RankContext) -> None:
    """Two messages before the first of each shape, and again after `begin_epoch`."""
    with pipeline_mesh(rank) as mesh:
        pipeline = Pipeline(GPipe(), mesh, rank.device)
        messages, (info,) = pipeline.messages, pipeline.stages
        assert messages is not None
        link = Link(info.index, nested, rank.device)
        executor = Executor({info.index: link}, 2, Mean(), nullcontext, messages)
        for headers, shapes in (
            (1, [(2, 3)] * 4),
            (0, [(2, 3)] * 4),
            (2, [(2, 4), (2, 3), (1, 3), (2, 4)]),
            (0, [(1, 3), (2, 4)]),
        ):
            before = messages.num_calls
            executor.train(pipeline.program(len(shapes)), batch(shapes, rank.device), LossScale())
            odd = sum(length % 2 for _, length in shapes)
            outputs, gradients = 5 * len(shapes) - 2 * odd, 4 * len(shapes) - odd
            assert messages.num_calls - before == 2 * headers + outputs + gradients
        pipeline.begin_epoch()
        before = messages.num_calls
        executor.train(pipeline.program(1), batch([(2, 3)], rank.device), LossScale())
        assert messages.num_calls - before == 2 + 3 + 3


class Mean(Hooks):
    """The loss of a tree."""

    def microbatch_loss(self, output: Any, microbatch: Any) -> WeightedLoss:
        return super().microbatch_loss(output.pair.left * output.many["a"][0], microbatch)


class Hidden:
    """No tree."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class NoInputs(Hooks):
    def microbatch_inputs(self, microbatch: Any) -> Any:
        return {"x": microbatch["x"]}


def distributed(link: Link, got: Any, scale: Tensor) -> Any:
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, got["x"].device.type)
    return DTensor.from_local(got["x"] * link.weight, mesh, [Replicate()], run_check=False)


def hidden(link: Link, got: Any, scale: Tensor) -> Any:
    return [Hidden(got["x"] * link.weight)]


def elsewhere(link: Link, got: Any, scale: Tensor) -> Any:
    return (got["x"] * link.weight).to("meta")


def numbered(link: Link, got: Any, scale: Tensor) -> Any:
    """The mean of each microbatch as a number."""
    return got["x"] * link.weight, [float(got["x"].mean())]


def selected(link: Link, got: Any, scale: Tensor) -> Any:
    """Return as many rows as have a positive sum."""
    x = got["x"] * link.weight
    return x[0, x[0].sum(-1) > 0]


REFUSED: list[tuple[Transform, Hooks, str]] = [
    (distributed, Hooks(), r"stage 0 returned a DTensor placed \(Replicate\(\),\); .*to_local"),
    (hidden, Hooks(), "stage 0 returned a Hidden; return tensors and plain values"),
    (elsewhere, Hooks(), "stage 0 returned a tensor on meta; move it to"),
    (nested, NoInputs(), r"microbatch_inputs returned dict; return StageInputs"),
    (
        numbered,
        Hooks(),
        r"stage 0 returned \((\w+)\[1, 6, 4\] with gradient, (\S+)\) .* after \(\1\[1, 6, 4\] .*, (?!\2)",
    ),
    (selected, Hooks(), r"stage 0 returned \(.*\) for a microbatch, after \(.*\) for one of the same shapes"),
]


@pytest.mark.ranks(2, timeout_seconds=20, record=False)
def test_what_cannot_be_handed_over_is_refused_where_it_is_made(rank: RankContext) -> None:
    """The first rank refuses it. The second does not take what was sent before, and nothing of it reaches the next
    run."""
    for transform, hooks, text in REFUSED:
        with pipeline_mesh(rank) as mesh:
            pipeline = Pipeline(GPipe(), mesh, rank.device)
            assert pipeline.messages is not None
            cut = batch([(1, 6)] * 4, rank.device)
            if rank.rank == 0:
                executor = Executor({0: Link(0, transform, rank.device)}, 2, hooks, nullcontext, pipeline.messages)
                with pytest.raises(ConfigError, match=text) as caught:
                    executor.train(pipeline.program(4), cut, LossScale())
                assert "of stage 0, microbatch" in caught.value.__notes__[-1]
                assert not executor.stages[0]._live
                assert not pipeline.messages._sent
