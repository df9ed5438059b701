"""Adapters compute what the formula says, and can be merged."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.modules import GroupedExperts, SparseMoE, TokenEmbedding
from lightning_d9d.ops import defer
from lightning_d9d.ops.weight_gradients import WeightGradients
from lightning_d9d.parallel import ParallelConfig, compile_blocks, recompute_activations
from lightning_d9d.peft import FullTune, LoRA, Stack, inject, is_adapted, merge, trainable_parameters, unmerge
from lightning_d9d.peft.inject import adapter_scales, check_scales
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.tolerances import Tolerance
from tests.peft.test_methods import CONFIG

EXACT = Tolerance(relative=1e-12)
ALL = LoRA(rank=3, alpha=5, targets=[r"[qkvo]_proj", "experts", "mlp.(gate|up|down)_proj", "embed_tokens", "lm_head"])
IDS = torch.arange(40).view(2, 20) % CONFIG.vocab_size


def with_values(module, seed=0):
    """Adapters whose product is not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora.b"):
                parameter.normal_(std=0.3, generator=generator)
    return module


def model_of(method=ALL, **changes):
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(dataclasses.replace(CONFIG, initializer_range=0.3, **changes)).double()
    inject(model, method)
    return model


def test_a_linear_layer_with_an_adapter():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 4)).double()
    x, weight, bias = torch.randn(3, 5, 6).double(), layer[0].weight.clone(), layer[0].bias.clone()
    before = layer(x)
    inject(layer, LoRA(rank=2, alpha=3, targets=["0"]))
    assert_bitwise_equal("at the start", layer(x), before)
    with_values(layer)
    a, b = layer[0].lora.a, layer[0].lora.b
    assert (a.shape, b.shape) == ((2, 6), (4, 2))
    assert_close_named("y", layer(x), x @ weight.T + bias + 3 / 2 * (x @ a.T) @ b.T, tolerance=EXACT)
    assert trainable_parameters(layer).keys() == {"0.lora.a", "0.lora.b"}


def test_an_embedding_with_an_adapter():
    layer = nn.Sequential(TokenEmbedding(9, 4, initializer_range=1.0)).double()
    inject(layer, LoRA(rank=2, alpha=3, targets=["0"]))
    with_values(layer)
    ids = torch.tensor([[0, 8], [3, 3]])
    expected = F.embedding(ids, layer[0].weight + 1.5 * (layer[0].lora.b @ layer[0].lora.a).T)
    assert_close_named("y", layer(ids), expected, tolerance=EXACT)


def test_each_expert_has_adapters_of_its_own():
    torch.manual_seed(0)
    experts = GroupedExperts(3, 6, 4, initializer_range=1.0).double()
    inject(experts, LoRA(alpha=3, targets=["gate_up_proj", "down_proj"], rank_of_experts=2))
    with_values(experts)
    x, weights = torch.randn(7, 6).double(), torch.rand(7).double()
    up, down = experts.gate_up_lora, experts.down_lora
    assert (up.a.shape, up.b.shape) == ((3, 4, 6), (3, 8, 2))
    assert (down.a.shape, down.b.shape) == ((3, 2, 4), (3, 6, 2))
    results = []
    for row, expert in enumerate([0, 0, 0, 2, 2, 2, 2]):
        gate_weight, up_weight = experts.gate_up_proj[expert].split(4)
        gate_weight = gate_weight + 1.5 * up.b[expert, :4] @ up.a[expert, :2]
        up_weight = up_weight + 1.5 * up.b[expert, 4:] @ up.a[expert, 2:]
        inner = F.silu(gate_weight @ x[row]) * (up_weight @ x[row])
        down_weight = experts.down_proj[expert] + 1.5 * down.b[expert] @ down.a[expert]
        results.append(weights[row] * (down_weight @ inner))
    y = experts(x, weights, torch.tensor([3, 3, 7], dtype=torch.int32))
    assert_close_named("y", y, torch.stack(results), tolerance=EXACT)


def test_experts_outside_of_a_mixture_need_a_rank():
    with pytest.raises(ConfigError, match=r"how many experts a token visits in down_proj.*set rank_of_experts"):
        inject(GroupedExperts(3, 6, 4, initializer_range=1.0), LoRA(targets=["down_proj"]))


