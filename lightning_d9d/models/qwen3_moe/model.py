from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.states import LayerStates, OutputHiddenStates
from lightning_d9d.modules import (
    BalanceConfig,
    GroupedQueryAttention,
    LMHead,
    RMSNorm,
    SparseMoE,
    SplitLMHead,
    SplitTokenEmbedding,
    SwiGLU,
    TokenEmbedding,
    document_positions,
    rope_tables,
)
from lightning_d9d.modules.lm_head import Reduction
from lightning_d9d.parallel.tokens import TokenShard
from lightning_d9d.pipeline.partition import check_layers, distribute_layers
from lightning_d9d.pipeline.types import StageInfo

_HEAD_SPEED = 2.5
"""Products of the head run about this many times as fast as those of a layer: layers also attend, move and send tokens.

With these products alone, the head of 30b-a3b is 5.5 layers. It took the time of 2.0 to 2.6 on four H200s."""


def layers_of_stages(config: Qwen3MoeConfig, num_stages: int, before: int = 0, after: int | None = None) -> list[range]:
    """Return the layers of each stage: equally many, with embedding and head counted as virtual layers.

    Args:
        config: Config of the whole model.
        num_stages: Number of stages of the whole pipeline.
        before: Virtual layers of the first stage. Looking up an embedding takes almost no time.
        after: Virtual layers of the last stage. By default, None, it is the time of the head in layers, rounded. That
            is the ratio of its matrix products to those of a layer, divided by 2.5: a layer does more than products.
            It is less if the last stage would have no layer.

    Raises:
        ConfigError: A stage would have no layer.
    """
    num_layers = config.num_hidden_layers
    if after is None:
        head = config.vocab_size * config.hidden_size
        all_layers = config.num_active_parameters - head * (1 if config.tie_word_embeddings else 2)
        most = (num_layers + before - num_stages) // max(1, num_stages - 1)
        after = max(0, min(round(num_layers * head / all_layers / _HEAD_SPEED), most))
    return distribute_layers(num_layers, num_stages, before, after)


class CausalLMOutput(NamedTuple):
    """The output of a causal language model; a tuple, because FSDP2 attaches hooks to tensors in a tuple."""

    logits: Tensor | None = None
    """Shape `[batch, seq, vocab]`; None with labels."""

    loss: Tensor | None = None
    """Cross-entropy of each label `[batch, seq]`, or the sum of all; None without labels."""

    hidden_states: tuple[Tensor, ...] | None = None
    """The embeddings, then the output of each layer, the last one after the final norm: `num_hidden_layers + 1`, if
    they were requested. Shape `[batch, tokens of this rank, hidden]`: all tokens if no other rank shares the sequences.
    With context parallelism a rank has two chunks of each sequence, with tensor parallelism a slice of those. With
    `output_hidden_states="whole"` the shape is `[batch, seq, hidden]`, in the order of the sequence."""

    router_loss: Tensor | None = None
    """The sum of all layers' router losses, a scalar in float32 (float64 in float64), averaged over the tokens of this
    call. None if no such loss is configured, and without gradient."""

    pooled_states: Tensor | None = None
    """The mean of each of these hidden states over the tokens of a row that `pooling_mask` selects, from all ranks.
    Shape `[batch, num_hidden_layers + 1, hidden]`, in float32 (float64 in float64); 0 for a row without such tokens.
    None without a mask."""


