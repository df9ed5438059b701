"""Predicted operations and bytes against those of the real modules."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeLayer
from lightning_d9d.modules import LMHead, RMSNorm, rope_tables
from lightning_d9d.ops import WeightGradients, defer

TINY = dataclasses.replace(Qwen3MoeConfig.preset("tiny"), mlp_only_layers=(1,))
SPARSE, DENSE = 0, 1
SEQUENCE = 48
SHARED = dataclasses.replace(TINY, shared_expert_intermediate_size=96)
QUERIES = TINY.num_attention_heads * TINY.head_dim


of_each_kind = pytest.mark.parametrize(
    ("config", "index"), [(TINY, SPARSE), (TINY, DENSE), (SHARED, SPARSE)], ids=["sparse", "dense", "shared expert"]
)


def decoder_layer(
    config: Qwen3MoeConfig, index: int, dtype: torch.dtype, sequence: int
) -> tuple[nn.Module, Tensor, tuple[Tensor, Tensor]]:
    layer = Qwen3MoeLayer(config, index).to(dtype)
    rope = rope_tables(torch.arange(sequence)[None], TINY.head_dim, TINY.rope_theta, dtype)
    return layer, torch.randn(1, sequence, TINY.hidden_size, dtype=dtype, requires_grad=True), rope


def counted(layer: nn.Module, *inputs) -> tuple[int, int, int]:
    """Operations of forward, of the backward to the inputs, and of what the weights add to that."""
    backwards = []
    for trained in (False, True):
        layer.requires_grad_(trained)
        with FlopCounterMode(display=False) as forward:
            output = layer(*inputs)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        backwards.append(backward.get_total_flops())
    return forward.get_total_flops(), backwards[0], backwards[1] - backwards[0]


@of_each_kind
def test_operations_of_a_decoder_layer(config: Qwen3MoeConfig, index: int) -> None:
    """In float64 experts are plain products. So is attention: the whole square, with two and four products."""
    layer, x, rope = decoder_layer(config, index, torch.float64, SEQUENCE)
    square = 2 * SEQUENCE**2 * QUERIES
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        forward, inputs, weights = counted(layer, x, rope)
    costs = model_costs(config, SEQUENCE).layers[index]
    assert costs.forward_flops == forward - 2 * square + square
    assert costs.backward_input_flops == inputs - 4 * square + 2.5 * square
    assert costs.backward_weight_flops == weights


def test_operations_of_the_head() -> None:
    """The backward has two halves. In a whole backward, the forward makes the gradient of the weight as well."""
    head = LMHead(TINY.vocab_size, TINY.hidden_size, initializer_range=0.02)
    x, labels = torch.randn(SEQUENCE, TINY.hidden_size, requires_grad=True), torch.randint(TINY.vocab_size, (SEQUENCE,))
    later = WeightGradients()
    operations = []
    with FlopCounterMode(display=False) as counter, defer(later):
        loss = head(x, labels, "sum")
        operations.append(counter.get_total_flops())
    for half in (partial(later.backward, loss, torch.ones(())), later.accumulate):
        with FlopCounterMode(display=False) as counter:
            half()
        operations.append(counter.get_total_flops())
    costs = model_costs(TINY, SEQUENCE).after
    assert [costs.forward_flops, costs.backward_input_flops, costs.backward_weight_flops] == operations

    with FlopCounterMode(display=False) as counter:
        head(x, labels, "sum").backward()
    assert counter.get_total_flops() == sum(operations)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "decoder_sparse_step": 2},
        {"num_experts": 0},
        {"shared_expert_intermediate_size": 40},
        {"tie_word_embeddings": True},
        {"vocab_splits": {"a": 200, "b": 56}},
    ],
    ids=str,
)
def test_parameters_of_each_part(changes: dict) -> None:
    config = dataclasses.replace(TINY, **changes)
    with torch.device("meta"):
        whole = Qwen3MoeForCausalLM(config)
    costs = model_costs(config, SEQUENCE, bytes_per_element=2)

    def num_bytes(*modules: nn.Module) -> int:
        return 2 * sum(parameter.numel() for module in modules for parameter in module.parameters())

    assert costs.before.weight_bytes == num_bytes(whole.model.embed_tokens)
    assert [layer.weight_bytes for layer in costs.layers] == [num_bytes(x) for x in whole.model.layers.values()]
    head = whole.model.embed_tokens if config.tie_word_embeddings else whole.lm_head
    assert costs.after.weight_bytes == num_bytes(whole.model.norm, head)


def kept_bytes(module: nn.Module, x: Tensor, *inputs) -> int:
    """Memory of everything that a forward keeps for its backward, but for parameters and what came from outside."""
    given = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *given)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x, *inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@of_each_kind
def test_what_a_decoder_layer_keeps(config: Qwen3MoeConfig, index: int) -> None:
    """All but row statistics and routing.

    On a CPU torch has norms of several ops, which keep their result as well. Its SwiGLU also keeps silu(gate), and of
    experts the product before their weights.
    """
    layer, x, rope = decoder_layer(config, index, torch.float32, 512)
    swiglu = 2 * TINY.num_experts_per_tok * TINY.moe_intermediate_size + config.shared_expert_intermediate_size
    swiglu = swiglu if config.is_sparse(index) else TINY.intermediate_size
    normed = 512 * 4 * (2 * TINY.hidden_size + QUERIES + TINY.num_key_value_heads * TINY.head_dim + swiglu)
    costs = model_costs(config, 512, bytes_per_element=4).layers[index]
    assert kept_bytes(layer, x, rope) - normed == pytest.approx(costs.activation_bytes, rel=0.02)


def test_what_the_head_keeps() -> None:
    """The head keeps tensors for the weight backward, with the gradient of the logits. The norm's input comes from
    outside."""
    norm, head = RMSNorm(TINY.hidden_size, 1e-6), LMHead(TINY.vocab_size, TINY.hidden_size, initializer_range=0.02)
    x, labels = torch.randn(1, 512, TINY.hidden_size, requires_grad=True), torch.randint(TINY.vocab_size, (1, 512))
    gradient_of_input = one_activation = x.untyped_storage().nbytes()
    with defer(WeightGradients()):
        kept = kept_bytes(head, norm(x), labels, "sum")
    costs = model_costs(TINY, 512, bytes_per_element=4).after
    assert kept - gradient_of_input == pytest.approx(costs.split_activation_bytes, rel=0.02)
    assert gradient_of_input + one_activation == costs.activation_bytes


def test_all_layers_are_those_of_the_config() -> None:
    costs = model_costs(TINY, SEQUENCE)
    assert len(costs.layers) == TINY.num_hidden_layers
    assert [layer == costs.layers[DENSE] for layer in costs.layers] == [False, True, False, False]
    one_row = SEQUENCE * TINY.hidden_size * 2
    assert {part.output_bytes for part in (costs.before, *costs.layers)} == {one_row}
