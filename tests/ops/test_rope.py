"""`rope` and `norm_rope` on their kernels (Triton's interpreter without a GPU) and on torch's."""

from itertools import product

import pytest
import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import norm_rope, rope
from lightning_d9d.ops.kernels import using_kernels
from lightning_d9d.ops.norm_rope import norm_rope_reference
from lightning_d9d.ops.rope import rope_reference
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind
from tests.ops.grid import DEVICES, LAYOUTS, check_op, dtypes

SHAPES = [(1, 1, 1, 32, 16), (2, 5, 3, 14, 5), (1, 2, 33, 128, 32), (1, 7, 1, 1030, 515)]
"""Batch, sequence, heads, width of a head and pairs; the last one has more tiles than the interpreter has programs."""

BOTH = pytest.mark.parametrize("has_norm", [False, True])


def inputs(batch: int, seq: int, heads: int, dim: int, pairs: int, *, shared: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    angles = 9 * torch.randn(1 if shared else batch, seq, 1, pairs, generator=generator)
    x = torch.randn(batch, seq, heads, dim, generator=generator)
    return {"x": x, "cos": angles.cos(), "sin": angles.sin(), "weight": torch.randn(dim, generator=generator)}


def check(has_norm, tensors, dtype, device, *, gradients_of=("x", "weight"), **options):
    op, reference = (norm_rope, norm_rope_reference) if has_norm else (rope, rope_reference)
    if has_norm:
        options["eps"] = 1e-3
    else:
        tensors, gradients_of = (
            {n: t for n, t in tensors.items() if n != "weight"},
            [n for n in gradients_of if n == "x"],
        )
    wide = ["cos", "sin"]
    check_op(op, reference, tensors, dtype, device, gradients_of=gradients_of, wide=wide, **options)


@DEVICES
@BOTH
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_shape_and_dtype(device, has_norm, interleaved):
    centering = {"zero_centered": interleaved} if has_norm else {}
    for shape, dtype in product(SHAPES, dtypes(device)):
        check(has_norm, inputs(*shape), dtype, device, interleaved=interleaved, **centering)


@DEVICES
@BOTH
def test_tables_shared_by_rows_of_the_batch(device, has_norm):
    check(has_norm, inputs(3, 5, 2, 16, 8, shared=True), torch.float32, device)


@DEVICES
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device, has_norm, layout):
    check(has_norm, inputs(2, 7, 4, 40, 14), torch.float32, device, layout=layout)


@DEVICES
@BOTH
def test_heads_beside_others_and_tables_of_other_strides(device, has_norm):
    tensors = {name: tensor.to(device) for name, tensor in inputs(2, 5, 4, 16, 8).items()}
    whole = torch.cat([tensors["x"], torch.full_like(tensors["x"], torch.nan)], dim=2)
    cos = torch.stack([tensors["cos"], tensors["sin"]], dim=1)[:, 0]
    arguments = (tensors["weight"], 1e-6) if has_norm else ()
    op = norm_rope if has_norm else rope
    with using_kernels("triton"):
        beside = op(whole[:, :, :4], *arguments, cos, tensors["sin"])
        alone = op(tensors["x"], *arguments, tensors["cos"], tensors["sin"])
    assert_bitwise_equal("beside others", beside, alone)


@DEVICES
def test_every_gradient_alone_and_together(device):
    for names, interleaved in product([[], ["x"], ["weight"], ["x", "weight"]], [False, True]):
        tensors = inputs(1, 5, 3, 24, 8)
        check(True, tensors, torch.float16, device, gradients_of=names, interleaved=interleaved)


@DEVICES
def test_weight_may_be_wider(device):
    tensors = inputs(2, 5, 3, 24, 12)
    options = {"gradients_of": ["x", "weight"], "wide": ["weight", "cos", "sin"], "eps": 1e-6}
    check_op(norm_rope, norm_rope_reference, tensors, torch.float16, device, **options)


@DEVICES
@BOTH
def test_tables_may_be_narrower(device, has_norm):
    x, cos, sin, weight = (tensor.to(device) for tensor in inputs(1, 7, 5, 600, 200).values())
    cos, sin = cos.half(), sin.half()
    leaves = [x.requires_grad_(), weight.requires_grad_()] if has_norm else [x.requires_grad_()]
    results = []
    with using_kernels("triton"):
        for tables in ((cos, sin), (cos.float(), sin.float())):
            y = norm_rope(*leaves, 1e-6, *tables) if has_norm else rope(*leaves, *tables)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for narrow, wide in zip(*results, strict=True):
        assert_bitwise_equal("turned", narrow, wide)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_pairs_are_complex_numbers(interleaved, kernels):
    x, angles = torch.randn(2, 3, 2, 10), torch.randn(2, 3, 1, 4)
    with using_kernels(kernels):
        y = rope(x, angles.cos(), angles.sin(), interleaved=interleaved)
    assert_bitwise_equal("rest", y[..., 8:], x[..., 8:])
    before, after = (t[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4)) for t in (x, y))
    before, after = (t if interleaved else t.transpose(-1, -2) for t in (before, after))
    expected = torch.view_as_complex(before.contiguous()) * torch.polar(torch.ones(()), angles)
    assert_close_named("turned", after, torch.view_as_real(expected), kind=Kind.OUTPUT)


