"""Operators of torch that are called without torch's dispatcher where nothing asks for them.

[Note: straight calls] The dispatcher and the derivatives that `torch.library.register_autograd` makes in Python take
several times the host's time of launching a kernel. Both are there for those who look at operators or change what they
do: compilers, tracers, modes, transformations, profilers, subclasses of tensors and tensors without values. Where none
of them is about, the implementation itself is called, and recorded for autograd by a `torch.autograd.Function` with the
same backward. Results, gradients and what is kept for them are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, profiler
from torch.nn import Parameter

from lightning_d9d.ops.compile_ahead import BackwardAhead, only_compiles

_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype, list, tuple})
"""Classes of arguments that are no tensors, and hold none."""
_BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")
"""Of `torch.autograd.grad(is_grads_batched=True)`, which `torch.func` knows nothing of."""


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    compiles_ahead: bool | Callable[..., bool] = False,
) -> Callable[..., Any]:
    """Registers an operator, `torch.ops.lightning_d9d.<name>`, and returns what to call in its place.

    That is the operator for those who can tell, and costs less of the host's time where nobody can:
    [Note: straight calls]. It takes arguments by position alone, all of them.

    Args:
        name: of the operator, once in a process.
        schema: its arguments and results, `"(Tensor x, float eps) -> Tensor"`. No lists of tensors.
        run: computes it on every device; its derivative is not looked for in there.
        fake: gives results without values, for tensors that have none.
        setup_context: with `backward`, keeps what it needs: `setup_context(ctx, inputs, output)`, with these names, as
            `torch.library.register_autograd` takes it.
        backward: gives a gradient or None for each argument, from the context and the gradients of the results. Without
            one the operator has no derivative of its own; where one would be recorded, torch is left to say so.
        compiles_ahead: The backward has Triton kernels, and looks at no values on the host: [Note: compiling ahead].
            A function says it of the arguments.
    """
    qualified = f"lightning_d9d::{name}"
    # Not torch.library.custom_op, which imports the compiler at the first call.
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "CompositeExplicitAutograd", run)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    registered = getattr(torch.ops.lightning_d9d, name)
    recorded = registered if backward is None else _recorded(name, run, setup_context, backward)
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
    """`run` with a derivative."""

    # Not Function.setup_context, for which torch looks at the signature in each call.
    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply
