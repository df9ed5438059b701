"""What a rank keeps while a program runs, action by action, and when it tells data parallelism what."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_d9d.pipeline import transfer
from lightning_d9d.pipeline.executor import Executor, LossScale, SplitBatch, _Run
from lightning_d9d.pipeline.types import StageInputs
from lightning_d9d.schedule import (
    SCHEDULES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlapped,
    ReceiveBackward,
    ReceiveForward,
    SendForward,
    compute_parts,
)
from lightning_d9d.schedule.actions import COMPUTE
from tests.harness.ranks import RankContext
from tests.pipeline.layered import KINDS, Rig, cut_of, of_one_process, pipeline_mesh

NUM_MICROBATCHES = 4
"""The fewest that every schedule of two ranks takes."""
Key = tuple[int, int]
"""Stage and microbatch."""


class Saved:
    """A tensor that a graph has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watch:
    """Looks at the rank after each action."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.current: Key = (-1, -1)
        self.saved: dict[Key, weakref.WeakSet[Saved]] = defaultdict(weakref.WeakSet)
        """What graphs have saved and not let go."""
        self.graphs: set[Key] = set()
        """The microbatches whose backward has not begun."""
        self.weights: set[Key] = set()
        """The microbatches whose weight backward is still to come."""
        self.outputs: dict[Key, list[weakref.ref[Tensor]]] = {}
        """Outputs that were not sent yet, nor taken by the next stage on this rank."""
        self.given: list[weakref.ref[Tensor]] = []
        """Outputs after that."""
        self.posted: dict[type, set[Key]] = {ReceiveForward: set(), ReceiveBackward: set()}
        """Receives that nothing has used yet."""
        self.buffers: dict[Key, list[weakref.ref[Tensor]]] = {}
        """Buffers of the inputs of microbatches whose backward has not begun."""
        self.used: list[weakref.ref[Tensor]] = []
        """Buffers after that."""
        self.num_actions = 0
        for stage in rig.stages.values():
            self._wrap(stage)

    def _wrap(self, stage: nn.Module) -> None:
        run = stage.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            saved = self.saved[self.current]

            def pack(tensor: Tensor) -> Saved:
                packed = Saved(tensor)
                saved.add(packed)
                return packed

            with saved_tensors_hooks(pack, lambda packed: packed.tensor):
                output = run(*args, **kwargs)
            self.outputs[self.current] = [weakref.ref(each) for each in tree_leaves(output) if isinstance(each, Tensor)]
            return output

        stage.forward = forward

    @contextmanager
    def open(self) -> Iterator[None]:
        original = _Run.run

        def run(batch: _Run, action: Action) -> None:
            if isinstance(action, Overlapped):
                return original(batch, action)
            self.current = (action.stage, getattr(action, "microbatch", -1))
            original(batch, action)
            self._follow(action)
            self._check()
            self.num_actions += 1

        gc.disable()  # nothing may wait for it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Run, "run", run)
            yield
        gc.enable()

    def _follow(self, action: Action) -> None:
        """What the action should have changed."""
        key, messages = self.current, self.rig.pipeline.messages
        stage, microbatch = key
        match action:
            case Forward():
                self.graphs.add(key)
                self.posted[ReceiveForward].discard(key)
                self.given += self.outputs.pop((stage - 1, microbatch), [])
                if stage == len(self.rig.pipeline.placement) - 1:
                    self.given += self.outputs.pop(key)  # the loss is made
            case SendForward():
                self.given += self.outputs.pop(key)
            case Backward() | BackwardInput():
                self.graphs.remove(key)
                self.posted[ReceiveBackward].discard(key)
                self.used += self.buffers.pop(key, [])
                if isinstance(action, BackwardInput):
                    self.weights.add(key)
            case BackwardWeight():
                self.weights.remove(key)
            case ReceiveForward():
                assert messages is not None
                self.posted[ReceiveForward].add(key)
                self.buffers[key] = [weakref.ref(tensor) for tensor in messages._forward[key].tensors]
            case ReceiveBackward():
                self.posted[ReceiveBackward].add(key)

    def _check(self) -> None:
        executor, messages = self.rig.executor, self.rig.pipeline.messages
        assert {key for key, saved in self.saved.items() if len(saved)} == self.graphs
        live = {(index, microbatch) for index, stage in executor.stages.items() for microbatch in stage._live}
        assert live == self.graphs | self.weights
        for stage, microbatch in self.weights:
            kept = executor.stages[stage]._live[microbatch]
            assert not kept.edges
            assert not kept.inputs
            assert kept.weights is not None
            assert kept.weights.noted
        assert all(each() is None for each in [*self.given, *self.used])
        if messages is not None:
            assert set(messages._forward) == self.posted[ReceiveForward]
            assert set(messages._backward) == self.posted[ReceiveBackward]


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("all trained", [*SCHEDULES], marks=pytest.mark.meshes, id="all trained"),
        pytest.param("shared", [*SCHEDULES], marks=pytest.mark.meshes, id="shared, every schedule"),
        # gpipe comes first: what torch makes once and keeps, its runs make
        pytest.param("shared", ["gpipe", "interleaved_1f1b", "zero_bubble", "dual_pipe_v"], id="shared"),
    ],
)
def test_nothing_is_kept_longer_than_it_is_needed(rank: RankContext, kind: str, names: list[str]) -> None:
    """Graphs end with their backward, outputs with their send, buffers with their use, and all with the batch."""
    expected = of_one_process(kind, NUM_MICROBATCHES, rank.device)[-1]
    with pipeline_mesh(rank) as mesh:
        for name in names:
            rig = Rig(SCHEDULES[name](), mesh, rank.device, KINDS[kind])
            rig.check(NUM_MICROBATCHES, expected)
            before, watch = num_tensors(), Watch(rig)
            with watch.open():
                rig.check(NUM_MICROBATCHES, expected)
            program = rig.pipeline.program(NUM_MICROBATCHES)
            assert watch.num_actions == sum(len(compute_parts(each)) or 1 for each in program)
            assert num_tensors() <= before
            rig.close()


def test_keyword_arguments_go_with_their_last_forward() -> None:
    """A module may make a mask for each microbatch."""
    masks: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []

    class Masked:
        def microbatch_inputs(self, microbatch: Any) -> StageInputs:
            mask = torch.ones(4)
            masks.append(weakref.ref(mask))
            return StageInputs(first={"x": microbatch}, shared={"mask": mask})

        def microbatch_loss(self, output: Tensor, microbatch: Any) -> Tensor:
            num_alive.append(sum(mask() is not None for mask in masks))
            return output.sum()

        def microbatch_metrics(self, output: Tensor, microbatch: Any) -> dict[str, Any]:
            return {}

    class Product(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + mask)

    schedule = SCHEDULES["interleaved_1f1b"]()
    stages = {index: Product(4, 4) for index in range(len(schedule.placement(1)))}
    executor = Executor(stages, len(stages), Masked(), nullcontext)
    cut = SplitBatch([torch.ones(1, 4)] * 6, [1] * 6)
    executor.train(schedule.program(1, 6).ranks[0], cut, LossScale())
    assert len(stages) == 2
    assert len(masks) == len(num_alive) == 6
    assert max(num_alive) < 6


@pytest.mark.ranks(2)
def test_messages_have_left_when_train_returns(rank: RankContext) -> None:
    works: list[dist.Work] = []

    def isend(*args: Any) -> dist.Work | None:
        work = dist_isend(*args)
        assert work is not None
        works.append(work)
        return work

    dist_isend = dist.isend
    with pipeline_mesh(rank) as mesh:
        for name in SCHEDULES:
            rig = Rig(SCHEDULES[name](), mesh, rank.device, KINDS["all trained"])
            works.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transfer.dist, "isend", isend)
                rig.train(rig.pipeline.program(4), cut_of(4, rank.device))
            if rank.device.type == "cuda":
                torch.cuda.synchronize()
            assert len(works) >= 4
            assert all(work.is_completed() for work in works)
            rig.close()


class Noted:
    """Notes what data parallelism gets, and what gradients are when they are said to be there."""

    def __init__(self, rig: Rig, events: list[Any]) -> None:
        self.rig = rig
        self.events = events
        self.reduced: dict[str, Tensor] = {}

    def unshard(self, stage: int) -> None:
        self.events.append(("unshard", stage))

    def reshard(self, stage: int) -> None:
        self.events.append(("reshard", stage))

    def last_backward(self, stage: int) -> None:
        self.events.append(("last backward", stage))

    def reduce(self, stage: int) -> None:
        self.events.append(("reduce", stage))
        for name, parameter in self.rig.stages[stage].named_parameters():
            assert parameter.grad is not None
            self.reduced[name] = parameter.grad.clone()


@pytest.mark.ranks(2)
def test_data_parallelism_is_told_when_gradients_are_complete(rank: RankContext) -> None:
    """It learns this around the actions of a stage. Nothing is added to a gradient after `reduce`."""
    events: list[Any] = []
    original = _Run.run

    def run(batch: _Run, action: Action) -> None:
        if not isinstance(action, Overlapped):  # it runs two
            events.append(action)
        original(batch, action)

    with pipeline_mesh(rank) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Run, "run", run)
        for name in SCHEDULES:
            rig = Rig(SCHEDULES[name](), mesh, rank.device, KINDS["all trained"])
            rig.close()  # no buckets
            events.clear()
            noted = Noted(rig, events)
            rig.executor.train(rig.pipeline.program(4), cut_of(4, rank.device), LossScale(), noted)
            assert set(noted.reduced) == set(rig.names.values())
            for parameter, full in rig.names.items():
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, noted.reduced[full])
            splits = any(isinstance(event, BackwardInput) for event in events)
            for stage in rig.stages:
                used = [i for i, each in enumerate(events) if isinstance(each, COMPUTE) and each.stage == stage]
                unshard, reshard, reduce = (events.index((word, stage)) for word in ("unshard", "reshard", "reduce"))
                assert unshard < used[0]
                assert used[-1] < reshard < reduce
                assert events.count(("last backward", stage)) == (not splits)
                assert splits or events[used[-1] + 1] == ("last backward", stage)
