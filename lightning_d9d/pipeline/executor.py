"""Runs programs: a loop over the actions of one batch on one rank of a pipeline."""

from __future__ import annotations

import dataclasses
import dis
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_d9d.errors import ConfigError, ScheduleError
from lightning_d9d.pipeline.stage import Stage
from lightning_d9d.pipeline.timeline import Observer
from lightning_d9d.pipeline.totals import BatchTotals, as_weighted
from lightning_d9d.pipeline.transfer import Messages, Schema
from lightning_d9d.pipeline.trees import described, put_together
from lightning_d9d.pipeline.turns import Turns
from lightning_d9d.pipeline.types import StageInputs, WeightedLoss
from lightning_d9d.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeAction,
    Forward,
    Overlapped,
    ReceiveBackward,
    ReceiveForward,
    ReduceGradients,
    Reshard,
    SendBackward,
    SendForward,
    Unshard,
    compute_parts,
)


class MicrobatchHooks(Protocol):
    """Hooks of a module that the executor calls; `D9DModule` documents each."""

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        """Return the keyword arguments of the stages."""
        ...

    def microbatch_loss(self, output: Any, microbatch: Any) -> Tensor | WeightedLoss:
        """Return a scalar mean, or a sum with its weight."""
        ...

    def microbatch_metrics(self, output: Any, microbatch: Any) -> Mapping[str, Tensor | WeightedLoss]:
        """Return further scalars, without gradient."""
        ...


class DataParallel(Protocol):
    """Notifies data parallelism about a stage; the executor calls it.

    Collective over the ranks that hold the same stages.
    """

    def unshard(self, stage: int) -> None:
        """Gather the stage's parameters: its actions come next."""
        ...

    def reshard(self, stage: int) -> None:
        """Reshard the stage: all its actions have run."""
        ...

    def last_backward(self, stage: int) -> None:
        """Announce the stage's last full backward: gradients may be reduced as they become complete."""
        ...

    def reduce(self, stage: int) -> None:
        """Launch the stage's remaining reductions: all its gradients are complete."""
        ...


class ForwardsAgain(Protocol):
    """Runs forwards of stages, some of them twice."""

    def begin(self) -> None:
        """Begin a batch. Local."""
        ...

    def forward(self, stage: int, microbatch: int, run: Callable[[], Any]) -> Any:
        """Return the result of a forward. Collective over the ranks that hold the same stages."""
        ...

    def as_forward(self, stage: int, microbatch: int) -> AbstractContextManager:
        """Open a context around a backward, whose recomputations repeat what its forward did last."""
        ...

    def end(self) -> None:
        """End a batch, after all backwards. Collective over the ranks that hold the same stages."""
        ...


@dataclass(frozen=True)
class SplitBatch:
    """A batch in microbatches."""

    microbatches: Sequence[Any]
    rows: Sequence[int | None]
    """Rows of each microbatch: the weight of a mean loss. None means that the microbatch has no rows and needs a
    `WeightedLoss`.
    """
    num_dummies: int = 0
    """Dummy microbatches at the end. The schedule or other ranks need them; they run and count 0."""

    @property
    def num_counted(self) -> int:
        """The number of microbatches before the dummies."""
        return len(self.microbatches) - self.num_dummies

    def counts(self, microbatch: int) -> bool:
        """Return True unless a microbatch is a dummy."""
        return microbatch < self.num_counted


class LossScale(NamedTuple):
    """The factor on the value sum of a microbatch's loss before its backward, by the result of `microbatch_loss`."""

    of_mean: float = 1.0
    """The factor for a Tensor, a mean over the rows of the microbatch."""
    of_sum: Tensor | float | None = 1.0
    """The factor for a `WeightedLoss`. None refuses it, because the step's weight must be known before its backward."""


