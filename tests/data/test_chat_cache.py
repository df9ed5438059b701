"""Chats are tokenized once, and again when something is another or damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d.data import chat_cache
from lightning_d9d.data.chat_cache import TokenizedChats, tokenized_chats
from lightning_d9d.data.chat_masks import ChatTokenizer
from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from tests.data.chats import chat, make_tokenizer, write_chats
from tests.harness.ranks import RankContext


@pytest.fixture
def num_tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an item for each chat that this process tokenizes."""
    return count(monkeypatch)


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    call = ChatTokenizer.__call__

    def counted(self: ChatTokenizer, *arguments: Any) -> Any:
        calls.append(1)
        return call(self, *arguments)

    monkeypatch.setattr(ChatTokenizer, "__call__", counted)
    return calls


def read(folder: Path, *files: Path, family: str = "chatml", length: int = 97) -> TokenizedChats:
    return tokenized_chats(files, make_tokenizer(family), length, folder / "cache", Ranks(alone=True))


def contents(chats: TokenizedChats) -> Any:
    samples = [tuple(part.tolist() for part in each) for each in chats.samples]
    return samples, chats.num_samples.tolist(), chats.report


def test_the_second_time_nothing_is_tokenized(tmp_path: Path, num_tokenized: list[int]) -> None:
    file = write_chats(tmp_path / "a.jsonl", 20)
    first = contents(read(tmp_path, file))
    assert len(num_tokenized) == len(first[1]) == 20
    moved = file.rename(tmp_path / "moved.jsonl")
    assert contents(read(tmp_path, moved)) == first
    assert len(num_tokenized) == 20
    for changed in ({"family": "marked"}, {"length": 60}):
        read(tmp_path, moved, **changed)
    with moved.open("a") as lines:
        lines.write(json.dumps(chat("more", "words")))
    assert len(read(tmp_path, moved).num_samples) == 21
    assert len(num_tokenized) == 20 + 20 + 20 + 21
    assert len(list((tmp_path / "cache").glob("*.pt"))) == 4


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_file_is_made_again(
    tmp_path: Path, num_tokenized: list[int], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_chats(tmp_path / "a.jsonl", 20)
    first = contents(read(tmp_path, file))
    (kept,) = (tmp_path / "cache").glob("*.pt")
    content = bytearray(kept.read_bytes())
    if damage == "cut":
        del content[-100:]
    elif damage == "flipped":
        content[content.index(read(tmp_path, file).samples[0][0].int().numpy().tobytes())] ^= 1
    else:
        content = bytearray(b"PK nothing")
    kept.write_bytes(content)
    assert contents(read(tmp_path, file)) == first
    assert len(num_tokenized) == 40
    assert "is damaged; its chats are tokenized again" in caplog.text


def test_several_processes_give_what_one_does(
    tmp_path: Path, num_tokenized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_chats(tmp_path / f"{number}.jsonl", number) for number in (20, 5)]
    monkeypatch.setattr(chat_cache, "num_processes_here", lambda: 1)
    first = contents(read(tmp_path / "one", *files))
    assert len(num_tokenized) == 25
    monkeypatch.setattr(chat_cache, "num_processes_here", lambda: 2)
    assert contents(read(tmp_path / "two", *files)) == first
    assert len(num_tokenized) == 25
    assert not multiprocessing.active_children()
    files[1].write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match=r"5\.jsonl, line 1 has messages=\[\]"):
        read(tmp_path, *files)
    monkeypatch.setattr(ChatTokenizer, "__call__", lambda *_: os._exit(1))
    with pytest.raises(ConfigError, match="a process that tokenized has died"):
        read(tmp_path / "three", write_chats(tmp_path / "b.jsonl", 2), files[0])


@pytest.mark.ranks(2)
def test_one_rank_tokenizes_and_all_map(rank: RankContext) -> None:
    file = rank.tmp_dir / "chats.jsonl"
    rank.from_first_rank(write_chats, file, 20)
    with pytest.MonkeyPatch.context() as monkeypatch:
        num_tokenized = count(monkeypatch)
        chats = tokenized_chats([file], make_tokenizer("chatml"), 97, rank.tmp_dir / "cache", Ranks())
    assert rank.all_gather_object(len(num_tokenized)) == [20, 0]
    assert len({str(each) for each in rank.all_gather_object(contents(chats))}) == 1
