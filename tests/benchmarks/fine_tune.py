"""Steps of fine-tuning on some layers of Qwen3-MoE and one GPU, against transformers.

With LoRA the peers have peft. All parameters are trained with states in eight bits: of `StochasticAdamW` here, of
torchao's and bitsandbytes' AdamW there.

All contenders have equal weights, frozen but for adapters with LoRA, in bf16 on a GPU. They take the same tokens:
forward, loss, backward, AdamW. All recompute each block, or with `--recompute none` nothing. Transformers has SDPA, and
every implementation of experts that is asked for; the fastest is the peer. The learning rate is 0, so nothing changes a
loss, and losses are compared.

Contenders run one after the other, each in a process of its own and for so long at most: memory has one at a time. Each
is printed when it is measured.
"""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn
from torch.optim import AdamW

from lightning_d9d import ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, save_huggingface
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.peft import LoRA, inject
from tests.benchmarks.first_import import importing_first
from tests.benchmarks.frame import LOSS_TOLERANCE, Case, rank_main, summarize
from tests.benchmarks.train_step import OwnLoop, TransformersLoop, Work, more_of_ours, table, transformers_of

__all__ = ["cases", "run_case", "table"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
"""The implementations of experts in transformers."""
RANK = 16
EIGHT_BITS = ("torchao", "bitsandbytes")
"""Packages with an AdamW for transformers whose states are in eight bits."""
LEAST_OF_WHOLE = 1.3
"""Tokens/s of ours with all parameters, of the best peer's."""
LEAST_OF_PEER = 1.5
"""Tokens/s of ours with adapters of attention and experts, of the best peer's, whatever that adapts."""
MOST_SECONDS = 150
"""The most time of a contender: start, warm-up and all steps."""


@dataclass(frozen=True)
class Adapters:
    """What is trained."""

    rank_of_experts: int = 0
    """0: experts have none."""

    def __str__(self) -> str:
        return f"attention and experts at rank {self.rank_of_experts}" if self.rank_of_experts else "attention"


def cases(
    device_type: str,
    quick: bool,
    layers: int = 8,
    experts: Sequence[str] = IMPLEMENTATIONS,
    seconds: int = MOST_SECONDS,
    recompute: str = "full",
) -> list[Case]:
    """Some layers of the 30b-a3b geometry: with peers that adapt attention alone, and with those that do as ours."""
    same = {"seconds": seconds, "recompute": recompute}
    if quick or device_type == "cpu":
        work = Work(config=Qwen3MoeConfig.preset("tiny"), dtype=torch.float32, num_rows=2, sequence_length=32)
        rounds: dict[str, Any] = dict(warmup_steps=2, block_steps=1, repeats=2 if quick else 12)
        return [case("small model", work, Adapters(), [Adapters(2)], experts, None, **same, **rounds)]
    config = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=layers)
    work = Work(config=config, dtype=torch.bfloat16, num_rows=4, sequence_length=4096)
    rounds = dict(warmup_steps=3, block_steps=2, repeats=8)
    of_ours, limit = [Adapters(), Adapters(RANK), Adapters(2)], 1 / LEAST_OF_PEER
    return [
        case("peft on attention", work, Adapters(), of_ours, experts, limit, **same, **rounds),
        case("peft on experts, too", work, Adapters(2), of_ours[-1:], experts, limit, **same, **rounds),
        of_all("all parameters", work, EIGHT_BITS, experts[0], 1 / LEAST_OF_WHOLE, **same, **rounds),
    ]


def of_all(
    name: str,
    work: Work,
    packages: Sequence[str],
    implementation: str,
    limit: float | None,
    *,
    seconds: int,
    recompute: str,
    **rounds: Any,
) -> Case:
    """Ours and a peer for each package with an AdamW of eight bits, all parameters trained."""
    ours = {"ours, states in eight bits": partial(OursWhole, work, recompute=recompute)}
    theirs = {
        f"transformers, AdamW of {each}": partial(TheirsWhole, work, each, implementation, recompute=recompute)
        for each in packages
    }
    return Case(
        name=name,
        contenders={**ours, **theirs},
        peer=next(iter(theirs)),
        limits={} if limit is None else dict.fromkeys(ours, limit),
        afterwards=partial(more_of_ours, work),
        conditions={**work.conditions(), "recompute": recompute, "seconds": seconds},
        **rounds,
    )


