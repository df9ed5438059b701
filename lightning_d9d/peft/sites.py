"""Weights that can have an adapter, and the names by which they are selected."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.modules import GroupedExperts, GroupedQueryAttention, LMHead, SparseMoE, SwiGLU, TokenEmbedding
from lightning_d9d.modules.adapters import (
    Adapter,
    EmbeddingAdapter,
    ExpertsAdapter,
    HeadAdapter,
    LinearAdapter,
    adapted_embedding,
    adapted_linear,
)
from lightning_d9d.modules.lm_head import SplitLMHead

_NUM_NEAREST = 3
_EXPERTS = {"gate_up_proj": ("gate_up_lora", 2), "down_proj": ("down_lora", 1)}
"""The name of the adapter and the number of parts of its rows, for each weight of experts."""


_READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read the weights of inner layers without calling these layers, so that an adapter would be ignored."""


class Site(NamedTuple):
    """A weight that can have an adapter."""

    name: str
    """The name for targets: that of the layer, or of the weight of experts."""
    owner: nn.Module
    """The layer that will contain the adapter."""
    weight_name: str
    """The weight's name in the owner."""
    adapter_name: str
    """The adapter's name in the owner."""
    num_parts: int = 1
    top_k: int | None = None
    """The number of experts that a token visits; None for other weights, or if it is unknown."""

    @property
    def weight(self) -> Tensor:
        """The weight, shape `[..., out, in]`, or `[vocab, hidden]` of an embedding."""
        return self.owner.get_parameter(self.weight_name)

    @property
    def is_of_experts(self) -> bool:
        """True if each expert has a matrix in the weight."""
        return isinstance(self.owner, GroupedExperts)

    @property
    def parameter(self) -> str:
        """The weight's name in the whole module."""
        return self.name if self.is_of_experts else f"{self.name}.weight"

    @property
    def prefix(self) -> str:
        """The prefix of the names of the adapter's parameters in the whole module."""
        layer = self.name.rpartition(".")[0] if self.is_of_experts else self.name
        return f"{layer}.{self.adapter_name}." if layer else f"{self.adapter_name}."

    @property
    def most(self) -> int:
        """The largest possible rank of an adapter of the weight."""
        *_, num_out, num_in = self.weight.shape
        return min(num_out // self.num_parts, num_in)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, whether merged or not."""
        found = self.owner._modules.get(self.adapter_name)
        return found if isinstance(found, Adapter) else None

    def attach(self, rank: int, scale: float, dropout: float) -> Adapter:
        """Give the layer an adapter, on the device of its weight and without values."""
        weight = self.weight.detach()
        adapter: Adapter
        if self.is_of_experts:
            adapter = ExpertsAdapter(weight, rank, scale=scale, dropout=dropout, num_parts=self.num_parts)
        elif isinstance(self.owner, nn.Embedding):
            adapter = EmbeddingAdapter(weight, rank, scale=scale, dropout=dropout)
            self.owner.forward = partial(adapted_embedding, self.owner)
        elif isinstance(self.owner, LMHead):
            adapter = HeadAdapter(weight, rank, scale=scale, dropout=dropout)
        else:
            assert isinstance(self.owner, nn.Linear)
            adapter = LinearAdapter(weight, rank, scale=scale, dropout=dropout)
            self.owner.forward = partial(adapted_linear, self.owner)
        self.owner.add_module(self.adapter_name, adapter.train(self.owner.training))
        return adapter


def sites_of(module: nn.Module) -> dict[str, Site]:
    """Return the weights of a module that can have an adapter, by name. Local."""
    found: dict[str, Site] = {}
    top_k = {part.experts: part.gate.top_k for part in module.modules() if isinstance(part, SparseMoE)}
    left_out = (SplitLMHead, *_READ_WEIGHTS)
    inside = {part for each in module.modules() if isinstance(each, left_out) for part in each.modules()}
    for path, part in module.named_modules():
        if part in inside:
            continue
        if isinstance(part, GroupedExperts):
            for weight, (adapter, num_parts) in _EXPERTS.items():
                name = f"{path}.{weight}" if path else weight
                found[name] = Site(name, part, weight, adapter, num_parts, top_k.get(part))
        elif _is_plain(part) or (isinstance(part, LMHead) and part.weight is not None):
            found[path] = Site(path, part, "weight", "lora")
    return found


def default_sites(module: nn.Module) -> dict[str, Site]:
    """Find all projections of attention, of dense MLPs and of experts. Local."""
    layers = {
        child
        for part in module.modules()
        if isinstance(part, GroupedQueryAttention | SwiGLU)
        for child in part.children()
    }
    return {name: site for name, site in sites_of(module).items() if site.is_of_experts or site.owner in layers}


def chosen_by(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches, as a whole or after a dot. Local.

    A module stands for its contents: `model.layers.0` selects `model.layers.0.self_attn.q_proj`.

    Raises:
        ConfigError: The pattern is not a regular expression.
    """
    try:
        compiled = re.compile(rf"(?:.*\.)?(?:{pattern})")
    except re.error as error:
        raise ConfigError(f"the target {pattern!r} is not a regular expression: {error}; correct it") from error
    return [name for name in names if any(compiled.fullmatch(each) for each in _with_owners(name))]


def nearest_names(pattern: str, names: Sequence[str]) -> str:
    """Return the names most similar to a pattern, for an error; each kind of layer once."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    last = {name: name.rpartition(".")[2] for name in kinds.values()}

    def likeness(name: str) -> float:
        return max(difflib.SequenceMatcher(None, pattern, each).ratio() for each in (name, last[name]))

    return ", ".join(sorted(kinds.values(), key=likeness, reverse=True)[:_NUM_NEAREST])


def refuse_without_adapter(pattern: str, module: nn.Module) -> None:
    """Refuse a target that names parameters which cannot have an adapter. Local.

    Raises:
        ConfigError: The target names such parameters; the error suggests what to do with them.
    """
    owners = [name for name, _ in module.named_parameters()]
    for name in chosen_by(pattern, owners):
        owner = module.get_submodule(name.rpartition(".")[0])
        readers = [
            type(part) for part in module.modules() if isinstance(part, _READ_WEIGHTS) and owner in part.modules()
        ]
        if readers:
            raise ConfigError(
                f"LoRA(targets=[{pattern!r}]): {name} cannot have an adapter, because {readers[0].__name__} reads the "
                "weight and does not call the layer. Use FullTune for it, or leave it out"
            )
        remedy = "use FullTune for it"
        if isinstance(owner, LMHead):
            remedy = "a vocabulary in parts has no adapter of its head; use FullTune for a part of it"
        raise ConfigError(
            f"LoRA(targets=[{pattern!r}]): {name} of a {type(owner).__name__} cannot have an adapter, which linear "
            f"layers, experts, embeddings and heads have; {remedy}, or leave it out"
        )


def refuse_tied(sites: Iterable[Site], module: nn.Module) -> None:
    """Refuse an adapter of a matrix that several layers share, such as embedding and head. Local.

    Raises:
        ConfigError: One is.
    """
    if (site := tied_site(sites, module)) is not None:
        raise ConfigError(
            f"LoRA: {site.name} cannot have an adapter, because another layer has the same weight (tied embeddings). "
            "Leave it out, train it whole with FullTune, or build the model without tied embeddings "
            "(tie_word_embeddings=False)"
        )


def tied_site(sites: Iterable[Site], module: nn.Module) -> Site | None:
    """Return the first site whose matrix another layer shares; None if there is none. Local."""
    without_weight = any(isinstance(part, LMHead) and part.weight is None for part in module.modules())
    num_holders = Counter(map(id, (each for _, each in module.named_parameters(remove_duplicate=False))))
    for site in sites:
        if num_holders[id(site.weight)] > 1 or (without_weight and isinstance(site.owner, nn.Embedding)):
            return site
    return None


def _is_plain(part: nn.Module) -> bool:
    """Return whether a module is a linear layer or an embedding that computes like torch's."""
    kind = type(part)
    if isinstance(part, nn.Linear):
        return kind.forward is nn.Linear.forward
    return isinstance(part, TokenEmbedding) or (isinstance(part, nn.Embedding) and kind.forward is nn.Embedding.forward)


def _with_owners(name: str) -> Iterator[str]:
    """Yield the name, and those of the modules that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
