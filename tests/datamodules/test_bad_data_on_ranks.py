"""Bad data end a run on all ranks with one message, and what is left out is counted alike."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest

from lightning_d9d import ConfigError, D9DStrategy, RankError
from lightning_d9d.data import Span, TokenFile, TokenFileWriter, TokenRows, tokenized_chats
from lightning_d9d.datamodules import ChatDataModule, TokenDataModule
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.data.chats import chat, make_tokenizer, write_chats
from tests.harness.ranks import RankContext
from tests.meshes.equality import CONFIG
from tests.strategy.plain import trainer

VOCAB_SIZE = 320
MODEL = dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE, num_hidden_layers=1)


def tokens(folder: Path, ids: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Path:
    writer = TokenFileWriter(folder / "text")
    writer.add([ids] * 40)
    writer.finish()
    return writer.path


def of_tokens(path: Path, weight: float = 1.0) -> TokenDataModule:
    return TokenDataModule({str(path): weight}, sequence_length=8, batch_size=2)


def truncated(folder: Path) -> TokenDataModule:
    path = tokens(folder)
    path.write_bytes(path.read_bytes()[:-4])
    return of_tokens(path)


def index_beyond_the_file(folder: Path) -> TokenDataModule:
    path, longer = tokens(folder), folder / "longer"
    longer.mkdir()
    path.with_suffix(".idx").write_bytes(tokens(longer, (1, 2, 3, 4, 5, 6)).with_suffix(".idx").read_bytes())
    return of_tokens(path)


def outside_of_the_vocabulary(folder: Path) -> TokenDataModule:
    return of_tokens(tokens(folder, (1, 2, 3, 4, VOCAB_SIZE)))


def of_another_tokenizer(folder: Path) -> TokenDataModule:
    path = tokens(folder)
    path.with_suffix(".json").write_text('{"tokenizer": "large", "vocab_size": 50000}')
    return of_tokens(path)


def weights_of_zero(folder: Path) -> TokenDataModule:
    return of_tokens(tokens(folder), weight=0.0)


def line_of_text(folder: Path) -> TokenDataModule:
    return of_texts(folder, '{"text": "a"}\n{"text": \n')


def no_text(folder: Path) -> TokenDataModule:
    return of_texts(folder, None)


def of_texts(folder: Path, content: str | None) -> TokenDataModule:
    if content is not None:
        (folder / "a.jsonl").write_text(content)
    options = {"tokenizer": "bytes", "cache_folder": str(folder / "cache")}
    return TokenDataModule(str(folder / "a.jsonl"), sequence_length=8, batch_size=2, **options)


def of_chats(folder: Path, content: str, family: str = "chatml") -> ChatDataModule:
    (folder / "a.jsonl").write_text(content)
    options = {"sequence_length": 96, "batch_size": 2, "cache_folder": str(folder / "cache")}
    return ChatDataModule(str(folder / "a.jsonl"), make_tokenizer(family), **options)


def line_of_chats(folder: Path) -> ChatDataModule:
    return of_chats(folder, json.dumps(chat("a", "b")) + '\n{"messages": [\n')


def roles_that_the_template_lacks(folder: Path) -> ChatDataModule:
    return of_chats(folder, json.dumps(chat("a", "b", system="Be brief.")) + "\n", family="instruct")


def tokenizer_of_chats(folder: Path) -> ChatDataModule:
    module = of_chats(folder, write_chats(folder / "chats.jsonl", 40).read_text())
    module.tokenizer.add_tokens([f"<{number}>" for number in range(VOCAB_SIZE)])
    return module


BAD: dict[str, tuple[Callable[[Path], L.LightningDataModule], str]] = {
    "truncated": (truncated, "text.bin has 396 bytes of tokens"),
    "index beyond the file": (index_beyond_the_file, "text.bin has 400 bytes of tokens"),
    "an id outside of the vocabulary": (outside_of_the_vocabulary, f"text.bin has the id {VOCAB_SIZE} at token"),
    "another tokenizer": (of_another_tokenizer, "made by the tokenizer 'large', whose ids go up to 49999"),
    "weights of zero": (weights_of_zero, "sum to 0"),
    "an invalid line of text": (line_of_text, "a.jsonl, line 2 is not JSON"),
    "no text": (no_text, "a.jsonl cannot be read: it does not exist"),
    "an invalid line of chats": (line_of_chats, "a.jsonl, line 2 is not JSON"),
    "roles that the template lacks": (roles_that_the_template_lacks, "line 1 has a message of the role 'system'"),
    "another tokenizer of chats": (tokenizer_of_chats, "ids of the tokenizer of ChatDataModule go up to"),
}

PREPARED = ["no text", "an invalid line of text", "an invalid line of chats"]


def errors(rank: RankContext, make: Callable[[Path], L.LightningDataModule], folder: Path) -> list[BaseException]:
    """What each rank raises, which has a folder of its own, as on machines of their own."""
    own = folder / f"of {rank.rank}"
    own.mkdir()
    run = trainer(D9DStrategy(), rank.world_size, max_steps=30, limit_val_batches=0)
    error: BaseException | None = None
    try:
        run.fit(Qwen3MoePretraining(MODEL, warmup_steps=1), datamodule=make(own))
    except (ConfigError, RankError) as raised:
        error = raised
    return rank.all_gather_object(error)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BAD)
def test_all_ranks_say_the_same(rank: RankContext, name: str) -> None:
    make, message = BAD[name]
    found = errors(rank, make, rank.tmp_dir)
    assert all(isinstance(error, ConfigError | RankError) for error in found), found
    assert all(message in str(error) for error in found), found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["truncated", "another tokenizer", "weights of zero", *PREPARED])
def test_all_ranks_end_where_one_has_bad_data(rank: RankContext, name: str) -> None:
    make, message = BAD[name]

    def sound(folder: Path) -> L.LightningDataModule:
        if "chats" in name:
            return of_chats(folder, write_chats(folder / "chats.jsonl", 40).read_text())
        if "text" in name:
            return of_texts(folder, '{"text": "some text"}\n' * 40)
        return of_tokens(tokens(folder))

    found = errors(rank, make if rank.rank == 1 else sound, rank.tmp_dir)
    assert [type(error) for error in found] == [ConfigError] * 2, found
    assert str(found[0]) == str(found[1])
    what = "prepared" if name in PREPARED else "read"
    assert str(found[0]).startswith(f"data cannot be {what}: rank 1: ")
    assert message in str(found[0])


@pytest.mark.ranks(2)
def test_what_is_left_out_is_counted_alike(rank: RankContext) -> None:
    """Each rank tokenizes its own copy of the chats, and opens its own copy of the tokens."""
    own = rank.tmp_dir / f"of {rank.rank}"
    own.mkdir()
    whole, long = chat("a", "b"), "word " * 200
    unfit = [chat(long, "b"), chat("a", "b", long, "c"), chat("a", "b", long)]
    (own / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [whole, *unfit]))
    tokenizer, alone = make_tokenizer("chatml"), Ranks(alone=True)
    report = tokenized_chats([str(own / "a.jsonl")], tokenizer, 97, own / "cache", alone).report
    spans = [Span(file, 0, len(file)) for file in [TokenFile(tokens(own, (1, 2, 3)))]]
    num_left_out = TokenRows("text", spans, 7, borders=True).num_left_out
    assert (report.chats, report.samples, report.too_long, report.shortened) == (4, 3, 1, 1)
    assert num_left_out == 40 * 3 % 7
    assert rank.all_gather_object((report, num_left_out)) == [(report, num_left_out)] * 2