@pytest.mark.parametrize("labels", [None, (IDS + 1) % CONFIG.vocab_size])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=str)
def test_merged_is_the_same(labels, changes):
    model = with_values(model_of(**changes)).eval()
    before, base = model(IDS, labels), {name: p.clone() for name, p in model.state_dict().items()}
    merge(model)
    after = model(IDS, labels)
    assert not any("lora" in name for name in model.state_dict())
    for name in ("logits",) if labels is None else ("loss",):
        assert_close_named(name, getattr(after, name), getattr(before, name), tolerance=EXACT)
    plain = Qwen3MoeForCausalLM(model.config).double()
    plain.load_state_dict(model.state_dict())
    assert_bitwise_equal("plain", plain(IDS).logits, model(IDS).logits)
    with pytest.raises(ConfigError, match="merged into its weights; call unmerge"):
        model.train()
    unmerge(model)
    assert_tensors_close(model.state_dict(), base, tolerance=EXACT)


def test_merging_twice_or_nothing_is_refused():
    model = with_values(model_of())
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(ConfigError, match="is not merged"):
        unmerge(model)
    merge(model)
    with pytest.raises(ConfigError, match="is merged already"):
        merge(model)
    unmerge(model)
    assert_tensors_close(model.state_dict(), before, tolerance=EXACT)
    with pytest.raises(ConfigError, match="has no adapters"):
        merge(nn.Linear(2, 2))


def test_gradients_are_those_of_the_sum():
    """The gradients of an adapter follow from that of the weight that it stands for."""
    model = with_values(model_of())
    labels = (IDS + 1) % CONFIG.vocab_size
    model(IDS, labels, reduction="sum").loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    plain = copy.deepcopy(model)
    merge(plain)
    for parameter in plain.parameters():
        parameter.requires_grad_(True)
    plain(IDS, labels, reduction="sum").loss.backward()
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"):
        of_weight, adapter = plain.get_submodule(name).weight.grad, model.get_submodule(name).lora
        assert_close_named(name, adapter.b.grad, adapter.scale * of_weight @ adapter.a.T)
        assert_close_named(name, adapter.a.grad, adapter.scale * adapter.b.T @ of_weight)
    of_weight, adapter = plain.model.embed_tokens.weight.grad, model.model.embed_tokens.lora
    assert_close_named("embedding", adapter.a.grad, adapter.scale * (of_weight @ adapter.b).T)
    experts, merged = model.model.layers["0"].mlp.experts, plain.model.layers["0"].mlp.experts
    adapter, of_weight = experts.gate_up_lora, merged.gate_up_proj.grad
    of_a = torch.cat([b.mT @ w for b, w in zip(adapter.b.chunk(2, 1), of_weight.chunk(2, 1), strict=True)], 1)
    assert_close_named("experts", adapter.a.grad, adapter.scale * of_a)
    assert_close_named("down", experts.down_lora.b.grad, adapter.scale * merged.down_proj.grad @ experts.down_lora.a.mT)


def test_dropout_is_of_training_alone():
    model = with_values(model_of(dataclasses.replace(ALL, dropout=0.5)))
    model.eval()
    without = model(IDS).logits
    assert_bitwise_equal("twice", model(IDS).logits, without)
    model.train()
    torch.manual_seed(1)
    dropped = model(IDS).logits
    assert not torch.equal(dropped, without)
    torch.manual_seed(1)
    assert_bitwise_equal("seeded", model(IDS).logits, dropped)


def test_dropout_keeps_the_mean():
    layer = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    inject(layer, LoRA(rank=1, alpha=1, targets=["0"], dropout=0.25))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0)
        layer[0].weight.zero_()
    torch.manual_seed(0)
    y = layer(torch.ones(40_000, 1).double())
    assert {round(value, 9) for value in y.flatten().tolist()} == {0.0, round(4 / 3, 9)}
    assert abs(y.mean().item() - 1) < 0.02


def test_adapters_start_by_name_and_seed():
    torch.manual_seed(5)
    one, other = (Qwen3MoeForCausalLM(CONFIG) for _ in range(2))
    for model in (one, other):
        torch.rand(3)  # the state of the generator does not matter
        inject(model, ALL)
    for name, parameter in trainable_parameters(one).items():
        assert_bitwise_equal(name, parameter, other.get_parameter(name))
    a = one.model.layers["0"].self_attn.q_proj.lora.a
    assert not torch.equal(a, one.model.layers["1"].self_attn.q_proj.lora.a)
    assert abs(a.std().item() * (3 * CONFIG.hidden_size) ** 0.5 - 1) < 0.3


