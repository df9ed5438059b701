"""`TextSample` prints text that a model generates."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_d9d.callbacks.export import qwen3_moe_stages
from lightning_d9d.errors import ConfigError, printable
from lightning_d9d.generation import ByteTokenizer, Sampling, Tokenizer, load_tokenizer
from lightning_d9d.generation.sources import BYTES, NUM_BYTES
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.strategy.module import D9DModule


class TextSample(L.Callback):
    """Prints text that the model generates when its training ends.

    Args:
        prompt: Beginning of the text; at least one token.
        num_tokens: Number of generated tokens.
        temperature: Divisor of the logits before a token is drawn; lower values are more certain, and 0 takes the
            likeliest token.
        context_length: Number of preceding tokens that the model sees, as in training.
        seed: Seed of the random draws.
        tokenizer: A directory, a name that `transformers` knows, "bytes", or a tokenizer object. By default it is
            `tokenizer` of the data module; without one, a model with a vocabulary of 256 writes bytes.
    """

    def __init__(
        self,
        prompt: str = "import ",
        num_tokens: int = 200,
        temperature: float = 0.7,
        context_length: int = 256,
        seed: int = 0,
        tokenizer: Any = None,
    ) -> None:
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.temperature = temperature
        self.context_length = context_length
        self.seed = seed
        self.tokenizer = tokenizer
        self._loaded: Tokenizer | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise `ConfigError` before the training if the module holds no Qwen3-MoE, or the tokenizer is unknown."""
        vocab_size = qwen3_moe_stages(pl_module, self)[0].config.vocab_size
        data = getattr(trainer, "datamodule", None)
        self._loaded = self._load(getattr(data, "tokenizer", None), vocab_size, type(data).__name__ if data else None)
        if len(self._loaded.encode(self.prompt)) == 0:
            raise ConfigError(f"TextSample(prompt={self.prompt!r}) has no tokens; give at least one")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Generate on all ranks, because each may have a part of the model, and print on rank 0.

        This does not wait for the end of `fit`: stages can no longer reach one another then.
        """
        with trainer.precision_plugin.forward_context():
            text = printable(self.generate(pl_module))
        if trainer.is_global_zero:
            trainer.print(f"--- {self.num_tokens} generated tokens ---\n{self.prompt}{text}\n---")

    @torch.no_grad()
    def generate(self, module: nn.Module) -> str:
        """Return the text that follows the prompt, the same on every rank. Collective over the ranks of the model.

        Args:
            module: A `Qwen3MoeForCausalLM`, or a LightningModule with one or with this rank's stages of one.
        """
        stages = qwen3_moe_stages(module, self)
        device = next(stages[0].parameters()).device
        vocab_size = stages[0].config.vocab_size
        tokenizer = self._loaded or self._load(None, vocab_size)
        known = _num_ids(tokenizer, vocab_size)
        sampling, generator = Sampling(self.temperature), torch.Generator(device).manual_seed(self.seed)
        tokens = torch.tensor(list(tokenizer.encode(self.prompt)), device=device)
        were_training = [stage.training for stage in stages]
        for stage in stages:
            stage.eval()
        for _ in range(self.num_tokens):
            logits = self._logits(module, stages, tokens[None, -self.context_length :])[:, -1, :known]
            tokens = torch.cat([tokens, sampling.choose(logits, generator)])
        for stage, was_training in zip(stages, were_training, strict=True):
            stage.train(was_training)
        return tokenizer.decode(tokens[-self.num_tokens :].tolist())

    def _load(self, of_data: Any, vocab_size: int, data: str | None = None) -> Tokenizer:
        """Return the tokenizer that this callback or the data name, or that of bytes."""
        given = of_data if self.tokenizer is None else self.tokenizer
        if given is None and vocab_size == NUM_BYTES:
            given = BYTES
        if given is None:
            why = f"{data} names none" if data else "no data module is given"
            raise ConfigError(
                f"TextSample has no tokenizer to write the text of a model of vocab_size={vocab_size}: {why}. Give "
                "TextSample tokenizer: a directory, a name on Hugging Face's hub, or 'bytes' for a model that was "
                "trained on bytes"
            )
        return load_tokenizer(given, "", vocab_size) if isinstance(given, str) else given

    def _logits(self, module: nn.Module, stages: list[Qwen3MoeForCausalLM], input_ids: Tensor) -> Tensor:
        """Return the logits of the whole sequence, from all ranks that share it."""
        if not isinstance(module, D9DModule):
            return stages[0](input_ids).logits
        length = input_ids.shape[1]
        padding = -length % module.pipeline.tokens.multiple  # causal attention does not see it
        batch = {"input_ids": F.pad(input_ids, (0, padding))}
        evaluation = module.evaluation
        logits = module.predict_step(batch, 0) if evaluation is None else evaluation.predict(batch, share=True)
        return logits[:, :length]


def _num_ids(tokenizer: Any, vocab_size: int) -> int:
    """Return the number of tokens that have a text: a model may have more."""
    if isinstance(tokenizer, ByteTokenizer):
        return NUM_BYTES
    return max(tokenizer.get_vocab().values()) + 1 if hasattr(tokenizer, "get_vocab") else vocab_size
