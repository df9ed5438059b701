"""Records the collectives that a process issues.

Every collective of torch.distributed, whoever issues it, ends in an operator of torch's dispatcher (`c10d::allreduce_`
and so on). The recorder takes their dispatch key BackendSelect, which comes right before the device's kernel and is on
in every thread and mode, and dispatches further. So it sees the classic and the functional API, DTensor, FSDP2, the
all-reduces of C++ DDP, compiled graphs, and calls from autograd's threads and any other thread, on gloo, nccl and the
fake backend. It does not see what goes round process groups (the store, one's own sockets), `monitored_barrier`, nor
which reduction (sum, maximum) was asked for.
"""

import pickle
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from tests.harness.records import Entry

_AGREED_TENSORS = {
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "broadcast_": "tensors",
    "reduce_": "tensors",
    "allgather_": "output_tensors",
    "_allgather_base_": "output_tensor",
    "allgather_coalesced_": "output_lists",
    "allgather_into_tensor_coalesced_": "outputs",
    "reduce_scatter_": "input_tensors",
    "_reduce_scatter_base_": "input_tensor",
    "reduce_scatter_tensor_coalesced_": "inputs",
    "gather_": "input_tensors",
    "scatter_": "output_tensors",
    "alltoall_": "input_tensors",
    "alltoall_base_": "input",
    "barrier": None,
    "send": "tensors",
    "recv_": "tensors",
    "recv_any_source_": "tensors",
}
"""Operator to the argument whose dtype and shape all ranks must agree on; in an all-to-all, but for what is split."""

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class Recorder:
    """Writes this process's collectives to a file, each before it is issued: a rank that hangs leaves its record."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._library = torch.library.Library("c10d", "IMPL")
        for name in _AGREED_TENSORS:
            self._wrap(name)

    def start(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def stop(self) -> None:
        if self._file:
            self._file.close()
        self._file = None

    def close(self) -> None:
        """Takes the recorder out again."""
        self.stop()
        self._library._destroy()

    def _wrap(self, name: str) -> None:
        operator = getattr(torch.ops.c10d, name).default
        parameters = [argument.name for argument in operator._schema.arguments]

        def record_and_run(keys: torch.DispatchKeySet, *arguments: Any) -> Any:
            if self._file:
                pickle.dump(_entry(name, dict(zip(parameters, arguments, strict=False))), self._file)
            # Unlike a call of the kernel itself, this lets go of the interpreter lock. Holding it could be a deadlock:
            # gloo's thread may be the last to release a tensor that Python knows, with its queue's lock in hand.
            return operator.redispatch(keys & _BELOW, *arguments)

        self._library.impl(name, record_and_run, "BackendSelect", with_keyset=True, allow_override=True)


def _entry(name: str, arguments: Mapping[str, Any]) -> Entry:
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    thread = threading.current_thread()
    agreed = _AGREED_TENSORS[name]
    peer = next((arguments[key] for key in ("root_rank", "dst", "src") if key in arguments), None)
    tensors, sends, receives = _describe(_flatten(arguments[agreed])) if agreed else "", (), ()
    if name == "alltoall_base_":
        tensors = f"{_dtype(arguments['input'])}[{', '.join(['*', *map(str, arguments['input'].shape[1:])])}]"
        sends = _rows(arguments["input"], arguments["input_split_sizes"], len(ranks))
        receives = _rows(arguments["output"], arguments["output_split_sizes"], len(ranks))
    elif name == "alltoall_":
        tensors = f"{_dtype(arguments['input_tensors'][0])}[*]"
        sends = tuple(tensor.numel() for tensor in arguments["input_tensors"])
        receives = tuple(tensor.numel() for tensor in arguments["output_tensors"])
    return Entry(
        group=group.group_name,
        ranks=ranks,
        operator="receive" if name.startswith("recv") else name.strip("_"),
        tensors=tensors,
        sends=sends,
        receives=receives,
        peer=None if peer is None else ranks[peer],
        tag=arguments.get("tag", 0),
        # torch's own threads are unknown to Python until they call into it
        ordered=thread is threading.main_thread() or isinstance(thread, threading._DummyThread),
    )


def _rows(tensor: torch.Tensor, splits: list[int], num_ranks: int) -> tuple[int, ...]:
    """Rows for each rank; no splits means equal ones."""
    return tuple(splits) or (tensor.shape[0] // num_ranks,) * num_ranks


def _flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flatten(part)]


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{_dtype(tensor)}{list(tensor.shape)}" for tensor in tensors)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