class Qwen3MoeLayer(nn.Module):
    """One decoder layer: attention, then a mixture of experts or a dense SwiGLU, each on normed input and added to it.

    Args:
        config: Config of the whole model.
        index: Index of this layer in the whole model; it decides whether the layer is sparse.
        balance: How the load of the experts is balanced.
    """

    def __init__(self, config: Qwen3MoeConfig, index: int, balance: BalanceConfig | None = None) -> None:
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
                shared_intermediate_size=config.shared_expert_intermediate_size,
                balance=balance,
            )
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, initializer_range=std)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer to shape `[batch, seq, hidden]`; `rope` and `documents` as in `GroupedQueryAttention`.

        A mixture whose router has a loss returns it too, as `SparseMoE` does.
        """
        attended = self.self_attn(self.input_layernorm(x), rope, documents)
        normed, x = self.post_attention_layernorm(attended, residual=x)
        y = self.mlp(normed)
        return (x + y[0], y[1]) if isinstance(y, tuple) else x + y


class Qwen3MoeModel(nn.Module):
    """Embedding, decoder layers and final norm, or one stage's part of them.

    The first stage has the embedding, each stage its layers, and the last stage the norm. `layers` has the layer's
    index in the whole model as key, so parameters have the same names in a stage as in the whole.

    Args:
        config: Config of the whole model.
        stage: The stage to build, with `stage.layers` if given, else `layers_of_stages(config, stage.num_stages)`.
        balance: How the load of the experts is balanced; None does not balance it.

    Raises:
        ConfigError: The balance is set although the whole model has no mixture of experts, or the stage has layers that
            the model lacks.
    """

    def __init__(
        self, config: Qwen3MoeConfig, stage: StageInfo = StageInfo(0, 1), balance: BalanceConfig | None = None
    ) -> None:
        super().__init__()
        if balance is not None:
            config.refuse_without_experts(f"balance={balance}")
        self.config = config
        self.stage = stage
        if stage.layers is None:
            layers = layers_of_stages(config, stage.num_stages)[stage.index]
        else:
            layers = check_layers(stage.layers, config.num_hidden_layers)
        if stage.is_first:
            self.embed_tokens = token_embedding(config)
        self.tokens = TokenShard()
        self.layers = nn.ModuleDict({str(index): Qwen3MoeLayer(config, index, balance) for index in layers})
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        hidden_states: Tensor | None = None,
        snapshots: tuple[Tensor, ...] | None = None,
        output_hidden_states: OutputHiddenStates = False,
        router_loss: Tensor | None = None,
        document_ids: Tensor | None = None,
        pooling_mask: Tensor | None = None,
        state_sums: Tensor | None = None,
    ) -> dict[str, Any]:
        """Run the stage's part of the computation from ids to hidden states.

        Args:
            input_ids: On the first stage: integers, shape `[batch, seq]`.
            position_ids: Integers, shape `[batch, seq]` or `[1, seq]`, the same on every stage; default 0, 1, 2, ...,
                with `document_ids` from 0 on in each run of equal ids.
            hidden_states: On later stages: shape `[batch, tokens of this rank, hidden]`, from the previous stage.
            snapshots: On later stages: snapshots from the previous stage, if it has some.
            output_hidden_states: On the first stage: whether to take snapshots, of this rank's tokens (True) or of all
                ("whole"). Later stages add theirs if they receive some.
            router_loss: On later stages: the sum of the previous stage, if it has one.
            document_ids: Integers, shape `[batch, seq]`, the same on every stage: tokens attend only to tokens of their
                row that have the same id. By default tokens attend to their whole row. Always causally.
            pooling_mask: As in `Qwen3MoeForCausalLM.forward`.
            state_sums: On later stages: the sums from the previous stage, if it has some.

        Returns:
            `hidden_states`, on the last stage after the final norm. With snapshots, `snapshots`: the input of each
            layer so far and, on the last stage, also its `hidden_states`. With router losses, `router_loss`, their sum
            so far. With a mask, `state_sums` of this rank's tokens, on the last stage `pooled_states`. The dictionary
            also has all other values that the next stage needs.

        Raises:
            ConfigError: The first stage got no ids, or a later one no hidden states. Or `document_ids` have another
                shape than `input_ids`, or the requested hidden states are not possible.
        """
        x = self._into_layers(input_ids, hidden_states)
        if document_ids is not None and input_ids is not None and document_ids.shape != input_ids.shape:
            raise ConfigError(
                f"document_ids have shape {list(document_ids.shape)}, but input_ids {list(input_ids.shape)}: give each "
                "token the id of its document, and give padding a separate id"
            )
        states = LayerStates(
            self.stage, self.tokens, x.shape, output_hidden_states, pooling_mask, snapshots, state_sums
        )
        if position_ids is None and document_ids is not None:
            position_ids = self.tokens.of_whole(document_positions, document_ids)
        elif position_ids is None:
            position_ids = self.tokens.positions(x.shape[1], x.device)
        rope = rope_tables(position_ids, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers.values():
            states.add(x)
            y = layer(x, rope, document_ids)
            x, loss = y if isinstance(y, tuple) else (y, None)
            if loss is not None:
                router_loss = loss if router_loss is None else router_loss + loss
        if self.stage.is_last:
            router_loss = None if router_loss is None else self.tokens.mean(router_loss)
            x = self.norm(x)
            states.add(x)
        output = {"hidden_states": x, **(states.results() if self.stage.is_last else states.for_next_stage())}
        return output if router_loss is None else {**output, "router_loss": router_loss}

    def _into_layers(self, input_ids: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        given, needed = (input_ids, "input_ids") if self.stage.is_first else (hidden_states, "hidden_states")
        if given is None:
            raise ConfigError(
                f"stage {self.stage.index} of {self.stage.num_stages} was called without {needed}. The first stage "
                "takes input_ids, a later one the results of the previous stage, as keyword arguments"
            )
        return self.embed_tokens(given) if self.stage.is_first else given


def token_embedding(config: Qwen3MoeConfig) -> TokenEmbedding | SplitTokenEmbedding:
    """Return the embedding of the whole vocabulary, in parts if the config has `vocab_splits`."""
    hidden, std = config.hidden_size, config.initializer_range
    if config.vocab_splits is None:
        return TokenEmbedding(config.vocab_size, hidden, initializer_range=std)
    return SplitTokenEmbedding(config.vocab_splits, hidden, initializer_range=std)


class Qwen3MoeForCausalLM(nn.Module):
    """Qwen3-MoE that predicts the next token (https://arxiv.org/abs/2505.09388), or one stage of it, on one device.

    A config without experts makes it dense Qwen3, with the parameters of `transformers.Qwen3ForCausalLM`.

    Parameters have the names that transformers 5 uses in memory, in a stage too. The last stage has the head. With tied
    embeddings the head has no parameter and takes `model.embed_tokens.weight`. First and last stage then both have this
    parameter, and its gradient is the sum of theirs.

    Args:
        config: Config of the whole model.
        stage: The stage to build, as in `Qwen3MoeModel`; the default is the whole model.
        balance: How the load of the experts is balanced; None does not balance it.

    Example:
        >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig.preset("tiny"))
        >>> ids = torch.randint(256, (2, 16))
        >>> model(ids).logits.shape
        torch.Size([2, 16, 256])

        >>> model(ids[:, :-1], labels=ids[:, 1:]).loss.shape
        torch.Size([2, 15])
    """

    def __init__(
        self, config: Qwen3MoeConfig, stage: StageInfo = StageInfo(0, 1), balance: BalanceConfig | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.model = Qwen3MoeModel(config, stage, balance)
        if not stage.is_last:
            return
        hidden, std = config.hidden_size, config.initializer_range
        if config.tie_word_embeddings:
            self.lm_head = LMHead(None, hidden, initializer_range=std)
            if not stage.is_first:
                self.model.embed_tokens = token_embedding(config)
        elif config.vocab_splits is None:
            self.lm_head = LMHead(config.vocab_size, hidden, initializer_range=std)
        else:
            self.lm_head = SplitLMHead(config.vocab_splits, hidden, initializer_range=std)

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        reduction: Reduction = "none",
        hidden_states: Tensor | None = None,
        snapshots: tuple[Tensor, ...] | None = None,
        output_hidden_states: OutputHiddenStates = False,
        router_loss: Tensor | None = None,
        document_ids: Tensor | None = None,
        pooling_mask: Tensor | None = None,
        state_sums: Tensor | None = None,
    ) -> CausalLMOutput | dict[str, Any]:
        """Return logits of the next token at each position, or the loss against labels.

        Stages are chained as `later(**earlier(input_ids, position_ids=...), position_ids=..., labels=...)`.

        Args:
            input_ids: Integers, shape `[batch, seq]`; with `vocab_splits`, ids over all parts in order. Needed on the
                first stage.
            labels: The id that follows each position (already shifted), shape `[batch, seq]`; -100 is ignored. Needed
                on the last stage.
            position_ids: Integers, shape `[batch, seq]` or `[1, seq]`; default 0, 1, 2, ..., with `document_ids` from 0
                on in each run of equal ids. Attention is causal in the order of the sequence, whatever the positions.
                The same on every stage.
            reduction: "none" returns `loss` in the shape of `labels`, 0 where ignored; "sum" returns one number.
            hidden_states: Value that the previous stage returned under this name, shape
                `[batch, tokens of this rank, hidden]`.
            snapshots: Value that the previous stage returned under this name.
            output_hidden_states: Whether `.hidden_states` of the output has those of every layer. True returns those of
                this rank's tokens. "whole" returns those of whole sequences, which the last stage gathers. The first
                stage gets this argument. The states of every layer are sent over each pipeline link, and "whole" states
                take the memory of all tokens.
            router_loss: Value that the previous stage returned under this name.
            document_ids: Integers, shape `[batch, seq]`, the same on every stage. Tokens attend only to tokens of their
                row that have the same id, so padding is a document of its own. Default: one document a row. Labels are
                used as given, across borders too.
            pooling_mask: Bool or integers, shape `[batch, seq]`, the same on every stage: `.pooled_states` of the
                output are means over the tokens where it is not 0. Only a few bytes for them are sent over a pipeline
                link.
            state_sums: Value that the previous stage returned under this name.

        Returns:
            `.logits` in the model's dtype when `labels` is None, else `.loss` in float32 (float64 in float64), without
            `.router_loss`. A stage other than the last returns the dictionary of `Qwen3MoeModel.forward`.

        Raises:
            ConfigError: The first stage got no ids, or a later one no hidden states. Or `document_ids` have another
                shape than `input_ids`, or the requested hidden states are not possible.
        """
        output = self.model(
            input_ids,
            position_ids,
            hidden_states,
            snapshots,
            output_hidden_states,
            router_loss,
            document_ids,
            pooling_mask,
            state_sums,
        )
        if not self.stage.is_last:
            return output
        x = output["hidden_states"]
        besides = {name: output.get(name) for name in ("router_loss", "pooled_states")}
        besides["hidden_states"] = output.get("snapshots")
        tied = {"weight": self.model.embed_tokens.weight} if self.config.tie_word_embeddings else {}
        if labels is None:
            return CausalLMOutput(logits=self.lm_head(x, **tied), **besides)
        return CausalLMOutput(loss=self.lm_head(x, labels, reduction, **tied), **besides)
