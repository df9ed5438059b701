"""Which weights a method chooses, and what it refuses."""

import dataclasses

import pytest
import torch
from torch import nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.peft import FullTune, LoRA, Stack
from lightning_d9d.peft.methods import as_table, from_table

CONFIG = Qwen3MoeConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    mlp_only_layers=(1,),
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def model_of(**changes):
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(dataclasses.replace(CONFIG, **changes))


def test_attention_mlps_and_experts_are_adapted_by_default():
    plan = LoRA(rank=4, alpha=8).plan(model_of(shared_expert_intermediate_size=12))
    attention = {f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ATTENTION}
    dense = {f"model.layers.{i}.mlp" for i in (0, 1)}
    dense = {
        f"{path}.{name}_proj"
        for path in ("model.layers.0.mlp.shared_expert", "model.layers.1.mlp")
        for name in ("gate", "up", "down")
    }
    experts = {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert plan.adapters.keys() == attention | dense | experts
    assert {plan.adapters[name].rank for name in attention | dense} == {4}
    assert {plan.adapters[name].scale for name in attention | dense} == {2.0}
    # 4 // 2 experts a token
    assert {(plan.adapters[name].rank, plan.adapters[name].scale) for name in experts} == {(2, 4.0)}
    assert plan.trained == frozenset()


def test_rank_of_experts():
    name = "model.layers.0.mlp.experts.down_proj"
    assert LoRA(rank=1).plan(model_of()).adapters[name].rank == 1
    assert LoRA(rank=4, rank_of_experts=3).plan(model_of()).adapters[name].rank == 3
    assert LoRA(rank=4, alpha=6, rslora=True).plan(model_of()).adapters["model.layers.0.self_attn.q_proj"].scale == 3.0


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("q_proj", {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        (r"layers\.1\.self_attn\.[qk]_proj", {"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"}),
        ("layers.1.self_attn", {f"model.layers.1.self_attn.{name}" for name in ATTENTION}),
        ("experts", {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}),
        ("experts.down_proj", {"model.layers.0.mlp.experts.down_proj"}),
        ("embed_tokens", {"model.embed_tokens"}),
        ("lm_head", {"lm_head"}),
    ],
)
def test_a_target_is_a_name_or_its_end(pattern, expected):
    assert LoRA(rank=4, targets=[pattern]).plan(model_of()).adapters.keys() == expected


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        (
            LoRA(targets=["qproj"]),
            {},
            r"matches no name of Qwen3MoeForCausalLM; the nearest are model\.layers\.0\.self_attn\.q",
        ),
        (
            LoRA(targets=["q_proj", "gate"]),
            {},
            "mlp.gate.weight of a TopKRouter cannot have an adapter.* use FullTune",
        ),
        (LoRA(targets=["q_proj("]), {}, "is not a regular expression"),
        (LoRA(rank=9), {}, r"rank 9 is larger than a dim of model\.layers\.0\.self_attn\.k_proj.*\[8, 16\].*at most 8"),
        (LoRA(rank=4, rank_of_experts=9), {}, r"LoRA\.rank_of_experts: rank 9 .*gate_up_proj.*at most 8"),
        (LoRA(targets=["q_proj"], rank_of_experts=2), {}, "rank_of_experts=2 has no effect"),
        (LoRA(targets=["lm_head"]), {"tie_word_embeddings": True}, "matches no name"),
        (LoRA(targets=["embed_tokens"]), {"tie_word_embeddings": True}, "tied embeddings.*FullTune"),
        (LoRA(targets=["lm_head"]), {"vocab_splits": {"text": 40, "new": 8}}, "a vocabulary in parts has no adapter"),
        (FullTune(["nrm"]), {}, "matches no name of Qwen3MoeForCausalLM; the nearest are model"),
        (Stack([LoRA(rank=2), LoRA(rank=2, targets=["q_proj"])]), {}, "two methods give model.layers.0.self_attn.q_pr"),
    ],
)
def test_what_cannot_be_had_is_refused(method, changes, expected):
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        method.plan(model_of(**changes))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LoRA(rank=0), "rank=0"),
        (lambda: LoRA(rank_of_experts=0), "rank_of_experts=0"),
        (lambda: LoRA(alpha=0), "alpha=0"),
        (lambda: LoRA(dropout=1.0), r"dropout=1\.0"),
        (lambda: LoRA(rank=True), "rank=True"),
        (lambda: LoRA(alpha="32"), "alpha='32' must be a number"),
        (lambda: LoRA(dropout="0.1"), r"dropout='0\.1' must be a number"),
        (lambda: LoRA(targets="q_proj"), "list of patterns"),
        (lambda: LoRA(targets=[]), r"targets=\[\] must be a list of patterns"),
        (lambda: LoRA(targets=["q_proj", 3]), "list of patterns"),
        (lambda: FullTune([]), "list of patterns"),
        (lambda: FullTune(5), "list of patterns"),
        (lambda: Stack([]), "list of LoRA"),
        (lambda: Stack(LoRA()), "list of LoRA"),
    ],
)
def test_settings_outside_of_their_range_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


def test_a_weight_of_two_layers_has_no_adapter():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    with pytest.raises(ConfigError, match="0 cannot have an adapter, because another layer has the same weight"):
        LoRA(rank=2, targets=["0"]).plan(module)


@pytest.mark.parametrize("make", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_layers_that_are_not_called_have_no_adapter(make):
    """An encoder layer of torch reads its weights where nothing is differentiated."""
    module = nn.Sequential(make(4, 2), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=rf"0\..*cannot have an adapter, because {make.__name__} reads the weight"):
        LoRA(rank=2, targets=[r"0\..*"]).plan(module)
    assert LoRA(rank=2, targets=["1"]).plan(module).adapters.keys() == {"1"}


def test_layers_of_others_need_targets():
    with pytest.raises(ConfigError, match="name layers in targets, such as 0"):
        LoRA().plan(nn.Sequential(nn.Linear(4, 4)))


def test_full_tuning_takes_parameters_by_name_or_module():
    model = model_of()
    assert FullTune().plan(model).trained == {name for name, _ in model.named_parameters()}
    assert FullTune("norm").plan(model).trained == {"model.norm.weight"}
    assert FullTune(["mlp.gate"]).plan(model).trained == {"model.layers.0.mlp.gate.weight"}


def test_a_method_is_plain_values_in_a_checkpoint():
    method = Stack([LoRA(rank=3, targets=["q_proj"]), FullTune("norm")])
    assert from_table(as_table(method)) == method
    for damaged in ({"kind": "LoRA", "rnk": 3}, {"kind": "Other"}, 7):
        with pytest.raises(ConfigError, match="is not LoRA"):
            from_table(damaged)