def case(
    name: str,
    work: Work,
    of_peer: Adapters,
    of_ours: Sequence[Adapters],
    implementations: Sequence[str],
    limit: float | None,
    *,
    seconds: int,
    recompute: str,
    **rounds: Any,
) -> Case:
    """Peers, and ours with several adapters, of which the last may take `limit` times as long as the best at most."""
    ours = {f"ours, {adapters}": partial(Ours, work, adapters, recompute=recompute) for adapters in of_ours}
    theirs = {
        f"transformers and peft, {of_peer}, {each}": partial(Theirs, work, of_peer, each, recompute=recompute)
        for each in implementations
    }
    if find_spec("unsloth"):  # an import would replace parts of transformers for all
        theirs[f"unsloth, {of_peer}"] = partial(Unsloth, work, of_peer, recompute=recompute)
    return Case(
        name=name,
        contenders={**ours, **theirs},
        peer=next(iter({**theirs, **ours})),
        limits={} if limit is None else {[*ours][-1]: limit},
        afterwards=partial(more_of_ours, work),
        conditions={**work.conditions(), "rank of attention": RANK, "recompute": recompute, "seconds": seconds},
        **rounds,
    )


def run_case(case: Case, device_type: str) -> dict[str, Any]:
    """Measure contenders one by one, and compare them with the fastest peer that came through.

    Raises:
        RuntimeError: No peer came through, or ours did not, or their losses differ.
    """
    measured: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    print(f"\nfine_tune, {case.name}", flush=True)
    for name, build in case.contenders.items():
        alone = replace(case, contenders={name: build}, peer=name, limits={})
        outcome = _measured_alone(alone, device_type, case.conditions["seconds"])
        if isinstance(outcome, str):
            failed[name] = outcome
            print(f"  {name}: {outcome}", flush=True)
        else:
            measured[name] = outcome
            print(f"  {_row(name, outcome, case.conditions['tokens'])}", flush=True)
    peers = [name for name in measured if not name.startswith("ours")]
    if not peers or any(name.startswith("ours") for name in failed):
        raise RuntimeError(f"{case.name}: nothing to compare, as there failed {failed}")
    peer = min(peers, key=lambda name: sorted(measured[name]["seconds_per_step"])[case.repeats // 2])
    losses = {name: values["warmup_loss"] for name, values in measured.items()}
    if any(not math.isclose(loss, losses[peer], rel_tol=LOSS_TOLERANCE) for loss in losses.values()):
        raise RuntimeError(f"{case.name}: the losses after the warm-up differ: {losses}")
    return summarize(replace(case, peer=peer), measured) | {"failed": failed}


def _measured_alone(case: Case, device_type: str, seconds: float) -> dict[str, Any] | str:
    """What `frame.measure` gives for the one contender of a case, or why there is nothing."""
    (name,) = case.contenders
    with tempfile.TemporaryDirectory() as directory:
        first = "unsloth" if name.startswith("unsloth") else ""
        arguments = (first, pickle.dumps((rank_main, 0, case, device_type, directory)))
        process = multiprocessing.get_context("spawn").Process(target=importing_first, args=arguments)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return f"not done in {seconds} s"
        if process.exitcode:
            return f"failed with exit code {process.exitcode}"
        return json.loads((Path(directory) / "measured.json").read_text())[name]


def _row(name: str, values: dict[str, Any], num_tokens: int) -> str:
    seconds = sorted(values["seconds_per_step"])
    median, first = seconds[len(seconds) // 2], values["seconds_of_first"]
    peak = values["peak_memory_bytes"]
    memory = "" if peak is None else f", {peak / 2**30:.2f} GiB"
    return f"{name}: {num_tokens / median:.0f} tokens/s, {1e3 * median:.1f} ms{memory}, first steps in {first:.1f} s"


class Ours(OwnLoop):
    """`Qwen3MoeForCausalLM` with adapters."""

    def __init__(self, work: Work, adapters: Adapters, device: torch.device, *, recompute: str = "full") -> None:
        network = work.network(device)
        targets = [*ATTENTION, *(["experts"] if adapters.rank_of_experts else [])]
        inject(network, LoRA(RANK, targets=targets, rank_of_experts=adapters.rank_of_experts or None))
        parallelize_qwen3_moe(network, None, ParallelConfig(recompute=recompute))
        super().__init__(work, network, StochasticAdamW(_trained(network), lr=0.0, state_dtype=work.dtype), device)


class Theirs(TransformersLoop):
    """Transformers' model of the same weights, with peft's adapters."""

    def __init__(
        self, work: Work, adapters: Adapters, implementation: str, device: torch.device, *, recompute: str = "full"
    ) -> None:
        from peft import LoraConfig, get_peft_model

        network: Any = transformers_of(work, device, experts=implementation)
        if recompute != "none":
            network.gradient_checkpointing_enable({"use_reentrant": False})
        config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=list(ATTENTION),
            target_parameters=list(EXPERTS) if adapters.rank_of_experts else None,
            rank_pattern=dict.fromkeys(EXPERTS, adapters.rank_of_experts) if adapters.rank_of_experts else {},
        )
        network = get_peft_model(network, config, autocast_adapter_dtype=False)
        super().__init__(work, network, AdamW(_trained(network), lr=0.0, fused=device.type == "cuda"), device)


class Unsloth(TransformersLoop):
    """Unsloth's model of the same weights, by way of a directory, as it takes no other."""

    def __init__(self, work: Work, adapters: Adapters, device: torch.device, *, recompute: str = "full") -> None:
        from unsloth import FastLanguageModel  # `importing_first` has imported it before transformers

        with tempfile.TemporaryDirectory() as directory:
            save_huggingface(work.network(device), directory, files=_smallest_tokenizer())
            network, _ = FastLanguageModel.from_pretrained(
                directory, max_seq_length=work.sequence_length, dtype=work.dtype, load_in_4bit=False, load_in_16bit=True
            )
        targets = [*ATTENTION, *(["gate_up_proj", "down_proj"] if adapters.rank_of_experts else [])]
        network = FastLanguageModel.get_peft_model(
            network,
            r=RANK,
            lora_alpha=2 * RANK,
            lora_dropout=0,
            target_modules=targets,
            use_gradient_checkpointing=False if recompute == "none" else "unsloth",
        )
        network = FastLanguageModel.for_training(network)
        super().__init__(work, network, AdamW(_trained(network), lr=0.0, fused=device.type == "cuda"), device)

    def mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the model's own loss. It shifts labels by itself, so each row has one label less."""
        ids, labels = batch["input_ids"], batch["labels"]
        return self.network(ids, labels=torch.cat([ids[:, :1], labels[:, :-1]], dim=1)).loss


def _smallest_tokenizer() -> dict[str, bytes]:
    """Files of a tokenizer of one word. Return names and contents."""
    words = {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<unk>"}
    settings["eos_token"] = "<unk>"
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    return {name: json.dumps(values).encode() for name, values in files.items()}


class OursWhole(OwnLoop):
    """`Qwen3MoeForCausalLM` with all parameters trained."""

    def __init__(self, work: Work, device: torch.device, *, recompute: str = "full") -> None:
        network = work.network(device)
        parallelize_qwen3_moe(network, None, ParallelConfig(recompute=recompute))
        super().__init__(work, network, StochasticAdamW(network.parameters(), lr=0.0, state_dtype=torch.uint8), device)


class TheirsWhole(TransformersLoop):
    """Transformers' model of the same weights, with all parameters trained by an AdamW of a package."""

    def __init__(
        self, work: Work, package: str, implementation: str, device: torch.device, *, recompute: str = "full"
    ) -> None:
        network: Any = transformers_of(work, device, experts=implementation)
        if recompute != "none":
            network.gradient_checkpointing_enable({"use_reentrant": False})
        adamw = import_module(f"{package}.optim").AdamW8bit
        super().__init__(work, network, adamw(network.parameters(), lr=0.0), device)


def _trained(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]
