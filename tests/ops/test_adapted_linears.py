"""Frozen linear layers of one input with adapters: the same as separate products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_d9d.ops import adapted_linears
from lightning_d9d.ops.adapted_linears import MOST_LAYERS
from tests.harness.compare import assert_tensors_close
from tests.ops.grid import DEVICES, LAYOUTS, check_op, dtypes

IN, WIDTHS, RANKS, SCALES = 24, (40, 8, 16), (3, 1, 8), (0.7, 2.0, 1.0)


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def inputs(num_layers: int, *shape: int) -> dict[str, Tensor]:
    tensors = {"x": noise(*shape, IN)}
    for i, (width, rank) in enumerate(zip(WIDTHS[:num_layers], RANKS, strict=False)):
        tensors[f"weight{i}"] = noise(width, IN, scale=0.2)
        tensors[f"a{i}"], tensors[f"b{i}"] = noise(rank, IN, scale=0.2), noise(width, rank, scale=rank**-0.5)
    return tensors


def joined(x: Tensor, **matrices: Tensor) -> tuple[Tensor, ...]:
    weights, a, b = ([each for name, each in matrices.items() if name[:-1] == kind] for kind in ("weight", "a", "b"))
    return adapted_linears(x, weights, a, b, SCALES[: len(weights)])


def separate(x: Tensor, **matrices: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        x @ matrices[f"weight{i}"].T + scale * ((x @ matrices[f"a{i}"].T) @ matrices[f"b{i}"].T)
        for i, scale in enumerate(SCALES[: len(matrices) // 3])
    )


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("num_layers", range(1, MOST_LAYERS + 1))
def test_results_and_gradients(num_layers: int, layout: str, device: str) -> None:
    for shape in ((2, 5), (0,), (1,)):
        tensors = inputs(num_layers, *shape)
        trained = [name for name in tensors if "weight" not in name]
        for dtype in dtypes(device):
            check_op(joined, separate, tensors, dtype, device, layout=layout, gradients_of=trained)


@DEVICES
def test_results_that_nothing_reads(device: str) -> None:
    tensors = inputs(2, 5)
    for trained in (["x"], ["a0", "b1"]):
        check_op(
            lambda **tensors: joined(**tensors)[1],
            lambda **tensors: separate(**tensors)[1],
            tensors,
            torch.float32,
            device,
            gradients_of=[name for name in trained if not name.endswith("0")],
        )
    leaves = {name: tensor.to(device).requires_grad_("weight" not in name) for name, tensor in tensors.items()}
    joined(**leaves)[1].sum().backward()
    assert not leaves["a0"].grad.any()
    assert not leaves["b0"].grad.any()
    assert leaves["a1"].grad.any()


@DEVICES
@pytest.mark.parametrize("num_layers", range(1, MOST_LAYERS + 1))
def test_the_operator_is_what_torch_takes_it_for(num_layers: int, device: str) -> None:
    tensors = {name: each.to(device) for name, each in inputs(num_layers, 5).items()}
    a = torch.cat([each for name, each in tensors.items() if name[0] == "a"])
    pairs = [each for name, each in tensors.items() if name[0] in "wb"]
    trained = [each.requires_grad_(place % 2 == 1) for place, each in enumerate(pairs)]
    absent = [None] * 2 * (MOST_LAYERS - num_layers)
    arguments = (tensors["x"].requires_grad_(), a.requires_grad_(), *trained, *absent, [*SCALES[:num_layers]])
    torch.library.opcheck(torch.ops.lightning_d9d.adapted_linears.default, arguments)


@DEVICES
def test_compiled_whole(device: str) -> None:
    """A GPU may take another product: what a compiled backward gets from a sum has other strides."""
    tensors = {name: each.to(device) for name, each in inputs(3, 5).items()}
    results = []
    for function in (torch.compile(joined, backend="aot_eager", fullgraph=True), joined):
        leaves = {name: tensor.detach().requires_grad_("weight" not in name) for name, tensor in tensors.items()}
        ys = function(**leaves)
        trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
        results.append([*ys, *torch.autograd.grad(sum(y.sum() for y in ys), trained)])
    ours, theirs = ({str(place): each for place, each in enumerate(all_of)} for all_of in results)
    assert_tensors_close(ours, theirs)
