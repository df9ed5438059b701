"""What else there is to know of pipeline steps: bubbles, memory, host time, messages, host syncs.

- *Bubble*: the share of time in which ranks compute nothing, of a step that was timed by events on the device, beside
  that of the simulator with the mean cost of each stage and kind of action in that step, and of a message.
- *Memory*: the most that PyTorch had allocated on a rank in a step, above what it had before. The simulator's is what
  one microbatch takes in a stage (measured alone, one microbatch after another), counted through the program, and to it
  come the gradients and the most that one action needs while it runs.
- *Host time*: of `Executor.train` over its actions, of which messages are some, with modules that compute nothing, a
  backward that does nothing and messages that nobody sends.
- *Messages*: tensors handed to torch in a step.
- *Host syncs*: warnings of `torch.cuda.set_sync_debug_mode` in a step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.pipeline.stage import Stage
from lightning_d9d.pipeline.timeline import Timeline
from lightning_d9d.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Costs,
    Forward,
    Program,
    add_messages,
    bubble_ratio,
    compute_parts,
    mean_costs,
    simulate,
)
from tests.benchmarks.frame import Contender, synchronize

if TYPE_CHECKING:
    from tests.benchmarks.pipeline import Ours

HOST_REPEATS = 20
COSTS = ("forward", "backward", "backward_input", "backward_weight", "latency")


def measure(contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """All of it, by contender. Collective."""
    measured: dict[str, dict[str, Any]] = {}
    for name, contender in contenders.items():
        values = measured[name] = {}
        values["messages"] = all_gather_object(_count_messages(contender))
        if device.type == "cuda":
            values["memory_bytes"] = all_gather_object(_peak_bytes(contender, device))
            values["host_syncs"] = all_gather_object(host_syncs(contender))
        if hasattr(contender, "executor"):
            ours: Any = contender
            values |= _bubble(ours)
            if device.type == "cuda":
                values["predicted_memory_bytes"] = _predicted_bytes(ours)
            values["host_seconds_per_action"] = all_gather_object(_host_seconds(ours))
    return measured


# Bubble


def _bubble(ours: Ours) -> dict[str, Any]:
    timeline = ours.executor.observer = Timeline(ours.device, ours.pipeline.group)
    ours.run(1)
    ours.executor.observer = None
    spans = timeline.spans()
    costs = mean_costs(spans, ours.program.placement)
    simulation = simulate(ours.program, costs)
    start = min(span.start for span in spans)
    return {
        "bubble": bubble_ratio(spans),
        "simulated_bubble": simulation.bubble_ratio,
        "timed_seconds": max(span.end for span in spans) - start,
        "simulated_seconds": simulation.step_time,
        "costs": {name: getattr(costs, name) for name in COSTS},
        "spans": [[span.rank, str(span.action), span.start - start, span.end - start] for span in spans],
    }


# Memory


def _peak_bytes(contender: Contender, device: torch.device) -> int:
    contender.run(1)  # what contenders before it have left in gradients
    _clear(contender)
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    contender.run(1)
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _clear(contender: Any) -> None:
    for stage in contender.stages.values():
        for parameter in stage.parameters():
            parameter.grad = None


class _MemoryProbe:
    """Takes a Timeline's place: bytes allocated before and after each action, and the most in between."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_action: dict[Action, tuple[int, int, int]] = {}

    @contextmanager
    def span(self, action: Action) -> Generator[None]:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        after = torch.cuda.memory_allocated(self.device)
        self.of_action[action] = before, after, torch.cuda.max_memory_allocated(self.device)


