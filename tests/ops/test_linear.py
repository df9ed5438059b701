import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from lightning_d9d.modules.linear import Linear
from lightning_d9d.ops import WeightGradients, defer, linear, split_linears
from lightning_d9d.ops.linear import _halves
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind, tolerance_for

SHAPES = {"2-d": (7, 5), "3-d": (2, 3, 5), "4-d": (2, 1, 3, 5), "no rows": (0, 3, 5), "one row": (1, 5)}
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(shape=(2, 3, 5), dtype=torch.float64, device="cpu", num_out=4):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in (shape, (num_out, 5), (num_out,)))
    return [tensor.to(device, dtype).requires_grad_() for tensor in (x, weight, bias)]


def backward(function, tensors, dy=None):
    """The result and the gradients of an ordinary backward."""
    y = function(*tensors)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y, *take_gradients(tensors)


def split_backward(function, tensors, dy=None):
    gradients = WeightGradients()
    with defer(gradients):
        y = function(*tensors)
    gradients.backward(y, torch.ones_like(y) if dy is None else dy)
    gradients.accumulate()
    return y, *take_gradients(tensors)


def take_gradients(tensors):
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return gradients


def assert_all_bitwise_equal(actual, expected):
    for name, ours, theirs in zip(("y", "dx", "dweight", "dbias"), actual, expected, strict=False):
        assert_bitwise_equal(name, ours, theirs)


@on_every_device
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tensors", [2, 3], ids=["weight", "weight and bias"])
def test_equals_linear_bit_by_bit(shape, dtype, num_tensors, device):
    tensors = make(shape, dtype, device)[:num_tensors]
    dy = torch.randn(*shape[:-1], 4, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    assert_all_bitwise_equal(split_backward(linear, tensors, dy), backward(F.linear, tensors, dy))


@pytest.mark.parametrize("num_tensors", [2, 3], ids=["weight", "weight and bias"])
def test_strided_operands(num_tensors):
    tensors = make((6, 2, 5), num_out=8)[:num_tensors]

    def strided(function):
        return lambda x, *rest: function(x.transpose(0, 1), *rest).chunk(2, dim=-1)[1].transpose(0, 1)

    dy = torch.randn(2, 6, 4, dtype=torch.float64).transpose(0, 1)
    for name, ours, theirs in zip(
        ("y", "dx", "dweight", "dbias"),
        split_backward(strided(linear), tensors, dy),
        backward(strided(F.linear), tensors, dy),
        strict=False,
    ):
        assert_close_named(name, ours, theirs)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tensors", [2, 3], ids=["weight", "weight and bias"])
def test_autocast(dtype, num_tensors, device):
    tensors = make(dtype=dtype, device=device)[:num_tensors]

    def under_autocast(function):
        return torch.autocast(device, torch.bfloat16)(function)

    expected = backward(under_autocast(F.linear), tensors)
    assert expected[0].dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    assert_all_bitwise_equal(split_backward(under_autocast(linear), tensors), expected)


def test_autocast_still_finds_the_weight_of_plain_ops():
    """Autocast remembers casts of weights; one made without a graph would cut the others off."""
    tensors = make(dtype=torch.float32)[:2]

    @torch.autocast("cpu", torch.bfloat16)
    def both(function, x, weight):
        return function(x, weight) + 2 * F.linear(x, weight)

    actual = split_backward(lambda *args: both(linear, *args), tensors)
    expected = backward(lambda *args: both(F.linear, *args), tensors)
    assert_bitwise_equal("y", actual[0], expected[0])
    for name, ours, theirs in zip(("dx", "dweight"), actual[1:], expected[1:], strict=True):
        assert_close_named(name, ours, theirs, tolerance=tolerance_for(Kind.GRADIENT, torch.bfloat16))


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("x",), ("weight", "bias")], ids=str)
def test_only_what_is_trained_gets_a_gradient(frozen):
    named = dict(zip(("x", "weight", "bias"), make(), strict=True))
    for name in frozen:
        named[name].requires_grad_(False)
    gradients = WeightGradients()
    with defer(gradients):
        y = linear(**named)
    gradients.backward(y.sum())
    waiting = {name for name, tensor in named.items() if tensor.grad is None} - set(frozen)
    # Something waits only where x has a gradient to hurry for, and the product of the weight's is worth it.
    assert waiting == (set() if {"x", "weight"} & set(frozen) else {"weight", "bias"} - set(frozen))
    gradients.accumulate()
    actual = take_gradients(named.values())
    _, *expected = backward(F.linear, list(named.values()))
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_weights_that_are_no_leaves_do_not_wait():
    layer = parametrizations.weight_norm(nn.Linear(5, 4, dtype=torch.float64))
    x, *_ = make()
    tensors = [x, *layer.parameters()]
    split_linears(layer)
    assert_all_bitwise_equal(split_backward(lambda *_: layer(x), tensors), backward(lambda *_: layer(x), tensors))
    x, weight, bias = make()
    gradients = WeightGradients()
    with defer(gradients):
        y = linear(x, weight, 2 * bias)
    gradients.backward(y.sum())
    assert torch.equal(bias.grad, torch.full_like(bias, 12))


def test_vectors():
    tensors = make((5,))
    assert_all_bitwise_equal(split_backward(linear, tensors), backward(F.linear, tensors))


def test_outside_of_deferred_it_is_the_plain_op():
    tensors = make()
    assert type(linear(*tensors).grad_fn) is type(F.linear(*tensors).grad_fn)
    with defer(WeightGradients()):
        assert type(linear(*tensors).grad_fn) is not type(F.linear(*tensors).grad_fn)
        with torch.no_grad():
            assert linear(*tensors).grad_fn is None
    assert type(linear(*tensors).grad_fn) is type(F.linear(*tensors).grad_fn)


