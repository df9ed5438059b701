"""Whole training steps of one Qwen3-MoE on one GPU, against transformers with and without `torch.compile`.

All contenders have equal weights, in bf16 on a GPU, and take the same tokens: forward, loss, backward, AdamW.
Transformers has its grouped products (`grouped_mm`), SDPA, each layer compiled, and torch's fused AdamW; ours has
`StochasticAdamW` with states as narrow as the weights, so both keep equally many bytes.

When the rounds are over one more step of ours is profiled: `step_parts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_d9d import D9DModule, D9DStrategy, ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.ops.packages import optional_module
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.sync.norm import clip_factor, gradient_norm
from tests.benchmarks import step_parts
from tests.benchmarks.frame import Case, Contender
from tests.benchmarks.strategy_overhead import MAX_NORM, PausedFit, Tokens

OURS, TRAINER = "ours", "ours, by Trainer"
OURS_COMPILED, OURS_CAPTURED = "ours, compiled", "ours, CUDA graphs"
COMPILED, EAGER = "transformers, compiled", "transformers"
COMPILED_FLASH = "transformers, compiled, flash-attn 4"
LEAST_OF_PEER = 1.15
"""Tokens/s of ours, of the best peer's."""
LEAST_OF_LONG = 1.2
LEAST_OF_SMALL = 2.0
MOST_OF_BARE = 1.01


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender trains."""

    config: Qwen3MoeConfig
    dtype: torch.dtype
    num_rows: int
    sequence_length: int
    clips: bool = False

    @property
    def precision(self) -> str:
        """The precision of a Trainer."""
        return "bf16-true" if self.dtype == torch.bfloat16 else "32-true"

    @property
    def num_tokens(self) -> int:
        """The number of tokens in a step."""
        return self.num_rows * self.sequence_length

    def network(self, device: torch.device) -> Qwen3MoeForCausalLM:
        """Always the same weights, made on the device and in the dtype."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                return Qwen3MoeForCausalLM(self.config).to(self.dtype)
        finally:
            torch.set_default_dtype(before)

    def batches(self, device: torch.device) -> DataLoader:
        """Return batches on the host, more than any run takes."""
        tokens = Tokens(self.config.vocab_size, self.sequence_length)
        return DataLoader(tokens, batch_size=self.num_rows, pin_memory=device.type == "cuda")

    def conditions(self) -> dict[str, Any]:
        """Return the conditions for the report."""
        return {
            "parameters": self.config.num_parameters,
            "layers": self.config.num_hidden_layers,
            "hidden size": self.config.hidden_size,
            "experts": f"{self.config.num_experts_per_tok} of {self.config.num_experts}",
            "vocabulary": self.config.vocab_size,
            "batch": f"{self.num_rows} x {self.sequence_length} tokens",
            "dtype": str(self.dtype).removeprefix("torch."),
            "operations": self.num_tokens * self.config.flops_per_token(self.sequence_length),
            "tokens": self.num_tokens,
        }


QUICK = Work(config=Qwen3MoeConfig.preset("tiny"), dtype=torch.float32, num_rows=2, sequence_length=32)


def cases(device_type: str, quick: bool, peers: str | None = None) -> list[Case]:
    """The step of the 30b-a3b geometry, with and without clipping and by a Trainer; long sequences; a small model.

    With each peer ours is measured again: three contenders do not fit into memory. "best" leaves out slower ones.
    """
    if quick or device_type == "cpu":
        if peers is not None:
            raise ValueError(f"--peers {peers} does nothing on a CPU or with --quick, where a small model has one peer")
        rounds: dict[str, Any] = dict(warmup_steps=2, block_steps=1, repeats=2 if quick else 12)
        return [
            case("step", QUICK, (EAGER, OURS), judges=False, **rounds),
            case("norm and clipping", replace(QUICK, clips=True), (EAGER, OURS), judges=False, **rounds),
            case("by Trainer", replace(QUICK, clips=True), (OURS, TRAINER), judges=False, **rounds),
        ]
    geometry = Qwen3MoeConfig.preset("30b-a3b")
    whole = Work(config=replace(geometry, num_hidden_layers=8), dtype=torch.bfloat16, num_rows=4, sequence_length=4096)
    long = replace(whole, config=replace(geometry, num_hidden_layers=4), num_rows=1, sequence_length=32_768)
    small = Work(config=Qwen3MoeConfig.preset("tiny"), dtype=torch.bfloat16, num_rows=8, sequence_length=256)
    rounds = dict(warmup_steps=4, block_steps=2, repeats=10)
    others = [] if peers == "best" else [case("step, uncompiled peer", whole, (EAGER, OURS), judges=False, **rounds)]
    name = "32,768 tokens, flash-attn 4 for both"
    of_flash = case(name, long, (COMPILED_FLASH, OURS), 1 / LEAST_OF_LONG, **rounds)
    return [
        *others,
        case("step", whole, (COMPILED, OURS), 1 / LEAST_OF_PEER, **rounds),
        case("norm and clipping", replace(whole, clips=True), (COMPILED, OURS), 1 / LEAST_OF_PEER, **rounds),
        case("by Trainer", replace(whole, clips=True), (OURS, TRAINER), MOST_OF_BARE, **rounds | {"block_steps": 8}),
        case("compiled blocks", whole, (OURS, OURS_COMPILED), None, **rounds),
        case("32,768 tokens", long, (COMPILED, OURS), 1 / LEAST_OF_LONG, **rounds),
        *([of_flash] if optional_module("flash_attn.cute.interface") else []),
        case(
            "small model",
            small,
            (EAGER, OURS, OURS_CAPTURED),
            1 / LEAST_OF_SMALL,
            warmup_steps=8,
            block_steps=40,
            repeats=10,
            min_step_seconds=0,
        ),
    ]