def test_scales_of_a_checkpoint():
    model = nn.Sequential(nn.Linear(4, 4))
    inject(model, LoRA(rank=2, alpha=3.0, targets=["0"]))
    assert adapter_scales(model) == {"0": (2, 1.5)}
    check_scales({}, model)
    check_scales({"0": [2, 1.5], "elsewhere": (2, 9.0)}, model)
    check_scales({"0": (4, 9.0)}, model)  # of another rank, whose matrices do not fit
    for other in (1.0, float("nan")):
        with pytest.raises(StateError, match=rf"adapter of 0 has scale {other:.6g}, but that of the model has 1.5"):
            check_scales({"0": (2, other)}, model)
    for damaged in ([2, 1.5], None, {"0": 1.5}, {"0": (2, "1.5")}, {"0": (2, 1.5, 0)}, {"0": (True, 1.5)}):
        with pytest.raises(StateError, match="does not have the scales of adapters"):
            check_scales(damaged, model)


def test_what_is_trained():
    model = model_of(Stack([LoRA(rank=2, targets=["q_proj"]), FullTune("norm")]))
    names = {f"model.layers.{i}.self_attn.q_proj.lora.{each}" for i in (0, 1) for each in "ab"}
    assert trainable_parameters(model).keys() == names | {"model.norm.weight"}
    with pytest.raises(ConfigError, match="already has adapters"):
        inject(model, ALL)


def test_copies_compute_by_themselves():
    model = with_values(model_of())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers["0"].self_attn.q_proj.lora.b.zero_()
        twin.model.embed_tokens.lora.b.zero_()
    assert not torch.equal(twin(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: compile_blocks(model.model, ParallelConfig(compile=True)),
        lambda model: recompute_activations(model.model, ParallelConfig(recompute="full")),
        lambda model: model.model.layers["0"].compile(),
    ],
    ids=["compiled", "recomputed", "compiled in place"],
)
def test_changed_blocks_are_refused(change):
    model = Qwen3MoeForCausalLM(CONFIG)
    change(model)
    with pytest.raises(ConfigError, match=r"that is compiled, recomputed or sharded.*call inject first"):
        inject(model, LoRA(rank=2))
    assert not is_adapted(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_compiled_module_is_refused():
    module = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 4))))
    with pytest.raises(ConfigError, match="compiled"):
        inject(module, LoRA(rank=2, targets=["0"]))


def test_recomputed_layers_have_the_same_gradients():
    gradients = []
    for kind in ("none", "full", "selective"):
        model = with_values(model_of(dataclasses.replace(ALL, dropout=0.3)))
        recompute_activations(model.model, ParallelConfig(recompute=kind))
        torch.manual_seed(3)
        model(IDS, (IDS + 1) % CONFIG.vocab_size, reduction="sum").loss.backward()
        gradients.append({name: p.grad for name, p in trainable_parameters(model).items()})
    assert_tensors_close(gradients[1], gradients[0])
    assert_tensors_close(gradients[2], gradients[0])


def test_split_backwards_defer_the_gradients_of_adapters():
    module = nn.Sequential(nn.Linear(6, 4)).double()
    inject(module, LoRA(rank=2, targets=["0"]))
    with_values(module)
    x = torch.randn(5, 6).double().requires_grad_()
    module(x).square().sum().backward()
    trained = trainable_parameters(module)
    expected = {name: p.grad for name, p in trained.items()}
    module.zero_grad()
    gradients = WeightGradients()
    with defer(gradients):
        y = module(x)
    gradients.backward(y.square().sum())
    assert all(parameter.grad is None for parameter in module.parameters())
    gradients.accumulate()
    assert_tensors_close({name: p.grad for name, p in trained.items()}, expected)
    assert module[0].weight.grad is None


def test_a_mixture_without_a_model():
    moe = SparseMoE(8, 4, 4, 2, normalize=True, initializer_range=0.5)
    inject(moe, LoRA(rank=6))
    assert moe.experts.gate_up_lora.a.shape == (4, 6, 8)
    assert moe.experts.down_lora.rank == 3
