"""Launches all kernels of a block at once, as CUDA graphs, for steps that wait for the host.

Each block gets an attribute `forward`, as in `compiling`. The first call with tensors of a form captures the block's
forward and backward. Later calls copy their tensors to the addresses that the captured kernels read, and launch the
graph.

[Note: what a graph holds] A graph has the addresses of its tensors. A block is captured again if weights have moved
since, or have become trainable. The graph holds one copy of the tensors that the forward saves for the backward. A
second forward overwrites this copy, and so does the backward. So the backward of an earlier forward is refused, and so
is a second backward of one forward. Results and gradients are copied out, because a caller may keep them. The decisions
of Python code are part of a graph, too. Forwards while a part of the block is in `eval()`, or counts no tokens
(`lightning_d9d.pipeline.CountsTokens`), are another form.

A captured block has no weight phase in split backwards, like a compiled one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.modules import ExpertBalance
from lightning_d9d.ops.backend import chosen_kernels
from lightning_d9d.ops.grouped_gemm import chosen_grouped_gemm
from lightning_d9d.ops.weight_gradients import defer
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.data import blocks_of, check_blocks
from lightning_d9d.parallel.forwards import replace_forwards, restore_forwards
from lightning_d9d.state.threads import uncollected

MAX_FORMS = 8
"""The number of input forms for which a block is captured; others run without graphs."""
_NUM_WARM_UPS = 2
"""Runs before a capture: kernels are compiled and chosen, and workspaces allocated, when they first run."""


def capture_blocks(
    module: nn.Module, parallel: ParallelConfig, mesh: MeshDomains | None, blocks: Iterable[nn.Module] | None = None
) -> None:
    """Run the blocks of a module as CUDA graphs while it is trained on CUDA, in place. Local.

    Losses and gradients are those of the uncaptured module. Dropout draws other numbers. Each block keeps the memory of
    its activations for each form of its inputs (shapes, dtypes, which of them require gradients), up to eight. The
    forward must not wait for the device or for other ranks. It may only compute from its arguments, parameters and
    buffers, and change buffers in place. Anything else happens only during the capture. Results cannot be
    differentiated twice.

    Args:
        module: Any module.
        parallel: Blocks are captured if `parallel.cuda_graphs` is set. In any case earlier calls are undone.
        mesh: The mesh of all ranks; None for one process.
        blocks: Parts of the module; by default those that `blocks_of` finds with `parallel.shard_blocks`.

    Raises:
        ConfigError: The module has neither blocks nor lists of modules. Ranks do not hold whole models. Routers have a
            loss over several ranks. Or a block instance has its own `forward` beside that of its class. In the first
            training step: a block cannot be captured, or a parameter has a hook, which would change its gradient twice.
    """
    restore_forwards(module, _forward)
    release_graphs(module)
    if not parallel.cuda_graphs:
        return
    if mesh is not None:
        _check_whole(mesh.config)
    # Each rank runs a block more than once when it captures it, and some capture when others do not.
    has_loss_of_ranks = dist.is_initialized() and dist.get_world_size() > 1
    if has_loss_of_ranks and any(
        isinstance(part, ExpertBalance) and part.config.global_batch_loss for part in module.modules()
    ):
        raise ConfigError(
            "ParallelConfig.cuda_graphs=True: routers have a loss over several ranks "
            "(BalanceConfig.global_batch_loss). Leave out one of them, or use sequence_loss or bias_rate"
        )
    blocks = list(blocks_of(module, parallel.shard_blocks) if blocks is None else blocks)
    check_blocks(module, blocks, "ParallelConfig.cuda_graphs=True")
    replace_forwards(blocks, _forward, "ParallelConfig.cuda_graphs=True")


def _check_whole(config: MeshConfig) -> None:
    needs = "ParallelConfig.cuda_graphs=True needs the whole model on each rank"
    if config.world_size != config.data_parallel_replicate:
        raise ConfigError(
            f"{needs}: data_parallel_replicate={config.data_parallel_replicate} must be the number of ranks, "
            f"{config.world_size}"
        )
    if config.expert_parallel > 1:
        raise ConfigError(f"{needs}: expert_parallel={config.expert_parallel} must be 1")


def release_graphs(module: nn.Module) -> None:
    """Free the memory of all captured graphs of a module; the next call captures again. Local."""
    for part in module.modules():
        _captured.pop(part, None)


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    weights = [parameter for parameter in block.parameters() if parameter.requires_grad]
    is_trained = block.training and torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *weights))
    if not is_trained or not all(t.is_cuda for t in tensors):
        return type(block).forward(block, *args, **kwargs)
    autocasts = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    held = tuple((each.data_ptr(), each.requires_grad) for each in (*block.parameters(), *block.buffers()))
    form = _form(block, leaves, structure)
    its_held, graphs = _captured.get(block, (None, {}))
    if its_held != held:  # [Note: what a graph holds]
        graphs = {}
        _captured[block] = held, graphs
    if form not in graphs:
        if len(graphs) == MAX_FORMS:
            return type(block).forward(block, *args, **kwargs)
        if hooked := [name for name, weight in block.named_parameters() if weight._backward_hooks]:
            raise ConfigError(
                f"ParallelConfig.cuda_graphs=True: {hooked[0]} of a {type(block).__name__} has a hook "
                "(Tensor.register_hook), which would change its gradient twice: in the graph and after it. Set "
                "cuda_graphs=False, or use register_post_accumulate_grad_hook"
            )

        def call(inputs: Sequence[Tensor]) -> Any:
            of_inputs = iter(inputs)
            replaced = [next(of_inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            new_args, new_kwargs = tree_unflatten(replaced, structure)
            # The cache of autocast would make a graph read a copy of a weight that nothing updates.
            with (
                defer(None),
                torch.autocast("cuda", autocasts or None, enabled=bool(autocasts), cache_enabled=False),
            ):
                return type(block).forward(block, *new_args, **new_kwargs)

        try:
            with torch.autocast("cuda", enabled=False):  # as backwards run
                graphs[form] = _Graphs(call, tensors, weights, list(block.buffers()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"ParallelConfig.cuda_graphs=True: a {type(block).__name__} cannot be captured. Set it to False, or "
                "remove operations that wait for the device, such as products of experts in float32. A block whose "
                f"results need no gradient cannot be captured either: {error}"
            ) from error
    captured = graphs[form]
    results = iter(_Replay.apply(captured, *tensors, *weights))
    return tree_unflatten([next(results) if isinstance(r, Tensor) else r for r in captured.results], captured.structure)


def _form(block: nn.Module, leaves: Sequence[Any], structure: Any) -> tuple[Any, ...]:
    """Return everything except the values of tensors on which a block's graph depends; each form has its own graph."""
    return (
        structure,
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        chosen_kernels(),
        chosen_grouped_gemm(),
        tuple((part.training, vars(part).get("counts_tokens")) for part in block.modules()),
        *((t.shape, t.stride(), t.dtype, t.requires_grad) if isinstance(t, Tensor) else t for t in leaves),
    )


