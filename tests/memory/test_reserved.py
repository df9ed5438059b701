"""What torch reserves: steps on the meta device go through the rules of its allocator, beside measured runs.

A plan has a share of fragments instead, which is less exact: docs/explanation/what-a-rank-holds-and-sends.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_d9d.memory.layers import tokens_at_once
from lightning_d9d.memory.peak import WORKSPACE
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.ops.eight_bits import scale_shape
from lightning_d9d.optim.state_dtypes import has_codes
from lightning_d9d.parallel import recompute_activations
from tests.benchmarks.plan_runs import Run, listed
from tests.benchmarks.plan_runs_job import module_of, strategy_of
from tests.memory.caching import MIB, CachingAllocator, ExpandableAllocator
from tests.memory.traced import as_on_gpu
from tests.plan.test_measured import MEASURED, planned

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "what-a-rank-holds-and-sends.md"
STEPS = 3
EXPANDABLE_64K = 32.73
"""What *sparse 64k* reserved with `expandable_segments:True` on one H100, in 10^9 bytes."""


class Allocations(TorchDispatchMode):
    """Gives each tensor that is made inside a block, and frees it with its storage."""

    def __init__(self, known: Iterable[Tensor], allocator: CachingAllocator) -> None:
        super().__init__()
        self.allocator = allocator
        self.allocated = self.most = 0
        self.on_their_way: set[int] = set()
        self._waiting: list[Any] = []
        self._alive = {each.untyped_storage()._cdata for each in known}

    def allocate(self, num_bytes: int) -> Any:
        self.allocated += num_bytes
        self.most = max(self.most, self.allocated)
        return self.allocator.allocate(num_bytes)

    def end_step(self) -> None:
        """Free the memory that a copy to or from the host has used: the host is one step ahead."""
        for block in self._waiting:
            self.allocator.free(block)
        self._waiting.clear()

    def _end(self, address: int, block: Any, num_bytes: int) -> None:
        self._alive.discard(address)
        self.allocated -= num_bytes
        if address in self.on_their_way:
            self.on_their_way.discard(address)
            self._waiting.append(block)
        else:
            self.allocator.free(block)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        workspace = self.allocate(size) if (size := _workspace(str(func), args)) else None
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and part.untyped_storage()._cdata not in self._alive:
                self._note(part.untyped_storage())
        if workspace is not None:
            self.allocated -= size
            self.allocator.free(workspace)
        return result

    def _note(self, storage: Any) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if num_bytes:
            self._alive.add(address)
            weakref.finalize(storage, self._end, address, self.allocate(num_bytes), num_bytes)


def _workspace(name: str, args: Any) -> int:
    """Return the bytes that an operator has for itself: gradients of queries in float32, or a chunk of logits."""
    if name == "lightning_d9d.attention_backward.default":
        return 4 * max(each.numel() for each in args if isinstance(each, Tensor))
    if name == "lightning_d9d.linear_cross_entropy.default":
        x, weight = args[:2]
        return 2 * tokens_at_once(x.numel() // x.shape[-1], weight.shape[1], weight.shape[0]) * weight.shape[0]
    return 0


def simulated(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: type[CachingAllocator] = CachingAllocator
) -> tuple[int, int]:
    """Return the most bytes of tensors, and the bytes that torch would reserve, over some steps of a run on one GPU."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(module_of(run, is_quick=False).config).bfloat16()
    recompute_activations(model, strategy_of(run).parallel)
    ids = torch.zeros(run.rows, run.tokens, dtype=torch.int64, device="meta")
    parameters = list(model.parameters())
    with as_on_gpu(), torch.device("meta"), Allocations([*parameters, *model.buffers(), ids], kind()) as found:
        _keep_shapes_of_inputs(monkeypatch, found)
        found.allocate(WORKSPACE)
        for each in parameters:
            found.allocate(each.nbytes)
        for step in range(STEPS):
            model(ids, labels=ids, reduction="sum").loss.backward()
            for num_bytes in _states(run, parameters) if step == 0 else ():
                found.allocate(num_bytes)
            model.zero_grad()
            found.end_step()
    return found.most, found.allocator.reserved


def _states(run: Run, parameters: Iterable[Tensor]) -> Iterator[int]:
    """Yield the bytes of the optimizer's tensors, in the order in which it makes them."""
    for each in parameters:
        in_codes = run.optimizer == "uint8" and has_codes(each, torch.uint8)
        yield 4
        yield from 2 * [each.numel() if in_codes else each.nbytes]
        yield from 2 * [math.prod(scale_shape(tuple(each.shape)))] if in_codes else []


