"""Sizes of Qwen3 by name: the released mixtures, the released dense models, and small ones for tests.

Released sizes are those of the `config.json` beside the weights of the instruct models (https://huggingface.co/Qwen).
"""

from __future__ import annotations

from typing import Any, Literal

PresetName = Literal["tiny", "tiny-dense", "0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b"]

_TINY = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
)
_RELEASED = dict(
    vocab_size=151_936,
    head_dim=128,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
    bos_token_id=151_643,
    eos_token_id=151_645,
)
_RELEASED_MIXTURE = dict(
    **_RELEASED, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True
)
_RELEASED_DENSE = dict(**_RELEASED, num_key_value_heads=8, num_experts=0)

_DENSE = {
    "0.6b": (1024, 3072, 28, 16, True),
    "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True),
    "8b": (4096, 12_288, 36, 32, False),
    "14b": (5120, 17_408, 40, 40, False),
    "32b": (5120, 25_600, 64, 64, False),
}
"""Hidden size, intermediate size, layers, query heads, and whether embeddings are tied."""

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(**_TINY, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True),
    "tiny-dense": dict(**_TINY, num_experts=0, tie_word_embeddings=True),
    **{
        name: dict(
            **_RELEASED_DENSE,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            tie_word_embeddings=is_tied,
        )
        for name, (hidden, inner, layers, heads, is_tied) in _DENSE.items()
    },
    "30b-a3b": dict(
        **_RELEASED_MIXTURE,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
    ),
    "235b-a22b": dict(
        **_RELEASED_MIXTURE,
        hidden_size=4096,
        intermediate_size=12_288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
    ),
}
"""Fields of `Qwen3MoeConfig`, by the name of the size."""
