"""Rows of tokens from a folder that litdata has written with its `TokensLoader`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lightning_d9d.data.token_files import BorderToken
from lightning_d9d.data.token_rows import check_ids, make_row
from lightning_d9d.errors import ConfigError, reason


class LitDataRows(Dataset[dict[str, Tensor]]):
    """Rows of `sequence_length` tokens, each from a block of one more token, in the form of litdata's `TokensLoader`.

    Items are those of `TokenRows`. Blocks do not share tokens: the first token of each block is never predicted.

    Args:
        folder: Folder with `index.json` and chunks, as `litdata.optimize(..., item_loader=TokensLoader())` writes them.
        sequence_length: Tokens of a row.
        border: The token that separates documents; None if they are not separated.
        vocab_size: Vocabulary of the model; ids are checked as rows are read. None does not check them.
        blocks: The blocks of the folder that are used; None for all.

    Raises:
        ConfigError: The folder has no index of such chunks, or litdata is not installed.
    """

    def __init__(
        self,
        folder: str,
        sequence_length: int,
        border: BorderToken | None,
        vocab_size: int | None = None,
        blocks: range | None = None,
    ) -> None:
        try:
            from litdata import StreamingDataset, TokensLoader  # pyright: ignore[reportMissingImports]: an extra
        except ImportError as error:
            raise ConfigError(f"{folder} needs litdata: pip install 'lightning-d9d[litdata]'") from error
        self.name = folder
        self.border = border
        self.vocab_size = vocab_size
        block_size = sequence_length + 1
        num_tokens = _tokens_of_chunks(folder)
        self.blocks = range(sum(count // block_size for count in num_tokens)) if blocks is None else blocks
        self.num_left_out = sum(count % block_size for count in num_tokens)
        """Tokens at the ends of chunks that fill no block."""
        self._blocks: Any = StreamingDataset(folder, item_loader=TokensLoader(block_size=block_size))

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows of {self.name}")
        block = self.blocks[index]
        tokens = self._blocks[block].numpy().astype(np.int64)
        check_ids(tokens, self.vocab_size, f"{self.name}, block {block}", 0)
        if self.border is None:
            return make_row(tokens, len(tokens) - 1, None)
        found = np.flatnonzero(tokens == self.border.token) + (0 if self.border.is_first else 1)
        return make_row(tokens, len(tokens) - 1, found[(found > 0) & (found < len(tokens))])


def is_litdata(path: str) -> bool:
    """Return whether a path is a folder with litdata's index."""
    return (Path(path).expanduser() / "index.json").is_file()


def _tokens_of_chunks(folder: str) -> list[int]:
    """Return the number of tokens of each chunk."""
    path = Path(folder).expanduser() / "index.json"
    try:
        return [int(chunk["dim"]) for chunk in json.loads(path.read_text(encoding="utf-8"))["chunks"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not give the tokens of chunks ({type(error).__name__}: {reason(error)}); write the folder "
            "with litdata.optimize(..., item_loader=TokensLoader())"
        ) from error
