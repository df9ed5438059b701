from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightning_d9d.checkpoint import is_directory
from lightning_d9d.errors import ConfigError, StateError, did_you_mean
from lightning_d9d.models.qwen3_moe.presets import PRESETS, PresetName
from lightning_d9d.peft.saved import ADAPTER_CONFIG
from lightning_d9d.state.format import read_json
from lightning_d9d.state.places import Place, check_link

_WIDTH = (1, 2**24)
_INTEGERS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), _WIDTH),
    "num_hidden_layers": (1, 4096),
    "num_experts": (0, 65_536),
    "num_experts_per_tok": (0, 65_536),
    "shared_expert_intermediate_size": (0, 2**24),
    "decoder_sparse_step": (1, 2**31 - 1),
    "max_position_embeddings": (1, 2**31 - 1),
}
"""Lowest and highest value of each field. The highest value is far above any model, and low enough that no computation
with it takes long or overflows."""
_MAX_EXPERTS = 2**20
_MAX_PARAMETERS = 10**15

_DENSE_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "num_experts": 0,
}
"""Defaults of Hugging Face's dense Qwen3 that differ from those of its Qwen3-MoE."""
_OF_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
    "output_router_logits",
)
"""Names that only the `config.json` of a mixture of experts has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig:
    """Size and shape of a Qwen3-MoE model, in the field names (and with the defaults) of Hugging Face's `config.json`.

    A config without experts, `num_experts=0`, is dense Qwen3 (`model_type: qwen3`): fields of experts then have no
    effect.

    Raises:
        ConfigError: A field has a value with which no model can be built. The message names the field, the value and
            the legal values.
    """

    vocab_size: int = 151_936
    """Number of token ids; rows of the embedding and of the head."""

    hidden_size: int = 2048
    """Width of the residual stream."""

    intermediate_size: int = 6144
    """Inner width of the dense layers (those that are not mixtures of experts)."""

    moe_intermediate_size: int = 768
    """Inner width of one expert."""

    num_hidden_layers: int = 24
    """Number of decoder layers."""

    num_attention_heads: int = 32
    """Number of query heads; a multiple of num_key_value_heads."""

    num_key_value_heads: int = 4
    """Number of key and value heads."""

    head_dim: int = 128
    """Width of one attention head, even; independent of hidden_size."""

    num_experts: int = 128
    """Number of experts in a mixture layer; 0 makes every layer dense, which is Qwen3 without MoE."""

    num_experts_per_tok: int = 8
    """Number of experts that each token visits."""

    norm_topk_prob: bool = False
    """Scale a token's weights over its chosen experts to sum to one."""

    shared_expert_intermediate_size: int = 0
    """Inner width of the shared expert of each mixture layer, as in Qwen2-MoE; 0 for none. Every token visits it, and a
    sigmoid of the token's own gate scales the result. `transformers` has no Qwen3-MoE with a shared expert: only this
    package reads such an export."""

    decoder_sparse_step: int = 1
    """Every n-th layer is a mixture of experts (counted from one), the others are dense."""

    mlp_only_layers: tuple[int, ...] = ()
    """Indices of layers that are dense in any case."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""

    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""

    max_position_embeddings: int = 32_768
    """Longest document, in tokens, that the model is meant for. `Qwen3MoePretraining` does not train on longer ones."""

    tie_word_embeddings: bool = False
    """If True, the head uses the embedding's matrix."""

    attention_bias: bool = False
    """If True, the four attention projections have a bias."""

    initializer_range: float = 0.02
    """Standard deviation of the initial matrices."""

    bos_token_id: int | None = None
    """Id of the token that begins a text, for exports."""

    eos_token_id: int | list[int] | None = None
    """Id or ids of the token that ends a text, for exports."""

    vocab_splits: dict[str, int] | None = None
    """Name and size of each part of the vocabulary, in order of their ids; sizes sum to vocab_size. Each part has its
    own matrix in embedding and head. None is a single unnamed part."""

    def __post_init__(self) -> None:
        for name, (least, most) in _INTEGERS.items():
            value = getattr(self, name)
            legal = f"an integer, at least {least} and at most {most}"
            self._require(name, type(value) is int and least <= value <= most, legal)
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            is_legal = type(value) in (int, float) and 1e-30 <= value <= 1e30
            self._require(name, is_legal, "a number greater than 0, from 1e-30 to 1e30")
        for name in ("norm_topk_prob", "tie_word_embeddings", "attention_bias"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        self._require("num_key_value_heads", heads % kv_heads == 0, f"a divisor of num_attention_heads={heads}")
        self._require("head_dim", self.head_dim % 2 == 0, "even (rotary positions turn pairs)")
        self._require(
            "num_experts_per_tok",
            self.num_experts == 0 or 1 <= self.num_experts_per_tok <= self.num_experts,
            f"1 to num_experts={self.num_experts}",
        )
        self._require(
            "shared_expert_intermediate_size",
            self.num_experts > 0 or self.shared_expert_intermediate_size == 0,
            "0, as num_experts=0 leaves no layer that has one",
        )
        self._require(
            "num_experts",
            self.num_experts * self.num_hidden_layers <= _MAX_EXPERTS,
            f"at most {_MAX_EXPERTS} in all of num_hidden_layers={self.num_hidden_layers} layers",
        )
        self._check_mlp_only_layers()
        self._check_token_ids()
        self._check_vocab_splits()
        if (number := self.num_parameters) > _MAX_PARAMETERS:
            raise ConfigError(
                f"Qwen3MoeConfig describes a model of {number} parameters, but {_MAX_PARAMETERS} are the limit; reduce "
                "its widths, layers or experts."
            )

    def _require(self, name: str, condition: bool, legal: str) -> None:
        if not condition:
            raise ConfigError(f"Qwen3MoeConfig.{name}={reprlib.repr(getattr(self, name))} must be {legal}.")

    def _check_mlp_only_layers(self) -> None:
        num_layers, layers = self.num_hidden_layers, self.mlp_only_layers
        self._require(
            "mlp_only_layers",
            isinstance(layers, list | tuple)
            and len(layers) <= num_layers
            and all(type(layer) is int and 0 <= layer < num_layers for layer in layers),
            f"layer indices from 0 to num_hidden_layers - 1 = {num_layers - 1}",
        )
        object.__setattr__(self, "mlp_only_layers", tuple(layers))

    def _check_token_ids(self) -> None:
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
            are_ids = len(ids) <= 1000 and all(type(each) is int and -(2**31) <= each < 2**31 for each in ids)
            self._require(name, are_ids, "a token id or at most 1000 of them, each an integer of 32 bits, or None")

    def _check_vocab_splits(self) -> None:
        splits = self.vocab_splits
        if splits is None:
            return
        are_sizes = (
            isinstance(splits, Mapping)
            and 1 <= len(splits) <= 1000
            and all(type(size) is int and size >= 1 for size in splits.values())
        )
        self._require("vocab_splits", are_sizes, "1 to 1000 sizes of at least 1 token, or None")
        total = sum(splits.values())
        self._require(
            "vocab_splits",
            total == self.vocab_size,
            f"sizes that sum to vocab_size={self.vocab_size} (they sum to {total})",
        )
        taken = set(dir(nn.ModuleDict()))
        self._require(
            "vocab_splits",
            all(isinstance(name, str) and name.isidentifier() and name not in taken | {"weight"} for name in splits),
            "named by identifiers other than 'weight' and the attributes of torch.nn.ModuleDict",
        )

    def is_sparse(self, layer: int) -> bool:
        """Return True if the layer of this global index is a mixture of experts."""
        return (
            layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers that are mixtures of experts."""
        return sum(self.is_sparse(layer) for layer in range(self.num_hidden_layers))

    def refuse_without_experts(self, setting: str) -> None:
        """Refuse a setting that acts only on mixtures of experts, if no layer is one.

        Args:
            setting: The setting in the message, such as `MeshConfig.expert_parallel=2`.

        Raises:
            ConfigError: Every layer is dense.
        """
        if self.num_sparse_layers == 0:
            name = setting.partition("=")[0].rpartition(".")[2]
            raise ConfigError(
                f"{setting} has no effect: no layer of the config is a mixture of experts "
                f"(num_experts={self.num_experts}); leave {name} out, or set num_experts"
            )

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters; a tied matrix counts once."""
        return self._num_parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses: num_experts_per_tok experts a layer, and all others."""
        return self._num_parameters(self.num_experts_per_tok)

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the floating-point operations of a training step for one token, without recomputation.

        Forward and backward take six operations for each parameter in a matrix product of the token. The lookup in the
        embedding is not such a product. The two products of causal attention over `sequence_length` tokens are added;
        half of each is masked.
        """
        vocabulary = self.vocab_size * self.hidden_size
        in_products = self.num_active_parameters - (0 if self.tie_word_embeddings else vocabulary)
        heads_width = self.num_attention_heads * self.head_dim
        return 6 * in_products + 6 * self.num_hidden_layers * heads_width * sequence_length

    def _num_parameters(self, experts_per_layer: int) -> int:
        hidden, q = self.hidden_size, self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        attention = hidden * (2 * q + 2 * kv) + 2 * self.head_dim
        if self.attention_bias:
            attention += q + 2 * kv + hidden
        dense = 3 * hidden * self.intermediate_size
        sparse = hidden * self.num_experts + 3 * hidden * self.moe_intermediate_size * experts_per_layer
        if self.shared_expert_intermediate_size:
            sparse += hidden * (3 * self.shared_expert_intermediate_size + 1)
        num_sparse = self.num_sparse_layers
        layers = self.num_hidden_layers * (attention + 2 * hidden)
        layers += num_sparse * sparse + (self.num_hidden_layers - num_sparse) * dense
        return layers + hidden + self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)

    @classmethod
    def preset(cls, name: PresetName) -> Qwen3MoeConfig:
        """Return a config by name: a released Qwen3 size, or `tiny` and `tiny-dense`, whose tokens are bytes.

        `tiny`, `30b-a3b` and `235b-a22b` are mixtures of experts, the others dense.

        Raises:
            ConfigError: No preset has this name.
        """
        if name not in PRESETS:
            raise ConfigError(
                f"preset={name!r} is unknown; choose one of {', '.join(map(repr, PRESETS))}, or the path of a Hugging "
                f"Face config.json{did_you_mean(name, PRESETS)}"
            )
        return cls(**PRESETS[name])

    @classmethod
    def from_json(cls, path: str | Path) -> Qwen3MoeConfig:
        """Read Hugging Face's `config.json`: a file, or the one in a directory.

        Raises:
            ConfigError: The file has neither `model_type: qwen3_moe` nor `qwen3`, or needs a feature that this model
                lacks.
        """
        refuse_checkpoint(path)
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_description(path), source=str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "config.json") -> Qwen3MoeConfig:
        """Build a config from Hugging Face's dictionary; keys that do not shape the model are ignored.

        Args:
            values: Dictionary with transformers 4 names (`rope_theta`) or transformers 5 names (`rope_parameters`), of
                a mixture (`model_type: qwen3_moe`) or of a dense model (`qwen3`).
            source: Name of the dictionary in error messages.

        Raises:
            ConfigError: The dictionary describes another model, or a dense one with a field of experts. Or one of its
                values does not allow a model.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: {reprlib.repr(values)} must be a table of names and values.")
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{source}: rope_parameters={reprlib.repr(rope)} must be a table of names and values.")
        _refuse_unsupported(values, rope, source)
        names = {field.name for field in dataclasses.fields(cls)}
        # Keys set to null mean Hugging Face's default, which ours are.
        known = {name: value for name, value in values.items() if name in names and value is not None}
        if "rope_theta" in rope:
            known["rope_theta"] = rope["rope_theta"]
        if "num_experts" not in known and values.get("num_local_experts") is not None:  # what transformers 5 writes
            known["num_experts"] = values["num_local_experts"]
        is_dense = values["model_type"] == "qwen3"
        if is_dense:
            known = {**_DENSE_DEFAULTS, **known}
            if values.get("num_key_value_heads", 0) is None:  # it has one null that means something else
                known["num_key_value_heads"] = known.get("num_attention_heads", cls.num_attention_heads)
        try:
            config = cls(**known)
            if "head_dim" not in known and not is_dense:
                config = dataclasses.replace(config, head_dim=config.hidden_size // config.num_attention_heads)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return Hugging Face's `config.json` as a dictionary that transformers 4 and 5 can read."""
        values = dataclasses.asdict(self)
        values["mlp_only_layers"] = list(self.mlp_only_layers)
        if self.vocab_splits is None:
            del values["vocab_splits"]
        if self.shared_expert_intermediate_size == 0:
            del values["shared_expert_intermediate_size"]
        if self.num_experts == 0:
            values = {name: value for name, value in values.items() if name not in _OF_EXPERTS}
        return {
            "architectures": ["Qwen3ForCausalLM" if self.num_experts == 0 else "Qwen3MoeForCausalLM"],
            "model_type": "qwen3" if self.num_experts == 0 else "qwen3_moe",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            **values,
        }

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict()` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def refuse_checkpoint(path: str | Path) -> None:
    """Refuse a checkpoint or adapters in place of a Hugging Face directory, and name what takes them. Local.

    Raises:
        ConfigError: The path is a checkpoint, file or directory, or a directory of adapters.
    """
    if "://" not in str(path) and (is_directory(path) or (Path(path).suffix == ".ckpt" and Path(path).is_file())):
        raise ConfigError(
            f"{path} is a checkpoint, but a Hugging Face directory is needed. Convert it with `lightning-d9d convert "
            f"{path} DIRECTORY`, and set preset=DIRECTORY and pretrained=DIRECTORY; or resume from the checkpoint "
            "itself with ckpt_path"
        )
    if (
        "://" not in str(path)
        and (Path(path) / ADAPTER_CONFIG).is_file()
        and not (Path(path) / "config.json").is_file()
    ):
        raise ConfigError(
            f"{path} has adapters ({ADAPTER_CONFIG}), but whole weights are needed. Merge them with `lightning-d9d "
            f"convert BASE DIRECTORY --adapter {path}`, where BASE has the weights that they adapt"
        )


