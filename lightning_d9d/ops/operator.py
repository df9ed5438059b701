"""Operators of torch that are called without torch's dispatcher where nothing asks for them.

[Note: straight calls] The dispatcher and the derivatives that `torch.library.register_autograd` makes in Python take
several times the host's time of launching a kernel. Both are there for those who look at operators or change what they
do: compilers, tracers, modes, transformations, profilers, subclasses of tensors and tensors without values. Where none
of them is about, the implementation itself is called, and recorded for autograd by a `torch.autograd.Function` with the
same backward. Results, gradients and what is kept for them are the same.

[Note: kept before it is made] `torch.utils.checkpoint` ends a recomputation with the last tensor that is kept. A
`Function` keeps tensors when its forward has run. So an operator that comes last in a block would be computed once more
for nothing. If it keeps arguments alone, two functions can do its work: the first keeps them, and its result has a
shape but no memory. The second computes the operator, and its backward passes the gradient on to the first. So it is
done where what is kept is packed by somebody, as it is in a recomputed block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, profiler
from torch.nn import Parameter

from lightning_d9d.ops.compile_ahead import BackwardAhead, only_compiles

_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype, list, tuple})
"""Classes of arguments that neither are tensors nor hold any."""
_BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")
"""Dispatch key of `torch.autograd.grad(is_grads_batched=True)`, which `torch.func` does not see."""


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
    """Registers an operator, `torch.ops.lightning_d9d.<name>`, and returns what to call in its place.

    That is the operator for those who can tell, and costs less of the host's time where nobody can:
    [Note: straight calls]. It takes arguments by position alone, all of them.

    Args:
        name: name of the operator, once in a process.
        schema: its arguments and results, `"(Tensor x, float eps) -> Tensor"`. No lists of tensors.
        run: computes it on every device; its derivative is not looked for in there.
        fake: gives results without values, for tensors that have none.
        setup_context: with `backward`, keeps what it needs: `setup_context(ctx, inputs, output)`, with these names, as
            `torch.library.register_autograd` takes it.
        backward: gives a gradient or None for each argument, from the context and the gradients of the results. Without
            one the operator has no derivative of its own; where one would be recorded, torch is left to say so.
        compiles_ahead: The backward has Triton kernels, and looks at no values on the host: [Note: compiling ahead].
            A function says it of the arguments.
        keeps_first: The operator often comes last in what is recomputed. It has one result, and `setup_context` looks
            at the arguments alone: [Note: kept before it is made].
    """
    qualified = f"lightning_d9d::{name}"
    # Not torch.library.custom_op, which imports the compiler at the first call.
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "CompositeExplicitAutograd", run)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    registered = getattr(torch.ops.lightning_d9d, name)
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
        if (
            torch.compiler.is_compiling()  # first, as compilers see no further
            or torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._are_functorch_transforms_active()
            or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS)
            or torch._C._is_tracing()
            or profiler._is_profiler_enabled
        ):
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
    """Call `run` with a derivative whose arguments are kept before. [Note: kept before it is made]."""

    def without_memory(*args: Any) -> Any:
        result = fake(*args)
        return result.new_empty(()).expand(result.shape)

    keep, at_once = (_recorded(name, function, setup_context, backward) for function in (without_memory, run))
    make = type(f"{name}_made", (Function,), {"forward": staticmethod(_make), "backward": staticmethod(_pass_on)}).apply

    def recorded(*args: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
        return at_once(*args) if hooks is None else make(keep(*args), partial(run, *args))

    return recorded


def _make(ctx: Any, kept: Tensor, run: Callable[[], Tensor]) -> Tensor:
    return run()


def _pass_on(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None
