"""An operator called without the dispatcher does what it does with it, and whoever looks for it finds it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_d9d.ops import grouped_gemm, operator
from lightning_d9d.ops.operator import OperatorMode, define
from tests.harness.compare import assert_bitwise_equal

callers: list[str] = []
"""The files that called the implementations below since it was emptied."""


def note_caller() -> None:
    callers.append(sys._getframe(2).f_code.co_filename)


def scale(x: Tensor, factors: Tensor | None, power: float) -> tuple[Tensor, Tensor]:
    note_caller()
    return x * (2.0 if factors is None else factors**power), (x > 0).long()


def new_scaled(x: Tensor, factors: Tensor | None, power: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, factors, ctx.power = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, factors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dy: Tensor, none: None) -> tuple[Tensor | None, ...]:
    assert none is None
    x, factors, _ = ctx.saved_tensors
    needs_x, needs_factors, _ = ctx.needs_input_grad
    dx, dfactors = scaled_backward(dy, x, factors, ctx.power, needs_x, needs_factors)
    return dx if needs_x else None, dfactors if needs_factors else None, None


def gradients(
    dy: Tensor, x: Tensor | None, factors: Tensor | None, power: float, needs_x: bool, needs_factors: bool
) -> tuple[Tensor, Tensor]:
    note_caller()
    dx, dfactors = new_gradients(dy, x, factors, power, needs_x, needs_factors)
    with torch.no_grad():  # as a kernel, which autograd does not see
        if needs_x:
            dx.copy_(dy * (2.0 if factors is None else factors**power))
        if needs_factors:
            assert x is not None
            assert factors is not None
            dfactors.copy_(dy * x * power * factors ** (power - 1))
    return dx, dfactors


def new_gradients(
    dy: Tensor, x: Tensor | None, factors: Tensor | None, power: float, needs_x: bool, needs_factors: bool
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape if needs_x else 0), dy.new_empty(dy.shape if needs_factors else 0)


scaled = define(
    "test_scaled",
    "(Tensor x, Tensor? factors, float power) -> (Tensor, Tensor)",
    scale,
    new_scaled,
    setup_context=keep,
    backward=differentiate,
)
scaled_backward = define(
    "test_scaled_backward",
    "(Tensor dy, Tensor? x, Tensor? factors, float power, bool needs_x, bool needs_factors) -> (Tensor, Tensor)",
    gradients,
    new_gradients,
)
registered = torch.ops.lightning_d9d.test_scaled


@pytest.fixture(autouse=True)
def _no_callers():
    callers.clear()


def went_straight() -> list[bool]:
    """Return for each call whether it came from `operator.py` itself, and not through torch."""
    assert callers
    return [Path(name) == Path(operator.__file__) for name in callers]


def inputs(needs_x: bool = True, needs_factors: bool = True, *, has_factors: bool = True) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator)
    factors = torch.rand(4, 3, generator=generator) + 1
    return x.requires_grad_(needs_x), factors.requires_grad_(needs_factors) if has_factors else None, 3.0


def results_of(op: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Results, gradients, and what is saved for them."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t.detach().clone()) or t, lambda t: t):
        y, signs = op(*arguments)
    results = {"y": y, "signs": signs, **{f"saved {i}": tensor for i, tensor in enumerate(saved)}}
    trained = {f"gradient {i}": t for i, t in enumerate(arguments) if isinstance(t, Tensor) and t.requires_grad}
    if trained:
        results |= zip(trained, torch.autograd.grad(y, list(trained.values()), torch.ones_like(y)), strict=True)
    return results


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("needs_factors", [None, False, True])
def test_both_ways_agree(needs_x: bool, needs_factors: bool | None) -> None:
    arguments = inputs(needs_x, bool(needs_factors), has_factors=needs_factors is not None)
    ours = results_of(scaled, *arguments)
    assert all(went_straight())
    theirs = results_of(registered, *arguments)
    assert not went_straight()[-2 if needs_x or needs_factors else -1]
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_bitwise_equal(name, value, theirs[name])
        assert value.requires_grad == theirs[name].requires_grad, name


def test_without_gradient_nothing_is_recorded() -> None:
    with torch.no_grad():
        y, _ = scaled(*inputs())
    assert y.grad_fn is None
    assert scaled(*inputs(False, False))[0].grad_fn is None
    assert scaled(nn.Parameter(torch.ones(2)), None, 1.0)[0].grad_fn is not None
    assert went_straight() == [True] * 3


def test_one_backward_of_part_of_the_results() -> None:
    x, factors, power = inputs()
    y, signs = scaled(x, factors, power)
    assert not signs.requires_grad
    y.sum().backward(inputs=[x])
    assert x.grad is not None
    assert factors.grad is None


@pytest.mark.parametrize("op", [scaled, registered], ids=["straight", "registered"])
def test_second_derivatives_are_refused(op: Callable[..., Any]) -> None:
    x, factors, power = inputs()
    y, _ = op(x, factors, power)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not went_straight()[-1]  # what has no derivative is left to torch
    with (
        pytest.warns(UserWarning, match="autograd kernel was not registered"),
        pytest.raises(RuntimeError, match="not have been used in the graph"),
    ):
        torch.autograd.grad(dx.sum(), factors)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_both_operators() -> None:
    x, factors, power = inputs()
    with Seen() as seen:
        scaled(x, factors, power)[0].sum().backward()
    assert "lightning_d9d.test_scaled.default" in seen.names
    assert "lightning_d9d.test_scaled_backward.default" in seen.names


class Informed(OperatorMode):
    """Knows the operators, and doubles the results of the one that scales."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.call(func, partial(func, **(kwargs or {})), args)

    def call(self, op: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.names.append(str(op))
        results = run(*args)
        return (results[0] * 2, results[1]) if op is registered.default else results


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_straight_calls_tell_a_mode_of_operators(needs_gradient: bool) -> None:
    x, factors, power = inputs()
    expected = torch.autograd.grad(2 * scaled(x, factors, power)[0].sum(), [x, factors])
    callers.clear()
    with Informed() as informed, torch.set_grad_enabled(needs_gradient):
        y = scaled(x, factors, power)[0]
        assert torch._C._len_torch_dispatch_stack() == 1
        y = y + 0
    assert informed.names == ["lightning_d9d.test_scaled.default", "aten.add.Tensor"]  # not what it computes with
    assert callers == [__file__]
    assert y.requires_grad == needs_gradient
    assert_bitwise_equal("result", y, 2 * scaled(x, factors, power)[0])
    if needs_gradient:
        for name, ours, theirs in zip(
            ["dx", "dfactors"], torch.autograd.grad(y.sum() * 2, [x, factors]), expected, strict=True
        ):
            assert_bitwise_equal(name, ours, theirs)


def test_a_mode_is_active_again_after_an_operator_that_fails() -> None:
    x, factors, _ = inputs()
    with Informed() as informed, pytest.raises(TypeError):
        scaled(x, factors, "one")
    assert torch._C._len_torch_dispatch_stack() == 0
    assert len(informed.names) == 1


@pytest.mark.parametrize("modes", [(Informed, Seen), (Seen, Informed)])
def test_several_modes_see_the_operator_of_the_dispatcher(modes: tuple[type[Any], type[Any]]) -> None:
    callers.clear()
    with modes[0]() as first, modes[1]() as second:
        scaled(*inputs())
    assert "lightning_d9d.test_scaled.default" in first.names
    assert "lightning_d9d.test_scaled.default" in second.names
    assert went_straight() == [False]


def test_a_function_mode_sees_the_operator() -> None:
    with SeenFunctions() as seen:
        scaled(*inputs())
    assert registered in seen.functions


def test_a_profile_names_both_operators() -> None:
    x, factors, power = inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        scaled(x, factors, power)[0].sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {"lightning_d9d::test_scaled", "lightning_d9d::test_scaled_backward"} <= names
    scaled(x, factors, power)
    assert went_straight() == [False, False, True]


def test_a_subclass_gets_the_operator() -> None:
    x, factors, power = inputs(False, False)
    y, _ = scaled(TwoTensor(x, 2 * x), TwoTensor(factors, factors), power)
    assert isinstance(y, TwoTensor)
    assert went_straight() == [False, False]  # for each of its parts
    assert_bitwise_equal("second part", y.b, scaled(2 * x, factors, power)[0])


def test_tensors_without_values_have_results_without_values() -> None:
    x, factors, power = inputs(False, False)
    assert scaled(x.to("meta"), factors.to("meta"), power)[0].is_meta
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    y, _ = scaled(fake, None, power)
    assert y.shape == x.shape
    assert type(y) is type(fake)
    assert not callers


def test_transformations_get_the_operator() -> None:
    x, factors, power = inputs(False, False)
    y, _ = torch.func.vmap(lambda x, factors: scaled(x, factors, power))(x, factors)
    assert went_straight() == [False] * len(x)  # torch has no rule for it, and takes one row after the other
    assert_bitwise_equal("y", y, scaled(x, factors, power)[0])
    messages = []
    for op in (scaled, registered):
        with pytest.raises(RuntimeError) as caught:
            torch.func.grad(lambda x, op=op: op(x, factors, power)[0].sum())(x)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_batches_of_gradients_get_the_operator() -> None:
    x, factors, power = inputs(True, False)
    y, _ = scaled(x, factors, power)
    (together,) = torch.autograd.grad(y, x, torch.stack([y, 2 * y]), is_grads_batched=True, retain_graph=True)
    assert went_straight() == [True, False, False]  # the backward: one after the other
    for factor, ours in enumerate(together, 1):
        assert_bitwise_equal("dx", ours, *torch.autograd.grad(y, x, factor * y, retain_graph=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_a_tracer_gets_the_operator() -> None:
    x, factors, power = inputs(False, False)
    traced: Any = torch.jit.trace(lambda x: scaled(x, factors, power)[0], (x,))
    assert "lightning_d9d::test_scaled" in [node.kind() for node in traced.graph.nodes()]
    assert_bitwise_equal("y", traced(2 * x), scaled(2 * x, factors, power)[0])


def test_compilers_get_the_operator() -> None:
    targets: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    x, factors, power = inputs()
    compiled = torch.compile(lambda x, factors: scaled(x, factors, power), backend=backend, fullgraph=True)
    compiled(x, factors)
    assert registered in targets

    whole = torch.compile(lambda x, factors: scaled(x, factors, power), backend="aot_eager", fullgraph=True)
    ours = results_of(scaled, x, factors, power)
    y, signs = whole(x, factors)
    assert_bitwise_equal("y", y, ours["y"])
    assert_bitwise_equal("signs", signs, ours["signs"])
    dx, dfactors = torch.autograd.grad(y.sum(), [x, factors])
    assert_bitwise_equal("dx", dx, ours["gradient 0"])
    assert_bitwise_equal("dfactors", dfactors, ours["gradient 1"])


def test_checkpoint_computes_it_again() -> None:
    x, factors, power = inputs()

    def chain(x: Tensor, factors: Tensor) -> Tensor:
        y, _ = scaled(x, factors, power)
        return scaled(y.sin(), factors, power)[0]

    expected = torch.autograd.grad(chain(x, factors).sum(), [x, factors])
    callers.clear()
    again = torch.autograd.grad(checkpoint(chain, x, factors, use_reentrant=False).sum(), [x, factors])
    assert went_straight() == [True] * 6  # two forwards, the same once more, two backwards
    for name, ours, theirs in zip(["dx", "dfactors"], again, expected, strict=True):
        assert_bitwise_equal(name, ours, theirs)


def test_torch_takes_it_for_what_it_is() -> None:
    torch.library.opcheck(registered.default, inputs())


def test_an_op_of_the_package_is_seen_in_forward_and_backward() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    results = []
    with Seen() as seen:
        y = grouped_gemm(x, weight, offsets)
        results.append([y, *torch.autograd.grad(y.sum(), [x, weight])])
    y = grouped_gemm(x, weight, offsets)
    results.append([y, *torch.autograd.grad(y.sum(), [x, weight])])
    names = ["grouped_gemm", "grouped_gemm", "grouped_gemm_weight_gradient"]
    assert [name for name in seen.names if "lightning_d9d" in name] == [f"lightning_d9d.{n}.default" for n in names]
    for name, ours, theirs in zip(["y", "dx", "dweight"], *results, strict=True):
        assert_bitwise_equal(name, ours, theirs)
