"""`rms_norm` on its kernels (Triton's interpreter without a GPU) and on torch's."""

import pytest
import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import rms_norm
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.rms_norm import MAX_NORM_DIM, rms_norm_reference
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.ops.grid import DEVICES, LAYOUTS, check_op, shapes_and_dtypes

SHAPES = [(1, 1), (5, 33), (3, 2, 4, 8), (9, 1030), (2, 4099)]
"""The last but one has more tiles than the interpreter has programs."""
GRADIENTS = [names for n in range(8) if (names := [name for i, name in enumerate("xwr") if n >> i & 1])]
NAMES = {"x": "x", "w": "weight", "r": "residual"}


def inputs(*shape: int, has_residual: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    tensors = {"x": torch.randn(*shape, generator=generator), "weight": torch.randn(shape[-1], generator=generator)}
    return tensors | ({"residual": torch.randn(*shape, generator=generator)} if has_residual else {})


def check(tensors, dtype, device, **options):
    # eps is so large that the two summands of the gradient of a row of one number do not cancel
    check_op(rms_norm, rms_norm_reference, tensors, dtype, device, eps=0.25, **options)


@DEVICES
@pytest.mark.parametrize("has_residual", [False, True])
def test_every_shape_and_dtype(device, has_residual):
    for shape, dtype in shapes_and_dtypes(SHAPES, device, has_residual):
        check(inputs(*shape, has_residual=has_residual), dtype, device, zero_centered=has_residual)


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device, layout):
    for has_residual in (False, True):
        check(inputs(7, 3, 24, has_residual=has_residual), torch.float32, device, layout=layout)


@DEVICES
def test_every_gradient_alone_and_together(device):
    for names in [[], *GRADIENTS]:
        gradients_of = [NAMES[name] for name in names]
        check(inputs(33, 96, has_residual=True), torch.float32, device, gradients_of=gradients_of)
        if "r" not in names:
            check(inputs(33, 96), torch.float16, device, gradients_of=gradients_of, zero_centered=True)


@DEVICES
def test_without_eps(device):
    """The last rows of a tile may be missing."""
    for rows in (3, 129):
        check_op(rms_norm, rms_norm_reference, inputs(rows, 32), torch.float32, device, eps=0.0)


@DEVICES
def test_weight_may_be_wider(device):
    check(inputs(5, 48, has_residual=True), torch.float16, device, wide=["weight"])


@DEVICES
def test_residual_may_be_wider(device):
    with using_kernels("triton"):
        x = torch.randn(5, 16, device=device, dtype=torch.float16, requires_grad=True)
        residual = torch.randn(5, 16, device=device, requires_grad=True)
        normed, total = rms_norm(x, torch.ones(16, device=device), 1e-6, residual=residual)
        (normed * residual.detach() + total).sum().backward()
    assert_bitwise_equal("total", total, x.float() + residual)
    assert normed.dtype == torch.float32
    assert_bitwise_equal("gradient of x", x.grad, residual.grad.half())


@DEVICES
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_results(device, used):
    def one_of(x, weight, residual):
        return rms_norm(x, weight, 1e-6, residual=residual)[used]

    def one_of_reference(x, weight, residual):
        return rms_norm_reference(x, weight, 1e-6, residual=residual)[used]

    gradients_of = ["x", "weight", "residual"] if used == 0 else ["x", "residual"]
    check_op(
        one_of, one_of_reference, inputs(5, 16, has_residual=True), torch.float32, device, gradients_of=gradients_of
    )


@DEVICES
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (3, 0)])
def test_nothing_to_norm(device, shape):
    with using_kernels("triton"):
        x, residual = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
        weight = torch.randn(shape[-1], device=device, requires_grad=True)
        normed, total = rms_norm(x, weight, 1e-6, residual=residual)
        (normed.sum() + total.sum()).backward()
    assert normed.shape == total.shape == x.grad.shape == residual.grad.shape == shape
    assert_bitwise_equal("weight", weight.grad, torch.zeros_like(weight))


@pytest.mark.gpu
def test_wide_rows_and_offsets_beyond_32_bits():
    check(inputs(3, MAX_NORM_DIM), torch.bfloat16, "cuda")
    check(inputs(3, MAX_NORM_DIM + 1), torch.bfloat16, "cuda")
    x = torch.randn(2**31 // 4096 + 5, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    assert_bitwise_equal("last rows", rms_norm(x, weight, 1e-6)[-5:], rms_norm(x[-5:], weight, 1e-6))


def test_float64_runs_on_torch():
    tensors = {name: tensor.double() for name, tensor in inputs(3, 8).items()}
    expected = tensors["x"] / (tensors["x"].square().mean(-1, keepdim=True) + 0.5).sqrt() * (1 + tensors["weight"])
    with using_kernels("triton"):
        assert_close_named("normed", rms_norm(**tensors, eps=0.5, zero_centered=True), expected)


def test_shapes_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"weight \[7\] of a norm .* x \[3, 8\]"):
        rms_norm(torch.ones(3, 8), torch.ones(7), 1e-6)
    with pytest.raises(ConfigError, match=r"residual \[1, 8\] .* x \[3, 8\]"):
        rms_norm(torch.ones(3, 8), torch.ones(8), 1e-6, residual=torch.ones(1, 8))


@DEVICES
def test_the_operators_are_what_torch_takes_them_for(device):
    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    ops = torch.ops.lightning_d9d
    torch.library.opcheck(ops.rms_norm.default, (tensor(3, 2, 8), tensor(8), tensor(3, 2, 8), 1e-6, True))
    gradients = (tensor(3, 8).detach(), None, tensor(3, 8).detach(), tensor(8).detach(), 1e-6, False, True, True)
    torch.library.opcheck(ops.rms_norm_backward.default, gradients, test_utils=("test_schema", "test_faketensor"))


@DEVICES
def test_compiled_whole(device):
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    with using_kernels("triton"):
        x, weight, residual = (t.to(device).requires_grad_() for t in inputs(5, 16, has_residual=True).values())
        results = []
        for op in (compiled, rms_norm):
            normed, total = op(x, weight, 1e-6, residual=residual)
            results.append([normed, total, *torch.autograd.grad(normed.sum() + total.sum(), [x, weight, residual])])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise_equal("compiled", ours, theirs)
