"""Costs of the layers of a Qwen3-MoE model, for `schedule=Auto(...)`, from its sizes alone."""

from __future__ import annotations

from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig
from lightning_d9d.schedule.layers import ATTENTION_BACKWARD, LayerCosts, ModelCosts, Moment

_TOKEN_ID = 8
_WIDE = 4
"""Bytes of a number in float32."""
_NOTES = 20
"""Bytes that routing keeps for each expert of a token."""


def model_costs(config: Qwen3MoeConfig, sequence_length: int, bytes_per_element: int = 2) -> ModelCosts:
    """Return the costs of embedding, decoder layers and head, for one sequence on a rank with whole layers.

    Operations are those of matrix products, two for each multiplication, and of attention. Causal attention counts half
    of the full square. Its backward counts two and a half times the forward, because scores are computed again. Each
    token is computed by its own experts, but all experts' weights are held. Activations are those that the modules keep
    with the kernels of a GPU; torch's operators on a CPU keep more in norms and SwiGLU. A tied head counts with its own
    matrix, because the last rank has a copy. Its logits are a single chunk, whose gradient is kept for a weight
    backward. With more chunks the forward computes the gradient of the matrix, too.

    Args:
        config: Config of the model.
        sequence_length: Tokens of a row.
        bytes_per_element: Bytes of an element of weights and activations: 2 for bfloat16.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    weights, tokens = bytes_per_element, sequence_length * bytes_per_element
    embedding = LayerCosts(
        forward_bytes=tokens * 2 * hidden,
        backward_weight_bytes=tokens * hidden,
        weight_bytes=weights * vocab * hidden,
        activation_bytes=sequence_length * _TOKEN_ID,
        split_activation_bytes=sequence_length * _TOKEN_ID + tokens * hidden,
        output_bytes=tokens * hidden,
    )
    # `linear_cross_entropy`, whose forward makes the gradient of its input as well.
    logits = 2 * sequence_length * hidden * vocab
    head = LayerCosts(
        forward_flops=2 * logits,
        backward_weight_flops=logits,
        forward_bytes=tokens * 2 * (hidden + vocab),
        backward_input_bytes=tokens * 3 * hidden,
        weight_bytes=weights * (vocab * hidden + hidden),
        activation_bytes=tokens * 2 * hidden,
        split_activation_bytes=tokens * (hidden + vocab),
    )
    layers = {is_sparse: _layer(config, sequence_length, bytes_per_element, is_sparse) for is_sparse in (False, True)}
    return ModelCosts(
        before=embedding,
        layers=tuple(layers[config.is_sparse(index)] for index in range(config.num_hidden_layers)),
        after=head,
    )


def _layer(config: Qwen3MoeConfig, sequence_length: int, bytes_per_element: int, is_sparse: bool) -> LayerCosts:
    """Return the costs of one decoder layer. Numbers of elements are those of one token."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    tokens = sequence_length * bytes_per_element

    projections = hidden * (queries + 2 * keys) + queries * hidden
    num_weights = projections + 2 * config.head_dim + 2 * hidden
    num_weights += (queries + 2 * keys + hidden) if config.attention_bias else 0
    if is_sparse:
        inner, num_copies, router = config.moe_intermediate_size, config.num_experts_per_tok, config.num_experts
        shared = config.shared_expert_intermediate_size
        gated = hidden if shared else 0  # what the shared expert puts out, before its sigmoid
        num_weights += hidden * router + config.num_experts * 3 * hidden * inner + 3 * hidden * shared + gated
        copied = num_copies * hidden
    else:
        inner, num_copies, router, shared, gated, copied = config.intermediate_size, 1, 0, 0, 0, 0
        num_weights += 3 * hidden * inner
    products = projections + hidden * router + 3 * hidden * (num_copies * inner + shared) + gated
    wide = num_copies * inner
    attention = 2 * sequence_length**2 * queries

    # x, normed x; q and k before and after norm and rope, v; what was attended, and its logarithms. Then x, normed x,
    # copies for experts; gate, up, and their product, with the experts' weights where there are any.
    of_attention = 2 * hidden + 3 * queries + 3 * keys
    kept = of_attention + 2 * hidden + copied + 3 * wide + 3 * shared + gated
    # The layer's input, and results: of the four projections, attention, the router, gate and up, the shared expert.
    selective = 2 * hidden + 2 * queries + 2 * keys + router + 2 * wide + 2 * shared + gated
    # Inputs of products, and gradients of their outputs.
    inputs = hidden + queries + hidden + copied + wide + shared
    gradients = queries + 2 * keys + hidden + router + 2 * wide + (copied if is_sparse else hidden) + 2 * shared + gated
    # Each of norms, rope, dispatch and SwiGLU as one kernel that reads and writes once.
    moved = (
        6 * hidden + 2 * (queries + keys) + 3 * (wide + shared + gated) + (2 * (hidden + copied) if is_sparse else 0)
    )
    moved_back = (
        8 * hidden
        + 3 * (queries + keys)
        + 5 * (wide + shared)
        + 3 * gated
        + (2 * (hidden + copied) if is_sparse else 0)
    )
    # Numbers in float32: logarithms of attention; weights of experts twice, their numbers and places in int64.
    notes = sequence_length * (_WIDE * config.num_attention_heads + (_NOTES * num_copies if is_sparse else 0))
    down = bytes_per_element * (config.num_experts if is_sparse else 1) * inner * hidden
    if is_sparse:
        # the gradient of copies, and of what goes into `down`; then that of gate and up, of copies, and both gradients
        both = (copied + wide, down), (copied - wide, 3 * down)
        moments = tuple(Moment(tokens * of_copies, weights, tokens * of_copies) for of_copies, weights in both)
    else:
        moments = (Moment(tokens * 2 * wide, down), Moment(tokens * (hidden - wide), 2 * down))
    rest = tokens * (2 * hidden + copied + 3 * wide + 3 * shared + gated)
    # Gradients of the result of attention, of queries, keys and values, beside those of the layer's output.
    freed = tokens * (copied + 3 * wide) if is_sparse else 0
    moments += (Moment(tokens * (hidden + 2 * queries + 2 * keys) - rest, 3 * down, -freed),)
    return LayerCosts(
        forward_flops=2 * sequence_length * products + attention,
        backward_input_flops=2 * sequence_length * products + ATTENTION_BACKWARD * attention,
        backward_weight_flops=2 * sequence_length * products,
        forward_bytes=tokens * moved,
        backward_input_bytes=tokens * moved_back,
        weight_bytes=bytes_per_element * num_weights,
        activation_bytes=tokens * kept + notes,
        selective_bytes=tokens * selective + notes,
        attention_bytes=tokens * (kept - 3 * queries - 3 * keys) + notes,
        split_activation_bytes=tokens * (inputs + gradients),
        output_bytes=tokens * hidden,
        block_bytes=tokens * max(hidden, copied, 2 * wide, queries),
        dispatch_bytes=tokens * copied,
        copies_bytes=freed,
        forward_peak_bytes=tokens * (kept + (copied if is_sparse else 0) + hidden) + notes,
        backward_moments=moments,
        frozen_bytes=tokens * (2 * hidden + 3 * queries + 3 * keys + 2 * wide + 2 * shared + gated) + notes,
        attention_flops=attention,
        grouped_flops=2 * sequence_length * 3 * hidden * wide if is_sparse else 0.0,
    )
