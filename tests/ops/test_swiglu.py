"""`swiglu` on its kernels (Triton's interpreter without a GPU) and on torch's."""

from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import swiglu
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.swiglu import swiglu_reference
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.ops.grid import DEVICES, LAYOUTS, check_op, dtypes

SHAPES = [(40, 1), (5, 33), (3, 2, 8), (9, 515)]
ARGUMENTS = ["gate", "up", "weights"]


def inputs(*shape: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    gate, up = (torch.randn(*shape, generator=generator) * 3 for _ in range(2))
    return {"gate": gate, "up": up, "weights": torch.rand(*shape[:-1], generator=generator)}


def apart(gate, up, weights=None):
    return swiglu((gate, up), weights)


def apart_reference(gate, up, weights=None):
    return swiglu_reference((gate, up), weights)


def check(tensors, dtype, device, *, forms=(True, False), **options):
    """Check the op in one piece and in two, with weights and without. `gradients_of` names gate and up separately."""
    names = options.pop("gradients_of", ARGUMENTS)
    fused_names = [name for name in names if name == "weights"] + (["gate_up"] if {"gate", "up"} & {*names} else [])
    gate_up = torch.cat([tensors["gate"], tensors["up"]], -1)
    for has_weights in forms:
        weights = {"weights": tensors["weights"]} if has_weights else {}
        present = [name for name in names if weights or name != "weights"]
        pair = {"gate": tensors["gate"], "up": tensors["up"], **weights}
        check_op(apart, apart_reference, pair, dtype, device, gradients_of=present, **options)
        present = [name for name in fused_names if weights or name != "weights"]
        check_op(
            swiglu, swiglu_reference, {"gate_up": gate_up, **weights}, dtype, device, gradients_of=present, **options
        )


@DEVICES
def test_every_shape_and_dtype(device):
    for shape, dtype in product(SHAPES, dtypes(device)):
        check(inputs(*shape), dtype, device)


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device, layout):
    check(inputs(7, 3, 24), torch.float32, device, layout=layout)


@DEVICES
def test_every_gradient_alone_and_together(device):
    for names in [[*names] for n in range(4) for names in combinations(ARGUMENTS, n)]:
        check(inputs(9, 300), torch.float16, device, gradients_of=names, forms=[True])


@DEVICES
def test_weights_may_be_wider(device):
    check(inputs(9, 48), torch.float16, device, wide=["weights"])


@DEVICES
def test_padding_stays_where_it_is(device):
    tensors = {name: tensor.to(device) for name, tensor in inputs(6, 16).items()}
    whole = {name: torch.cat([tensor, torch.full_like(tensor[:2], torch.nan)]) for name, tensor in tensors.items()}
    results = []
    with using_kernels("triton"):
        for arguments in (tensors, whole):
            leaves = [tensor.requires_grad_() for tensor in arguments.values()]
            y = swiglu((leaves[0], leaves[1]), leaves[2])
            results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for alone, padded in zip(*results, strict=True):
        assert_bitwise_equal("rows before the padding", padded[:6], alone)


@DEVICES
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter
def test_large_gates(device):
    gate = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]], device=device, requires_grad=True)
    with using_kernels("triton"):
        y = swiglu((gate, torch.ones_like(gate)))
        y.sum().backward()
    assert y.tolist() == [[0, 0, 0, 200, 1e4]]
    assert gate.grad.tolist() == [[0, 0, 0.5, 1, 1]]


@DEVICES
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (3, 0)])
def test_nothing_to_activate(device, shape):
    with using_kernels("triton"):
        gate_up = torch.randn(shape, device=device, requires_grad=True)
        weights = torch.randn(shape[:-1], device=device, requires_grad=True)
        y = swiglu(gate_up, weights)
        y.sum().backward()
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert gate_up.grad.shape == gate_up.shape
    assert_bitwise_equal("weights", weights.grad, torch.zeros_like(weights))


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    gate_up = torch.randn(2**31 // 4096 + 5, 4096, device="cuda", dtype=torch.bfloat16)
    assert_bitwise_equal("last rows", swiglu(gate_up)[-5:], swiglu(gate_up[-5:]))


def test_other_dtypes_run_on_torch():
    tensors = {name: tensor.double() for name, tensor in inputs(3, 8).items()}
    expected = tensors["gate"] * tensors["gate"].sigmoid() * tensors["up"] * tensors["weights"][:, None]
    with using_kernels("triton"):
        assert_close_named("float64", apart(**tensors), expected)
        mixed = swiglu((tensors["gate"].half(), tensors["up"].float()))
    assert_bitwise_equal("two dtypes", mixed, F.silu(tensors["gate"].half()) * tensors["up"].float())


def test_shapes_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"gate_up \[2, 7\] must have an even last dim"):
        swiglu(torch.ones(2, 7))
    with pytest.raises(ConfigError, match=r"gate \[2, 7\] and up \[1, 7\] must have one shape"):
        swiglu((torch.ones(2, 7), torch.ones(1, 7)))
    with pytest.raises(ConfigError, match=r"weights \[3\] must have one number for each row of \[2, 8\]"):
        swiglu(torch.ones(2, 8), torch.ones(3))


@DEVICES
def test_the_operators_are_what_torch_takes_them_for(device):
    gate, up, weights = (t.to(device).requires_grad_() for t in inputs(3, 2, 8).values())
    ops = torch.ops.lightning_d9d
    torch.library.opcheck(ops.swiglu.default, (gate, up, weights))
    torch.library.opcheck(ops.swiglu.default, (gate, None, None), test_utils=("test_schema", "test_faketensor"))
    backward = (up.detach(), gate.detach(), up.detach(), weights.detach(), True, False, True)
    torch.library.opcheck(ops.swiglu_backward.default, backward, test_utils=("test_schema", "test_faketensor"))


@DEVICES
def test_compiled_whole(device):
    leaves = [t.to(device).requires_grad_() for t in inputs(5, 16).values()]
    results = []
    with using_kernels("triton"):
        for op in (torch.compile(apart, backend="aot_eager", fullgraph=True), apart):
            y = op(*leaves)
            results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise_equal("compiled", ours, theirs)
