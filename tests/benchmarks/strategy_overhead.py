"""What `D9DStrategy` costs a step: against a bare torch loop in one process, against stock DDP in two.

The cases called watched compare it with itself: with and without callbacks that watch a run.

All contenders train equal networks with equal initial weights on equal batches: the same loss, fused AdamW on CUDA, a
constant learning rate through a scheduler, and clipping by norm. Batches come from the same DataLoader (no workers;
pinned memory on CUDA), and each contender brings them to the device. Trainers have the progress bar, logger and
checkpoints off and `log_every_n_steps=50`.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from tempfile import gettempdir
from typing import Any, Literal, Protocol

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from lightning_d9d import D9DStrategy, GradSyncConfig
from lightning_d9d.callbacks import RunMetrics, StepProfile, Stragglers
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining
from tests.benchmarks.frame import Case

MAX_NORM = 0.1
WIDE = "D9DStrategy, D9DModule, float32 sums"
BARE, STAGED, PLAIN = "bare torch loop", "D9DStrategy, D9DModule", "D9DStrategy, plain module"
STOCK, DDP = "SingleDeviceStrategy, plain module", "DDPStrategy, plain module"
METRICS, IDLE, ALL = "RunMetrics", "StepProfile, idle", "RunMetrics, StepProfile, Stragglers"
WATCHED_STEPS = 48
"""Blocks of the watched cases: each has one report of `Stragglers` and one logged step of `RunMetrics`."""


def cases(device_type: str, quick: bool) -> list[Case]:
    """One process against the bare loop, two against stock DDP."""
    if quick:
        model = Qwen3MoeConfig.preset("tiny")
        work = Work(config=model, precision="32-true", batch_size=2, sequence_length=32)
    elif device_type == "cuda":
        model = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=2)
        work = Work(config=model, precision="bf16-true", batch_size=4, sequence_length=4096)
    else:
        model = replace(Qwen3MoeConfig.preset("tiny"), vocab_size=1024)
        work = Work(config=model, precision="32-true", batch_size=8, sequence_length=128)
    limit = 1.01 if device_type == "cuda" else 1.05
    rounds: dict[str, Any]
    if quick:
        rounds = dict(warmup_steps=4, block_steps=1, repeats=2)
    elif device_type == "cuda":  # the host runs ahead of the device: only blocks of many steps show the steady state
        rounds = dict(warmup_steps=4, block_steps=24, repeats=9)
    else:  # short blocks: what else the machine does hits contenders alike
        rounds = dict(warmup_steps=4, block_steps=1, repeats=60)
    plain, staged = partial(fit_plain, work), partial(fit_staged, work)
    own_dtype = "bfloat16" if work.precision == "bf16-true" else "auto"  # DDP sums gradients in the weights' dtype
    return [
        Case(
            name="one process",
            contenders={
                BARE: partial(BareLoop, work),
                STAGED: staged,
                PLAIN: plain,
                STOCK: partial(fit_plain, work, strategy=SingleDeviceStrategy),
            },
            peer=BARE,
            limits={} if quick else {STAGED: limit, PLAIN: limit},
            conditions=work.conditions(),
            **rounds,
        ),
        Case(
            name="two processes",
            contenders={
                DDP: partial(fit_plain, work, strategy=DDPStrategy, num_processes=2),
                STAGED: partial(staged, num_processes=2, sums=own_dtype),
                PLAIN: partial(plain, num_processes=2),
            }
            | ({WIDE: partial(staged, num_processes=2)} if work.precision == "bf16-true" else {}),
            peer=DDP,
            limits={} if quick else {STAGED: limit, PLAIN: limit},
            num_processes=2,
            conditions=work.conditions(),
            **rounds,
        ),
        *watched_cases(work, device_type, quick, own_dtype),
    ]


def watched_cases(work: Work, device_type: str, quick: bool, sums: Literal["auto", "bfloat16"]) -> list[Case]:
    """Return cases that compare a run with watching callbacks to the same run without them. Targets are for a GPU.

    Args:
        work: For all.
        device_type: "cpu" or "cuda".
        quick: Few and short rounds.
        sums: The dtype of sums over ranks.
    """
    steps = 2 if quick else WATCHED_STEPS
    limit = 1.005

    def case(num_processes: int, *names: str) -> Case:
        staged = partial(fit_staged, work, num_processes=num_processes, sums=sums, log_every_n_steps=steps)
        return Case(
            name=f"watched, {num_processes} process{'es' if num_processes > 1 else ''}",
            contenders={
                STAGED: staged,
                **{name: partial(staged, watched_by=partial(watchers, name)) for name in names},
            },
            peer=STAGED,
            limits=dict.fromkeys(names, limit) if device_type == "cuda" and not quick else {},
            num_processes=num_processes,
            conditions=work.conditions(),
            warmup_steps=2 if quick else 4,
            block_steps=steps,
            repeats=2 if quick else 9,
        )

    return [case(1, METRICS, IDLE), case(2, METRICS, ALL)]


def watchers(name: str) -> list[L.Callback]:
    """The callbacks of a contender."""
    found: list[L.Callback] = []
    if name in (METRICS, ALL):
        found.append(RunMetrics())
    if name in (IDLE, ALL):
        found.append(StepProfile(gettempdir(), first_step=1_000_000))
    if name == ALL:
        found.append(Stragglers(every_n_steps=WATCHED_STEPS))
    return found


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender trains. `batch_size` is one process's."""

    config: Qwen3MoeConfig
    precision: str
    batch_size: int
    sequence_length: int

    def network(self, device: torch.device) -> Qwen3MoeForCausalLM:
        """A network on the device; always the same weights."""
        torch.manual_seed(0)
        with device:
            network = Qwen3MoeForCausalLM(self.config)
        return network.to(torch.bfloat16 if self.precision == "bf16-true" else torch.float32)

    def batches(self, device: torch.device) -> DataLoader:
        """Batches on the host, more than any run takes."""
        tokens = Tokens(self.config.vocab_size, self.sequence_length)
        return DataLoader(tokens, batch_size=self.batch_size, pin_memory=device.type == "cuda")

    def conditions(self) -> dict[str, Any]:
        """Return the conditions for the report."""
        return {
            "parameters": self.config.num_parameters,
            "layers": self.config.num_hidden_layers,
            "hidden size": self.config.hidden_size,
            "experts": self.config.num_experts,
            "vocabulary": self.config.vocab_size,
            "batch": f"{self.batch_size} x {self.sequence_length} tokens a process",
            "precision": self.precision,
        }


