"""Muon: Newton-Schulz over the experts of a layer, a whole step, and its share of a training step.

The target is 1.25 of the time of the products alone, by `torch.bmm` at the same shapes. Two other forms do the same
with fewer operations: one iterates on Gram matrices, the other computes the lower blocks of symmetric matrices alone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.optim import MuonAdamW, StochasticAdamW
from lightning_d9d.optim.muon import _COEFFICIENTS, _ITERATIONS, orthogonalized
from tests.benchmarks import __main__ as main
from tests.benchmarks import frame, ops
from tests.benchmarks.adamw_cases import shapes_of_layer
from tests.benchmarks.frame import Case, Contender
from tests.benchmarks.op_case import QUICK, Inputs, OpCase, Sizes
from tests.benchmarks.op_case import Work as OpWork
from tests.benchmarks.train_step import QUICK as QUICK_STEP
from tests.benchmarks.train_step import OwnLoop, Work

PRODUCTS, GRAM, BLOCKS = "products", "Gram form", "lower blocks"
MOST_OF_PRODUCTS = 1.25
ADAMW, MUON = "StochasticAdamW", "MuonAdamW"
_PHASES = (3, 2)
"""Iterations of the Gram form on one Gram matrix; in bfloat16 five on one diverge."""
_NUM_BLOCKS = 3
_RANKS = (1, 2, 8)
_LAYERS = 4


def cases(device_type: str, quick: bool) -> list[OpCase | Case]:
    """Experts of a layer of `30b-a3b`, its whole step, and training steps of four such layers; or tiny ones."""
    is_small = quick or device_type == "cpu"
    sizes = QUICK if is_small else Sizes()
    return [
        _newton_schulz("newton_schulz, gate and up", sizes, (sizes.experts, 2, sizes.width, sizes.hidden), quick),
        _newton_schulz("newton_schulz, down", sizes, (sizes.experts, sizes.hidden, sizes.width), quick),
        _step(sizes, quick),
        _share(is_small),
    ]


def flops(shape: Sequence[int]) -> int:
    """Return the operations of Newton-Schulz over a stack of matrices."""
    rows, columns = sorted(shape[-2:])
    return math.prod(shape[:-2]) * _ITERATIONS * (4 * rows**2 * columns + 2 * rows**3)


def flops_of_gram_form(shape: Sequence[int]) -> int:
    """Return those of the Gram form: per phase a Gram matrix and its use, and square products between."""
    rows, columns = sorted(shape[-2:])
    squares = sum(iterations + (iterations - 1) + 2 * (iterations - 1) for iterations in _PHASES)
    return math.prod(shape[:-2]) * (len(_PHASES) * 4 * rows**2 * columns + squares * 2 * rows**3)


def _newton_schulz(name: str, sizes: Sizes, shape: tuple[int, ...], quick: bool) -> OpCase:
    peers: dict[str, Callable[..., Any]] = {
        PRODUCTS: lambda matrices: products([matrices]),
        GRAM: by_gram_matrices,
        BLOCKS: by_lower_blocks,
    }
    work = flops(shape)
    return OpCase(
        name=name,
        dtype=sizes.dtype,
        inputs=lambda make: {"matrices": make.fixed(*shape)},
        ours=orthogonalized,
        peers=peers,
        limits={PRODUCTS: MOST_OF_PRODUCTS},
        work={"forward": OpWork(flops=work)},
        graphed=False,
        repeats=2 if quick else 20,
        note=f"{work / 1e12:.2f} TFLOP, in Gram form {flops_of_gram_form(shape) / 1e12:.2f}",
    )


def _step(sizes: Sizes, quick: bool) -> OpCase:
    shapes = shapes_of_layer(sizes)
    work = sum(flops(shape) for shape in _matrices(shapes))

    def inputs(make: Inputs) -> dict[str, Any]:
        parameters = [nn.Parameter(make.fixed(*shape).mul_(0.02)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = make.fixed(*parameter.shape)
        return {"optimizer": muon(parameters), "shapes": _matrices(shapes), "like": parameters[0].detach()}

    def by_products(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]], like: Tensor) -> None:
        products([like.new_empty(shape) for shape in shapes])

    return OpCase(
        name="MuonAdamW.step, a layer",
        dtype=sizes.dtype,
        inputs=inputs,
        ours=lambda optimizer, shapes, like: optimizer.step(),
        kernels="auto",
        peers={PRODUCTS: by_products},
        limits={PRODUCTS: MOST_OF_PRODUCTS},
        work={"forward": OpWork(flops=work)},
        shares_inputs=True,
        graphed=False,
        repeats=2 if quick else 20,
        note=f"{work / 1e12:.2f} TFLOP, {sum(map(math.prod, shapes)) / 1e6:.0f} M parameters",
    )


def muon(parameters: Sequence[nn.Parameter], **options: Any) -> MuonAdamW:
    """Return the optimizer, which knows gate and up by their shape: stacks of wide matrices."""
    halves = [each for each in parameters if each.ndim == 3 and each.shape[-2] <= each.shape[-1]]
    others = [each for each in parameters if all(each is not half for half in halves)]
    words = [each for each in others if each.ndim == 2 and each.shape[0] >= 100_000]
    rest = [each for each in others if all(each is not word for word in words)]
    groups = [{"params": halves, "num_parts": 2}, {"params": rest}, {"params": words, "matrices": False}]
    return MuonAdamW([group for group in groups if group["params"]], **{"lr": 1e-4, **options})


def _matrices(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Split gate from up."""
    found = []
    for shape in shapes:
        if len(shape) == 3 and shape[-2] <= shape[-1]:
            shape = (shape[0], 2, shape[1] // 2, shape[2])
        found += [shape] if len(shape) > 1 else []
    return found


def products(matrices: Sequence[Tensor]) -> None:
    """Compute the three products of each iteration, with nothing between."""
    for each in matrices:
        rows, columns = sorted(each.shape[-2:])
        x = each.reshape(-1, rows, columns)
        gram, square, out = x.new_empty(len(x), rows, rows), x.new_empty(len(x), rows, rows), torch.empty_like(x)
        for _ in range(_ITERATIONS):
            torch.bmm(x, x.mT, out=gram)
            torch.bmm(gram, gram, out=square)
            torch.bmm(square, x, out=out)


def by_gram_matrices(matrices: Tensor) -> Tensor:
    """Iterate on Gram matrices, and multiply the matrices by what comes of it, once in each phase."""

    def iterate(y: Tensor, shift: float, rest: float) -> Tensor:
        for iterations in _PHASES:
            gram, whole = y @ y.mT, None
            for iteration in range(iterations):
                shifted = gram.clone()
                _diagonal(shifted).add_(shift)
                step = shifted @ shifted
                _diagonal(step).add_(rest)
                whole = step if whole is None else step @ whole
                if iteration < iterations - 1:
                    gram = step @ gram @ step
            assert whole is not None
            y = whole @ y
        return y

    return _normalised(matrices, iterate)


def by_lower_blocks(matrices: Tensor) -> Tensor:
    """Compute the blocks on and below the diagonal of symmetric matrices, and copy the others."""

    def iterate(y: Tensor, shift: float, rest: float) -> Tensor:
        for _ in range(_ITERATIONS):
            gram = _symmetric(y, y)
            _diagonal(gram).add_(shift)
            step = _symmetric(gram, gram)
            _diagonal(step).add_(rest)
            y = step @ y
        return y

    return _normalised(matrices, iterate)


def _symmetric(left: Tensor, right: Tensor) -> Tensor:
    rows = left.shape[-2]
    out = left.new_empty(len(left), rows, rows)
    size = -(-rows // _NUM_BLOCKS)
    for begin in range(0, rows, size):
        for other in range(0, begin + 1, size):
            block = out[:, begin : begin + size, other : other + size]
            torch.bmm(left[:, begin : begin + size], right[:, other : other + size].mT, out=block)
            if other < begin:
                out[:, other : other + size, begin : begin + size].copy_(block.mT)
    return out


def _normalised(matrices: Tensor, iterate: Callable[[Tensor, float, float], Tensor]) -> Tensor:
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    y = x * (c**0.25 / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7))
    y = iterate(y.reshape(-1, *y.shape[-2:]), b / (2 * math.sqrt(c)), a - b * b / (4 * c)) * c**-0.25
    y = y.view(*matrices.shape[:-2], *y.shape[-2:])
    return y.mT if is_tall else y


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1)