def case(
    name: str, work: Work, contenders: Sequence[str], limit: float | None = 1.0, *, judges: bool = True, **rounds: Any
) -> Case:
    """A peer, and contenders of which the last may take `limit` times as long at most."""
    build: dict[str, Callable[[torch.device], Contender]] = {
        OURS: partial(Ours, work),
        OURS_COMPILED: partial(Ours, work, parallel=ParallelConfig(compile=True)),
        OURS_CAPTURED: partial(Ours, work, parallel=ParallelConfig(cuda_graphs=True)),
        TRAINER: partial(by_trainer, work),
        COMPILED: partial(Transformers, work, True),
        COMPILED_FLASH: partial(Transformers, work, True, attention="flash_attention_4"),
        EAGER: partial(Transformers, work, False),
    }
    peer, *others = contenders
    return Case(
        name=name,
        contenders={each: build[each] for each in contenders},
        peer=peer,
        limits={others[-1]: limit} if judges and limit is not None else {},
        afterwards=partial(more_of_ours, work),
        conditions=work.conditions(),
        **rounds,
    )


class Loop:
    """The training loop that one would write without a trainer."""

    def __init__(self, work: Work, network: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self.work, self.network, self.optimizer, self.device = work, network, optimizer, device
        self.batches = iter(work.batches(device))
        self.last_loss = torch.zeros(())
        self.seconds_of_first: float | None = None
        """The seconds of the first steps, in which kernels are compiled and chosen."""

    def run(self, steps: int) -> None:
        if self.seconds_of_first is None:
            start = time.perf_counter()
            self._train(steps)
            self.loss()  # waits for the device
            self.seconds_of_first = time.perf_counter() - start
        else:
            self._train(steps)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            batch = {name: t.to(self.device, non_blocking=True) for name, t in next(self.batches).items()}
            loss = self.mean_loss(batch)
            loss.backward()
            if self.work.clips:
                self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.last_loss = loss.detach()

    def mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def clip(self) -> None:
        raise NotImplementedError

    def loss(self) -> float:
        return self.last_loss.item()

    def close(self) -> None:
        pass


class OwnLoop(Loop):
    """The loop of a `Qwen3MoeForCausalLM`."""

    def mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.network(batch["input_ids"], labels=batch["labels"], reduction="sum").loss / self.work.num_tokens


class TransformersLoop(Loop):
    """The loop of a model of transformers."""

    def mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        return self.network(batch["input_ids"], labels=labels, shift_labels=labels, use_cache=False).loss


class Ours(OwnLoop):
    """`Qwen3MoeForCausalLM` and `StochasticAdamW`, which divides by what clipping asks for."""

    def __init__(self, work: Work, device: torch.device, parallel: ParallelConfig | None = None) -> None:
        network = work.network(device)
        parallelize_qwen3_moe(network, None, parallel or ParallelConfig())
        super().__init__(work, network, _optimizer(network, work.dtype), device)

    def clip(self) -> None:
        factor = clip_factor(gradient_norm(self.network.parameters()), MAX_NORM)
        self.optimizer.grad_scale = 1 / factor  # type: ignore[attr-defined]


class Transformers(TransformersLoop):
    """The model of transformers with the same weights."""

    def __init__(self, work: Work, compiles: bool, device: torch.device, attention: str = "sdpa") -> None:
        network = transformers_of(work, device, attention)
        if compiles:
            for layer in network.model.layers:  # type: ignore[union-attr]
                layer.compile()
        super().__init__(work, network, AdamW(network.parameters(), lr=1e-4, fused=device.type == "cuda"), device)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)


