"""Compiles every Triton kernel as a GPU would, without one: `python -m tests.ops.lowered`, to Triton's IR.

What Triton refuses in a kernel, its interpreter may accept. Ops run here on tensors of the CPU, and each launch is a
compilation for an H100 with the types and constants of its arguments, which launches nothing. `--all` has more types
and sizes, and compiles to binaries, which takes minutes. The output ends with the kernels that no call reached. With
`--all` these are followed by kernels that need more shared memory than an H100 has.
"""

from __future__ import annotations

import pkgutil
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightning_d9d.ops.rows import HOPPER_SHARED_MEMORY

HOPPER = GPUTarget("cuda", 90, 32)
RANKS, EXPERTS, TOP_K, TOKENS, WIDTH, ADAPTER_RANK = 2, 4, 2, 24, 128, 8
_lowered: Counter[str] = Counter()
"""How often each kernel was compiled, by its whole name."""
_too_large: list[str] = []
"""Kernels that need more shared memory than there is, and their constants."""


class NoGpu:
    """A driver whose only device is one to compile for."""

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return HOPPER

    def get_current_device(self) -> int:
        """Return the number of the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return what launches would wait for."""
        return 0


def to_ir(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
    """Make Triton's IR of a kernel: this takes the place of `triton.compile`."""
    backend: Any = triton.compiler.make_backend(target)
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, codegen, backend.get_module_map(), context)
    assert module.verify(), source.name
    _lowered[f"{source.fn.module}.{source.name}"] += 1


def to_binary(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
    """Compile a kernel to what a GPU runs; Triton checks its shared memory only at a launch."""
    compiled: Any = triton.compile(source, target=target, options=options)
    name = f"{source.fn.module}.{source.name}"
    _lowered[name] += 1
    if compiled.metadata.shared > HOPPER_SHARED_MEMORY:
        constants = {source.fn.arg_names[at[0]]: value for at, value in source.constants.items()}
        _too_large.append(f"{name} needs {compiled.metadata.shared} bytes of shared memory: {constants}")


def launch_as_compilation(compiler: Any) -> None:
    """Let each launch of a kernel compile it. Before kernels are imported."""
    assert not any(name.startswith("lightning_d9d.ops.kernels.") for name in sys.modules)
    knobs.runtime.interpret = False
    no_gpu: Any = NoGpu()
    driver.set_active(no_gpu)
    triton.compiler.compile = compiler  # where each kernel finds it when it is first launched
    kernel = import_module("lightning_d9d.ops.kernels.compiling").Kernel
    kernel.__getitem__ = lambda self, grid: lambda *args, **kwargs: self.run(*args, grid=(1,), warmup=True, **kwargs)


def kernels() -> set[str]:
    """Return the whole names of all kernels that the host launches."""
    package = import_module("lightning_d9d.ops.kernels")
    modules = [import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)]
    kind = import_module("lightning_d9d.ops.kernels.compiling").Kernel
    return {
        f"{value.module}.{value.__name__}"
        for module in modules
        for value in vars(module).values()
        if type(value) is kind
    }


def run_ops(dtype: torch.dtype) -> None:
    """Call the ops that have benchmarks."""
    from tests.benchmarks.op_cases import op_cases
    from tests.ops.sanitized import ODD, run

    for case in op_cases(replace(ODD, dtype=dtype)):
        run(case, torch.device("cpu"))


def run_others(dtype: torch.dtype, head_dims: Sequence[int], adapter_ranks: Sequence[int]) -> None:
    """Call the ops and kernels that have none, or other variants of them."""
    from lightning_d9d import ops
    from lightning_d9d.ops.backend import using_kernels
    from lightning_d9d.ops.momentum import descend_, momentum_direction_, scale_

    def rows(*shape: int) -> Tensor:
        return torch.ones(*shape, dtype=dtype, requires_grad=True)

    offsets = torch.full((EXPERTS,), TOKENS, dtype=torch.int32)
    with using_kernels("triton"):
        documents, sinks = torch.zeros(1, TOKENS, dtype=torch.int64), torch.zeros(4, requires_grad=True)
        for head_dim in head_dims:
            masks: list[dict[str, Any]] = [{}, {"documents": documents, "window": 7}, {"sinks": sinks}]
            for options in masks:
                q, k, v = (rows(1, heads, TOKENS, head_dim) for heads in (4, 2, 2))
                ops.attention(q, k, v, kernel="triton", **options).sum().backward()
        for rank in adapter_ranks:
            weight = rows(EXPERTS, 2 * WIDTH, WIDTH).detach()
            gate_up, h = ops.adapted_gate_up(
                rows(TOKENS, WIDTH), weight, rows(EXPERTS, 2 * rank, WIDTH), offsets=offsets, scale=0.5
            )
            b, a = rows(EXPERTS, 2 * WIDTH, rank), rows(EXPERTS, rank, WIDTH)
            inner, projected = ops.adapted_swiglu(gate_up, h, b, a, torch.ones(TOKENS), offsets=offsets, scale=0.5)
            assert projected is not None
            down = ops.adapted_down(inner, weight[:, :WIDTH], projected, rows(EXPERTS, WIDTH, rank), offsets=offsets)
            down.sum().backward()
        direction = momentum_direction_(torch.ones(TOKENS), rows(TOKENS).detach(), 0.9, dtype)
        descend_(torch.ones(TOKENS, dtype=torch.bfloat16), direction, 0.9, 0.1, 1)
        scale_(rows(EXPERTS, WIDTH, WIDTH).detach(), torch.ones(EXPERTS))
    run_thin_products(dtype)
    run_moves(dtype)


