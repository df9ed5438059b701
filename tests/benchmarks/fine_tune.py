"""Steps of fine-tuning on some or all layers of Qwen3-MoE and one GPU, against transformers and Unsloth.

With LoRA the peers have peft. All parameters are trained with states in eight bits: of `StochasticAdamW` here, of
torchao's and bitsandbytes' AdamW there.

All contenders have equal weights, frozen but for adapters with LoRA, in bf16 on a GPU. They take the same tokens:
forward, loss, backward, AdamW. Each is tried with every kind of recomputation that is asked for and that it knows, and
its best is compared. Transformers has SDPA, and every implementation of experts that is asked for. The fastest of
others is the peer. The learning rate is 0, so nothing changes a loss, and losses are compared.

Contenders run one after the other, each in a process of its own and for so long at most: memory has one at a time. Each
is printed when it is measured.
"""

from __future__ import annotations

import json
import math
import pickle
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, multiprocessing, nn
from torch.optim import AdamW

from lightning_d9d import ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.ops.packages import optional_module
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.peft import LoRA, inject
from tests.benchmarks.first_import import importing_first
from tests.benchmarks.frame import LOSS_TOLERANCE, Case, Contender, rank_main, summarize
from tests.benchmarks.options import check_choices, naming
from tests.benchmarks.train_step import (
    Loop,
    OwnLoop,
    TransformersLoop,
    Work,
    more_of_ours,
    table,
    transformers_of,
)

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
OF_UNSLOTH: dict[str, str | bool] = {"none": False, "full": True, "unsloth": "unsloth"}
"""Kinds of recomputation, and what Unsloth calls them. Its own offloads the inputs of blocks to the host."""
RECOMPUTE = "full,unsloth"
WHOLE = 24
"""So many layers and more have long steps: a block of a round is one."""

Build = Callable[[torch.device], Contender]


@dataclass(frozen=True)
class Adapters:
    """What is trained."""

    rank_of_experts: int = 0
    """0: experts have none."""

    def __str__(self) -> str:
        return f"attention and experts at rank {self.rank_of_experts}" if self.rank_of_experts else "attention"

    def num_parameters(self, config: Qwen3MoeConfig, *, of_gate_up: int) -> int:
        """Return the number of trained parameters, where gate and up of experts have one adapter, or two."""
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        heads = config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
        attention = RANK * (4 * hidden + 2 * heads)
        experts = config.num_experts * self.rank_of_experts * (of_gate_up * hidden + 2 * inner + inner + hidden)
        return config.num_hidden_layers * (attention + experts)

    def of_peft(self) -> dict[str, Any]:
        """Return the same adapters as arguments of peft's `LoraConfig`."""
        experts = EXPERTS if self.rank_of_experts else ()
        return dict(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=list(ATTENTION),
            target_parameters=[*experts] or None,
            rank_pattern=dict.fromkeys(experts, self.rank_of_experts),
        )