@DEVICES
def test_positions_are_looked_up(device):
    tensors = {name: tensor.to(device) for name, tensor in inputs(2, 5, 4, 16, 6).items()}
    cos, sin = (torch.randn(40, 6, device=device) for _ in range(2))
    position_ids = torch.tensor([[3, 0, 39, 39, 7]], device=device)
    for kernels in ("torch", "triton"):
        with using_kernels(kernels):
            looked_up = rope(tensors["x"], cos, sin, position_ids)
            expected = rope(tensors["x"], *(t[position_ids][:, :, None] for t in (cos, sin)))
        assert_bitwise_equal(kernels, looked_up, expected)
    assert_close_named("reference", looked_up, rope_reference(tensors["x"], cos, sin, position_ids), kind=Kind.OUTPUT)


@DEVICES
@BOTH
@pytest.mark.parametrize("shape", [(0, 3, 2, 8, 4), (2, 0, 2, 8, 4), (2, 3, 0, 8, 4), (2, 3, 2, 8, 0)])
def test_nothing_to_turn(device, has_norm, shape):
    tensors = {name: tensor.to(device).requires_grad_() for name, tensor in inputs(*shape).items()}
    tables = tensors["cos"].detach(), tensors["sin"].detach()
    with using_kernels("triton"):
        y = norm_rope(tensors["x"], tensors["weight"], 1e-6, *tables) if has_norm else rope(tensors["x"], *tables)
        y.sum().backward()
    assert y.shape == tensors["x"].grad.shape == shape[:4]
    if has_norm and not y.numel():
        assert_bitwise_equal("weight", tensors["weight"].grad, torch.zeros_like(tensors["weight"]))


@DEVICES
def test_tables_may_be_trained(device):
    tensors = {name: tensor.to(device).requires_grad_() for name, tensor in inputs(2, 3, 2, 8, 4).items()}
    with using_kernels("triton"):
        rope(tensors["x"], tensors["cos"], tensors["sin"]).sum().backward()
    first, second = tensors["x"].detach().chunk(2, dim=-1)
    assert_close_named("cos", tensors["cos"].grad, (first + second).sum(2, keepdim=True))


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    x = torch.randn(1, 2**31 // 4096 + 5, 32, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(1, x.shape[1], 1, 64, device="cuda")
    cos, sin, weight = angles.cos(), angles.sin(), torch.randn(128, device="cuda", dtype=torch.bfloat16)
    last = rope(x[:, -5:], cos[:, -5:], sin[:, -5:])
    assert_bitwise_equal("turned", rope(x, cos, sin)[:, -5:], last)
    last = norm_rope(x[:, -5:], weight, 1e-6, cos[:, -5:], sin[:, -5:])
    assert_bitwise_equal("normed and turned", norm_rope(x, weight, 1e-6, cos, sin)[:, -5:], last)


def test_float64_runs_on_torch():
    tensors = {name: tensor.double() for name, tensor in inputs(2, 3, 2, 8, 4).items()}
    x, cos, sin, weight = tensors.values()
    first, second = (x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight).chunk(2, dim=-1)
    with using_kernels("triton"):
        y = norm_rope(x, weight, 0.5, cos, sin)
    assert_close_named("turned", y, torch.cat([first * cos - second * sin, second * cos + first * sin], -1))


def test_shapes_that_do_not_fit():
    x, table = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 1, 4)
    for cos, sin in [
        (table[0], table[0]),
        (table, table[..., :2]),
        (torch.ones(2, 3, 1, 5), torch.ones(2, 3, 1, 5)),
        (torch.ones(3, 3, 1, 4), torch.ones(3, 3, 1, 4)),
        (torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4)),
        (torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4)),
    ]:
        with pytest.raises(ConfigError, match="do not fit x"):
            rope(x, cos, sin)
    with pytest.raises(ConfigError, match=r"weight \[7\] of a norm"):
        norm_rope(x, torch.ones(7), 1e-6, table, table)


@DEVICES
def test_the_operators_are_what_torch_takes_them_for(device):
    x, cos, sin, weight = (tensor.to(device) for tensor in inputs(2, 3, 2, 8, 4).values())
    x.requires_grad_()
    weight.requires_grad_()
    ops, quick = torch.ops.lightning_d9d, ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.norm_rope.default, (x, weight, 1e-6, cos, sin, True, False))
    torch.library.opcheck(ops.rope.default, (x.detach(), cos, sin, False, False), test_utils=quick)
    arguments = (x.detach(), x.detach(), weight.detach(), cos, sin, 1e-6, False, False, False, True)
    torch.library.opcheck(ops.norm_rope_backward.default, arguments, test_utils=quick)


@DEVICES
@BOTH
def test_compiled_whole(device, has_norm):
    x, cos, sin, weight = (tensor.to(device) for tensor in inputs(2, 3, 2, 8, 3).values())
    leaves = [x.requires_grad_(), weight.requires_grad_()] if has_norm else [x.requires_grad_()]

    def run(*leaves):
        return norm_rope(*leaves, 1e-6, cos, sin) if has_norm else rope(*leaves, cos, sin)

    results = []
    with using_kernels("triton"):
        for op in (torch.compile(run, backend="aot_eager", fullgraph=True), run):
            y = op(*leaves)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise_equal("compiled", ours, theirs)