class Executor:
    """An executor of programs over the stages that this rank holds.

    Args:
        stages: This rank's stages, by index in the whole model.
        num_stages: Number of stages of the whole model.
        hooks: Hooks of the module for microbatches.
        forward_context: Opens the precision context (autocast) around each forward and its loss; backwards run outside.
        messages: Sends messages to and from stages on other ranks; None if all stages are here.
        observer: Wrapped around the computation of each compute action; None for no observer.
        stage_context: Context that is opened inside `forward_context`, around a stage only: losses are computed
            outside.
        before_first: Called before the first forward of a stage, with the stage and its arguments.
        pairs_on: Device on which the forward and the backward of an overlapped pair take turns, if they are of two
            stages. None: one runs after the other, as with an `observer`.
        again: Runs the forwards of training; None runs each once.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        hooks: MicrobatchHooks,
        forward_context: Callable[[], AbstractContextManager],
        messages: Messages | None = None,
        observer: Observer | None = None,
        stage_context: Callable[[], AbstractContextManager] = nullcontext,
        before_first: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], None] | None = None,
        pairs_on: torch.device | None = None,
        again: ForwardsAgain | None = None,
    ) -> None:
        self.stages = {index: Stage(module, before_first) for index, module in stages.items()}
        self.num_stages = num_stages
        self.hooks = hooks
        self.forward_context = forward_context
        self.messages = messages
        self.observer = observer
        self.stage_context = stage_context
        self.pairs_on = pairs_on
        self.again = again

    def train(
        self,
        actions: Sequence[Action],
        batch: SplitBatch,
        scale: LossScale,
        data_parallel: DataParallel | None = None,
    ) -> BatchTotals:
        """Run this rank's part of a program, leaving gradients in `.grad`. Collective over the pipeline's ranks.

        Args:
            actions: This rank's actions of a program with messages.
            batch: The batch, the same on all ranks of the pipeline.
            scale: The factor on losses before their backward.
            data_parallel: Gathers parameters and reduces gradients; None if nothing is sharded or replicated. If the
                caller did not begin the batch as one that reduces, it reduces only the units of
                `reduce="every_microbatch"`.

        Returns:
            The totals, on the rank of the last stage; empty on others.
        """
        run = _Run(self, batch, scale=scale, data_parallel=data_parallel)
        if self.again is not None:
            self.again.begin()
        self._run(actions, run)
        if self.again is not None:
            self.again.end()
        return run.totals

    @torch.no_grad()
    def evaluate(self, actions: Sequence[Action], batch: SplitBatch) -> BatchTotals:
        """Run a forward-only program without gradients, for its losses and metrics. Otherwise it is like `train`."""
        run = _Run(self, batch)
        self._run(actions, run)
        return run.totals

    @torch.no_grad()
    def outputs(self, actions: Sequence[Action], batch: SplitBatch, take: Callable[[Any], Any]) -> list[Any]:
        """Run a forward-only program and return `take(output)` for each microbatch that counts.

        The list is empty on ranks without the last stage. Collective over the pipeline's ranks.
        """
        run = _Run(self, batch, take=take)
        self._run(actions, run)
        return [run.taken[microbatch] for microbatch in sorted(run.taken)]

    def close(self) -> None:
        """Restore the modules."""
        for stage in self.stages.values():
            stage.close()

    def _run(self, actions: Sequence[Action], run: _Run) -> None:
        action: Action | None = None
        for each in actions:
            for part in compute_parts(each):
                run.backwards_left[part.stage] += isinstance(part, Backward | BackwardWeight)
                run.forwards_left[part.microbatch] += isinstance(part, Forward)
                run.splits_backward |= isinstance(part, BackwardInput)
        for stage in self.stages.values():
            stage.begin()
        try:
            for action in actions:
                with record_function(str(action)) if torch.autograd._profiler_enabled() else _NOTHING:
                    run.run(action)
            action = None
            if self.messages is not None:
                self.messages.finish()
        except BaseException as error:
            for stage in self.stages.values():
                stage.drop()
            if self.messages is not None:
                self.messages.drop()
            error.add_note(
                f"at {_in_words(action)} (stages 0 to {self.num_stages - 1}, "
                f"microbatches 0 to {len(run.batch.microbatches) - 1}); each microbatch is "
                f"{described(run.batch.microbatches[0])}"
            )
            raise


class _Run:
    """The run of one batch through this rank's stages."""

    def __init__(
        self,
        executor: Executor,
        batch: SplitBatch,
        *,
        scale: LossScale | None = None,
        data_parallel: DataParallel | None = None,
        take: Callable[[Any], Any] | None = None,
    ) -> None:
        self.executor = executor
        self.batch = batch
        self.scale = scale
        self.data_parallel = data_parallel
        self.take = take
        self.totals = BatchTotals()
        self.taken: dict[int, Any] = {}
        self.backwards_left: Counter[int] = Counter()
        """Number of coming actions that complete a microbatch's gradients, by stage."""
        self.splits_backward = False
        """True if backwards are split in two halves."""
        self.forwards_left: Counter[int] = Counter()
        """Number of coming forwards that take a microbatch's keyword arguments."""
        self._inputs: dict[int, StageInputs] = {}
        self._signatures: dict[int, Hashable] = {}
        """[Note: schemas] in `transfer.py`."""
        self._outputs: dict[tuple[int, int], tuple[Schema, list[Tensor]]] = {}
        """Outputs not yet sent, or passed on to a stage of this rank; by (stage, microbatch)."""
        self._schemas: dict[tuple[int, int], Schema] = {}
        """Schemas of outputs that went to another rank and whose gradients have not come yet."""
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}
        """Gradients of inputs, to send or to pass on to a stage of this rank."""
        self._losses: dict[int, Tensor] = {}
        self._factors: dict[float, Tensor] = {}
        """Gradients of losses, by factor."""

    def run(self, action: Action) -> None:
        match action:
            case Forward(stage, microbatch):
                self._forward(stage, microbatch)
            case Backward(stage, microbatch) | BackwardInput(stage, microbatch) | BackwardWeight(stage, microbatch):
                self._backward(action, stage, microbatch)
            case Overlapped(first, second):
                self._pair(first, second)
            case Unshard(stage) | Reshard(stage) | ReduceGradients(stage):
                self._collective(action, stage)
            case _:
                self._message(action)

    # Compute

    def _pair(self, first: ComputeAction, second: ComputeAction) -> None:
        device = self.executor.pairs_on
        is_forward_and_backward = isinstance(first, Forward) != isinstance(second, Forward)
        # FSDP2 has one state for a stage, and spans of actions in turns would contain each other.
        is_one_stage, is_measured = first.stage == second.stage, self.executor.observer is not None
        if device is None or not is_forward_and_backward or is_one_stage or is_measured:
            self.run(first)
            self.run(second)
        else:
            forward, backward = (first, second) if isinstance(first, Forward) else (second, first)
            Turns(device).run(partial(self.run, forward), partial(self.run, backward))

    def _forward(self, stage: int, microbatch: int) -> None:
        executor = self.executor
        inputs = self._inputs_of(microbatch)
        self.forwards_left[microbatch] -= 1
        if self.forwards_left[microbatch] == 0:
            del self._inputs[microbatch]
        arguments: Mapping[str, Any] = inputs.shared if stage else {**inputs.first, **inputs.shared}
        received, trained = self._received(stage, microbatch) if stage else (None, [])
        running = executor.stages[stage]
        counting = _NOTHING if self.batch.counts(microbatch) else running.without_counting()
        with self._observed(Forward(stage, microbatch)), executor.forward_context(), counting:
            run = partial(running.forward, microbatch, trained, received, arguments, self.splits_backward)
            with executor.stage_context():
                again = executor.again if torch.is_grad_enabled() else None
                output = run() if again is None else again.forward(stage, microbatch, run)
            is_last_stage = stage == executor.num_stages - 1
            outputs = self._finish(microbatch, output) if is_last_stage else self._pass_on(stage, microbatch, output)
            if torch.is_grad_enabled():
                running.keep(microbatch, outputs)

    def _received(self, stage: int, microbatch: int) -> tuple[Any, list[Tensor]]:
        """Return the stage's input as leaves of its graph, and those of its tensors that get a gradient."""
        if stage - 1 in self.executor.stages:
            schema, tensors = self._outputs.pop((stage - 1, microbatch))
            tensors = [tensor.detach() for tensor in tensors]
        else:
            schema, tensors = self._messages.receive_forward(stage, microbatch)
        trained = [
            t.requires_grad_() for t, expected in zip(tensors, schema.tensors, strict=True) if expected.requires_grad
        ]
        return put_together(schema.skeleton, tensors), trained

    def _pass_on(self, stage: int, microbatch: int, output: Any) -> list[Tensor]:
        schema, tensors = Schema.of(output, stage)
        self._outputs[stage, microbatch] = (schema, tensors)
        if torch.is_grad_enabled() and stage + 1 not in self.executor.stages:
            self._schemas[stage, microbatch] = schema
        return tensors

    def _finish(self, microbatch: int, output: Any) -> list[Tensor]:
        """Compute the loss of the last stage's output, and add it to the totals."""
        batch = self.batch
        counts = batch.counts(microbatch)
        if self.take is not None:
            if counts:
                self.taken[microbatch] = self.take(output)
            return []
        loss = loss_of(
            self.executor.hooks, output, batch.microbatches[microbatch], batch.rows[microbatch], self.totals, counts
        )
        if self.scale is not None:
            if not loss.requires_grad:
                raise ConfigError(
                    "microbatch_loss returned a loss without gradient: it does not depend on a trainable parameter. "
                    "Leave some parameters unfrozen and adapters unmerged, and do not use detach() and no_grad() in it"
                )
            self._losses[microbatch] = loss.detach()
        return [loss]

    def _backward(self, action: Action, stage: int, microbatch: int) -> None:
        running = self.executor.stages[stage]
        if not isinstance(action, BackwardInput):
            self.backwards_left[stage] -= 1
            is_last_backward = self.backwards_left[stage] == 0
            at_once = (
                isinstance(action, Backward) and not self.splits_backward
            )  # split backwards may add to a weight twice
            if is_last_backward and at_once and self.data_parallel is not None:
                self.data_parallel.last_backward(stage)
        if isinstance(action, BackwardWeight):
            with self._observed(action):
                running.backward_weight(microbatch)
            return
        gradients = self._gradients_of_output(stage, microbatch)
        again = self.executor.again
        with self._observed(action), _NOTHING if again is None else again.as_forward(stage, microbatch):
            run = running.backward if isinstance(action, Backward) else running.backward_input
            of_inputs = run(microbatch, gradients)
        if stage > 0:
            self._gradients[stage, microbatch] = of_inputs

    def _gradients_of_output(self, stage: int, microbatch: int) -> list[Tensor]:
        if stage == self.executor.num_stages - 1:
            assert self.scale is not None
            loss = self._losses.pop(microbatch)
            scale = self.scale.of_mean if self.totals.loss_is_mean else self.scale.of_sum
            if scale is None:
                raise ConfigError(
                    "D9DStrategy(step_in_backward=True) needs the weight of a step before its backward, but "
                    "microbatch_loss returned a WeightedLoss. Implement microbatch_weight, return a mean, or leave "
                    "step_in_backward out"
                )
            factor = scale if self.batch.counts(microbatch) else 0.0
            if isinstance(factor, Tensor):
                return [factor.to(loss)]
            if factor not in self._factors:
                self._factors[factor] = torch.full_like(loss, factor)
            return [self._factors[factor]]
        if stage + 1 in self.executor.stages:
            return self._gradients.pop((stage + 1, microbatch))
        return self._messages.receive_backward(stage, microbatch)

    def _observed(self, action: Action) -> AbstractContextManager:
        return _NOTHING if self.executor.observer is None else self.executor.observer.span(action)

    # Messages and collectives

    def _message(self, action: Action) -> None:
        messages = self._messages
        match action:
            case SendForward(stage, microbatch):
                schema, tensors = self._outputs.pop((stage, microbatch))
                messages.send_forward(stage, self._signature_of(microbatch), schema, tensors)
            case ReceiveForward(stage, microbatch):
                messages.post_forward(stage, microbatch, self._signature_of(microbatch))
            case SendBackward(stage, microbatch):
                messages.send_backward(stage, self._gradients.pop((stage, microbatch)))
            case ReceiveBackward(stage, microbatch):
                messages.post_backward(stage, microbatch, self._schemas.pop((stage, microbatch)))

    def _collective(self, action: Action, stage: int) -> None:
        if self.data_parallel is None:
            return
        match action:
            case Unshard():
                self.data_parallel.unshard(stage)
            case Reshard():
                self.data_parallel.reshard(stage)
            case ReduceGradients():
                self.data_parallel.reduce(stage)

    @property
    def _messages(self) -> Messages:
        if self.executor.messages is None:
            raise ScheduleError("the program has messages, but this run has one pipeline rank")
        return self.executor.messages

    def _inputs_of(self, microbatch: int) -> StageInputs:
        """Return the keyword arguments of a microbatch, kept from its first action here to its last forward."""
        if microbatch not in self._inputs:
            inputs = self._inputs[microbatch] = stage_inputs(self.executor.hooks, self.batch.microbatches[microbatch])
            self._signatures[microbatch] = torch.is_grad_enabled(), _shapes((inputs.first, inputs.shared))
        return self._inputs[microbatch]

    def _signature_of(self, microbatch: int) -> Hashable:
        if microbatch not in self._signatures:
            self._inputs_of(microbatch)
        return self._signatures[microbatch]


