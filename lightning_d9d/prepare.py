"""Makes token files from texts: `lightning-d9d prepare-data`.

The texts are read in pieces, and each becomes a small `.bin` and `.idx` in a folder beside the output. An interrupted
run resumes with the missing pieces. At the end the pieces are joined in the order of the texts, and get their final
names.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lightning_d9d.data.documents import DocumentReader, matching
from lightning_d9d.data.processes import map_in_processes
from lightning_d9d.data.records import Piece, has_records
from lightning_d9d.data.token_files import TokenFile, TokenFileWriter, bin_path, smallest_dtype
from lightning_d9d.errors import ConfigError

BYTES = "bytes"
_END_OF_BYTES = 0
"""The token that ends a document of bytes, as in `ByteTextDataModule`."""
_BATCH_CHARACTERS = 1 << 20
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)


@dataclass
class Counts:
    """Numbers of documents, tokens and bytes of text, the longest document, and the numbers of omitted documents."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    longest: int = 0
    empty: int = 0
    invalid: int = 0

    def __add__(self, other: Counts) -> Counts:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return Counts(**{**sums, "longest": max(self.longest, other.longest)})


class Encoder:
    """Converts texts to tokens, including the tokens that begin and end each text.

    Args:
        name: A directory, or a name that `transformers` knows, with tokenizer files; "bytes" takes the bytes of UTF-8.
        ends: Whether the tokenizer's end-of-text token follows each document.
        begins: Whether its begin-of-text token precedes each document.

    Raises:
        ConfigError: The tokenizer cannot be read, or has no such token.
    """

    def __init__(self, name: str, ends: bool = True, begins: bool = False) -> None:
        self._tokenizer: Any = None
        end: Any = _END_OF_BYTES
        begin: Any = None
        self.vocab_size = 256
        if name != BYTES:
            from lightning_d9d.generation.sources import load_tokenizer  # and torch

            tokenizer: Any = load_tokenizer(name, "", vocab_size=sys.maxsize)
            self._tokenizer, end, begin = tokenizer, tokenizer.eos_token_id, tokenizer.bos_token_id
            self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        if ends and end is None:
            raise ConfigError(f"the tokenizer {name!r} has no token that ends a text; add --no-end")
        if begins and begin is None:
            raise ConfigError(f"the tokenizer {name!r} has no token that begins a text; leave out --begin")
        self._before = [begin] if begins else []
        self._behind = [end] if ends else []

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        """Return the tokens of each text, int64."""
        if self._tokenizer is None:
            encoded: Any = [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        else:
            encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.concatenate([self._before, ids, self._behind]).astype(np.int64) for ids in encoded]


@dataclass(frozen=True)
class Settings:
    """The settings that determine the tokens, besides the texts.

    Args:
        reader: How documents are found.
        tokenizer: As `ends` and `begins` of `Encoder`.
    """

    reader: DocumentReader
    tokenizer: str
    ends: bool
    begins: bool


def description(settings: Settings) -> dict[str, Any]:
    """Return everything that determines the tokens besides the texts, with a hash of the tokenizer's files. Local."""
    files = [Path(settings.tokenizer) / name for name in _TOKENIZER_FILES]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}
    return {**asdict(settings), "files": digests}


_encoders: dict[Settings, Encoder] = {}
"""Encoders of this process, so that a tokenizer is read only once."""


def _encoder(settings: Settings) -> Encoder:
    if settings not in _encoders:
        _encoders[settings] = Encoder(settings.tokenizer, settings.ends, settings.begins)
    return _encoders[settings]


def main(chosen: argparse.Namespace) -> int | None:
    """Run the command.

    Args:
        chosen: Arguments as `lightning_d9d.cli.commands.prepare_parser` reads them.

    Returns:
        The exit code of an interrupted run.

    Raises:
        ConfigError: A text is invalid or cannot be read, an option has no effect, or the output exists.
    """
    sources = matching(chosen.sources)
    if chosen.column is not None and not any(map(has_records, sources)):
        raise ConfigError(f"--column {chosen.column} has no effect: none of the files has fields; leave it out")
    if chosen.lines and all(map(has_records, sources)):
        raise ConfigError("--lines has no effect: none of the files is plain text; leave it out")
    if chosen.processes is not None and chosen.processes < 1:
        raise ConfigError(f"--processes must be at least 1, not {chosen.processes}")
    reader = DocumentReader(chosen.column or "text", chosen.lines, chosen.skip_invalid)
    settings = Settings(reader, chosen.tokenizer, not chosen.no_end, chosen.begin)
    if not chosen.overwrite and bin_path(chosen.output).exists():
        raise ConfigError(f"{bin_path(chosen.output)} exists; choose another output or add --overwrite")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        counts = prepare(chosen.output, sources, settings, chosen.processes or available)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on where this one was\n")
        return 130
    _say(chosen.output, counts)
    return None