def _keep_shapes_of_inputs(monkeypatch: pytest.MonkeyPatch, found: Allocations) -> None:
    """Replace copies to the host, which tensors without data do not have."""

    class Waiting:
        def __init__(self, tensor: Tensor, before: weakref.ref[Waiting] | None) -> None:
            self.shape, self.before, self.was_taken = tensor.shape, before, False
            self.back: Tensor | None = None
            found.on_their_way.add(tensor.untyped_storage()._cdata)

        def release(self) -> None:
            """Wait for nothing, as when the run was measured."""

        def begin(self) -> Tensor:
            if self.back is None:
                self.back = torch.empty(self.shape, dtype=torch.bfloat16, device="meta")
                found.on_their_way.add(self.back.untyped_storage()._cdata)
            return self.back

        def take(self) -> Tensor:
            back, before = self.begin(), None if self.before is None else self.before()
            if before is not None and not before.was_taken:
                before.begin()
            self.back, self.was_taken = None, True
            return back

    monkeypatch.setattr("lightning_d9d.parallel.host_inputs._Waiting", Waiting)


@pytest.mark.parametrize(
    "name",
    [
        "sparse 64k",
        "eight-bit states",
        *(
            pytest.param(name, marks=pytest.mark.meshes)
            for name in (
                *("sparse", "sparse selective", "sparse full", "sparse attention", "sparse every second"),
                *("sparse 16k", "sparse 32k", "dense full", "dense none", "dense selective"),
            )
        ),
    ],
)
def test_blocks_of_the_allocator_are_those_of_measured_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = (each for each in listed() if each.name == name)
    found = simulated(run, monkeypatch)
    expandable = simulated(run, monkeypatch, ExpandableAllocator)
    errors = [each / 1e9 / of_run - 1 for each, of_run in zip(found, MEASURED[name][:2], strict=True)]
    assert errors[0] == pytest.approx(0, abs=0.006)
    assert errors[1] == pytest.approx(0, abs=0.075 if name == "sparse 64k" else 0.04)
    errors.append(planned(name).most.reserved / 1e9 / MEASURED[name][1] - 1)
    assert expandable[0] == found[0]
    if name == "sparse 64k":
        assert expandable[1] / 1e9 == pytest.approx(EXPANDABLE_64K, rel=0.01)
    errors.append(expandable[1] / found[1] - 1)
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| *{name}* |"))
    shown = [float(cell.strip(" %")) for cell in row.split("|")[2:6]]
    assert shown == pytest.approx([100 * error for error in errors], abs=0.1)


def test_blocks_are_taken_and_joined_by_hand() -> None:
    allocator = CachingAllocator()
    large = allocator.allocate(100 * MIB + 1)
    assert allocator.reserved == 102 * MIB  # in steps of 2 MiB
    allocator.free(large)
    first, second = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    assert allocator.reserved == 102 * MIB
    allocator.free(first)
    allocator.allocate(30 * MIB)  # what is left of the segment is too small, so it takes the first place
    third = allocator.allocate(60 * MIB)
    assert allocator.reserved == (102 + 60) * MIB
    allocator.free(second)
    allocator.allocate(70 * MIB)  # of 10, 40 and 22
    assert allocator.reserved == (102 + 60) * MIB
    allocator.free(third)
    allocator.allocate(2000)
    allocator.allocate(2 * MIB)
    assert allocator.reserved == (102 + 60 + 2) * MIB  # a segment of small blocks, and a piece of the third
    allocator.allocate(61 * MIB)
    allocator.allocate(58 * MIB)
    assert allocator.reserved == (102 + 60 + 2 + 62) * MIB


def test_an_expandable_segment_grows_at_its_end_by_hand() -> None:
    allocator = ExpandableAllocator()
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB  # of 40, and 20 more for the second
    allocator.free(second)
    allocator.allocate(45 * MIB)  # of the free 30, and 20 more
    assert allocator.reserved == 80 * MIB
    allocator.free(first)
    allocator.allocate(3 * MIB)  # of the first 30, although the free end of 5 is smaller
    allocator.allocate(27 * MIB)
    allocator.allocate(5 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.allocate(2000)
    assert allocator.reserved == 82 * MIB