def transformers_of(
    work: Work, device: torch.device, attention: str = "sdpa", experts: str = "grouped_mm"
) -> nn.Module:
    """Transformers' model, which takes over the weights of `work.network`."""
    from transformers import Qwen3MoeForCausalLM as Their

    config = config_of_transformers(work.config, experts)
    with torch.device("meta"):
        network = Their._from_config(config, attn_implementation=attention, dtype=work.dtype)
    network.load_state_dict(work.network(device).state_dict(), assign=True)
    network.model.rotary_emb = type(network.model.rotary_emb)(config).to(device)  # its tables are in no state dict
    return network.train()


def config_of_transformers(config: Qwen3MoeConfig, experts: str) -> Any:
    """Return transformers' configuration of the same geometry, with an implementation of experts."""
    from transformers import Qwen3MoeConfig as TheirConfig

    values = asdict(replace(config, vocab_splits=None))
    del values["vocab_splits"]
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    values["mlp_only_layers"] = list(values["mlp_only_layers"])
    return TheirConfig(**values, rope_parameters=rope, experts_implementation=experts)


def _optimizer(network: nn.Module, dtype: torch.dtype) -> Optimizer:
    return StochasticAdamW(network.parameters(), lr=1e-4, state_dtype=dtype)


class _Module(Qwen3MoePretraining):
    def __init__(self, work: Work) -> None:
        super().__init__(work.config)
        self.dtype_of_states = work.dtype

    def configure_optimizers(self) -> Any:
        return _optimizer(self, self.dtype_of_states)


def module_of(work: Work, device: torch.device) -> D9DModule:
    """What a Trainer trains, with the same weights."""
    module = _Module(work)
    module.stages.append(work.network(device))
    return module


def by_trainer(work: Work, device: torch.device) -> PausedFit:
    """The same through `Trainer.fit` and `D9DStrategy`."""
    return PausedFit(module_of(work, device), D9DStrategy(), work, device, 1)


def more_of_ours(work: Work, contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """How long the first steps took, and where ours is judged by transformers the parts of one of its steps."""
    loops = {name: each for name, each in contenders.items() if isinstance(each, Loop)}
    more: dict[str, dict[str, Any]] = {
        name: {"seconds_of_first": each.seconds_of_first} for name, each in loops.items()
    }
    if len(loops) > 1 and OURS in [*loops][1:]:
        step = partial(loops[OURS].run, 1)
        more[OURS]["parts"] = step_parts.measure(step, work.config, work.num_rows, work.sequence_length)
    return more


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown. Times only of GPUs."""
    conditions = result["conditions"]
    head = ["", "tokens/s of the peer's", "interval", "", "ms", "tokens/s", "TFLOP/s", "peak GiB", "s of first steps"]
    on_cuda = device_type == "cuda"
    counted = any("trained_parameters" in values for values in result["contenders"].values())
    rows = [[*(head if on_cuda else head[:4]), *(["trained"] if counted else [])]]
    rows.append(["---"] * len(rows[0]))
    for name, values in result["contenders"].items():
        ratio = values.get("ratio")
        row = [name, "1 (peer)", "", ""]
        if ratio is not None:
            interval = f"{1 / ratio['high']:.4f} .. {1 / ratio['low']:.4f}"
            row = [name, f"{1 / ratio['median']:.4f}", interval, ratio.get("verdict", "")]
        if on_cuda:
            seconds = values["median_seconds"]
            row += [f"{1e3 * seconds:.1f}", f"{conditions['tokens'] / seconds:.0f}"]
            row += [f"{conditions['operations'] / seconds / 1e12:.0f}", f"{values['peak_memory_bytes'] / 2**30:.2f}"]
            row += [f"{values['seconds_of_first']:.1f}" if "seconds_of_first" in values else ""]
        row += [f"{values['trained_parameters']:,}"] if counted else []
        rows.append(row)
    text = ", ".join(f"{key} {value}" for key, value in conditions.items())
    lines = [f"\n{result['benchmark']}, {result['case']}, {result['repeats']} rounds", f"  {text}", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for values in result["contenders"].values():
        if "parts" in values:
            lines += ["", step_parts.table(values["parts"])]
    return "\n".join(lines)


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    name = str(result["case"]).replace(" ", "-").replace(",", "")
    (directory / f"train_step-{name}.md").write_text(table(result, device_type) + "\n")