@pytest.mark.parametrize("num_tensors", [2, 3], ids=["weight", "weight and bias"])
def test_result_may_be_modified_in_place(num_tensors):
    tensors = make()[:num_tensors]
    assert_all_bitwise_equal(
        split_backward(lambda *args: linear(*args).mul_(2).relu_(), tensors),
        backward(lambda *args: F.linear(*args).mul_(2).relu_(), tensors),
    )


def test_transformations_take_the_plain_op():
    x, weight, bias = make()

    def mapped(function):
        return lambda x, weight, bias: torch.vmap(lambda row: function(row, weight, bias))(x)

    assert_all_bitwise_equal(
        split_backward(mapped(linear), (x, weight, bias)), backward(mapped(F.linear), (x, weight, bias))
    )


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def make_module():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(inplace=True), Linear(6, 6, bias=True, initializer_range=0.5), Doubled(6, 4)
    )
    return module.double()


def gradients_after_each_phase(module, x):
    gradients = WeightGradients()
    with defer(gradients):
        y = module(x)
    gradients.backward(y.sum())
    first = [p.grad is not None for p in module.parameters()]
    gradients.accumulate()
    return first, take_gradients(list(module.parameters()))


def plain_gradients(module, x):
    module(x).sum().backward()
    return take_gradients(list(module.parameters()))


def test_split_linears():
    module, (x, _, _) = make_module(), make()
    expected = plain_gradients(module, x)
    undo = split_linears(module)
    first, actual = gradients_after_each_phase(module, x)
    assert first == [False] * 4 + [True] * 2  # `Doubled` has a forward of its own
    assert_all_bitwise_equal(actual, expected)
    undo()
    assert not any("forward" in vars(part) for part in module.modules())
    assert gradients_after_each_phase(module, x)[0] == [True] * 6


def test_split_linears_leaves_other_replacements_alone():
    module = make_module()
    module[0].forward = lambda input: input.new_zeros(*input.shape[:-1], 6)
    undo = split_linears(module)
    split_linears(module)()  # nothing is left for the second one to do or undo
    assert not module[0](make()[0]).any()
    assert "forward" in vars(module[2])
    undo()
    assert "forward" in vars(module[0])
    assert "forward" not in vars(module[2])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_split_linears_are_independent(duplicate):
    module, (x, _, _) = make_module(), make()
    split_linears(module)
    other = duplicate(module)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    assert_all_bitwise_equal(gradients_after_each_phase(module, x)[1], plain_gradients(module, x))
    first, actual = gradients_after_each_phase(other, x)
    assert first == [False] * 4 + [True] * 2
    assert_all_bitwise_equal(actual, plain_gradients(other, x))
    assert all(p.grad is None for p in module.parameters())


def test_compiled_modules_do_not_wait():
    module, (x, _, _) = make_module(), make()
    expected = plain_gradients(module, x)
    split_linears(module)
    first, actual = gradients_after_each_phase(torch.compile(module, backend="aot_eager", fullgraph=True), x)
    assert first == [True] * 6
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close_named("gradient", ours, theirs)


@on_every_device
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("run", [backward, split_backward], ids=["whole", "split"])
def test_a_wider_dtype_is_that_of_copies(run, autocast, device):
    tensors = make((2, 3, 5), torch.bfloat16, device)
    copies = [tensor.detach().float().requires_grad_() for tensor in tensors]

    def wide(*tensors):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return linear(*tensors, dtype=torch.float32)

    y, *gradients = run(wide, tensors)
    expected, *expected_gradients = backward(F.linear, copies)
    assert_bitwise_equal("y", y, expected)
    for name, ours, theirs in zip(("dx", "dweight", "dbias"), gradients, expected_gradients, strict=True):
        assert_bitwise_equal(name, ours, theirs.to(torch.bfloat16))


def test_no_wider_copies_are_kept():
    x, weight, _ = make((6, 5), torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        linear(x, weight, dtype=torch.float32)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}


def test_a_frozen_weight_gets_no_gradient_in_a_wider_dtype():
    x, weight, bias = make((6, 5), torch.bfloat16)
    weight.requires_grad_(False)
    gradient, of_bias = torch.autograd.grad(linear(x, weight, bias, dtype=torch.float32).sum(), [x, bias])
    assert gradient.dtype == of_bias.dtype == torch.bfloat16


def test_two_halves_have_16_bits() -> None:
    wide = torch.randn(5, 7)
    halves = _halves(wide)
    assert halves.dtype == torch.bfloat16
    assert ((halves[:, 0].double() + halves[:, 1].double() - wide).abs() <= 2**-16 * wide.abs()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [False, True])
def test_wide_products_of_narrow_factors(splits: bool) -> None:
    """They are as exact as with all factors cast to float32: gradients are rounded to bfloat16 in the end."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(*s, generator=generator).cuda() for s in ((3, 65, 256), (24, 256), (3, 65, 24)))
    x, weight = (each.bfloat16().requires_grad_() for each in (x, weight))
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    expected = F.linear(*exact)
    expected.backward(dy.double())
    later = WeightGradients()
    with defer(later) if splits else nullcontext():
        y = linear(x, weight, dtype=torch.float32)
    if splits:
        later.backward(y, dy)
        later.accumulate()
    else:
        y.backward(dy)
    assert y.dtype == torch.float32
    assert_close_named("result", y, expected.float())
    for actual, gradient in zip((x.grad, weight.grad), (each.grad for each in exact), strict=True):
        error, of_rounding = ((each.double() - gradient).norm() for each in (actual, gradient.bfloat16()))
        assert error <= 1.01 * of_rounding
