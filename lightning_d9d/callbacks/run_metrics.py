"""`RunMetrics` logs how fast a fit is, where its time goes, and how its gradients and memory develop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_d9d.callbacks.router_counts import RouterCounts
from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.uneven import data_wait_seconds
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.metrics import Convention, StepClock, StepFlops, StepParts, peak_flops
from lightning_d9d.pipeline.microbatch import num_tokens
from lightning_d9d.strategy.batch_report import BatchReport
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizers import first_names
from lightning_d9d.strategy.strategy import D9DStrategy
from lightning_d9d.waits import observed_by

_GIB = 2**30


@dataclass(frozen=True)
class _Numbers:
    """A rank's numbers: for the batches since it last sent them, and current values."""

    seconds: Any
    steps: Any
    tokens: Any
    samples: Any
    padding: Any
    causal: Any
    full: Any
    causal_recompute: Any
    full_recompute: Any
    num_measured: Any
    data: Any
    host: Any
    compute: Any
    communication: Any
    allocated: Any
    peak: Any


class _Interval:
    """Counts this rank's batches, and the time that they take."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.samples = 0
        self.flops = dict.fromkeys(Convention, 0.0)
        self.padding: Tensor | None = None
        self._seconds = 0.0
        self._since: float | None = None

    def go(self) -> None:
        """Start the clock again."""
        if self._since is None:
            self._since = perf_counter()

    def stop(self) -> None:
        """Stop the clock."""
        self._seconds, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else perf_counter() - self._since)


class RunMetrics(L.Callback):
    """Logs speed, the parts of a step, memory, learning rates and gradient norms of a `D9DModule` under `D9DStrategy`.

    Values are logged every `log_every_n_steps` steps of the Trainer, and are equal on every rank. They need no message
    of their own, because the ranks' numbers are sent with the report of a batch. The host does not wait for the device
    to compute them; Lightning reads them when it passes them to loggers. Speeds cover all steps since the last values,
    up to the step before, without time for validation. One step of each interval is measured in parts. See [Read a
    run](../how-to/read-a-run.md) for each name. All ranks must have the callback.

    Args:
        peak_tflops: Peak of one device in 1e12 operations a second, for MFU and HFU. By default the peak of dense
            products in bfloat16, for GPUs whose data sheet is known; without a peak neither is logged.
        norm_every_step: Whether to compute `grad_norm` in each step even without clipping, so that callbacks can read
            it.
        norm_groups: Patterns of parameter names by label, such as `{"experts": "*.experts.*"}`: the gradient norm of
            each group is logged as `grad_norm/experts`.

    Raises:
        ConfigError: `peak_tflops` is not above 0. At the start of a fit: the module is not a `D9DModule` under
            `D9DStrategy`, or a pattern matches no parameter. When values are first logged: another part of the run logs
            a name, too.
    """

    def __init__(
        self,
        peak_tflops: float | None = None,
        norm_every_step: bool = False,
        norm_groups: dict[str, str] | None = None,
    ) -> None:
        if peak_tflops is not None and not 0 < peak_tflops < math.inf:
            raise ConfigError(
                f"RunMetrics(peak_tflops={peak_tflops}) must be a number above 0, such as 989 for an H100"
            )
        self.peak_tflops = peak_tflops
        self.norm_every_step = norm_every_step
        self.norm_groups = norm_groups or {}
        self._flops: dict[int, StepFlops | None] = {}  # by length of sequences
        self._rates: list[float] = []  # the initial learning rates of all groups of all ranks
        self._reset()

    def _reset(self) -> None:
        self._interval = _Interval()
        self._weight: Tensor | None = None
        """The weight of all batches up to the last interval."""
        self._sent_step = -1
        self._sent_weight: tuple[Tensor, Tensor] | None = None
        """The weight of all batches up to those that were sent, and of those in the interval."""
        self._clock: StepClock | None = None
        self._finished: StepClock | None = None
        self._observed = ExitStack()
        self._names: set[str] | None = None
        self._routers: RouterCounts | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run that cannot be measured.

        Raises:
            ConfigError: The module is not a `D9DModule` under `D9DStrategy`, or gradients have no norms by group.
        """
        if stage != "fit":
            return
        if not (isinstance(trainer.strategy, D9DStrategy) and isinstance(pl_module, D9DModule)):
            raise ConfigError(
                f"RunMetrics needs a D9DModule under D9DStrategy, but {type(pl_module).__name__} trains under "
                f"{type(trainer.strategy).__name__}; leave the callback out"
            )
        if self.norm_groups and trainer.strategy.step_in_backward:
            raise ConfigError(
                f"RunMetrics(norm_groups={self.norm_groups}) cannot be used with step_in_backward=True, which frees "
                "gradients before their norms are taken; leave one of them out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure. Collective over all ranks."""
        assert isinstance(pl_module, D9DModule)
        self._reset()
        self._flops.clear()
        report = pl_module.pipeline.batch_report
        report.open()
        report.logs_every_norm = self.norm_every_step
        self._groups = self._parameters_of_groups(pl_module)
        self._routers = RouterCounts(pl_module)
        rates = Ranks().all_gather(sorted({_initial_rate(group) for group in _param_groups(trainer)}))
        self._rates = sorted({rate for theirs in rates for rate in theirs}, reverse=True)
        self._start_clock(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Send the numbers of the batches before, if this step is logged. Local."""
        assert isinstance(pl_module, D9DModule)
        report, step = pl_module.pipeline.batch_report, trainer.global_step
        is_logged = _every(trainer) > 0 and (step + 1) % _every(trainer) == 0
        report.norm_groups = self._groups if is_logged else {}
        if is_logged and step != self._sent_step and self._interval.steps > 0:
            self._send(trainer, pl_module, report)
        self._interval.go()
        if self._clock is not None:
            self._clock.begin_batch()
            self._observed.enter_context(observed_by(self._clock))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; log the ranks' numbers, if the step is logged. Local."""
        assert isinstance(pl_module, D9DModule)
        if batch is None:  # Lightning leaves the step out
            return
        has_stepped = trainer.global_step != self._step
        self._observed.close()
        if self._clock is not None:
            self._clock.end_batch()
            if has_stepped:
                self._clock.finish(data_wait_seconds(trainer))
                self._finished, self._clock = self._clock, None
        self._count(trainer, pl_module, batch, has_stepped=has_stepped)
        if not has_stepped:
            return
        rows, report = pl_module.pipeline.batch_report.rows, pl_module.pipeline.batch_report
        if rows is not None and self._sent_step == trainer.global_step - 1:
            report.rows = None
            values = self._values(trainer, pl_module, rows)
            if self._routers is not None and report.sums is not None:
                values |= self._routers.values(report.sums)
            self._check_names(trainer, values)
            pl_module.log_dict(values, batch_size=1)
        self._start_clock(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop measuring. Local."""
        self._interval.stop()
        self._clock = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop watching. Local."""
        self._observed.close()
        self._close_routers()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop watching. Local."""
        assert isinstance(pl_module, D9DModule)
        pl_module.pipeline.batch_report.close()
        self._groups = {}
        self._close_routers()

    def _close_routers(self) -> None:
        if self._routers is not None:
            self._routers.close()
            self._routers = None

    def _parameters_of_groups(self, module: D9DModule) -> dict[str, list[Any]]:
        """Return the parameters of each group, by its label. Collective over all ranks."""
        names = first_names(module.state_dict(keep_vars=True))
        groups = {
            name: [weight for weight, called in names.items() if weight.requires_grad and fnmatchcase(called, pattern)]
            for name, pattern in self.norm_groups.items()
        }
        for of_ranks in zip(*Ranks().all_gather([(name, len(found)) for name, found in groups.items()]), strict=True):
            if not any(count for _, count in of_ranks):
                name = of_ranks[0][0]
                raise ConfigError(
                    f"RunMetrics(norm_groups={{{name!r}: {self.norm_groups[name]!r}}}): no trained parameter has such "
                    f"a name. Names are {next(iter(names.values()), '')!r} and so on, and * stands for anything"
                )
        return groups

    def _start_clock(self, trainer: L.Trainer, module: D9DModule) -> None:
        """Measure the next step, if it is in the middle of an interval."""
        self._step = trainer.global_step
        every = _every(trainer)
        if every > 0 and self._step % every == every // 2:
            self._clock = StepClock(module.device, data_wait_seconds(trainer))

    def _count(self, trainer: L.Trainer, module: D9DModule, batch: Any, *, has_stepped: bool) -> None:
        interval = self._interval
        interval.steps += has_stepped
        assert isinstance(trainer.strategy, D9DStrategy)
        if trainer.strategy.is_dummy_batch:
            return
        tokens, samples = num_tokens(batch), module.rows_of(batch) or 0
        interval.tokens += tokens
        interval.samples += samples
        padding = num_padding(batch)
        if padding is not None:
            interval.padding = padding if interval.padding is None else interval.padding + padding
        if samples > 0 and (flops := self._flops_of(trainer, module, tokens // samples)) is not None:
            for convention in Convention:
                interval.flops[convention] += samples * flops.count(convention)

    def _flops_of(self, trainer: L.Trainer, module: D9DModule, length: int) -> StepFlops | None:
        if length not in self._flops:
            once, twice = (module.model_costs(each, 2) for each in (length, 2 * length))
            self._flops[length] = None
            if length > 0 and once is not None and twice is not None:
                assert isinstance(trainer.strategy, D9DStrategy)
                layers = range(len(once.layers))
                share = sum(map(trainer.strategy.parallel.recomputes_block, layers)) / len(layers)
                self._flops[length] = StepFlops(once, twice, share, frozen=module.peft is not None)
        return self._flops[length]

    def _send(self, trainer: L.Trainer, module: D9DModule, report: BatchReport) -> None:
        interval, self._interval = self._interval, _Interval()
        self._has_parts = self._finished is not None
        parts = None if self._finished is None else self._finished.parts()
        if parts is not None:
            self._finished = None
        on_cuda = module.device.type == "cuda"
        numbers = _Numbers(
            seconds=interval.seconds,
            steps=interval.steps,
            tokens=interval.tokens,
            samples=interval.samples,
            padding=0.0 if interval.padding is None else interval.padding,
            num_measured=float(parts is not None),
            allocated=torch.cuda.memory_allocated(module.device) / _GIB if on_cuda else 0.0,
            peak=torch.cuda.max_memory_allocated(module.device) / _GIB if on_cuda else 0.0,
            **{str(convention): flops for convention, flops in interval.flops.items()},
            **asdict(parts or StepParts()),
        )
        rates = {_initial_rate(group): group["lr"] for group in _param_groups(trainer)}
        own = [getattr(numbers, each.name) for each in fields(numbers)]
        counts = None if self._routers is None else self._routers.take()
        report.send([*own, *(rates.get(rate, -math.inf) for rate in self._rates)], counts)
        self._sent_step = trainer.global_step
        self._has_padding = interval.padding is not None
        if report.weight is not None:
            before = 0.0 if self._weight is None else self._weight
            self._sent_weight = report.weight, report.weight - before
            self._weight = report.weight

    def _values(self, trainer: L.Trainer, module: D9DModule, rows: Tensor) -> dict[str, Tensor]:
        """Compute the values to be logged from the rows of all ranks. Local, without a host sync."""
        assert isinstance(trainer.strategy, D9DStrategy)
        size = len(fields(_Numbers))
        of = _Numbers(*rows[:, :size].unbind(1))
        seconds = of.seconds.max()
        # Ranks that share a batch have all counted it.
        num_readers = len(rows) / trainer.strategy.ranks.num_summed
        tokens, samples, padding = (each.sum() / num_readers for each in (of.tokens, of.samples, of.padding))
        values = {
            "speed/tokens_per_s": tokens / seconds,
            "speed/samples_per_s": samples / seconds,
            "step/seconds": seconds / of.steps.max(),
        }
        if self._sent_weight is not None:
            counted = self._sent_weight[1]
            values |= {"speed/counted_tokens_per_s": counted / seconds, "data/counted_share": counted / tokens}
        if self._has_padding:
            values["data/padding_share"] = padding / tokens
        values |= self._flops_values(module, of, num_readers)
        if self._has_parts:  # of the ranks whose devices are through with the step
            measured = of.num_measured.sum()
            values |= {f"step/{name}_seconds": getattr(of, name).sum() / measured for name in asdict(StepParts())}
        if module.device.type == "cuda":
            values |= {"memory/now_gib": of.allocated.max(), "memory/peak_gib": of.peak.max()}
        for index, rate in enumerate(self._rates):
            name = "learning_rate" if len(self._rates) == 1 else f"learning_rate/of_{rate:g}"
            values[name] = rows[:, size + index].max()
        if not trainer.strategy.skip_nonfinite:  # the strategy logs it otherwise
            skipped = module.pipeline.batch_report.skipped
            assert skipped is not None
            values["skipped_steps"] = skipped.clone()
        return {name: value.float() for name, value in values.items()}

    def _flops_values(self, module: D9DModule, of: _Numbers, num_readers: float) -> dict[str, Tensor]:
        known = [each for each in self._flops.values() if each is not None]
        if not known:
            return {}
        conventions = [*Convention] if known[0].recomputes else [Convention.CAUSAL, Convention.FULL]
        on_cuda = module.device.type == "cuda"
        peak = peak_flops(torch.cuda.get_device_name(module.device)) if on_cuda else None
        peak = peak if self.peak_tflops is None else self.peak_tflops * 1e12
        values = {}
        for convention in conventions:
            flops = getattr(of, convention).sum() / num_readers / len(of.seconds) / of.seconds.max()
            values[f"tflops/{convention}"] = flops / 1e12
            if peak is not None:
                values[convention.utilization] = flops / peak
        return values

    def _check_names(self, trainer: L.Trainer, values: Mapping[str, Tensor]) -> None:
        if self._names is None:
            if clash := sorted(values.keys() & trainer.callback_metrics.keys()):
                raise ConfigError(
                    f"RunMetrics logs {', '.join(clash)}, and so does another part of this run; give your own values "
                    "other names"
                )
            self._names = {*values}


def num_padding(batch: Any) -> Tensor | None:
    """Return how many tokens of a batch are padding, on its device; None if the batch does not say. Local.

    Args:
        batch: A mapping. Padding tokens have an `attention_mask` of 0, or negative `document_ids`.
    """
    if not isinstance(batch, Mapping):
        return None
    for name, is_padding in (("attention_mask", lambda mask: mask == 0), ("document_ids", lambda ids: ids < 0)):
        if isinstance(batch.get(name), Tensor):
            return is_padding(batch[name]).sum()
    return None


def _every(trainer: L.Trainer) -> int:
    return trainer.log_every_n_steps  # type: ignore[attr-defined]


def _param_groups(trainer: L.Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups if group["params"]]


def _initial_rate(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))
