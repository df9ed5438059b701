"""A model that is given a text in pieces gives the logits of one call with all of it."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d import ConfigError, StageInfo
from lightning_d9d.generation import CachedDecoder
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.ops import attention

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=(1,),
    max_position_embeddings=64,
    initializer_range=0.2,
)


def model_of(config: Qwen3MoeConfig = CONFIG) -> Qwen3MoeForCausalLM:
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(config).eval()


@pytest.mark.parametrize("pieces", [[1] * 12, [12], [5, 7], [1, 4, 1, 1, 5], [11, 1]])
def test_logits_are_those_of_one_call(pieces: list[int]) -> None:
    model = model_of()
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(2))
    decoder = CachedDecoder(model, 12)
    logits = torch.cat([decoder(piece) for piece in ids.split(pieces, 1)], 1)
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert decoder.length == 12


def test_the_model_is_as_it_was_between_calls() -> None:
    model = model_of()
    with pytest.raises(RuntimeError):
        CachedDecoder(model, 4)(torch.zeros(1, 2, dtype=torch.float64))
    assert all(layer.self_attn.attend is attention for layer in model.model.layers.values())  # type: ignore[union-attr]


def test_what_cannot_be_is_refused() -> None:
    decoder = CachedDecoder(model_of(), 4)
    decoder(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ConfigError, match="5 tokens exceed max_length=4"):
        decoder(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ConfigError, match="not stage 0 of 2"):
        CachedDecoder(Qwen3MoeForCausalLM(CONFIG, StageInfo(0, 2)), 4)
    model = model_of()
    model.model.layers["0"].self_attn.attend = lambda q, k, v, documents: v  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="spread over ranks"):
        CachedDecoder(model, 4)
