"""Chats of files as samples, which are tokenized once and kept in a file.

The file's name follows from the content of the chats, the tokenizer with its template, and the settings. So other data
have another file. It has torch's own format: a zip archive whose checksums reveal damage.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9d.data.cache import Progress, digest_of_files, made_once, replacing
from lightning_d9d.data.chat_files import chat_pieces
from lightning_d9d.data.chat_masks import ChatReport, ChatTokenizer
from lightning_d9d.data.processes import map_in_processes, num_processes_here
from lightning_d9d.data.records import Piece, read_records
from lightning_d9d.data.samples import SampleArrays, Samples
from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.mesh.agreement import Ranks

_VERSION = 1
"""The version of the format. Raise it whenever the same chats give other samples."""


class TokenizedChats(NamedTuple):
    """The samples of all chats of some files."""

    samples: Samples
    num_samples: Tensor
    """The number of samples of each chat, `[num_chats]` int64."""
    report: ChatReport


def tokenized_chats(
    files: Sequence[str | Path], tokenizer: Any, max_length: int, folder: Path, ranks: Ranks
) -> TokenizedChats:
    """Tokenize the chats of files, or map samples that were tokenized before. Collective over `ranks`.

    Args:
        files: As for `read_chats`.
        tokenizer: As for `ChatTokenizer`.
        max_length: Likewise.
        folder: Folder that keeps the samples.
        ranks: The ranks that need them; one rank of each machine, or of those that share the folder, tokenizes.

    Raises:
        ConfigError: A chat or a file has another form, or the folder cannot be written. The error is the same on all
            ranks.
    """
    name = partial(_name, files, tokenizer, max_length, folder)
    path = made_once(folder, name, partial(_make, files, tokenizer, max_length), ranks)
    return _open(path)


def _name(files: Sequence[str | Path], tokenizer: Any, max_length: int, folder: Path, tell: Progress) -> str:
    ChatTokenizer(tokenizer, max_length)  # refuses what cannot be used
    chat_pieces(files)
    about = [
        _VERSION,
        max_length,
        metadata.version("transformers"),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        digest_of_files(files, folder, tell),
    ]
    return f"chats-{hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:32]}.pt"


def _make(files: Sequence[str | Path], tokenizer: Any, max_length: int, path: Path, tell: Progress) -> None:
    if path.is_file():
        if _is_whole(path):
            return
        logger.warning("%s is damaged; its chats are tokenized again", path)
    arrays, num_samples, report = SampleArrays(), [], ChatReport()
    tokenize = partial(_tokenized, tokenize=ChatTokenizer(tokenizer, max_length))
    for found, numbers, of_piece in map_in_processes(tokenize, chat_pieces(files), num_processes_here()):
        arrays.extend(found)
        num_samples += numbers
        report += of_piece
        tell()
    if not num_samples:
        raise ConfigError(f"{', '.join(map(str, files))} has no chat; correct the path, or give chats")
    report.check()
    said = {**asdict(report), "rendered_roles": sorted(report.rendered_roles)}
    tensors = dict(zip(("tokens", "is_counted", "lengths"), arrays.tensors(), strict=True))
    with replacing(path) as part:
        torch.save({**tensors, "num_samples": torch.tensor(num_samples), "report": json.dumps(said)}, part)


def _tokenized(piece: Piece, tokenize: ChatTokenizer) -> tuple[SampleArrays, list[int], ChatReport]:
    """Return the samples of a piece, the number of samples of each chat, and a report on the chats."""
    arrays, num_samples, tokenize.report = SampleArrays(), [], ChatReport()
    for record in read_records(piece):
        samples = tokenize(record.checked(), record.place)
        for sample in samples:
            arrays.add(sample)
        num_samples.append(len(samples))
    return arrays, num_samples, tokenize.report


def _is_whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip() is not None:
                return False
        _open(path)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError, zipfile.BadZipFile):
        return False
    return True


def _open(path: Path) -> TokenizedChats:
    kept = torch.load(path, mmap=True, weights_only=True)
    said = json.loads(kept["report"])
    report = ChatReport(**{**said, "rendered_roles": set(said["rendered_roles"])})
    return TokenizedChats(Samples.of(kept["tokens"], kept["is_counted"], kept["lengths"]), kept["num_samples"], report)