def run_thin_products(dtype: torch.dtype) -> None:
    """Call the products with thin matrices."""
    from lightning_d9d.ops.kernels import thin_products as thin

    x, h = torch.ones(TOKENS, WIDTH, dtype=dtype), torch.ones(TOKENS * TOP_K, ADAPTER_RANK, dtype=dtype)
    matrices = torch.ones(EXPERTS, ADAPTER_RANK, WIDTH, dtype=dtype)
    offsets, sources = torch.full((EXPERTS,), len(h), dtype=torch.int32), torch.zeros(len(h), dtype=torch.int32)
    columns = torch.ones(TOKENS, EXPERTS * ADAPTER_RANK, dtype=dtype)
    for places in (sources, None):
        thin.project(x, matrices, offsets, places, 0.5, h)
        thin.gradient(h, x, offsets, places, 0.5, matrices)
    thin.accumulate(torch.ones(len(h), WIDTH, dtype=dtype), h, matrices, offsets, 0.5)
    thin.pick(columns, offsets, sources, 0.5, h)
    thin.spread(h, offsets, sources, columns)


def run_moves(dtype: torch.dtype) -> None:
    """Call what moves rows of tokens: on a rank, and between ranks that write into each other's memory."""
    from lightning_d9d.ops.kernels import linear_cross_entropy, moe_permute, moe_ranks, peer_exchange, peer_words
    from lightning_d9d.ops.peer_memory import Notes, PeerLayout, PeerMemory

    x, copies = torch.ones(TOKENS, WIDTH, dtype=dtype), torch.ones(TOKENS * TOP_K, WIDTH, dtype=dtype)
    places, weights = torch.zeros(TOKENS, TOP_K, dtype=torch.int32), torch.ones(TOKENS, TOP_K)
    counts, offsets = torch.zeros(2, EXPERTS, dtype=torch.int32)
    linear_cross_entropy.scale_in_place(x, torch.ones(()))
    moe_permute.fill_sources(places, torch.zeros(len(copies), dtype=torch.int32))
    moe_permute.clear_padding(counts, offsets, copies)
    moe_permute.dot_rows(x, copies, places, weights)
    moe_ranks.ranks_once(places.long(), EXPERTS // RANKS, RANKS, places)

    layout = PeerLayout(RANKS, EXPERTS // RANKS, TOKENS, WIDTH * dtype.itemsize, TOP_K)
    memory = PeerMemory([torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(RANKS)], 0, layout)
    ranks, experts = torch.zeros(2, TOKENS, TOP_K, dtype=torch.int32)
    table, shifts = torch.zeros(3, RANKS, dtype=torch.int32), torch.zeros(EXPERTS, dtype=torch.int32)
    peer_exchange.share_counts(memory, table[0], counts, offsets, len(copies), table, shifts, offsets)
    peer_exchange.meet(memory)
    word, late = torch.zeros(2, 1, dtype=torch.int32)
    peer_words.tell(word, 1, late)
    peer_words.hear(word, 1, late, 1, 1.0)
    of_rows = torch.ones(len(copies))
    for notes in (Notes(weights, experts, places, shifts, of_rows), None):
        own = None if notes is None else weights
        peer_exchange.exchange(memory, x, places, ranks, table, places, copies, notes)
        peer_exchange.take_rest(memory, table, places, copies, None if notes is None else of_rows)
        peer_exchange.push_sums(memory, copies, places, table, own)
        peer_exchange.take_sums(memory, places, ranks, x, own)


def main() -> int:
    """Compile all; return the number of kernels that were not reached or cannot run."""
    parser = ArgumentParser()
    parser.add_argument("--all", action="store_true")
    takes_all = parser.parse_args().all
    launch_as_compilation(to_binary if takes_all else to_ir)
    for dtype in (torch.bfloat16, torch.float32) if takes_all else (torch.bfloat16,):
        run_ops(dtype)
        run_others(dtype, *([(16, 64, 128), (1, ADAPTER_RANK, 64)] if takes_all else [(64,), (ADAPTER_RANK,)]))
    missing = sorted(kernels() - set(_lowered))
    found = [f"not reached: {name}" for name in missing] + _too_large
    print(f"{len(_lowered)} kernels, {_lowered.total()} times", *found, sep="\n")
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
