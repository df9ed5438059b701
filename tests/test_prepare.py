"""Texts become files of tokens: with any tokenizer, in several processes, going on after an interruption."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d import prepare
from lightning_d9d.cli import main
from lightning_d9d.cli.commands import parse
from lightning_d9d.data import TokenFile, TokenFileWriter, records
from lightning_d9d.data.documents import DocumentReader
from lightning_d9d.data.records import Piece
from lightning_d9d.errors import ConfigError

TEXTS = ["one and one", "", "zwei ä", "three, " * 5, "x"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `TEXTS` as JSON lines, in small pieces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "PIECE_BYTES", 30)
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def run(*arguments: str) -> None:
    prepare.main(parse("prepare-data", arguments))


def documents_of(path: str) -> list[list[int]]:
    file = TokenFile(path)
    starts = file.document_starts(0, len(file)).tolist()
    return [file.read(*each).tolist() for each in zip(starts, [*starts[1:], len(file)], strict=True)]


def test_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    run("out/a", "a.jsonl", "--tokenizer", "bytes", "--processes", "1")
    assert documents_of("out/a") == [[*text.encode(), 0] for text in TEXTS if text]
    assert sorted(os.listdir("out")) == ["a.bin", "a.idx", "a.json"]
    assert json.loads(Path("out/a.json").read_text()) == {
        **{"tokenizer": "bytes", "vocab_size": 256, "documents": 4, "tokens": 58, "bytes": 54, "longest": 36},
        **{"empty": 1, "invalid": 0},
    }
    assert capsys.readouterr().out == (
        "wrote out/a.bin (116 bytes) and a.idx\n"
        "4 documents, 58 tokens of 54 bytes of text (0.93 bytes a token), the longest 36 tokens\n"
        "left out: 1 empty\n"
    )
    with pytest.raises(ConfigError, match=r"out/a\.bin exists; choose another output or add --overwrite"):
        run("out/a", "a.jsonl", "--tokenizer", "bytes")
    run("out/a", "a.jsonl", "--tokenizer", "bytes", "--no-end", "--overwrite", "--processes", "1")
    assert documents_of("out/a") == [[*text.encode()] for text in TEXTS if text]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """The bar counts bytes of text, on a terminal only."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    size = Path("a.jsonl").stat().st_size
    run("a", "a.jsonl", "--tokenizer", "bytes", "--processes", "1")
    said = capsys.readouterr().err
    assert f"{size}/{size}" in said.replace(".0", "") if is_terminal else not said


def test_a_tokenizer_in_two_processes() -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS * 9, vocab_size=280, special_tokens=["<|end|>", "<|begin|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|end|>", bos_token="<|begin|>"
    ).save_pretrained("tokenizer")
    Path("b.txt").write_text("one text\nof lines")
    run("two", "a.jsonl", "b.txt", "--tokenizer", "tokenizer", "--begin", "--processes", "2")
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    texts = [*filter(None, TEXTS), "one text\nof lines"]
    assert documents_of("two") == [[1, *tokenizer.encode(text, add_special_tokens=False), 0] for text in texts]
    run("one", "a.jsonl", "b.txt", "--tokenizer", "tokenizer", "--begin", "--processes", "1")
    for suffix in (".bin", ".idx", ".json"):
        assert Path(f"one{suffix}").read_bytes() == Path(f"two{suffix}").read_bytes()
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained("bare")
    with pytest.raises(ConfigError, match="'bare' has no token that ends a text; add --no-end"):
        run("three", "a.jsonl", "--tokenizer", "bare")
    with pytest.raises(ConfigError, match="'bare' has no token that begins a text; leave out --begin"):
        run("three", "a.jsonl", "--tokenizer", "bare", "--no-end", "--begin")


def settings(reader: DocumentReader | None = None) -> prepare.Settings:
    return prepare.Settings(reader or DocumentReader(), "bytes", ends=True, begins=False)


def test_an_interrupted_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    whole = prepare._prepare_piece

    def stop_at_third(piece: Piece, number: int, parts: Path, chosen: prepare.Settings) -> None:
        whole(piece, number, parts, chosen)
        made.append(number)
        if len(made) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_prepare_piece", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare("a", ["a.jsonl"], settings())
    assert not Path("a.bin").exists()
    prepare.prepare("a", ["a.jsonl"], settings())
    num_pieces = len(DocumentReader().pieces("a.jsonl"))
    assert made == list(range(num_pieces))
    assert documents_of("a") == [[*text.encode(), 0] for text in TEXTS if text]
    assert not Path("a.parts").exists()


def test_a_killed_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was killed in the middle of its third piece."""
    add = TokenFileWriter.add
    written: list[str] = []

    def noted(writer: TokenFileWriter, texts: Any) -> None:
        add(writer, texts)
        written.append(writer.path.stem)

    def deadly(writer: TokenFileWriter, texts: Any) -> None:
        noted(writer, texts)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(TokenFileWriter, "add", deadly)
    if (child := os.fork()) == 0:
        prepare.prepare("a", ["a.jsonl"], settings())
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    finished = {path.stem for path in Path("a.parts").glob("0*.json")}
    assert finished
    monkeypatch.setattr(TokenFileWriter, "add", noted)
    prepare.prepare("a", ["a.jsonl"], settings())
    assert written
    assert not finished & set(written)
    assert documents_of("a") == [[*text.encode(), 0] for text in TEXTS if text]


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prepare, "_join", _interrupt)
    monkeypatch.setattr(
        sys, "argv", ["lightning-d9d", "prepare-data", "a", "a.jsonl", "--tokenizer", "bytes", "--processes", "1"]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on where this one was\n"


def test_other_settings_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "_join", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare("a", ["a.jsonl"], settings())
    assert Path("a.parts/000000.bin").exists()
    chosen = prepare.Settings(DocumentReader(), "bytes", ends=False, begins=False)
    prepare.prepare("a", ["a.jsonl"], chosen)
    assert documents_of("a") == [[*text.encode()] for text in TEXTS if text]


def _interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


class Deadly(DocumentReader):
    """Kills the process that reads."""

    def read(self, piece: Piece) -> Iterator[str | None]:
        os._exit(1)


def test_a_process_that_dies() -> None:
    with pytest.raises(ConfigError, match=r"a process that tokenized has died.*it resumes where it was"):
        prepare.prepare("a", ["a.jsonl"], settings(Deadly()), num_processes=2)


def test_an_invalid_line_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("a.jsonl", "a") as file:
        file.write("nothing\n")
    words = ["lightning-d9d", "prepare-data", "a", "a.jsonl", "--tokenizer", "bytes", "--processes", "2"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: a.jsonl, line 6 is not JSON: Expecting value; correct it, or leave out invalid documents with "
        "--skip-invalid\n"
    )
    monkeypatch.setattr(sys, "argv", [*words, "--skip-invalid"])
    main()
    assert "left out: 1 empty, 1 invalid\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.txt", "--column", "text"), "--column text has no effect"),
        (("a.jsonl", "--lines"), "--lines has no effect"),
        (("a.jsonl", "--processes", "0"), "--processes must be at least 1, not 0"),
        (("empty.jsonl",), r"empty\.jsonl: no document has any text \(1 empty\)"),
        (("a.jsonl", "--tokenizer", "folder"), "tokenizer='folder' cannot be read"),
    ],
)
def test_refused(arguments: tuple[str, ...], message: str) -> None:
    Path("a.txt").write_text("text")
    Path("folder").mkdir()
    Path("empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match=message):
        run("out", "--tokenizer", "bytes", *arguments)
