"""Operators of torch that are called without torch's dispatcher if nothing needs it.

[Note: straight calls] The dispatcher and the Python derivatives of `torch.library.register_autograd` take the host
several times as long as launching a kernel. Both are needed by code that observes operators or changes what they do:
compilers, tracers, modes, transformations, profilers, subclasses of tensors and tensors without values. If none of them
is active, the implementation itself is called, and recorded for autograd by a `torch.autograd.Function` with the same
backward. Results, gradients and the tensors kept for them are the same.

A mode that only needs to know the operators, such as that of a recomputation, can be an `OperatorMode`. Straight calls
then go on, and tell it their operators.

[Note: kept before it is made] `torch.utils.checkpoint` ends a recomputation with the last tensor that is kept. A
`Function` keeps tensors when its forward has run. So an operator that comes last in a block would be computed once more
without need. If it keeps only arguments, two functions can do its work: the first keeps them, and its result has a
shape but no memory. The second computes the operator, and its backward passes the gradient on to the first. This is
used if saved tensors are packed, as in a recomputed block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, profiler
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9d.ops.compile_ahead import BackwardAhead, only_compiles

_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype, list, tuple})
"""Classes of arguments that neither are nor contain tensors."""
_BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")
"""Dispatch key of `torch.autograd.grad(is_grads_batched=True)`, which `torch.func` does not see."""


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that straight calls go on with, if no other mode is active. [Note: straight calls]."""

    @abstractmethod
    def call(self, op: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return the results of an operator, like `__torch_dispatch__`. The mode is not active meanwhile.

        Args:
            op: The operator.
            run: Function that computes it, without derivatives.
            args: Its arguments.
        """


def outside_of_mode(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function while the innermost dispatch mode is not active, if it is an `OperatorMode`."""
    num_modes = torch._C._len_torch_dispatch_stack()
    if not num_modes or not isinstance(torch._C._get_dispatch_stack_at(num_modes - 1), OperatorMode):
        return function(*args)
    mode = torch._C._pop_torch_dispatch_stack(None)
    try:
        return function(*args)
    finally:
        torch._C._push_on_torch_dispatch_stack(mode)


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    compiles_ahead: bool | Callable[..., bool] = False,
    keeps_first: bool = False,
) -> Callable[..., Any]:
    """Register an operator, `torch.ops.lightning_d9d.<name>`, and return a function to call in its place.

    The function calls the operator if anything observes it, and otherwise costs less of the host's time: [Note:
    straight calls]. It takes all arguments, by position only.

    Args:
        name: Name of the operator, registered once in a process.
        schema: The arguments and results, `"(Tensor x, float eps) -> Tensor"`. Lists of tensors are not supported.
        run: Function that computes it on every device; autograd does not look inside.
        fake: Function that returns results without values, for tensors without values.
        setup_context: Function that saves the tensors for `backward`: `setup_context(ctx, inputs, output)`, with these
            names, as for `torch.library.register_autograd`.
        backward: Function that returns a gradient or None for each argument, from the context and the gradients of the
            results. Without one the operator has no derivative; torch reports this if one would be recorded.
        compiles_ahead: Whether the backward has Triton kernels, and reads no values on the host: [Note: compiling
            ahead]. It may be a function of the arguments.
        keeps_first: Whether the operator often comes last in a recomputed block. It must have one result, and
            `setup_context` must use only the arguments: [Note: kept before it is made].
    """
    qualified = f"lightning_d9d::{name}"
    # Not torch.library.custom_op, which imports the compiler at the first call.
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "CompositeExplicitAutograd", run)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    registered = getattr(torch.ops.lightning_d9d, name)
    run = partial(_run_in_mode, registered.default, run)
    make = partial(_recorded_first, fake) if keeps_first else _recorded
    recorded = registered if backward is None else make(name, run, setup_context, backward)
    if compiles_ahead:
        assert backward is not None
        assert setup_context is not None
        ahead, afterwards = BackwardAhead(name, fake, setup_context, backward), recorded

        def first_backward(ctx: Any, *gradients: Any) -> Any:
            nonlocal recorded
            recorded = afterwards
            return backward(ctx, *gradients)

        before = _recorded(name, run, setup_context, first_backward)

        def recorded(*args: Any) -> Any:
            if compiles_ahead is True or compiles_ahead(*args):
                ahead.start(args)
            return before(*args)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _is_observed():  # in this order, as compilers see no further
            return registered(*args)
        requires_grad = False
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                if arg.is_meta:
                    return (run if only_compiles() else registered)(*args)
                requires_grad = requires_grad or arg.requires_grad
            elif kind not in _VALUES:
                return registered(*args)
        return (recorded if requires_grad and torch.is_grad_enabled() else run)(*args)

    return call


def _is_observed() -> Any:
    num_modes = torch._C._len_torch_dispatch_stack()
    has_operator_mode = num_modes == 1 and isinstance(torch._C._get_dispatch_stack_at(0), OperatorMode)
    return (
        (num_modes and not has_operator_mode)
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS)
        or torch._C._is_tracing()
        or profiler._is_profiler_enabled
    )


def _run_in_mode(op: Any, run: Callable[..., Any], *args: Any) -> Any:
    """Run an operator, in the `OperatorMode` if there is one."""
    if not torch._C._len_torch_dispatch_stack():
        return run(*args)
    mode: Any = torch._C._get_dispatch_stack_at(0)
    return outside_of_mode(mode.call, op, run, args)


def _recorded(
    name: str, run: Callable[..., Any], setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Call `run` with a derivative."""

    # Not Function.setup_context, for which torch looks at the signature in each call.
    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply


def _recorded_first(
    fake: Callable[..., Any],
    name: str,
    run: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """Call `run` with a derivative whose arguments are saved before the call. [Note: kept before it is made]."""

    def without_memory(*args: Any) -> Any:
        result = fake(*args)
        return result.new_empty(()).expand(result.shape)

    keep, at_once = (_recorded(name, function, setup_context, backward) for function in (without_memory, run))
    make = type(f"{name}_made", (Function,), {"forward": staticmethod(_make), "backward": staticmethod(_pass_on)}).apply

    def recorded(*args: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
        # A mode would see the operators of `without_memory`.
        comes_at_once = hooks is None or torch._C._len_torch_dispatch_stack()
        return at_once(*args) if comes_at_once else make(keep(*args), partial(run, *args))

    return recorded


def _make(ctx: Any, kept: Tensor, run: Callable[[], Tensor]) -> Tensor:
    return run()


def _pass_on(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None
