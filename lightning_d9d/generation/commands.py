"""`lightning-d9d generate` and `evaluate`: text that a trained model generates, and how well it predicts a text."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from lightning_d9d.errors import ConfigError, printable, reason
from lightning_d9d.generation.perplexity import score
from lightning_d9d.generation.sampling import Sampling, generate
from lightning_d9d.generation.sources import Tokenizer, load_model, load_tokenizer
from lightning_d9d.log import logger
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM


def main_generate(chosen: argparse.Namespace) -> None:
    """Runs `generate`.

    Args:
        chosen: Arguments as `lightning_d9d.cli.commands.generate_parser` reads them.

    Raises:
        StateError: The model's files are missing, damaged or of another kind.
        ConfigError: The arguments ask for something impossible.
    """
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p)
    model, tokenizer = _load(chosen)
    prompt = sys.stdin.read() if chosen.prompt == "-" else chosen.prompt
    ends = getattr(tokenizer, "eos_token_id", None)
    stop = () if chosen.no_stop or ends is None else (ends,)
    tokens = torch.tensor(tokenizer.encode(prompt), dtype=torch.long)
    written = generate(model, tokens, chosen.max_new_tokens, sampling, stop=stop, seed=chosen.seed)
    sys.stdout.write(prompt)
    to_terminal = sys.stdout.isatty()
    for text in _texts(tokenizer, written):
        sys.stdout.write(printable(text) if to_terminal else text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def main_evaluate(chosen: argparse.Namespace) -> None:
    """Runs `evaluate`. Arguments and errors are those of `main_generate`."""
    texts = [_read(path) for path in chosen.text]
    model, tokenizer = _load(chosen)
    context_length = chosen.context_length or min(2048, model.config.max_position_embeddings)
    loss = num_tokens = 0.0
    for path, text in zip(chosen.text, texts, strict=True):
        tokens = torch.tensor(tokenizer.encode(text), dtype=torch.long)
        if len(tokens) < 2:
            raise ConfigError(f"{path} has {len(tokens)} tokens, so none can be predicted; give a longer text")
        of_text = score(model, tokens, context_length, chosen.batch_size)
        loss += of_text.loss * of_text.num_tokens
        num_tokens += of_text.num_tokens
    num_bytes = sum(len(text.encode()) for text in texts)
    sys.stdout.write(
        f"perplexity {math.exp(loss / num_tokens):.4f}  loss {loss / num_tokens:.4f}  "
        f"bits per byte {loss / math.log(2) / num_bytes:.4f}  tokens {int(num_tokens)}\n"
    )


def _load(chosen: argparse.Namespace) -> tuple[Qwen3MoeForCausalLM, Tokenizer]:
    dtype = getattr(torch, chosen.dtype) if chosen.dtype else None
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(chosen.source, dtype, device, chosen.base)
    return model, load_tokenizer(chosen.tokenizer, chosen.base or chosen.source, model.config.vocab_size)


def _read(path: str) -> str:
    if path.endswith((".jsonl", ".json")):
        logger.warning("%s is read as plain text, names and braces too; give files with the texts alone", path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {reason(error)}") from error


def _texts(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text in pieces; a character of several tokens is yielded when it is complete."""
    seen: list[int] = []
    text, num_given = "", 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[num_given:]
            num_given = len(text)
    yield text[num_given:]