class Tokens(Dataset):
    """A few random sequences over and over."""

    def __init__(self, vocab_size: int, sequence_length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(vocab_size, (16, sequence_length + 1), generator=generator)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row[:-1], "labels": row[1:]}


def mean_loss(network: Qwen3MoeForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    """The sum over labels that count, divided by their number."""
    loss = network(batch["input_ids"], labels=batch["labels"], reduction="sum").loss
    assert loss is not None
    return loss / (batch["labels"] != -100).sum()


def optimizer_and_schedule(network: torch.nn.Module) -> tuple[AdamW, LambdaLR]:
    """AdamW, fused on CUDA, with a scheduler that leaves the learning rate as it is."""
    parameters = list(network.parameters())
    optimizer = AdamW(parameters, lr=1e-4, fused=parameters[0].device.type == "cuda")
    return optimizer, LambdaLR(optimizer, lambda step: 1.0)


class BareLoop:
    """The training loop that one would write without a trainer."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.device = device
        self.network = work.network(device)
        self.optimizer, self.schedule = optimizer_and_schedule(self.network)
        self.batches = iter(work.batches(device))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batch = {name: t.to(self.device, non_blocking=True) for name, t in next(self.batches).items()}
            self.optimizer.zero_grad()
            loss = mean_loss(self.network, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)
            self.optimizer.step()
            self.schedule.step()
            self.last_loss = loss.detach()

    def loss(self) -> float:
        return self.last_loss.item()

    def close(self) -> None:
        pass


class Trained(Protocol):
    """What a Trainer needs to know of the work."""

    @property
    def precision(self) -> str: ...

    def batches(self, device: torch.device) -> DataLoader: ...


class PausedFit(L.Callback):
    """A `Trainer.fit` in a thread of its own that stands still at the start of a batch, between blocks."""

    def __init__(
        self,
        module: L.LightningModule,
        strategy: Strategy,
        work: Trained,
        device: torch.device,
        num: int,
        max_norm: float | None = MAX_NORM,
        callbacks: Sequence[L.Callback] = (),
        log_every_n_steps: int = 50,
    ) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        self._requests: SimpleQueue[int] = SimpleQueue()
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()
        self._steps_left = 0
        self._trainer = L.Trainer(
            strategy=strategy,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=num,
            precision=work.precision,  # type: ignore[arg-type]
            gradient_clip_val=max_norm,
            max_epochs=-1,
            log_every_n_steps=log_every_n_steps,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
            callbacks=[self, *callbacks],
        )
        self._thread = threading.Thread(target=self._fit, args=(module, work.batches(device)), daemon=True)
        self._thread.start()
        self._wait()

    def run(self, steps: int) -> None:
        self._train(steps)

    def loss(self) -> float:
        return float(self._trainer.callback_metrics["train_loss"])

    def close(self) -> None:
        self._trainer.should_stop = True
        self._train(1)
        self._thread.join()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._steps_left == 0:
            self._answers.put(None)
            self._steps_left = self._requests.get()
        self._steps_left -= 1

    def _fit(self, module: L.LightningModule, batches: DataLoader) -> None:
        try:
            self._trainer.fit(module, batches)
            self._answers.put(None)
        except BaseException as error:
            self._answers.put(error)

    def _train(self, steps: int) -> None:
        self._requests.put(steps)
        self._wait()

    def _wait(self) -> None:
        error = self._answers.get()
        if error is not None:
            raise error


class _Plain(L.LightningModule):
    def __init__(self, network: Qwen3MoeForCausalLM) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = mean_loss(self.network, batch)
        self.log("train_loss", loss, batch_size=1)  # with prog_bar=True Lightning would wait for the device each step
        return loss

    def configure_optimizers(self) -> Any:
        return _for_lightning(self)


class _Staged(Qwen3MoePretraining):
    def configure_optimizers(self) -> Any:
        return _for_lightning(self)


def _for_lightning(module: L.LightningModule) -> dict[str, Any]:
    optimizer, schedule = optimizer_and_schedule(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit_plain(
    work: Work, device: torch.device, strategy: Callable[..., Strategy] = D9DStrategy, num_processes: int = 1
) -> PausedFit:
    """A plain LightningModule around the network."""
    arguments = {"device": device} if strategy is SingleDeviceStrategy else {}
    return PausedFit(_Plain(work.network(device)), strategy(**arguments), work, device, num_processes)


def staged_module(work: Work, device: torch.device) -> Qwen3MoePretraining:
    """The network as a D9DModule."""
    module = _Staged(work.config)
    module.stages.append(work.network(device))
    return module


def fit_staged(
    work: Work,
    device: torch.device,
    num_processes: int = 1,
    sums: Literal["auto", "bfloat16"] = "auto",
    watched_by: Callable[[], list[L.Callback]] = list,
    log_every_n_steps: int = 50,
) -> PausedFit:
    """The D9DModule of the network; `sums` is the dtype in which gradients are summed over ranks."""
    module = staged_module(work, device)
    strategy = D9DStrategy(grad_sync=GradSyncConfig(dtype=sums))
    return PausedFit(
        module,
        strategy,
        work,
        device,
        num_processes,
        callbacks=watched_by(),
        log_every_n_steps=log_every_n_steps,
    )