def stage_inputs(hooks: MicrobatchHooks, microbatch: Any) -> StageInputs:
    """Call the hook and check its result.

    Raises:
        ConfigError: The result is not a `StageInputs`.
    """
    with naming_batch(hooks.microbatch_inputs, microbatch):
        inputs = hooks.microbatch_inputs(microbatch)
    if not isinstance(inputs, StageInputs):
        raise ConfigError(
            f"microbatch_inputs returned {type(inputs).__name__}; return StageInputs(first={{...}}, shared={{...}})"
        )
    return inputs


def loss_of(
    hooks: MicrobatchHooks, output: Any, microbatch: Any, rows: int | None, totals: BatchTotals, counts: bool = True
) -> Tensor:
    """Return the value sum of a microbatch with its graph; add loss and metrics to `totals` unless it is a dummy."""
    with naming_batch(hooks.microbatch_loss, microbatch):
        loss = hooks.microbatch_loss(output, microbatch)
    weighted = as_weighted(loss, rows, "microbatch_loss")
    totals.add_loss(weighted, is_mean=isinstance(loss, Tensor), counts=counts)
    if counts:
        with torch.no_grad(), naming_batch(hooks.microbatch_metrics, microbatch):
            metrics = hooks.microbatch_metrics(output, microbatch)
        totals.add_metrics(metrics, rows)
    return weighted.value_sum