def _predicted_bytes(ours: Ours) -> list[int]:
    """Predict the bytes of each rank from those of one microbatch at a time."""
    probe: Any = _MemoryProbe(ours.device)
    ours.executor.observer = probe
    _clear(ours)
    ours.train(serial(ours.program).ranks[ours.pipeline.rank])
    synchronize(ours.device)
    ours.executor.observer = None
    of_ranks = all_gather_object(probe.of_action)
    whole, kept = [], []
    for stage, rank in enumerate(ours.program.placement):
        before, after, _ = of_ranks[rank][Forward(stage, 1)]
        whole.append(after - before)
        before, after, _ = of_ranks[rank].get(BackwardInput(stage, 1), (0, 0, 0))
        kept.append(max(0, whole[-1] + after - before))
    live = simulate(ours.program, Costs(activation=whole, split_activation=kept)).peak_memory
    gradients = sum(p.nbytes for stage in ours.stages.values() for p in stage.parameters())
    while_running = [
        peak - (max(before, after) if isinstance(action, Forward) else before)
        for action, (before, after, peak) in probe.of_action.items()
        if action.microbatch > 0  # before that there are no gradients
    ]
    return [int(live[rank]) + theirs for rank, theirs in enumerate(all_gather_object(gradients + max(while_running)))]


def serial(program: Program) -> Program:
    """Two microbatches through the stages of a program one after another, with the kinds of backward it has."""
    orders = []
    for rank, actions in enumerate(program.ranks):
        stages = [stage for stage, holder in enumerate(program.placement) if holder == rank]
        split = {p.stage for action in actions for p in compute_parts(action) if isinstance(p, BackwardInput)}
        order: list[Action] = []
        for microbatch in range(2):
            order += [Forward(stage, microbatch) for stage in stages]
            for stage in reversed(stages):
                halves = (BackwardInput, BackwardWeight) if stage in split else (Backward,)
                order += [kind(stage, microbatch) for kind in halves]
        orders.append(tuple(order))
    return add_messages(Program(tuple(orders), program.placement, 2))


# Host time


class _Sent:
    """A message that nobody sends."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class _Nothing(nn.Module):
    """A replacement of a stage's module. It has its parameters, computes nothing, and gives its input a gradient at
    once."""

    def __init__(self, module: nn.Module, output: Any, gradient: Tensor) -> None:
        super().__init__()
        self.module = module
        self.output = output
        self.gradient = gradient

    def forward(self, hidden_states: Tensor | None = None, **_: Any) -> Any:
        if hidden_states is not None:
            hidden_states.grad = self.gradient
        return self.output


def _host_seconds(ours: Ours) -> float:
    executor, work = ours.executor, ours.work
    actions = ours.program.ranks[ours.pipeline.rank]
    shape = 1, work.sequence_length, work.config.hidden_size
    hidden = torch.zeros(shape, dtype=work.dtype, device=ours.device, requires_grad=True)
    loss = torch.zeros((), device=ours.device, requires_grad=True)
    stages, last = executor.stages, executor.num_stages - 1
    outputs = {index: SimpleNamespace(loss=loss) if index == last else {"hidden_states": hidden} for index in stages}
    gradient = torch.zeros_like(hidden)
    executor.stages = {
        index: Stage(_Nothing(module, outputs[index], gradient)) for index, module in ours.stages.items()
    }
    try:
        with (
            mock.patch.multiple(dist, isend=_not_sent, irecv=_not_sent),
            mock.patch.object(torch.autograd, "backward", _no_backward),
        ):
            # a pair is two
            return _fastest(lambda: ours.train(actions)) / sum(max(1, len(compute_parts(action))) for action in actions)
    finally:
        executor.close()
        executor.stages = stages


def _not_sent(*_: Any) -> _Sent:
    return _Sent()


def _no_backward(*_: Any) -> None:
    pass


def _fastest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(HOST_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# Messages and syncs


def _count_messages(contender: Any) -> int:
    if hasattr(contender, "executor"):
        messages = contender.pipeline.messages
        before = messages.num_calls
        contender.run(1)
        return messages.num_calls - before
    count = 0
    send = schedules._batch_p2p

    def counted(operations: list[Any], desc: str | None = None) -> Any:
        nonlocal count
        count += len(operations)
        return send(operations, desc)

    with mock.patch.object(schedules, "_batch_p2p", counted):
        contender.run(1)
    return count


def host_syncs(contender: Contender) -> list[str]:
    """Return the places where the host waits. Errors in place of warnings would leave the other ranks waiting."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            contender.run(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]
