"""Files of tokens: bytes written by hand, round trips, files that are damaged."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from lightning_d9d.data.token_files import BorderToken, TokenFile, TokenFileWriter, bin_path, smallest_dtype
from lightning_d9d.errors import ConfigError

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]
# Magic, version 1, dtype code 8 (uint16), 4 sequences, 5 borders; sizes; places in bytes; documents.
INDEX = (
    b"MMIDIDX\x00\x00"
    + bytes([1, 0, 0, 0, 0, 0, 0, 0, 8, 4, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0])
    + bytes([3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0])
    + bytes([0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0])
    + struct.pack("<5q", 0, 1, 2, 3, 4)
)
TOKENS = struct.pack("<8H", 5, 6, 7, 8, 9, 10, 11, 12)


def megatron(folder: Path, index: bytes = INDEX, tokens: bytes = TOKENS) -> Path:
    (folder / "text.idx").write_bytes(index)
    (folder / "text.bin").write_bytes(tokens)
    return folder / "text.bin"


def test_megatron_by_hand(tmp_path: Path) -> None:
    file = TokenFile(megatron(tmp_path))
    assert len(file) == 8
    assert file.read(2, 5).tolist() == [7, 8, 9]
    assert file.read(6, 20).tolist() == [11, 12]
    assert file.read(0, 1).dtype == np.int64
    assert file.document_starts(0, 8).tolist() == [0, 3, 4]
    assert [file.document_starts(*each).tolist() for each in ((1, 3), (1, 4), (3, 4), (4, 4))] == [[], [3], [3], []]
    assert np.concatenate(list(file.document_lengths())).tolist() == [3, 0, 1, 4]
    assert [file.next_document(place) for place in (0, 1, 4, 5)] == [0, 3, 4, 8]


def test_megatron_is_written_byte_for_byte(tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "new" / "text")
    writer.add(DOCUMENTS[:2])
    writer.add(DOCUMENTS[2:])
    assert not (tmp_path / "new" / "text.bin").exists()
    writer.finish()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["text.bin", "text.idx"]
    assert (tmp_path / "new" / "text.idx").read_bytes() == INDEX
    assert (tmp_path / "new" / "text.bin").read_bytes() == TOKENS
    assert (writer.num_documents, writer.num_tokens, writer.longest) == (4, 8, 4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_round_trip_of_each_type(tmp_path: Path, dtype: type[np.generic]) -> None:
    writer = TokenFileWriter(tmp_path / "text", dtype)
    writer.add([[0, np.iinfo(dtype).max], [1]])
    writer.finish()
    assert TokenFile(tmp_path / "text.idx").read(0, 3).tolist() == [0, np.iinfo(dtype).max, 1]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Sentences, say: a document begins with some of them only."""
    index = INDEX[:17] + b"\x08" + struct.pack("<2Q", 4, 3) + INDEX[34:82] + struct.pack("<3q", 0, 2, 4)
    file = TokenFile(megatron(tmp_path, index))
    assert file.document_starts(0, 8).tolist() == [0, 3]
    assert np.concatenate(list(file.document_lengths())).tolist() == [3, 5]


def test_nanogpt(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(TOKENS)
    file = TokenFile(path)
    assert file.read(0, 8).tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert not file.has_borders
    assert file.document_starts(0, 8).tolist() == [0]
    assert file.document_starts(1, 8).tolist() == []
    assert file.next_document(3) == 3
    assert list(file.document_lengths()) == []


@pytest.mark.parametrize(("is_first", "starts"), [(True, [0, 2, 6]), (False, [0, 3, 7])])
def test_borders_by_a_token(tmp_path: Path, is_first: bool, starts: list[int]) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(np.array([1, 1, 9, 2, 2, 2, 9, 3], dtype=np.uint16).tobytes())
    file = TokenFile(path, BorderToken(9, is_first))
    assert file.document_starts(0, 8).tolist() == starts
    for place in range(8):
        assert file.document_starts(place, 8).tolist() == [each for each in starts if each >= place]
        assert file.document_starts(0, place).tolist() == [each for each in starts if each < place]
    assert file.next_document(1) == starts[1]


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_header_of_llm_c(tmp_path: Path, magic: int, version: int, dtype: type[np.generic]) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, 4
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(header.tobytes() + np.array([50256, 1, 2, 3], dtype=dtype).tobytes())
    assert TokenFile(path).read(0, 9).tolist() == [50256, 1, 2, 3]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"fineweb_train_000001.bin has \d+ bytes of tokens.*truncated"):
        TokenFile(path)


def test_copies_in_other_processes_map_the_file(tmp_path: Path) -> None:
    file = TokenFile(megatron(tmp_path))
    pickled = pickle.dumps(file)
    assert len(pickled) < 300
    assert pickle.loads(pickled).read(0, 3).tolist() == [5, 6, 7]


def test_names(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(TOKENS)
    names = {"text": "text.bin", "text.idx": "text.bin", "a.b": "a.b.bin", "plain": "plain"}
    assert {name: bin_path(tmp_path / name).name for name in names} == names
    assert smallest_dtype(1 << 16) is np.uint16
    assert smallest_dtype(1 + (1 << 16)) is np.int32


@pytest.mark.parametrize(
    ("index", "tokens", "message"),
    [
        (
            INDEX,
            TOKENS[:-1],
            r"text.bin has 15 bytes of tokens.*declares 8 tokens of 2 bytes each. The file is truncated",
        ),
        (INDEX, TOKENS + b"\0\0", "text.bin has 18 bytes.*longer than its index"),
        (INDEX[:-1], TOKENS, r"text.idx has \d+ bytes, but 4 sequences and 5 borders.*truncated"),
        (INDEX[:12], TOKENS, "text.idx does not begin with"),
        (b"x" + INDEX[1:], TOKENS, "text.idx does not begin with"),
        (INDEX[:9] + b"\x02" + INDEX[10:], TOKENS, "version 2 and dtype code 8"),
        (INDEX[:17] + b"\x09" + INDEX[18:], TOKENS, "version 1 and dtype code 9"),
        (INDEX[:17] + b"\x07" + INDEX[18:], TOKENS, "type float32, but tokens are integers"),
        (INDEX[:58] + b"\x07" + INDEX[59:], TOKENS, "sequence 1 does not begin where the one before it ends"),
        (INDEX[:-8] + struct.pack("<q", 9), TOKENS, "do not cover sequences 0 to 4"),
        (INDEX[:-32] + struct.pack("<4q", 3, 2, 3, 4), TOKENS, "borders of documents are not ascending"),
    ],
)
def test_damaged(tmp_path: Path, index: bytes, tokens: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenFile(megatron(tmp_path, index, tokens))


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.bin cannot be read: it does not exist"):
        TokenFile(tmp_path / "nowhere")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"odd\.bin has 3 bytes, which is not a whole number of 2-byte tokens"):
        TokenFile(tmp_path / "odd.bin")
    with pytest.raises(ConfigError, match="the border token 3 has no effect"):
        TokenFile(megatron(tmp_path), BorderToken(3, is_first=True))
    with pytest.raises(ConfigError, match="must be an integer type"):
        TokenFileWriter(tmp_path / "new", np.float32)
    writer = TokenFileWriter(tmp_path / "new", np.uint8)
    with pytest.raises(ConfigError, match="ids must be 0 to 255, but go from 3 to 256"):
        writer.add([[3, 256]])
    writer.discard()
    assert not list(tmp_path.glob("new*"))
