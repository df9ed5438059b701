"""Adapters as directories of Hugging Face's `peft`: `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.mesh.sharding import local, local_ranges
from lightning_d9d.peft.inject import adapted_sites, apply_plan, builds_stages, is_adapted, stages_of
from lightning_d9d.peft.layouts import EXPERT_PARTS, file_tensors
from lightning_d9d.peft.methods import method_of
from lightning_d9d.peft.saved import ADAPTER_CONFIG, ADAPTER_FILE, SavedAdapter
from lightning_d9d.peft.sites import sites_of
from lightning_d9d.state import save_tensors

Layout = Literal["experts", "fused"]


class _Described(NamedTuple):
    """An adapter as the configuration describes it."""

    rank: int
    scale: float
    is_of_experts: bool
    dropout: float


@torch.no_grad()
def save_adapter(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    *,
    layout: Layout = "experts",
    base_model: str | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapters of a model as a directory that Hugging Face's `peft` and serving engines can load.

    All adapters get one scale: if an adapter has another, its `lora_B` is multiplied by the ratio. So readers that do
    not support a scale for single layers compute the same. `peft/layouts.py` describes the tensors.

    Collective over the default process group if there is one. Each rank gathers all adapters of its stages.

    Args:
        model: Model with adapters: whole, all stages of this rank, or a `D9DModule`. Names are those in the whole
            model.
        directory: Directory that does not exist yet, or is empty; as for `save_tensors`.
        layout: Layout of experts: a tensor for each matrix of each expert, or "fused", as `peft` keeps them in memory.
        base_model: Name or directory of the base model, which readers of the file may need.
        dtype: Dtype of the file; None keeps that of the adapters.
        overwrite: Whether to replace an existing directory, with everything in it.

    Raises:
        ConfigError: The model has no adapters, or merged ones, or trains other parameters, too, which such a file
            cannot contain. Or the layout is unknown, or other programs could not read it.
        StateError: The directory has files and `overwrite` is not set, or it cannot be written; raised on every rank.
    """
    stages = stages_of(model)
    failure = f"adapters cannot be saved to {str(directory)!r}"
    config, described = _agreed_config(stages, failure, layout, base_model)
    scale = config["lora_alpha"] / config["r"]
    tensors = {}
    for stage in stages:
        for site, adapter in adapted_sites(stage):
            wraps = site.is_of_experts and all(
                f"{site.name.rpartition('.')[0]}.{weight}" in described for weight in EXPERT_PARTS
            )
            tensors |= file_tensors(site, adapter.whole(), adapter.scale / scale, layout, wraps=wraps)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    files = {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    save_tensors(tensors, directory, dtype=dtype, files=files, overwrite=overwrite, only_file=ADAPTER_FILE)


def adapter_config(
    model: nn.Module | Sequence[nn.Module], failure: str, *, layout: Layout = "experts", base_model: str | None = None
) -> dict[str, Any]:
    """Return the table of `adapter_config.json` for a model, or raise the errors of `save_adapter`. Collective.

    Args:
        model: As for `save_adapter`.
        failure: Beginning of an error message.
        layout: As for `save_adapter`.
        base_model: As for `save_adapter`.

    Raises:
        ConfigError: The adapters cannot be saved, for a reason that `save_adapter` names.
    """
    return _agreed_config(stages_of(model), failure, layout, base_model)[0]


@torch.no_grad()
def load_adapter(model: nn.Module | Sequence[nn.Module], directory: str | Path, *, verify: bool = True) -> None:
    """Give a model the adapters of a directory, from `save_adapter` or from Hugging Face's `peft`, in place.

    In one process a model without adapters gets them, as `inject` would. Existing adapters, also sharded ones, get the
    values; their own scale stays, and `b` is adjusted to it. Both layouts can be read, and so can layers with different
    ranks.

    Collective over the default process group if there is one. Everything is checked before anything changes.

    Args:
        model: The whole model, all stages of this rank, or a `D9DModule`.
        directory: The directory; the same on every rank.
        verify: Whether to compare checksums, if the directory has a manifest, as those of `save_adapter` have.

    Raises:
        StateError: On every rank: a file is missing or damaged, or has unknown tensors or settings. Or it has numbers
            that are not finite, or belongs to another model or other adapters.
        ConfigError: The adapters of the model are merged. Or the stages of a `D9DModule` are not built, or a model on
            several ranks has no adapters.
    """
    ranks, failure = Ranks(), f"adapters cannot be loaded from {str(directory)!r}"
    with ranks.agreed(failure):
        stages = stages_of(model)
        saved = SavedAdapter(directory)
        saved.check_values(verify, ranks.share)
        if not stages:
            raise ConfigError(
                f"the stages of {type(model).__name__} are not built yet; call configure_model() first, or load the "
                "adapters in its load_pretrained()"
            )
        if ranks.alone and len(stages) == 1 and not is_adapted(stages[0]):
            _give_adapters(model, stages[0], saved)
    own = {site.name: "" for stage in stages for site, _ in adapted_sites(stage)}
    everywhere = ranks.merge(own)
    values: list[tuple[torch.Tensor, torch.Tensor]] = []
    with ranks.agreed(failure):
        if not everywhere:
            raise ConfigError(
                "the model has no adapters. On several ranks files do not give it some; set its peft to LoRA with the "
                "ranks and targets of the file"
            )
        saved.check_names(everywhere)
        for stage in stages:
            for site, adapter in adapted_sites(stage):
                if adapter.is_merged:
                    raise ConfigError(
                        f"the adapter of {site.name} is merged into its weight; call unmerge(model) first"
                    )
                a, b = saved.matrices(site, adapter.rank)
                values += [(adapter.a, a), (adapter.b, b * (saved.scale_of(site.name) / adapter.scale))]
    for parameter, whole in values:
        ranges = tuple(slice(each.start, each.stop) for each in local_ranges(parameter))
        local(parameter.detach()).copy_(whole[ranges])


def _give_adapters(model: nn.Module | Sequence[nn.Module], stage: nn.Module, saved: SavedAdapter) -> None:
    """Give a whole model the adapters of a file, without their values. A `D9DModule` builds its stages so from now on.

    Local.
    """
    plan = saved.plan(stage)
    if not builds_stages(model):
        apply_plan(stage, plan)
        return
    method = method_of(plan, stage)
    apply_plan(stage, method.plan(stage))
    model.peft, model.has_adapters = method, True


def _agreed_config(
    stages: Sequence[nn.Module], failure: str, layout: str, base_model: str | None
) -> tuple[dict[str, Any], dict[str, _Described]]:
    """Return the table of all ranks' adapters, and this rank's adapters."""
    ranks = Ranks()
    described: dict[str, _Described] = {}
    all_names: dict[str, str] = {}
    others: dict[str, str] = {}
    with ranks.agreed(failure):
        if layout not in get_args(Layout):
            raise ConfigError(f"layout={layout!r} must be one of {', '.join(map(repr, get_args(Layout)))}")
        for stage in stages:
            others |= dict.fromkeys(_trained_beside(stage), "")
            all_names |= dict.fromkeys(sites_of(stage), "")
            for site, adapter in adapted_sites(stage):
                described[site.name] = _Described(adapter.rank, adapter.scale, site.is_of_experts, adapter.dropout)
    described, all_names = dict(sorted(ranks.merge(described).items())), ranks.merge(all_names)
    others = ranks.merge(others)
    with ranks.agreed(failure):
        if not described:
            raise ConfigError(
                "the model has no adapters; give it some with inject(module, LoRA()), or save its weights"
            )
        if others:
            raise ConfigError(
                f"{first_of([*others])} is trained whole, which a file of adapters cannot contain; save the merged "
                "weights with the callback HuggingFaceExport, or with save_huggingface"
            )
        _check_experts_complete(described, layout)
    return _config(described, [*all_names], layout, base_model), described


def _trained_beside(stage: nn.Module) -> list[str]:
    """Return the parameters of the base that are trained beside adapters, none of which may be merged."""
    own = {id(parameter) for _, adapter in adapted_sites(stage) for parameter in adapter.parameters()}
    for site, adapter in adapted_sites(stage):
        if adapter.is_merged:
            raise ConfigError(f"the adapter of {site.name} is merged into its weight; call unmerge(model) first")
    return [name for name, each in stage.named_parameters() if each.requires_grad and id(each) not in own]


def _check_experts_complete(described: Mapping[str, _Described], layout: str) -> None:
    """Refuse adapters that `peft` with transformers 5 drops: layers of an expert without the last one."""
    owners = {name.rpartition(".")[0] for name, each in described.items() if each.is_of_experts}
    lonely = [f"{owner}.gate_up_proj" for owner in sorted(owners) if f"{owner}.down_proj" not in described]
    if lonely and layout == "experts":
        raise ConfigError(
            f"{lonely[0]} has an adapter, but down_proj beside it has none. In the layout 'experts' peft would drop "
            "the first one; set layout='fused', or add 'experts.down_proj' to the targets"
        )


def _config(
    described: Mapping[str, _Described], all_names: Sequence[str], layout: str, base_model: str | None
) -> dict[str, Any]:
    """Return the table of `adapter_config.json`, in which all adapters have one scale."""
    ordered = sorted(described.items(), key=lambda item: not item[1].is_of_experts)
    experts = [each for _, each in ordered if each.is_of_experts]
    scale = ordered[0][1].scale
    is_fused = layout == "fused"
    # Readers of one layer an expert take `r` for experts without asking the patterns.
    rank = Counter(each.rank for each in experts or [each for _, each in ordered]).most_common(1)[0][0]
    ranks: dict[str, int] = {}
    for name, each in described.items():
        weight = name.rpartition(".")[2]
        doubled = each.rank * len(EXPERT_PARTS[weight]) if each.is_of_experts else each.rank
        if (doubled if is_fused else each.rank) != rank:
            ranks[name] = doubled
            if each.is_of_experts and not is_fused:
                layers = name.rpartition(".")[0]
                ranks |= {rf"{layers}\.\d+\.{part}": each.rank for part in EXPERT_PARTS[weight]}
    modules = _short([n for n, each in described.items() if not each.is_of_experts], all_names)
    weights = sorted({n.rpartition(".")[2] for n, each in described.items() if each.is_of_experts})
    if not is_fused:
        modules += [part for weight in weights for part in EXPERT_PARTS[weight]]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0 if experts and is_fused else max(each.dropout for each in described.values()),
        "target_modules": sorted({*modules}),
        "target_parameters": [f"experts.{weight}" for weight in weights] if is_fused and weights else None,
        "rank_pattern": ranks,
        "alpha_pattern": {name: scale * each for name, each in ranks.items()},
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _short(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return the last parts of names, if all layers with this last part are meant; else the names."""
    others = {name.rpartition(".")[2] for name in all_names if name not in {*names}}
    return [last if (last := name.rpartition(".")[2]) not in others else name for name in names]
