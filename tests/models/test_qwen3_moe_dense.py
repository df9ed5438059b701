"""Configs without experts are dense Qwen3: sizes, `config.json` with `model_type: qwen3`, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config as ReferenceConfig
from transformers import Qwen3ForCausalLM as Reference

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig
from tests.harness.ranks import RankContext
from tests.meshes.equality import on_mesh

TINY = Qwen3MoeConfig.preset("tiny-dense")
HIDDEN, INNER, LAYERS, HEADS, TIED = range(5)
PUBLISHED = {
    "0.6b": (1024, 3072, 28, 16, True, 596_049_920),
    "1.7b": (2048, 6144, 28, 16, True, 1_720_574_976),
    "4b": (2560, 9728, 36, 32, True, 4_022_468_096),
    "8b": (4096, 12_288, 36, 32, False, 8_190_735_360),
    "14b": (5120, 17_408, 40, 40, False, 14_768_307_200),
    "32b": (5120, 25_600, 64, 64, False, 32_762_123_264),
}
"""Hidden and intermediate size, layers, query heads, tied embeddings, and the number of parameters.

Sizes are those of `qwen3_configs` in torchtitan (experiments/qwen3), tied embeddings those of table 1 in
https://arxiv.org/abs/2505.09388. Numbers are those that keras-hub publishes (qwen3_presets.py).
"""


def written(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3", **values}))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_size(name: str) -> None:
    *sizes, number = PUBLISHED[name]
    config = Qwen3MoeConfig.preset(name)  # type: ignore[arg-type]
    described = ReferenceConfig(
        vocab_size=151_936,
        hidden_size=sizes[HIDDEN],
        intermediate_size=sizes[INNER],
        num_hidden_layers=sizes[LAYERS],
        num_attention_heads=sizes[HEADS],
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=bool(sizes[TIED]),
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40_960,
        bos_token_id=151_643,
        eos_token_id=151_645,
        architectures=["Qwen3ForCausalLM"],
    )
    assert Qwen3MoeConfig.from_dict(described.to_dict()) == config
    assert config.num_parameters == config.num_active_parameters == number
    with torch.device("meta"):
        theirs, ours = Reference(described), Qwen3MoeForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert {name: parameter.shape for name, parameter in ours.named_parameters()} == shapes
    assert sum(shape.numel() for shape in shapes.values()) == number


def test_keys_that_are_left_out_are_those_of_transformers(tmp_path: Path) -> None:
    assert Qwen3MoeConfig.from_json(written(tmp_path)) == Qwen3MoeConfig.from_dict(ReferenceConfig().to_dict())
    config = Qwen3MoeConfig.from_json(
        written(tmp_path, num_attention_heads=4, num_key_value_heads=None, hidden_size=64)
    )
    assert (config.num_key_value_heads, config.head_dim, config.num_experts) == (4, 128, 0)


@pytest.mark.parametrize("version", [4, 5])
def test_a_config_goes_to_transformers_and_back(tmp_path: Path, version: int) -> None:
    config = dataclasses.replace(TINY, head_dim=48, rope_theta=123.0, attention_bias=True, eos_token_id=[3, 4])
    config.to_json(tmp_path / "config.json")
    theirs = ReferenceConfig.from_pretrained(tmp_path)
    assert theirs.architectures == ["Qwen3ForCausalLM"]
    values = theirs.to_dict()
    if version == 4:
        values |= {"rope_theta": values.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        del values["layer_types"]
    assert Qwen3MoeConfig.from_dict(values) == config
    names = ("head_dim", "attention_bias", "tie_word_embeddings", "intermediate_size", "num_key_value_heads")
    assert [getattr(theirs, name) for name in names] == [getattr(config, name) for name in names]


def test_an_older_export_says_the_mixture_without_experts(tmp_path: Path) -> None:
    values = {**TINY.to_dict(), "model_type": "qwen3_moe", "num_experts": 0, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig.from_dict(values)
    assert config.num_parameters == TINY.num_parameters
    assert config.to_dict() == TINY.to_dict()


@pytest.mark.parametrize(
    "values",
    [
        {"num_experts": 8},
        {"num_local_experts": 8},
        {"num_experts_per_tok": 2},
        {"moe_intermediate_size": 128},
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 1},
        {"mlp_only_layers": [1]},
        {"shared_expert_intermediate_size": 4},
        {"router_aux_loss_coef": 0.001},
    ],
    ids=str,
)
def test_fields_of_experts_in_a_dense_config_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(ConfigError) as error:
        Qwen3MoeConfig.from_json(written(tmp_path, **values))
    assert f"config.json: {name}={value!r} is a field of mixtures of experts" in str(error.value)
    assert f"Set model_type to 'qwen3_moe' if the weights have experts, or remove {name}." in str(error.value)


def test_fields_that_change_results_are_refused(tmp_path: Path) -> None:
    windows = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
    assert Qwen3MoeConfig.from_json(written(tmp_path, **windows)) == Qwen3MoeConfig.from_json(written(tmp_path))
    with pytest.raises(ConfigError, match="use_sliding_window=True is not supported"):
        Qwen3MoeConfig.from_json(written(tmp_path, **{**windows, "use_sliding_window": True}))
    with pytest.raises(
        ConfigError, match=r"layer_types=.*'sliding_attention'.* is not supported; all layers must be 'full"
    ):
        Qwen3MoeConfig.from_json(written(tmp_path, layer_types=["full_attention", "sliding_attention"]))


def test_settings_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shared_expert_intermediate_size=4 must be 0, as num_experts=0"):
        dataclasses.replace(TINY, shared_expert_intermediate_size=4)
    for build in (
        lambda: Qwen3MoePretraining(TINY, balance=BalanceConfig(z_loss=0.1)),
        lambda: Qwen3MoeForCausalLM(TINY, balance=BalanceConfig(z_loss=0.1)),
    ):
        with pytest.raises(ConfigError, match=r"balance=.*z_loss=0\.1.* has no effect: .*leave balance out"):
            build()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mesh": MeshConfig(data_parallel_replicate=2, expert_parallel=2)},
            r"MeshConfig\.expert_parallel=2 has no effect: no layer of the config is a mixture of experts "
            r"\(num_experts=0\); leave expert_parallel out, or set num_experts",
        ),
        (
            {"mesh": MeshConfig(pipeline_parallel=2), "parallel": ParallelConfig(grouped_gemm="eager")},
            r"ParallelConfig\.grouped_gemm='eager' has no effect: .*leave grouped_gemm out",
        ),
    ],
    ids=["experts over ranks", "products of experts"],
)
def test_settings_of_experts_are_refused_on_every_rank(
    rank: RankContext, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_mesh(rank, D9DStrategy(**options), TINY, steps=1)
