"""Recomputes activations in the backward instead of keeping them from the forward.

[Note: what is recomputed] A recomputed module runs under `torch.utils.checkpoint` (the non-reentrant one), which keeps
its inputs. The first of its nodes that the backward reaches runs its forward again, up to the last tensor that any node
has saved. An attribute `forward` of the module implements this, so parameters keep their names. Hooks around `forward`
run once. So FSDP2 gathers a recomputed block for its recomputation and keeps it for its backward. It treats units
inside a block, such as experts, in the same way.

*The default dtype* of the forward is set again. A precision such as "bf16-true" sets it only around the forward.

*Random numbers* of the forward repeat. The generators' states are always saved, because it is unknown beforehand
whether a module draws. This is a small part of a block's time on the host.

*Split backwards* recompute once, in the input backward. Weight gradients are deferred as without recomputation
(`lightning_d9d.ops.weight_gradients`): products keep their inputs, now the recomputed ones, for the weight backward. So
between its two backwards a microbatch is as large as without recomputation.

[Note: what is kept] "selective" keeps the results of some ops, in the order of their calls. In the recomputation, which
makes the same calls in the same order, it returns the kept results. It keeps no result that the recomputation does not
need. These are the results computed after the last tensor that is saved, and the latest one before if nothing has read
it by then. In a mixture of experts these are the tokens that come back from other ranks and the last product's results,
its largest tensors. Results that are modified in place are recomputed. Attention with dropout is recomputed, too:
without it, later modules would draw other random numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_d9d.dtypes import default_dtype
from lightning_d9d.errors import ConfigError
from lightning_d9d.modules import GroupedQueryAttention
from lightning_d9d.ops.operator import OperatorMode, outside_of_mode
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.context import CONTEXT_OPS
from lightning_d9d.parallel.data import blocks_of, check_blocks, has_lists
from lightning_d9d.parallel.host_inputs import inputs_on_host

ATTENTION: tuple[type[nn.Module], ...] = (GroupedQueryAttention, nn.MultiheadAttention)
"""Classes of the modules that `recompute="attention"` recomputes by default."""

_aten = torch.ops.aten
_ATTENTION_OPS = {
    op: [argument.name for argument in op._schema.arguments].index("dropout_p")
    for op in (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    )
}
"""Attention ops, each with the place of the argument that decides whether it draws random numbers."""
_KEPT_OPS = {
    _aten.mm.default,
    _aten.mm.dtype,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    torch.ops.lightning_d9d.grouped_gemm.default,
    torch.ops.lightning_d9d.adapted_gate_up.default,
    torch.ops.lightning_d9d.adapted_down.default,
    torch.ops.lightning_d9d.adapted_linears.default,
    _aten.topk.default,
    torch.ops.lightning_d9d.moe_route.default,
    torch.ops.lightning_d9d.moe_sort.default,
    torch.ops.lightning_d9d.all_to_all_rows.default,
    torch.ops.lightning_d9d.all_to_all_copies.default,
    torch.ops.lightning_d9d.peer_counts.default,
    torch.ops.lightning_d9d.peer_dispatch.default,
    torch.ops.lightning_d9d.peer_combine.default,
    torch.ops.lightning_d9d.scatter_sum.default,
    torch.ops.lightning_d9d.attention.default,
    *CONTEXT_OPS,
    *_ATTENTION_OPS,
}


def recompute_activations(
    module: nn.Module,
    parallel: ParallelConfig,
    blocks: Iterable[nn.Module] | None = None,
    *,
    attention: tuple[type[nn.Module], ...] = ATTENTION,
) -> None:
    """Drop the activations of parts of a module and recompute them in the backward, in place.

    Results and gradients stay the same, bitwise if ops are deterministic, and so do names of parameters. Without grad
    mode nothing is recomputed. Copies of the module recompute as well. A further call replaces an earlier one. Nothing
    is communicated. `parallel/recompute.py` describes what is kept and recomputed.

    Args:
        module: Any module.
        parallel: `parallel.recompute` selects the activations; "none" undoes an earlier call.
        blocks: Parts of the module, in order; by default those that `blocks_of` finds with `parallel.shard_blocks`.
            From these, "every_2" takes the first, the third and so on. "3_of_4" leaves out the fourth, the eighth and
            so on.
        attention: Classes of the modules that "attention" recomputes, wherever they are in the module.

    Raises:
        ConfigError: The module has nothing of the selected kind.
    """
    for part in module.modules():
        keep_activations(part)
    kind = parallel.recompute
    if kind == "none":
        return
    blocks = blocks_of(module, parallel.shard_blocks) if blocks is None else list(blocks)
    if kind == "attention":
        chosen = [part for part in module.modules() if isinstance(part, attention)]
    else:
        chosen = [
            block for place, block in enumerate(blocks) if kind == "selective" or parallel.recomputes_block(place)
        ]
    if kind == "attention" and not chosen and (blocks or not has_lists(module)):
        classes = " or ".join(each.__name__ for each in attention)
        raise ConfigError(
            f"ParallelConfig.recompute='attention': {type(module).__name__} has no {classes}. Name the class of its "
            "attention, in recompute_activations(module, parallel, attention=(MyAttention,)), or choose another kind"
        )
    if kind != "attention":
        check_blocks(module, blocks, f"ParallelConfig.recompute={kind!r}")
    for part in dict.fromkeys(chosen):
        part.forward = partial(_forward, part, vars(part).get("forward"), kind)


def keep_activations(module: nn.Module) -> None:
    """Undo `recompute_activations` for one module, but not for those inside."""
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func is _forward:
        _, replaced, _ = forward.args
        del module.forward
        if replaced is not None:
            module.forward = replaced


def _forward(module: nn.Module, replaced: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
    """Run `module.forward`, or the function that has `replaced` it, under a checkpoint."""
    forward = partial(type(module).forward, module) if replaced is None else replaced
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    num_positional, names, dtype = len(args), tuple(kwargs), torch.get_default_dtype()

    def run(*values: Any) -> Any:
        with nullcontext() if torch.get_default_dtype() == dtype else default_dtype(dtype):
            return forward(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))

    # All by position: torch saves no tensors of keywords, and does not see whether they are on a GPU that draws.
    values = (*args, *kwargs.values())
    contexts = _contexts if kind == "selective" else noop_context_fn
    with inputs_on_host(values) if kind == "offload" else nullcontext():
        return checkpoint(run, *values, use_reentrant=False, context_fn=contexts)


class _Result(NamedTuple):
    op: object
    value: Any
    reshaped: list[Tensor]
    """Results of `_unsafe_view` of the value: they share its memory, but have their own version counters."""
    versions: list[int]
    """Versions of the tensors in the value, and then of those in `reshaped`, when they were computed."""

    @property
    def tensors(self) -> list[Tensor]:
        value = self.value if isinstance(self.value, tuple) else (self.value,)
        return [part for part in value if isinstance(part, Tensor)]

    @property
    def is_modified(self) -> bool:
        return self.versions != [tensor._version for tensor in (*self.tensors, *self.reshaped)]

    def map(self, change: Any) -> _Result:
        """Return the same result with other tensors."""
        if isinstance(self.value, tuple):
            value = tuple(change(part) if isinstance(part, Tensor) else part for part in self.value)
        else:
            value = change(self.value)
        return self._replace(value=value, reshaped=[change(tensor) for tensor in self.reshaped])


class _Kept:
    """The results that one call keeps. [Note: what is kept]."""

    def __init__(self) -> None:
        self.results: deque[_Result] = deque()
        self._num_needed = 0
        self._is_unread = False  # whether only views of the latest result were made since
        self._passes_unread = False  # whether that was so when a tensor was saved last

    def add(self, op: object, value: Any) -> None:
        result = _Result(op, value, [], [])
        result.versions.extend(tensor._version for tensor in result.tensors)
        self.results.append(result)
        # Views of tensors of other classes need not share memory with them.
        self._is_unread = all(type(tensor) is Tensor for tensor in result.tensors)

    def reshape(self, source: Any, reshaped: Tensor) -> bool:
        """Record a result of `_unsafe_view`, which ends products of three or more dims; False if not of the latest."""
        if not (self.results and any(source is tensor for tensor in self.results[-1].tensors)):
            return False
        self.results[-1].reshaped.append(reshaped)
        self.results[-1].versions.append(reshaped._version)
        return True

    def read(self) -> None:
        """Record that an op has run, which may have read the latest result."""
        self._is_unread = False

    def saved(self, tensor: Tensor) -> None:
        """Record that a tensor is saved for the backward, so the recomputation reaches this point."""
        if self._is_unread and self._may_be_latest(tensor):
            self._is_unread = False
        self._num_needed = len(self.results) - self._is_unread
        self._passes_unread = self._is_unread

    def _may_be_latest(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter):
            return True
        memory = tensor.untyped_storage()._cdata  # tensors on the meta device have no other address
        return any(memory == each.untyped_storage()._cdata for each in self.results[-1].tensors)

    def close(self) -> None:
        """End the forward, and drop results that the recomputation does not need."""
        results = [*self.results]
        self.results.clear()
        self.results.extend(result.map(Tensor.detach) for result in results[: self._num_needed])
        if self._passes_unread:  # nobody reads its values, but the recomputation reaches it
            self.results.append(results[self._num_needed].map(_of_no_memory))

    def take(self, op: object) -> _Result | None:
        """Return the next result; None if it must be recomputed."""
        if not self.results:
            return None
        result = self.results.popleft()
        if result.op is not op:
            raise RuntimeError(
                f"a recomputed module called {op}, but its forward had called {result.op}: its calls must not depend "
                "on anything that changes between forward and backward"
            )
        return None if result.is_modified else result


def _of_no_memory(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)


def _is_kept(op: Any, args: tuple[Any, ...]) -> bool:
    if op not in _KEPT_OPS:
        return False
    place = _ATTENTION_OPS.get(op)
    return place is None or len(args) <= place or args[place] == 0.0


class _Mode(OperatorMode):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, partial(func, **kwargs) if kwargs else func, args)


class _Forward(_Mode):
    def call(self, op: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = run(*args)
        if _is_kept(op, args):
            self.kept.add(op, result)
        elif op is _aten._unsafe_view.default and self.kept.reshape(args[0], result):
            pass
        elif not getattr(op, "is_view", False):
            self.kept.read()
        return result


class _Recomputation(_Mode):
    def call(self, op: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = self.kept.take(op) if _is_kept(op, args) else None
        return run(*args) if result is None else result.value


@contextmanager
def _forward_context(kept: _Kept) -> Generator[None]:
    with _after_each_saved(kept.saved), _Forward(kept):
        yield
    kept.close()


class _RecomputationContext:
    """A second backward enters it again."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(_after_each_saved())
        self._stack.enter_context(_Recomputation(self._kept))

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _after_each_saved(call: Callable[[Tensor], None] | None = None) -> saved_tensors_hooks:
    """Return hooks that call a function with each saved tensor, and pack it as before, but outside of the mode."""
    # Hooks that are pushed replace those before: torch's own of this checkpoint.
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]

    def call_and_pack(tensor: Tensor) -> Any:
        if call is not None:
            call(tensor)
        return outside_of_mode(pack, tensor)

    return saved_tensors_hooks(call_and_pack, unpack)


def _contexts() -> tuple[Any, Any]:
    """Return the contexts of a forward and of its recomputation."""
    kept = _Kept()
    return _forward_context(kept), _RecomputationContext(kept)