def cases(
    device_type: str,
    quick: bool,
    layers: int | None = None,
    experts: Sequence[str] = IMPLEMENTATIONS,
    seconds: int = MOST_SECONDS,
    recompute: str = RECOMPUTE,
    contenders: Sequence[str] = (),
    folder: Path | None = None,
) -> list[Case]:
    """Some layers of the 30b-a3b geometry: with peers that adapt attention alone, and with those that do as ours.

    Args:
        device_type: "cuda" or "cpu".
        quick: Whether a small model is trained.
        layers: The number of layers; by default 8, or all of a small model.
        experts: Implementations of experts in transformers.
        seconds: The most time of a contender.
        recompute: Kinds of recomputation, with commas between them.
        contenders: The only ones that run, in this order, each by the begin of its name. None: all.
        folder: Keeps what was measured. What it has already is not measured again.
    """
    check_choices("--experts", experts, IMPLEMENTATIONS)
    for kind in recompute.split(","):
        with naming(f"--recompute {kind}"):
            ParallelConfig(recompute="full" if kind == "unsloth" else kind)
    same = {"seconds": seconds, "recompute": recompute, "folder": folder}
    if quick or device_type == "cpu":
        tiny = Qwen3MoeConfig.preset("tiny")
        config = replace(tiny, num_hidden_layers=layers or tiny.num_hidden_layers)
        work = Work(config=config, dtype=torch.float32, num_rows=2, sequence_length=32)
        rounds: dict[str, Any] = dict(warmup_steps=2, block_steps=1, repeats=2 if quick else 12)
        small = case("small model", work, Adapters(2), [Adapters(2)], experts, None, **same, **rounds)
        return _with_contenders([small], contenders)
    config = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=layers or 8)
    work = Work(config=config, dtype=torch.bfloat16, num_rows=4, sequence_length=4096)
    rounds = dict(warmup_steps=3, block_steps=1 if config.num_hidden_layers >= WHOLE else 2, repeats=8)
    of_ours, limit = [Adapters(), Adapters(RANK), Adapters(2)], 1 / LEAST_OF_PEER
    found = [
        case("peft on attention", work, Adapters(), of_ours, experts, limit, **same, **rounds),
        case("peft on experts, too", work, Adapters(2), of_ours[-1:], experts, limit, **same, **rounds),
        case("peft on experts at rank 16", work, Adapters(RANK), [Adapters(RANK)], experts, limit, **same, **rounds),
        of_all("all parameters", work, EIGHT_BITS, experts[:1], 1 / LEAST_OF_WHOLE, **same, **rounds),
    ]
    return _with_contenders(found, contenders)


def _with_contenders(found: Sequence[Case], begins: Sequence[str]) -> list[Case]:
    """Return the cases with only the contenders whose names have these begins, in this order; without any, with all.

    Raises:
        ValueError: No name has one of the begins.
    """
    if not begins:
        return [*found]
    names = {name: case for case in found for name in case.contenders}
    for begin in begins:
        if not any(name.startswith(begin) for name in names):
            raise ValueError(f"--contenders {begin!r} begins no name; choose from {', '.join(map(repr, names))}")
    chosen = [
        {name: build for begin in begins for name, build in case.contenders.items() if name.startswith(begin)}
        for case in found
    ]
    return [replace(case, contenders=each, peer=next(iter(each), "")) for case, each in zip(found, chosen, strict=True)]


def of_all(
    name: str, work: Work, packages: Sequence[str], implementations: Sequence[str], limit: float, **more: Any
) -> Case:
    """Ours and a peer for each package with an AdamW of eight bits, all parameters trained."""
    ours: dict[str, Any] = {"ours, states in eight bits": partial(OursWhole, work)}
    theirs: dict[str, Any] = {
        f"transformers, AdamW of {package}": partial(TheirsWhole, work, package, implementation)
        for package in packages
        for implementation in implementations
    }
    return _case(name, work, ours | theirs, dict.fromkeys(ours, limit), **more)


def case(
    name: str,
    work: Work,
    of_peer: Adapters,
    of_ours: Sequence[Adapters],
    implementations: Sequence[str],
    limit: float | None,
    **more: Any,
) -> Case:
    """Peers, and ours with several adapters, of which the last may take `limit` times as long as the best at most."""
    ours: dict[str, Any] = {f"ours, {adapters}": partial(Ours, work, adapters) for adapters in of_ours}
    theirs: dict[str, Any] = {
        f"transformers and peft, {of_peer}, {each}": partial(Theirs, work, of_peer, each) for each in implementations
    }
    if find_spec("unsloth"):  # an import would replace parts of transformers for all
        theirs[f"unsloth, {of_peer}"] = partial(Unsloth, work, of_peer, None)
        if optional_module("flash_attn.cute.interface"):
            theirs[f"unsloth, {of_peer}, flash-attn 4"] = partial(Unsloth, work, of_peer, "flash_attention_4")
    limits = {} if limit is None else {[*ours][-1]: limit}
    return _case(name, work, ours | theirs, limits, rank_of_attention=RANK, **more)