@contextmanager
def naming_batch(hook: Callable[..., Any], batch: Any) -> Generator[None]:
    """Wrap a hook: if it misses something in a batch, the error describes the batch.

    Other errors pass unchanged, also those that the hook itself raises and those of functions that it calls.

    Raises:
        ConfigError: An index, an attribute, an unpacking or another operator of the hook failed, or a container of the
            batch raised a KeyError.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        lacks = isinstance(error, KeyError) and isinstance(batch, Mapping) and error.args[0] not in batch
        if not lacks and not _is_of_operator(error, hook):
            raise
        name = getattr(hook, "__qualname__", repr(hook))
        reason = f"it has no {error.args[0]!r}" if lacks else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{name} cannot use a batch ({reason}). It is {described(batch)}; add the missing values in the "
            "DataLoader's collate_fn, or change the hook to use the batch's own"
        ) from error


def _is_of_operator(error: Exception, hook: Callable[..., Any]) -> bool:
    """Return whether an operator in the hook's own code failed, and not a `raise` or a call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code is not getattr(hook, "__code__", None):
        return False
    instruction = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return not any(each in instruction for each in ("RAISE", "CALL"))


class _Nothing(AbstractContextManager):
    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()
_WORDS = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input backward",
    BackwardWeight: "weight backward",
    SendForward: "sending the output",
    SendBackward: "sending the input's gradient",
    ReceiveForward: "receiving the input",
    ReceiveBackward: "receiving the output's gradient",
    Unshard: "gathering the parameters",
    Reshard: "resharding the parameters",
    ReduceGradients: "summing the gradients",
}


def _in_words(action: Action | None) -> str:
    if action is None:
        return "the end of the schedule"
    parts: tuple[Any, ...] = compute_parts(action) or (action,)
    return f"{action} of the schedule: " + " and ".join(
        f"{_WORDS[type(part)]} of stage {part.stage}"
        + (f", microbatch {part.microbatch}" if hasattr(part, "microbatch") else "")
        for part in parts
    )


def _shapes(value: Any) -> Hashable:
    """Return shapes and dtypes of the tensors in a tree, and other values by which microbatches differ."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((str(key), _shapes(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_shapes, value))
    if dataclasses.is_dataclass(value):
        return tuple((each.name, _shapes(getattr(value, each.name))) for each in dataclasses.fields(value))
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
