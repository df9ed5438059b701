"""`lightning-d9d generate` and `evaluate`: what a trained model writes, and how well it predicts a text."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lightning_d9d.errors import ConfigError, reason
from lightning_d9d.generation.perplexity import score
from lightning_d9d.generation.sampling import Sampling, generate
from lightning_d9d.generation.sources import Tokenizer, load_model, load_tokenizer
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM
from lightning_d9d.state import DTYPE_NAMES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


def main_generate(arguments: Sequence[str]) -> None:
    """Runs `generate`.

    Raises:
        StateError: What is read is missing, damaged or of another kind.
        ConfigError: What is asked for cannot be.
    """
    chosen = generate_parser().parse_args(arguments)
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p)
    model, tokenizer = _load(chosen)
    prompt = sys.stdin.read() if chosen.prompt == "-" else chosen.prompt
    ends = getattr(tokenizer, "eos_token_id", None)
    stop = () if chosen.no_stop or ends is None else (ends,)
    tokens = torch.tensor(tokenizer.encode(prompt), dtype=torch.long)
    written = generate(model, tokens, chosen.max_new_tokens, sampling, stop=stop, seed=chosen.seed)
    sys.stdout.write(prompt)
    for text in _texts(tokenizer, written):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def main_evaluate(arguments: Sequence[str]) -> None:
    """Runs `evaluate`. Raises as `main_generate`."""
    chosen = evaluate_parser().parse_args(arguments)
    texts = [_read(path) for path in chosen.text]
    model, tokenizer = _load(chosen)
    context_length = chosen.context_length or min(2048, model.config.max_position_embeddings)
    loss = num_tokens = 0.0
    for path, text in zip(chosen.text, texts, strict=True):
        tokens = torch.tensor(tokenizer.encode(text), dtype=torch.long)
        if len(tokens) < 2:
            raise ConfigError(f"{path} has {len(tokens)} tokens, and none to predict; give a longer text")
        of_text = score(model, tokens, context_length, chosen.batch_size)
        loss += of_text.loss * of_text.num_tokens
        num_tokens += of_text.num_tokens
    num_bytes = sum(len(text.encode()) for text in texts)
    sys.stdout.write(
        f"perplexity {math.exp(loss / num_tokens):.4f}  loss {loss / num_tokens:.4f}  "
        f"bits per byte {loss / math.log(2) / num_bytes:.4f}  tokens {int(num_tokens)}\n"
    )


def generate_parser() -> argparse.ArgumentParser:
    """Of the arguments of `generate`."""
    parser = _make_parser("generate", "Writes what a model makes of a prompt: greedily, or drawn with a temperature.")
    parser.add_argument("--prompt", required=True, help="what the text begins with; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="after how many tokens to end (200)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, help="draw from the likeliest tokens that have this probability together"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--no-stop", action="store_true", help="go on behind the token that ends a text")
    return parser


def evaluate_parser() -> argparse.ArgumentParser:
    """Of the arguments of `evaluate`."""
    parser = _make_parser("evaluate", "Tells how well a model predicts text files: loss, perplexity and bits per byte.")
    parser.add_argument("text", nargs="+", help="UTF-8 files; each is a text of its own")
    parser.add_argument(
        "--context-length", type=int, help="tokens that a window has; by default 2048, or all positions"
    )
    parser.add_argument("--batch-size", type=int, default=1, help="windows that run at the same time (1)")
    return parser


def _make_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"lightning-d9d {command}", description=description)
    parser.add_argument("source", help="Hugging Face directory, checkpoint directory or .ckpt file of a Qwen3-MoE")
    parser.add_argument(
        "--tokenizer", help="directory or name of one, or 'bytes'; by default what lies beside the model"
    )
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of the weights; by default as they are stored")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="of the model; by default the first GPU, if there is one")
    return parser


def _load(chosen: argparse.Namespace) -> tuple[Qwen3MoeForCausalLM, Tokenizer]:
    model = load_model(chosen.source, _DTYPES.get(chosen.dtype), chosen.device)
    return model, load_tokenizer(chosen.tokenizer, chosen.source, model.config.vocab_size)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {reason(error)}") from error


def _texts(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text in pieces; a character that takes several tokens comes when it is complete."""
    seen: list[int] = []
    text, num_given = "", 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[num_given:]
            num_given = len(text)
    yield text[num_given:]
