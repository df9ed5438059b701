"""The rank that prepares data is killed: the others end and say so. The next run goes on, with nothing half made."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_d9d import prepare
from lightning_d9d.data import TokenFile, cache, chat_cache, records
from lightning_d9d.data.chat_masks import ChatTokenizer
from lightning_d9d.datamodules import ChatDataModule, TokenDataModule
from lightning_d9d.datamodules.rows import RowsDataModule
from tests.data.chats import make_tokenizer, write_chats
from tests.datamodules.rows_job import rows_of_steps, train
from tests.harness.jobs import end_job, output_of_job, start_job

NUM_CHATS, NUM_DOCUMENTS, PIECE_BYTES = 240, 400, 1000


def chats(folder: Path) -> RowsDataModule:
    options = {"sequence_length": 96, "batch_size": 2, "cache_folder": str(folder / "cache")}
    return ChatDataModule(str(folder / "chats.jsonl"), make_tokenizer("chatml"), **options)


def texts(folder: Path) -> RowsDataModule:
    options = {"sequence_length": 8, "batch_size": 2, "cache_folder": str(folder / "cache")}
    return TokenDataModule(str(folder / "texts.jsonl"), tokenizer="bytes", **options)


def train_killed(folder: Path, output: Path, make: Any, dies: bool) -> None:
    """One rank of a job, the first of which dies in the middle of its preparation, in small pieces."""
    os.chdir(output)
    records.PIECE_BYTES = PIECE_BYTES  # type: ignore[misc]
    chat_cache.num_processes_here = lambda: 1  # type: ignore[assignment]
    done = []
    tokenize, piece = ChatTokenizer.__call__, prepare._prepare_piece

    def note(number: int) -> None:
        done.append(1)
        if dies and len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def chat(self: ChatTokenizer, *arguments: Any) -> Any:
        note(NUM_CHATS // 2)
        return tokenize(self, *arguments)

    def document(*arguments: Any) -> None:
        piece(*arguments)
        note(3)

    with (
        mock.patch.object(ChatTokenizer, "__call__", chat),
        mock.patch.object(prepare, "_prepare_piece", document),
        mock.patch.object(cache, "_TURN_SECONDS", 0.1),
        mock.patch("lightning_d9d.datamodules.texts.num_processes_here", return_value=1),
    ):
        train(output, partial(make, folder), 2, {"max_steps": 3})
    (output / f"done-{os.environ['LOCAL_RANK']}").write_text(str(len(done)))


@pytest.mark.jobs
@pytest.mark.parametrize("make", [chats, texts])
def test_others_end_and_the_next_run_goes_on(tmp_path: Path, make: Any) -> None:
    write_chats(tmp_path / "chats.jsonl", NUM_CHATS)
    lines = [json.dumps({"text": f"document {number}"}) for number in range(NUM_DOCUMENTS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    killed, after = tmp_path / "killed", tmp_path / "after"
    killed.mkdir()
    after.mkdir()
    codes = end_job(start_job(2, killed, train_killed, tmp_path, killed, make, True), seconds=120)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] not in (0, -signal.SIGKILL), "it had to be killed, or did not see it"
    said = (killed / "1.txt").read_text()
    assert "a rank has ended while data were prepared on rank 0; run the same again" in said
    assert "rank 0 failed: it does not answer" in said
    assert not list((tmp_path / "cache").glob("*.pt")) + list((tmp_path / "cache").glob("*.bin"))
    codes = end_job(start_job(2, after, train_killed, tmp_path, after, make, False), seconds=120)
    assert codes == [0, 0], output_of_job(after)
    assert len(rows_of_steps(after)) == 3
    (made,) = [path for path in (tmp_path / "cache").iterdir() if path.suffix in (".pt", ".bin")]
    num_made = int((after / "done-0").read_text())
    if make is texts:
        file = TokenFile(made)
        assert len(file) == sum(len(f"document {number}") + 1 for number in range(NUM_DOCUMENTS))
        with mock.patch.object(records, "PIECE_BYTES", PIECE_BYTES):
            assert num_made == len(records.pieces_of(str(tmp_path / "texts.jsonl"))) - 3 > 3
    else:
        assert num_made == NUM_CHATS
        assert not list((tmp_path / "cache").glob("*.part"))
