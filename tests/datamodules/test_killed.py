"""A job that is killed in the middle of an epoch goes on with the rows of one that was not, whatever it reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_d9d.data import TokenFileWriter
from lightning_d9d.datamodules.rows import RowsDataModule
from tests.data.chats import write_chats
from tests.datamodules.rows_job import chats, rows_of_steps, tokens, train
from tests.harness.jobs import end_job, start_job

Maker = Callable[[int], RowsDataModule]


def of_tokens(folder: Path) -> Maker:
    writer = TokenFileWriter(folder / "text")
    writer.add(np.arange(first, first + first % 30) for first in range(1000))
    writer.finish()
    return partial(tokens, {str(folder / "text"): 1.0})


def of_chats(folder: Path, packing: bool) -> Maker:
    return partial(chats, str(write_chats(folder / "chats.jsonl", 240)), packing)


DATA: dict[str, Callable[[Path], Maker]] = {
    "tokens": of_tokens,
    "packed chats": partial(of_chats, packing=True),
    "chats of similar length": partial(of_chats, packing=False),
}


@pytest.mark.jobs
@pytest.mark.parametrize("kind", DATA)
def test_after_sigkill(tmp_path: Path, kind: str) -> None:
    """With a worker; the others are in this process, without one."""
    data, folders = DATA[kind](tmp_path), [tmp_path / name for name in ("killed", "after", "whole")]
    for folder in folders:
        folder.mkdir()
    killed, after, whole = folders
    job = start_job(1, killed, train, killed, partial(data, 1), 1, {"killed_at": 7})
    assert end_job(job, seconds=120) == [-9]
    before = rows_of_steps(killed)
    assert len(before) == 8
    train(after, partial(data, 0), 1, {"resumed": killed / "step=6.ckpt", "max_steps": 12})
    train(whole, partial(data, 0), 1, {"max_steps": 12})
    assert rows_of_steps(after)[:2] == before[6:]
    assert before[:6] + rows_of_steps(after) == rows_of_steps(whole)
