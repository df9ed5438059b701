"""Reads adapters of Hugging Face's `peft`: the weights to which they belong, their scales and their matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.peft.layouts import EXPERT_PARTS, PREFIX, FileKey, from_fused
from lightning_d9d.peft.methods import AdapterSettings, PeftPlan, is_number
from lightning_d9d.peft.sites import Site, sites_of, tied_site
from lightning_d9d.state import Checks, SafetensorsReader
from lightning_d9d.state.format import read_json, reading
from lightning_d9d.state.places import place_of

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_REFUSED = {
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
    "use_qalora": False,
}
"""Settings whose other values mean something that adapters here do not support."""
_CHANGES_BASE = re.compile("corda|loftq|lora_ga|olora|pissa", re.IGNORECASE)
"""The beginnings of those `init_lora_weights` that change the weights of the base, too."""
_BASE = ".base_layer.weight"
_WEIGHT_OF_PART = {part: weight for weight, parts in EXPERT_PARTS.items() for part in parts}


class _Entry(NamedTuple):
    """An adapter of a file."""

    tensors: Mapping[tuple[int, str, str], str]
    """The name in the file, by expert, layer and matrix. For a single entry the expert is 0 and the layer is empty."""
    pattern_names: tuple[str, ...]
    """Names under which `rank_pattern` and `alpha_pattern` may list it."""
    is_fused: bool = False


class SavedAdapter:
    """The adapters of a directory. Local.

    Args:
        directory: Directory with `adapter_model.safetensors` and `adapter_config.json`; also a URL that fsspec knows.

    Raises:
        StateError: A file is missing or damaged, or has tensors or settings that are not those of adapters.
    """

    def __init__(self, directory: str | Path) -> None:
        with reading(directory):
            folder = place_of(directory)
        self.path = folder
        self.config = _read_config(folder)
        self.reader = SafetensorsReader(folder, ADAPTER_FILE)
        self._bases: dict[str, str] = {}
        self.entries = self._find_entries()
        if not self.entries:
            raise StateError(f"{folder / ADAPTER_FILE}: it has no adapters; give the directory of some")

    def check_values(self, checksums: bool, share: slice = slice(None)) -> None:
        """Look for numbers that are infinite or NaN, and compare checksums. Local.

        Args:
            checksums: Whether to compare checksums, if the directory has a manifest, as those of `save_adapter` have.
            share: This rank's part of the tensors.

        Raises:
            StateError: A tensor is damaged.
        """
        self.reader.verify(sorted(self.reader)[share], Checks(checksums, finite=True))

    def plan(self, module: nn.Module) -> PeftPlan:
        """Return the plan that gives a whole module these adapters. Local.

        Raises:
            StateError: An adapter belongs to a weight that the module does not have, or that several layers share.
        """
        sites = sites_of(module)
        self.check_names({name: "" for name in self.entries if name in sites})
        if (site := tied_site((sites[name] for name in self.entries), module)) is not None:
            raise StateError(
                f"{self.path / ADAPTER_FILE} has an adapter of {site.name}, whose weight another layer shares in this "
                "model (tied embeddings), so that it cannot be merged. Give adapters that were made without it, or a "
                "base without tied embeddings"
            )
        settings = {}
        for name in self.entries:
            rank = self.matrices(sites[name])[1].shape[-1]
            settings[name] = AdapterSettings(rank, self.scale_of(name), 0.0)
        return PeftPlan(settings)

    def check_names(self, names: Iterable[str]) -> None:
        """Compare the file with a model's adapters.

        Raises:
            StateError: One has an adapter that the other lacks.
        """
        names = set(names)
        if unknown := [name for name in self.entries if name not in names]:
            raise StateError(
                f"{self.path / ADAPTER_FILE} has an adapter of {first_of(unknown)}, but the model has none; use the "
                "base model of these adapters, with the same targets"
            )
        if missing := [name for name in names if name not in self.entries]:
            raise StateError(
                f"{self.path / ADAPTER_FILE} lacks an adapter of {first_of(sorted(missing))}, which the model has; set "
                "LoRA's targets to those of the file"
            )

    def scale_of(self, name: str) -> float:
        """Return the scale of an adapter.

        Raises:
            StateError: The configuration does not contain it.
        """
        entry = self.entries[name]
        alpha, rank = self._of_config("alpha_pattern", "lora_alpha", entry), self._of_config("rank_pattern", "r", entry)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def matrices(self, site: Site, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the matrices `a` and `b` of an adapter in this package's layout, whole, on the CPU. Local.

        Args:
            site: The adapter's.
            rank: Rank that the adapter must have.

        Raises:
            StateError: A shape does not fit the weight, or the rank differs.
        """
        entry = self.entries[site.name]
        self._check_base(site)
        *experts, num_out, num_in = site.weight.shape
        if isinstance(site.owner, nn.Embedding):
            num_out, num_in = num_in, num_out
        if not site.is_of_experts:
            a, b = self._pair(entry, 0, "", num_out, num_in)
        elif entry.is_fused:
            a, b = self._pair(entry, 0, "", num_out, num_in, experts[0])
            a, b = from_fused(a, b, experts[0], site.num_parts)
        else:
            parts = EXPERT_PARTS[site.weight_name]
            self._check_experts(site, entry, experts[0])
            pairs = [
                [self._pair(entry, expert, part, num_out // len(parts), num_in) for part in parts]
                for expert in range(experts[0])
            ]
            first = pairs[0][0][0].shape[0]
            if any(a.shape[0] != first for of_expert in pairs for a, _ in of_expert):
                raise StateError(
                    f"{self.path / ADAPTER_FILE}: the experts of {site.name} have adapters of several ranks; use a "
                    "file in which all experts of a layer have the same rank"
                )
            a = torch.stack([torch.cat([a for a, _ in of_expert]) for of_expert in pairs])
            b = torch.stack([torch.cat([b for _, b in of_expert]) for of_expert in pairs])
        if rank is not None and b.shape[-1] != rank:
            raise StateError(
                f"{self.path / ADAPTER_FILE}: the adapter of {site.name} has rank {b.shape[-1]}, but that of the model "
                f"has rank {rank}; set LoRA's rank to that of the file"
            )
        return a, b

    def _pair(
        self, entry: _Entry, expert: int, part: str, num_out: int, num_in: int, num_experts: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return both matrices of a file after a check of their shapes."""
        names = [entry.tensors[expert, part, matrix] for matrix in "AB"]
        a, b = (self.reader[name][()] for name in names)
        expected = self._of_config("rank_pattern", "r", entry) * num_experts
        if entry.is_fused is False and _WEIGHT_OF_PART.get(part) == "gate_up_proj" and a.shape[0] * 2 == expected:
            expected //= 2  # a pattern for gate and up projection together
        for name, each, shape in zip(names, (a, b), ((expected, num_in), (num_out, expected)), strict=True):
            if tuple(each.shape) != shape or not each.is_floating_point():
                raise StateError(
                    f"{self.path / ADAPTER_FILE}: {name} is {each.dtype} of shape {list(each.shape)}. For this model "
                    f"and the rank in {ADAPTER_CONFIG} it should have floats of shape {list(shape)}; give the adapter "
                    "of this base model"
                )
        return a, b

    def _check_base(self, site: Site) -> None:
        """Compare the copy of an embedding or a head that `peft` stores beside its adapter."""
        if (name := self._bases.get(site.name)) is None:
            return
        weight = site.weight.detach()
        if isinstance(weight, DTensor) or weight.is_meta:
            raise StateError(
                f"{self.path / ADAPTER_FILE}: {name} is a copy of a weight. It cannot be compared with a weight that "
                "is sharded or without values; save the adapter with save_embedding_layers=False"
            )
        copy = self.reader[name][()]
        if copy.shape != weight.shape or not torch.equal(copy.to(weight), weight):
            raise StateError(
                f"{self.path / ADAPTER_FILE}: {name} is not the weight of {site.name} in this model; use the base "
                "model of these adapters"
            )

    def _check_experts(self, site: Site, entry: _Entry, num_experts: int) -> None:
        known = {expert for expert, _, _ in entry.tensors}
        needed = {
            (expert, part, matrix)
            for expert in range(num_experts)
            for part in EXPERT_PARTS[site.weight_name]
            for matrix in "AB"
        }
        if entry.tensors.keys() != needed:
            lacks = sorted(needed - entry.tensors.keys())
            what = f"lacks {lacks[0]}" if lacks else f"has expert {max(known)}"
            raise StateError(
                f"{self.path / ADAPTER_FILE}: {site.name} has {num_experts} experts, but the file has {what}; give the "
                "adapter of this base model"
            )

    def _of_config(self, patterns: str, default: str, entry: _Entry) -> float:
        for pattern, value in (self.config.get(patterns) or {}).items():
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in entry.pattern_names):
                return value
        return self.config[default]

    def _find_entries(self) -> dict[str, _Entry]:
        tensors: dict[str, dict[tuple[int, str, str], str]] = {}
        fused: dict[str, dict[tuple[int, str, str], str]] = {}
        for name in self.reader:
            key = FileKey.of(name)
            if name.endswith(_BASE):
                self._bases[name.removeprefix(PREFIX).removesuffix(_BASE)] = name
                continue
            if key is None:
                raise StateError(
                    f"{self.path / ADAPTER_FILE}: {name} is not a tensor of a low-rank adapter; save the adapter "
                    "without it"
                )
            if (expert := key.expert) is not None:
                site = f"{expert[0]}.{_WEIGHT_OF_PART[expert[2]]}"
                tensors.setdefault(site, {})[expert[1], expert[2], key.matrix] = name
            elif key.module.endswith(("experts", "experts.base_layer")):
                fused.setdefault(key.module, {})[0, "", key.matrix] = name
            else:
                tensors.setdefault(key.module, {})[0, "", key.matrix] = name
        found = {name: _Entry(each, _pattern_names(name, each)) for name, each in tensors.items()}
        for module, each in fused.items():
            site = self._site_of_fused(module, fused)
            found[site] = _Entry(each, (site,), is_fused=True)
        for entry in found.values():
            for expert, part, matrix in entry.tensors:
                if (expert, part, "B" if matrix == "A" else "A") not in entry.tensors:
                    lonely = entry.tensors[expert, part, matrix]
                    raise StateError(f"{self.path / ADAPTER_FILE}: {lonely} lacks its other matrix")
        return found

    def _site_of_fused(self, module: str, fused: Mapping[str, Any]) -> str:
        """Return the weight: of two nested adapters, the inner one belongs to the gate and up projection."""
        experts = module.removesuffix(".base_layer")
        if module != experts:
            return f"{experts}.gate_up_proj"
        if f"{experts}.base_layer" in fused:
            return f"{experts}.down_proj"
        targets = self.config.get("target_parameters") or ()
        named = [weight for weight in EXPERT_PARTS if any(str(each).endswith(weight) for each in targets)]
        if len(named) != 1:
            raise StateError(
                f"{self.path / ADAPTER_CONFIG}: target_parameters={targets} do not say which weight of {module} has an "
                "adapter; name one"
            )
        return f"{experts}.{named[0]}"


def _pattern_names(name: str, tensors: Mapping[tuple[int, str, str], str]) -> tuple[str, ...]:
    owner = name.rpartition(".")[0]
    return (name, *(f"{owner}.{expert}.{part}" for expert, part, _ in list(tensors)[:1] if part))


def _read_config(folder: Any) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if not path.exists() and (folder / "config.json").exists():
        raise StateError(
            f"{folder} has whole weights (config.json), no adapters; give the directory of an {ADAPTER_CONFIG}"
        )
    try:
        config = read_json(path)
    except ValueError as error:
        raise StateError(f"{path}: cannot be read as a JSON configuration: {error}") from error
    if config.get("peft_type") != "LORA":
        raise StateError(f"{path}: peft_type={config.get('peft_type')!r} is not 'LORA'; give adapters of LoRA")
    for name, allowed in _REFUSED.items():
        if (value := config.get(name, allowed)) not in (allowed, None, [], {}):
            raise StateError(f"{path}: {name}={value!r} is not supported; give adapters that were made without it")
    if isinstance(init := config.get("init_lora_weights"), str) and _CHANGES_BASE.match(init):
        raise StateError(
            f"{path}: init_lora_weights={init!r} changes the weights of the base, too; give adapters that were saved "
            "with path_initial_model_for_weight_conversion, which fit the original base"
        )
    numbers = [config.get("r"), config.get("lora_alpha")]
    for patterns in ("rank_pattern", "alpha_pattern"):
        table = config.get(patterns) or {}
        numbers += table.values() if isinstance(table, Mapping) else [table]
        _check_patterns(path, patterns, table)
    if not all(is_number(each) and 0 < each < math.inf for each in numbers):
        raise StateError(f"{path}: r, lora_alpha, rank_pattern and alpha_pattern must have numbers above 0")
    return config


def _check_patterns(path: Any, setting: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(str(pattern))
        except re.error as error:
            raise StateError(
                f"{path}: {setting} has {pattern!r}, which is not a regular expression: {error}"
            ) from error
