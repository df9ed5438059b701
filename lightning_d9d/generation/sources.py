from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.huggingface import load_huggingface
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.module import ARGUMENTS_KEY, Qwen3MoePretraining
from lightning_d9d.paths import check_directory, is_path, missing
from lightning_d9d.state import DTYPE_NAMES
from lightning_d9d.state.format import read_json
from lightning_d9d.state.places import place_of
from lightning_d9d.strategy.checkpoint_files import is_checkpoint, read_value
from lightning_d9d.strategy.trained_only import BASE, check_base_given

BYTES = "bytes"
NUM_BYTES = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


class Tokenizer(Protocol):
    """A tokenizer converts text to tokens and back; those of `transformers` do."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


class ByteTokenizer:
    """Uses the UTF-8 bytes of a text as its tokens, as `ByteTextDataModule` does."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes.

        Tokens that are not bytes, and bytes that are not UTF-8, become replacement characters.
        """
        return b"".join(bytes([t]) if t < NUM_BYTES else b"\xff" for t in tokens).decode(errors="replace")


def load_model(
    source: str | Path, dtype: torch.dtype | None = None, device: str = "cpu", base: str | Path | None = None
) -> Qwen3MoeForCausalLM:
    """Read a whole Qwen3 model, MoE or dense, from Hugging Face files or a `Qwen3MoePretraining` checkpoint. Local.

    Args:
        source: A directory with `config.json` and safetensors files; a checkpoint directory, or a `.ckpt` file.
        dtype: Dtype of the weights; None keeps that of the checkpoint, or of `config.json`.
        device: Device of the model.
        base: Hugging Face directory with the frozen weights, for a checkpoint of `CheckpointConfig.trainable_only`.

    Raises:
        StateError: The source has nothing that can be read, or a file is damaged.
        ConfigError: The model is of another kind, this machine does not have the device, or `base` is missing or has
            no effect.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device={device!r} cannot be used here ({reason}); choose 'cpu', or 'cuda' with a GPU"
        ) from error
    recorded = read_value(source, BASE) if is_checkpoint(source) else None
    check_base_given(recorded, base, source)
    if is_checkpoint(source):
        try:
            chosen = {} if base is None else {"pretrained": str(base)}
            model = Qwen3MoePretraining.load_from_checkpoint(source, **chosen).model
        except ConfigError as error:
            if read_value(source, ARGUMENTS_KEY) is not None:
                raise
            raise ConfigError(
                f"{source} is a checkpoint, but not of a Qwen3MoePretraining: it does not name a Qwen3MoeConfig. Load "
                "it with load_from_checkpoint of its own class, and call that module with a batch"
            ) from error
        except StateError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise StateError(
                f"checkpoint {str(source)!r} is damaged ({type(error).__name__}: {str(error).splitlines()[0]}); give "
                "another one"
            ) from error
        return model.to(device=device, dtype=dtype).eval()
    config = Qwen3MoeConfig.from_json(source)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(dtype or _stored_dtype(source))
    model.to_empty(device=device)
    load_huggingface(model, source, check_first=False)
    return model.eval()


def _stored_dtype(source: str | Path) -> torch.dtype:
    described = read_json(place_of(source) / "config.json")
    name = described.get("dtype") or described.get("torch_dtype")
    return next((dtype for dtype in DTYPE_NAMES if str(dtype) == f"torch.{name}"), torch.float32)


def check_tokenizer_path(name: str) -> None:
    """Refuse the name of a tokenizer that must be a directory, and does not exist. Local.

    Raises:
        ConfigError: The directory does not exist.
    """
    if name != BYTES and is_path(name):
        check_directory("tokenizer", name, "give another directory, or a name on Hugging Face's hub")


def pretrained_tokenizer(name: str) -> Any:
    """Read a Hugging Face tokenizer. Local.

    Args:
        name: A directory, or a name that `transformers` knows.

    Raises:
        ConfigError: The tokenizer does not exist, or `transformers` is not installed.
    """
    check_tokenizer_path(name)
    try:
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]: an extra
    except ImportError as error:
        raise ConfigError(f"tokenizer={name!r} needs transformers: pip install 'lightning-d9d[hf]'") from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        tail = "" if os.path.exists(name) else f"; {missing(name)}"
        raise ConfigError(f"tokenizer={name!r} cannot be read: {str(error).splitlines()[0]}{tail}") from error


def load_tokenizer(name: str | None, source: str | Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a model. Local.

    Args:
        name: A directory, or a name that `transformers` knows, with tokenizer files; "bytes" for a model of bytes. None
            uses the files beside the model, or bytes if it has 256 tokens.
        source: Vocabulary of the model.
        vocab_size: The model's number of tokens.

    Raises:
        ConfigError: The tokenizer does not exist, it has more tokens than the model, or `transformers` is not
            installed.
    """
    if name is None:
        beside = Path(source)
        if any((beside / file).is_file() for file in TOKENIZER_FILES):
            name = str(beside)
        elif vocab_size == NUM_BYTES:
            name = BYTES
        else:
            raise ConfigError(
                f"{source} has no tokenizer ({', '.join(TOKENIZER_FILES)}) beside it. Give one with --tokenizer: a "
                "directory, a name on Hugging Face's hub, or 'bytes' for a model that was trained on bytes"
            )
    if name == BYTES:
        if vocab_size < NUM_BYTES:
            raise ConfigError(f"a model of vocab_size={vocab_size} has no token for each byte; give its own tokenizer")
        return ByteTokenizer()
    tokenizer = pretrained_tokenizer(name)
    if len(tokenizer) > vocab_size and max(tokenizer.get_vocab().values()) >= vocab_size:
        raise ConfigError(
            f"the tokenizer {name!r} has ids up to {max(tokenizer.get_vocab().values())}, but the model has "
            f"vocab_size={vocab_size}; give the model's own tokenizer"
        )
    return tokenizer