def prepare(
    output: str | Path,
    sources: Sequence[str],
    settings: Settings,
    num_processes: int = 1,
    tell: Callable[[], None] = lambda: None,
) -> Counts:
    """Make a token file, or resume one that was not finished.

    Args:
        output: As for `TokenFileWriter`. A folder beside it, which ends with `.parts`, has the finished pieces.
        sources: Files.
        settings: Settings that determine the tokens. If these or the files have changed, everything is made again.
        num_processes: Number of processes that tokenize at the same time; 1 uses only this process.
        tell: Called whenever a piece of the texts is done.

    Raises:
        ConfigError: A text is invalid or cannot be read, all are empty, or a process died.
    """
    target = bin_path(output)
    parts = target.with_suffix(".parts")
    encoder = _encoder(settings)
    pieces = [piece for source in sources for piece in settings.reader.pieces(source)]
    _open_parts(parts, sources, settings)
    missing = [number for number in range(len(pieces)) if not _notes(parts, number).exists()]
    with tqdm(
        total=sum(piece.num_bytes for piece in pieces), unit="B", unit_scale=True, disable=not sys.stderr.isatty()
    ) as bar:
        bar.update(sum(pieces[each].num_bytes for each in range(len(pieces)) if each not in set(missing)))
        prepare_one = functools.partial(_prepare_numbered, parts=parts, settings=settings)
        for number in map_in_processes(prepare_one, [(each, pieces[each]) for each in missing], num_processes):
            bar.update(pieces[number].num_bytes)
            tell()
    counts = [Counts(**json.loads(_notes(parts, number).read_text())) for number in range(len(pieces))]
    total = sum(counts, Counts())
    if total.documents == 0:
        raise ConfigError(f"{', '.join(sources)}: no document has any text ({total.empty} empty)")
    _join([_part(parts, number) for number in range(len(pieces))], target, encoder.vocab_size)
    about = {"tokenizer": settings.tokenizer, "vocab_size": encoder.vocab_size, **asdict(total)}
    _write(target.with_suffix(".json"), json.dumps(about, indent=2) + "\n")
    shutil.rmtree(parts)
    return total


def _join(parts: Sequence[Path], target: Path, vocab_size: int) -> None:
    writer = TokenFileWriter(target, smallest_dtype(vocab_size))
    try:
        for path in parts:
            part = TokenFile(path)
            lengths = np.concatenate([np.zeros(0, np.int64), *part.document_lengths()])
            writer.add_joined(part.read(0, len(part)), lengths)
    except BaseException:
        writer.discard()
        raise
    target.with_suffix(".json").unlink(missing_ok=True)
    writer.finish()


def _prepare_numbered(numbered: tuple[int, Piece], parts: Path, settings: Settings) -> int:
    number, piece = numbered
    _prepare_piece(piece, number, parts, settings)
    return number


def _prepare_piece(piece: Piece, number: int, parts: Path, settings: Settings) -> None:
    encoder, counts = _encoder(settings), Counts()
    writer = TokenFileWriter(_part(parts, number), smallest_dtype(encoder.vocab_size))
    try:
        for texts in _batches(settings.reader, piece, counts):
            writer.add(encoder(texts))
            counts.bytes += sum(len(text.encode()) for text in texts)
    except BaseException:
        writer.discard()
        raise
    counts.documents, counts.tokens, counts.longest = writer.num_documents, writer.num_tokens, writer.longest
    writer.finish()
    _write(_notes(parts, number), json.dumps(asdict(counts)))


def _batches(reader: DocumentReader, piece: Piece, counts: Counts) -> Iterator[list[str]]:
    """Yield documents that have text, some at a time, and count the others."""
    texts, size = [], 0
    for text in reader.read(piece):
        if text:
            texts.append(text)
            size += len(text)
        elif text is None:
            counts.invalid += 1
        else:
            counts.empty += 1
        if size >= _BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _open_parts(parts: Path, sources: Sequence[str], settings: Settings) -> None:
    """Make the folder of parts, or keep one that was made from the same texts with the same settings."""
    stats = [(str(Path(source).resolve()), os.stat(source).st_size, os.stat(source).st_mtime_ns) for source in sources]
    about = json.dumps([stats, description(settings)])
    noted = parts / "settings.json"
    if noted.is_file() and noted.read_text() == about:
        return
    if parts.exists():
        shutil.rmtree(parts)
    parts.mkdir(parents=True)
    _write(noted, about)


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:06}.bin"


def _notes(parts: Path, number: int) -> Path:
    return parts / f"{number:06}.json"


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _say(output: str, counts: Counts) -> None:
    path = bin_path(output)
    left_out = [f"{number} {kind}" for kind in ("empty", "invalid") if (number := getattr(counts, kind))]
    lines = [
        f"wrote {path} ({path.stat().st_size:,} bytes) and {path.with_suffix('.idx').name}",
        f"{counts.documents:,} documents, {counts.tokens:,} tokens of {counts.bytes:,} bytes of text "
        f"({counts.bytes / counts.tokens:.2f} bytes a token), the longest {counts.longest:,} tokens",
        *([f"left out: {', '.join(left_out)}"] if left_out else []),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