def read_description(path: Place) -> dict[str, Any]:
    """Return the values of a `config.json`.

    Args:
        path: The file; a link that leaves its directory is refused, as for the weights beside it.

    Raises:
        ConfigError: The file cannot be read, or is not one table.
        StateError: The file is a link that leads elsewhere.
    """
    if isinstance(path, Path):
        check_link(path.parent, path.name, path)
    try:
        return read_json(path)
    except StateError as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as a JSON configuration: {error}") from error


def _refuse_unsupported(values: Mapping[str, Any], rope: Mapping[str, Any], source: str) -> None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1.0
    for name, value, supported in (
        ("model_type", values.get("model_type"), ("qwen3_moe", "qwen3")),
        ("hidden_act", values.get("hidden_act", "silu"), ("silu",)),
        ("use_sliding_window", values.get("use_sliding_window") or False, (False,)),
        ("attention_dropout", values.get("attention_dropout") or 0.0, (0.0,)),
        ("output_router_logits", values.get("output_router_logits") or False, (False,)),
        ("quantization_config", values.get("quantization_config"), (None,)),
        ("rope type", rope_type, ("default",)),
        ("partial_rotary_factor", partial, (1.0,)),
    ):
        if value not in supported:
            legal = " or ".join(map(repr, supported))
            raise ConfigError(f"{source}: {name}={reprlib.repr(value)} is not supported; only {legal} is.")
    layer_types = values.get("layer_types") or []
    if not isinstance(layer_types, list | tuple) or any(each != "full_attention" for each in layer_types):
        raise ConfigError(
            f"{source}: layer_types={reprlib.repr(layer_types)} is not supported; all layers must be 'full_attention'."
        )
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"{source}: rope_parameters has a separate table for {reprlib.repr(nested[0])}, which is not supported; "
            "give one rope_theta for all layers."
        )
    if values["model_type"] == "qwen3" and (found := [name for name in _OF_EXPERTS if values.get(name)]):
        raise ConfigError(
            f"{source}: {found[0]}={reprlib.repr(values[found[0]])} is a field of mixtures of experts, but "
            "model_type='qwen3' is a dense model. Set model_type to 'qwen3_moe' if the weights have experts, or remove "
            f"{' and '.join(found)}."
        )