def _share(is_small: bool) -> Case:
    work = QUICK_STEP
    if not is_small:
        config = dataclasses.replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=_LAYERS)
        work = Work(config=config, dtype=torch.bfloat16, num_rows=4, sequence_length=4096)
    return Case(
        name="share of a training step",
        contenders={ADAMW: partial(_Loop, work, _adamw), MUON: partial(_Loop, work, muon)},
        peer=ADAMW,
        afterwards=of_optimizers,
        conditions=work.conditions(),
        warmup_steps=2,
        block_steps=1 if is_small else 2,
        repeats=2 if is_small else 6,
    )


def _adamw(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return StochasticAdamW(parameters, lr=1e-4, state_dtype=torch.bfloat16)


class _Loop(OwnLoop):
    """Training with an optimizer."""

    def __init__(self, work: Work, make: Callable[[Sequence[nn.Parameter]], Optimizer], device: torch.device) -> None:
        network = work.network(device)
        super().__init__(work, network, make(list(network.parameters())), device)


def of_optimizers(contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """Time optimizer steps by themselves, with gradients as weights are."""
    found = {}
    for name, loop in contenders.items():
        assert isinstance(loop, _Loop)
        for parameter in loop.network.parameters():
            parameter.grad = parameter.detach().clone()
        seconds = []
        for _ in range(4):
            frame.synchronize(device)
            begin = time.perf_counter()
            loop.optimizer.step()
            frame.synchronize(device)
            seconds.append(time.perf_counter() - begin)
        loop.optimizer.zero_grad()
        found[name] = {"optimizer_seconds": sorted(seconds)[1]}
    return found


def run_case(case: OpCase | Case, device_type: str) -> dict[str, Any]:
    """Run a case of either kind."""
    return ops.run_case(case, device_type) if isinstance(case, OpCase) else frame.run_case(case, device_type)


def table(result: dict[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown; shares for more ranks by arithmetic, as each computes its own experts."""
    if "passes" in result:
        return ops.table(result, device_type)
    lines = [main.table(result, device_type)]
    for name, values in result["contenders"].items():
        step, update = values["median_seconds"], values["optimizer_seconds"]
        shares = [f"{update / num / (step - update + update / num):.1%} on {num}" for num in _RANKS]
        lines.append(
            f"{name}: the update takes {1e3 * update:.1f} ms of {1e3 * step:.1f}; its share, by number of ranks"
        )
        lines[-1] += f" over which experts are spread: {', '.join(shares)}"
    return "\n".join(lines)


def verdicts(result: dict[str, Any]) -> list[str | None]:
    """Return the verdicts of all targets of a case."""
    return [*ops.verdicts(result)] if "passes" in result else main.verdicts(result)


def write(result: dict[str, Any], directory: Path, device_type: str) -> None:
    """Append the table to a file."""
    with (directory / "muon.md").open("a") as file:
        file.write(table(result, device_type) + "\n")