def _case(
    name: str,
    work: Work,
    contenders: Mapping[str, Any],
    limits: Mapping[str, float],
    *,
    seconds: int,
    recompute: str,
    folder: Path | None,
    rank_of_attention: int | None = None,
    **rounds: Any,
) -> Case:
    """Every contender with each kind of recomputation that it knows."""
    tried: dict[str, Build] = {
        f"{each}, recompute {kind}": partial(build, recompute=kind)
        for each, build in contenders.items()
        for kind in recompute.split(",")
        if build.func.knows(kind)
    }
    rank = {} if rank_of_attention is None else {"rank of attention": rank_of_attention}
    return Case(
        name=name,
        contenders=tried,
        peer=next(iter(tried), ""),
        limits=limits,
        afterwards=partial(_more, work),
        conditions={**work.conditions(), **rank, "seconds": seconds, **({"folder": str(folder)} if folder else {})},
        **rounds,
    )


def _more(work: Work, contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    more = more_of_ours(work, contenders, device)
    for name, each in contenders.items():
        if isinstance(each, Loop):
            more[name]["trained_parameters"] = sum(parameter.numel() for parameter in _trained(each.network))
    return more


def run_case(case: Case, device_type: str) -> dict[str, Any]:
    """Measure contenders one by one, and compare the best of each with the fastest peer that came through.

    Where only ours were selected, their fastest is the peer.

    Raises:
        RuntimeError: No peer came through, or ours did not, or their losses differ.
    """
    measured: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    print(f"\nfine_tune, {case.name}", flush=True)
    for name, build in case.contenders.items():
        alone = replace(case, contenders={name: build}, peer=name, limits={})
        outcome = _known_or_measured(alone, device_type)
        if isinstance(outcome, str):
            failed[name] = outcome
            print(f"  {name}: {outcome}", flush=True)
        else:
            measured[name] = outcome
            print(f"  {_row(name, outcome, case.conditions['tokens'])}", flush=True)
    best = _best(measured)
    lost = {_alone(name) for name in failed if name.startswith("ours")} - {*map(_alone, best)}
    peers = [name for name in best if not name.startswith("ours")]
    if lost or not (peers or (best and all(name.startswith("ours") for name in case.contenders))):
        raise RuntimeError(f"{case.name}: nothing to compare, as there failed {failed}")
    peer = min(peers or best, key=lambda name: _seconds(best[name]))
    losses = {name: values["warmup_loss"] for name, values in measured.items()}
    if any(not math.isclose(loss, losses[peer], rel_tol=LOSS_TOLERANCE) for loss in losses.values()):
        raise RuntimeError(f"{case.name}: the losses after the warm-up differ: {losses}")
    limits = {name: case.limits[_alone(name)] for name in best if _alone(name) in case.limits}
    return summarize(replace(case, peer=peer, limits=limits), best) | {"failed": failed}


def _alone(name: str) -> str:
    """Return the name of a contender without its kind of recomputation."""
    return name.rpartition(", ")[0]


def _seconds(values: Mapping[str, Any]) -> float:
    return statistics.median(values["seconds_per_step"])


def _best(measured: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return of each contender the kind of recomputation with the shortest steps."""
    best: dict[str, str] = {}
    for name in sorted(measured, key=lambda name: _seconds(measured[name])):
        best.setdefault(_alone(name), name)
    return {name: values for name, values in measured.items() if name in best.values()}


def _known_or_measured(case: Case, device_type: str) -> dict[str, Any] | str:
    """Return what the folder has of the one contender of a case, or measure and keep it. Failures are not kept."""
    (name,) = case.contenders
    folder = case.conditions.get("folder")
    path = Path(folder) / f"{case.name}, {name}.json" if folder else None
    if path and path.exists():
        return json.loads(path.read_text())
    outcome = _measured_alone(case, device_type)
    if path and not isinstance(outcome, str):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcome))
    return outcome


def _measured_alone(case: Case, device_type: str) -> dict[str, Any] | str:
    """What `frame.measure` gives for the one contender of a case, or why there is nothing."""
    (name,) = case.contenders
    seconds = case.conditions["seconds"]
    with tempfile.TemporaryDirectory() as directory:
        first = "unsloth" if name.startswith("unsloth") else ""
        arguments = (first, pickle.dumps((_measure_or_say, case, device_type, directory)))
        process = multiprocessing.get_context("spawn").Process(target=importing_first, args=arguments)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return f"not done in {seconds} s"
        if process.exitcode:
            said = Path(directory) / "error"
            return said.read_text() if said.exists() else f"failed with exit code {process.exitcode}"
        return json.loads((Path(directory) / "measured.json").read_text())[name]


def _measure_or_say(case: Case, device_type: str, directory: str) -> None:
    """Measure the case, or write the first line of an error as a file."""
    try:
        rank_main(0, case, device_type, directory)
    except Exception as error:
        first = str(error).partition("\n")[0]
        (Path(directory) / "error").write_text(f"{type(error).__name__}: {first}")
        raise


def _row(name: str, values: dict[str, Any], num_tokens: int) -> str:
    median, first = _seconds(values), values["seconds_of_first"]
    peak = values["peak_memory_bytes"]
    memory = "" if peak is None else f", {peak / 2**30:.2f} GiB"
    loss = f"loss {values['warmup_loss']:.4f}"
    speed = f"{num_tokens / median:.0f} tokens/s, {1e3 * median:.1f} ms"
    trained = f"{values['trained_parameters'] / 1e6:.2f} M trained"
    return f"{name}: {speed}{memory}, {trained}, first steps in {first:.1f} s, {loss}"


class _OwnLoop(OwnLoop):
    @staticmethod
    def knows(recompute: str) -> bool:
        """Whether it has this kind of recomputation."""
        return recompute != "unsloth"


class _TransformersLoop(TransformersLoop):
    @staticmethod
    def knows(recompute: str) -> bool:
        """Whether it has this kind of recomputation."""
        return recompute in ("none", "full")


class Ours(_OwnLoop):
    """`Qwen3MoeForCausalLM` with adapters."""

    def __init__(self, work: Work, adapters: Adapters, device: torch.device, *, recompute: str = "full") -> None:
        network = work.network(device)
        targets = [*ATTENTION, *(["experts"] if adapters.rank_of_experts else [])]
        inject(network, LoRA(RANK, targets=targets, rank_of_experts=adapters.rank_of_experts or None))
        parallelize_qwen3_moe(network, None, ParallelConfig(recompute=recompute))
        trained = _trained(network, adapters.num_parameters(work.config, of_gate_up=2))
        super().__init__(work, network, StochasticAdamW(trained, lr=0.0, state_dtype=work.dtype), device)


class Theirs(_TransformersLoop):
    """Transformers' model of the same weights, with peft's adapters."""

    def __init__(
        self, work: Work, adapters: Adapters, implementation: str, device: torch.device, *, recompute: str = "full"
    ) -> None:
        from peft import LoraConfig, get_peft_model

        network: Any = transformers_of(work, device, experts=implementation)
        if recompute != "none":
            network.gradient_checkpointing_enable({"use_reentrant": False})
        network = get_peft_model(network, LoraConfig(**adapters.of_peft()), autocast_adapter_dtype=False)
        trained = _trained(network, adapters.num_parameters(work.config, of_gate_up=1))
        super().__init__(work, network, AdamW(trained, lr=0.0, fused=device.type == "cuda"), device)


class Unsloth(TransformersLoop):
    """Unsloth's model of the same weights. They take the place of those that it reads from a directory.

    With None as attention it chooses.
    """

    def __init__(
        self, work: Work, adapters: Adapters, attention: str | None, device: torch.device, *, recompute: str = "full"
    ) -> None:
        from unsloth import FastLanguageModel  # `importing_first` has imported it before transformers

        checkpointing = OF_UNSLOTH[recompute]
        with tempfile.TemporaryDirectory() as directory, _weights_of(work, device):
            _write_empty_model(Path(directory), work)
            network, _ = FastLanguageModel.from_pretrained(
                directory,
                max_seq_length=work.sequence_length,
                dtype=work.dtype,
                load_in_4bit=False,
                load_in_16bit=True,
                use_gradient_checkpointing=checkpointing,
                attn_implementation=attention,
            )
        network = FastLanguageModel.get_peft_model(
            network, **adapters.of_peft(), use_gradient_checkpointing=checkpointing
        )
        network = FastLanguageModel.for_training(network)
        trained = _trained(network, adapters.num_parameters(work.config, of_gate_up=1))
        super().__init__(work, network, AdamW(trained, lr=0.0, fused=device.type == "cuda"), device)

    @staticmethod
    def knows(recompute: str) -> bool:
        """Whether it has this kind of recomputation."""
        return recompute in OF_UNSLOTH

    def mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the model's own loss. It shifts labels by itself, so each row has one label less."""
        ids, labels = batch["input_ids"], batch["labels"]
        return self.network(ids, labels=torch.cat([ids[:, :1], labels[:, :-1]], dim=1)).loss


def _weights_of(work: Work, device: torch.device) -> Any:
    """Give a model of transformers the weights of `work.network` where it would read files. Return a context.

    Nothing is written or read so, and the model is in memory once.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import PreTrainedModel

    def load(model: Any, state_dict: Any, files: Any, settings: Any) -> Any:
        return convert_and_load_state_dict_in_model(model, work.network(device).state_dict(), settings)

    return mock.patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(load))


def _write_empty_model(directory: Path, work: Work) -> None:
    """Write a configuration, a tokenizer of one word, and a file of weights without any."""
    from safetensors.torch import save_file

    words = {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<unk>"}
    settings["eos_token"] = "<unk>"
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    for name, values in {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}.items():
        (directory / name).write_text(json.dumps(values))
    (directory / "config.json").write_text(json.dumps(work.config.to_dict()))
    save_file({}, directory / "model.safetensors", metadata={"format": "pt"})


class OursWhole(_OwnLoop):
    """`Qwen3MoeForCausalLM` with all parameters trained."""

    def __init__(self, work: Work, device: torch.device, *, recompute: str = "full") -> None:
        network = work.network(device)
        parallelize_qwen3_moe(network, None, ParallelConfig(recompute=recompute))
        super().__init__(work, network, StochasticAdamW(network.parameters(), lr=0.0, state_dtype=torch.uint8), device)


class TheirsWhole(_TransformersLoop):
    """Transformers' model of the same weights, with all parameters trained by an AdamW of a package."""

    def __init__(
        self, work: Work, package: str, implementation: str, device: torch.device, *, recompute: str = "full"
    ) -> None:
        network: Any = transformers_of(work, device, experts=implementation)
        if recompute != "none":
            network.gradient_checkpointing_enable({"use_reentrant": False})
        adamw = import_module(f"{package}.optim").AdamW8bit
        super().__init__(work, network, adamw(network.parameters(), lr=0.0), device)


def _trained(network: nn.Module, expected: int | None = None) -> list[nn.Parameter]:
    """Return trained parameters.

    Raises:
        RuntimeError: They have another number of elements than expected, so contenders would not do the same work.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    found = sum(parameter.numel() for parameter in trained)
    if expected not in (None, found):
        raise RuntimeError(f"{type(network).__name__} trains {found} parameters, not {expected}")
    return trained
