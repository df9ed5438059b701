from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig
from lightning_d9d.modules import (
    GroupedQueryAttention,
    LMHead,
    RMSNorm,
    SparseMoE,
    SplitLMHead,
    SplitTokenEmbedding,
    SwiGLU,
    TokenEmbedding,
    rope_tables,
)
from lightning_d9d.modules.lm_head import Reduction


class CausalLMOutput(NamedTuple):
    """What a causal language model returns; a tuple, for FSDP2 puts its hooks on tensors that it finds in one."""

    logits: Tensor | None = None
    """Shape `[batch, seq, vocab]`, when there were no labels."""

    loss: Tensor | None = None
    """Cross-entropy of each label `[batch, seq]`, or the sum of all; when there were labels."""


class Qwen3MoeLayer(nn.Module):
    """One decoder layer: attention, then a mixture of experts or a dense SwiGLU, each on normed input and added to it.

    Args:
        config: of the whole model.
        index: of this layer in the whole model; decides whether it is sparse.
    """

    def __init__(self, config: Qwen3MoeConfig, index: int) -> None:
        super().__init__()
        std = config.initializer_range
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GroupedQueryAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            norm_eps=config.rms_norm_eps,
            bias=config.attention_bias,
            initializer_range=std,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_sparse(index):
            self.mlp = SparseMoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts,
                config.num_experts_per_tok,
                normalize=config.norm_topk_prob,
                initializer_range=std,
            )
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, initializer_range=std)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Shape `[batch, seq, hidden]` to the same; `rope` are the tables of `rope_tables`."""
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3MoeModel(nn.Module):
    """Embedding, decoder layers and final norm. `layers` is keyed by the layer's index in the whole model."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.config = config
        hidden, std = config.hidden_size, config.initializer_range
        if config.vocab_splits is None:
            self.embed_tokens = TokenEmbedding(config.vocab_size, hidden, initializer_range=std)
        else:
            self.embed_tokens = SplitTokenEmbedding(config.vocab_splits, hidden, initializer_range=std)
        self.layers = nn.ModuleDict(
            {str(index): Qwen3MoeLayer(config, index) for index in range(config.num_hidden_layers)}
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Hidden states `[batch, seq, hidden]` after the final norm, of ids `[batch, seq]`."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        x = self.embed_tokens(input_ids)
        rope = rope_tables(position_ids, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers.values():
            x = layer(x, rope)
        return self.norm(x)


class Qwen3MoeForCausalLM(nn.Module):
    """Qwen3-MoE that predicts the next token (https://arxiv.org/abs/2505.09388), on one device.

    Parameters have the names that transformers 5 uses in memory. With tied embeddings the head has no parameter.

    Example:
        >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig.preset("tiny"))
        >>> ids = torch.randint(256, (2, 16))
        >>> model(ids).logits.shape
        torch.Size([2, 16, 256])
        >>> model(ids[:, :-1], labels=ids[:, 1:]).loss.shape
        torch.Size([2, 15])
    """

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3MoeModel(config)
        hidden, std = config.hidden_size, config.initializer_range
        if config.tie_word_embeddings:
            self.lm_head = LMHead(None, hidden, initializer_range=std)
        elif config.vocab_splits is None:
            self.lm_head = LMHead(config.vocab_size, hidden, initializer_range=std)
        else:
            self.lm_head = SplitLMHead(config.vocab_splits, hidden, initializer_range=std)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        reduction: Reduction = "none",
    ) -> CausalLMOutput:
        """Logits of the next token at each place, or the loss against labels.

        Args:
            input_ids: integers, shape `[batch, seq]`; with `vocab_splits`, ids over all parts in order.
            labels: the id that follows each place (already shifted), shape `[batch, seq]`; -100 is ignored.
            position_ids: integers, shape `[batch, seq]` or `[1, seq]`; default 0, 1, 2, ... Attention is causal in the
                order of the sequence, whatever the positions.
            reduction: "none" gives `loss` the shape of `labels`, 0 where ignored; "sum" makes it one number.

        Returns:
            `.logits` in the model's dtype when `labels` is None, else `.loss` in float32 (float64 in float64).
        """
        x = self.model(input_ids, position_ids)
        tied = {"weight": self.model.embed_tokens.weight} if self.config.tie_word_embeddings else {}
        if labels is None:
            return CausalLMOutput(logits=self.lm_head(x, **tied))
        return CausalLMOutput(loss=self.lm_head(x, labels, reduction, **tied))