class _Graphs:
    """The forward and the backward of a function of tensors and weights, captured.

    Args:
        call: The function.
        tensors: The arguments of the block.
        weights: Other tensors whose gradients it computes.
        buffers: Buffers that it may change; the capture restores their values.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Tensor]], Any],
        tensors: Sequence[Tensor],
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        self.inputs = [torch.empty_like(t).copy_(t.detach()).requires_grad_(t.requires_grad) for t in tensors]
        sources = [t for t in (*self.inputs, *weights) if t.requires_grad]
        saved = [buffer.clone() for buffer in buffers]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                differentiable = _differentiable(tree_flatten(call(self.inputs))[0])
                gradients = [torch.zeros_like(t) for t in differentiable]
                torch.autograd.grad(differentiable, sources, gradients, allow_unused=True)
        torch.cuda.current_stream().wait_stream(stream)
        self.forward, self.backward, self.num_forwards = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), 0
        with _capture(self.forward, stream):
            results, self.structure = tree_flatten(call(self.inputs))
        differentiable = _differentiable(results)
        self.gradients = [torch.zeros_like(t) for t in differentiable]
        with _capture(self.backward, stream, self.forward.pool()):
            found = torch.autograd.grad(differentiable, sources, self.gradients, allow_unused=True)
        of_sources = iter(found)
        self.found = [next(of_sources) if t.requires_grad else None for t in (*self.inputs, *weights)]
        self.are_differentiable = [t.requires_grad for t in results if isinstance(t, Tensor)]
        self.results = [t.detach() if isinstance(t, Tensor) else t for t in results]
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Generator[None]:
    """Capture what this thread launches meanwhile; other threads may pin memory or watch collectives.

    Graphs of an earlier fit may be garbage in a reference cycle. CUDA ends a capture in which one is freed.
    """
    with uncollected(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, captured: _Graphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        torch._foreach_copy_([t.detach() for t in captured.inputs], tensors[: len(captured.inputs)])
        captured.forward.replay()
        captured.num_forwards += 1
        ctx.captured, ctx.number = captured, captured.num_forwards
        results = tuple(t.clone() for t in captured.results if isinstance(t, Tensor))
        ctx.mark_non_differentiable(
            *(t for t, does in zip(results, captured.are_differentiable, strict=True) if not does)
        )
        return results

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        captured: _Graphs = ctx.captured
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a block that runs as a CUDA graph cannot be differentiated twice (create_graph=True): set "
                "ParallelConfig.cuda_graphs to False"
            )
        if ctx.number != captured.num_forwards:
            raise RuntimeError(
                "this block ran again before the backward of this call, or this backward ran before, and overwrote "
                "the tensors that this one needs. With ParallelConfig.cuda_graphs exactly one backward must follow "
                "each forward of a block; set it to False"
            )
        ctx.number = None
        given = [g for g, does in zip(gradients, captured.are_differentiable, strict=True) if does]
        torch._foreach_copy_(captured.gradients, given)
        captured.backward.replay()
        return None, *(None if found is None else found.clone() for found in captured.found)


def _differentiable(results: Iterable[Any]) -> list[Tensor]:
    return [t for t in results if isinstance(t, Tensor) and t.requires_grad]


_captured: WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, _Graphs]]] = WeakKeyDictionary()
"""The addresses of each block's weights, and its graphs by form. It is kept outside of blocks, because copies share
nothing."""
