"""The data module of chats: rows by hand, its stream on workers and ranks, and resume in a real Trainer."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.datamodules import ChatDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoePretraining
from tests.data.chats import chat, make_tokenizer, write_chats
from tests.datamodules.runs import run_of
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.meshes.equality import CONFIG
from tests.strategy.plain import trainer

LENGTH = 96
ROWS = 8
"""The rows of an optimizer step."""
Row = tuple[int, ...]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl")


def data(
    path: Any, num_ranks: int = 1, rank: int = 0, family: str = "chatml", device: str = "cpu", **options: Any
) -> ChatDataModule:
    options = {"sequence_length": LENGTH, "batch_size": ROWS // num_ranks, **options}
    module = ChatDataModule(path, make_tokenizer(family), **options)
    module.trainer = run_of(num_ranks, rank, device)
    module.setup()
    return module


def batches(loader: Any, epoch: int = 0) -> list[list[Row]]:
    loader.sampler.set_epoch(epoch)
    return [[tuple(row.tolist()) for row in batch["input_ids"]] for batch in loader]


def documents(batch: dict[str, torch.Tensor]) -> list[tuple[Row, Row]]:
    """Tokens and labels of each document of a batch, without padding."""
    found = []
    for ids, labels, numbers in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
        for number in range(int(numbers.max()) + 1):
            places = numbers == number
            if (labels[places] != -100).any():
                found.append((tuple(ids[places].tolist()), tuple(labels[places].tolist())))
    return found


def test_rows_have_whole_chats_once(file: Path) -> None:
    module = data(str(file), batch_size=1)
    samples = module.train_samples
    assert samples is not None
    expected = [tuple(map(lambda part: tuple(part.tolist()), samples[index])) for index in range(len(samples))]
    found = [document for batch in module.train_dataloader() for document in documents(batch)]
    assert sorted(found) == sorted(expected)
    assert len(samples) == 114  # of 120 chats, 6 of which are held out


def test_a_row_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps(chat("Hi", "Yes")) + "\n")
    tokenizer = make_tokenizer("chatml")
    module = data(str(path), validation=str(path), sequence_length=40, batch_size=1)
    (batch,) = module.train_dataloader()
    prompt = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    answer = tokenizer.encode("Yes<|im_end|>", add_special_tokens=False)
    used = len(prompt) + len(answer) - 1
    assert batch["input_ids"][0, :used].tolist() == [*prompt, *answer[:-1]]
    assert batch["labels"][0, :used].tolist() == [-100] * (len(prompt) - 1) + answer
    assert batch["labels"][0, used:].unique().tolist() == [-100]
    assert batch["document_ids"][0].tolist() == [0] * used + [1] * (40 - used)


def test_a_step_learns_the_answer_and_its_end_alone(tmp_path: Path) -> None:
    """The gradient is that of the answer's tokens, which are found in the text by hand."""
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(chat("How are you?", "I am well.")) + "\n")
    (batch,) = data(str(path), validation=str(path), sequence_length=40, batch_size=1).train_dataloader()
    tokenizer = make_tokenizer("chatml")
    parts = ["<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n", "I am well.<|im_end|>"]
    prompt, answer = (tokenizer.encode(part, add_special_tokens=False) for part in parts)
    model = Qwen3MoeForCausalLM(dataclasses.replace(CONFIG, vocab_size=320)).double()
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
    expected.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss = model(**batch, reduction="sum").loss
    loss.backward()
    assert_close_named("loss", loss / len(answer), expected / len(answer), kind=Kind.LOSS)
    assert_tensors_close({name: each.grad for name, each in model.named_parameters()}, gradients)


@pytest.mark.parametrize("packing", [True, False])
def test_the_stream_does_not_depend_on_workers(file: Path, packing: bool) -> None:
    streams = [
        batches(data(str(file), packing=packing, num_workers=number).train_dataloader(), epoch=1)
        for number in (0, 1, 4)
    ]
    assert len(streams[0]) > 4
    assert streams[0] == streams[1] == streams[2]


@pytest.mark.parametrize("packing", [True, False])
def test_data_ranks_share_each_step(file: Path, packing: bool) -> None:
    whole = batches(data(str(file), packing=packing).train_dataloader(), epoch=1)
    for num_ranks in (2, 4):
        shares = [
            batches(data(str(file), num_ranks, rank, packing=packing).train_dataloader(), epoch=1)
            for rank in range(num_ranks)
        ]
        for index, step in enumerate(whole):
            of_ranks = [row for share in shares for row in share[index]]
            assert sorted(without_padding(of_ranks)) == sorted(without_padding(step))


def without_padding(rows: list[Row]) -> list[Row]:
    """Ranks pad their rows to different lengths."""
    return [row[: max(place + 1 for place, token in enumerate(row) if token)] for row in rows]


def test_batches_for_a_gpu_are_in_pinned_memory(file: Path) -> None:
    assert data(str(file), device="cuda").train_dataloader().pin_memory
    assert not data(str(file)).train_dataloader().pin_memory


def test_orders_follow_from_seed_and_epoch(file: Path) -> None:
    loader, again, other = (data(str(file), seed=seed).train_dataloader() for seed in (1, 1, 2))
    first = batches(loader)
    torch.manual_seed(5)
    assert batches(again) == first
    assert batches(other) != first
    assert batches(loader, epoch=1) != first
    assert batches(data(str(file)).val_dataloader(), epoch=1) == batches(data(str(file)).val_dataloader())


def test_rows_without_packing(file: Path) -> None:
    module = data(str(file), packing=False, pad_to_multiple_of=16)
    assert module.train_samples is not None
    lengths = sorted(module.train_samples.lengths)
    seen = []
    for batch in module.train_dataloader():
        assert set(batch) == {"input_ids", "labels"}
        length = batch["input_ids"].shape[1]
        longest = max(map(len, without_padding([tuple(row.tolist()) for row in batch["input_ids"]])))
        assert length % 16 == 0
        assert 0 <= length - longest < 16
        seen.append(length)
    assert len(seen) == len(lengths) // ROWS
    assert len(set(seen)) > 2
    assert sum(seen) * ROWS < 1.25 * sum(lengths)  # rows in random order would take 1.6 times as much


def test_chats_that_are_held_out_are_not_trained_on(file: Path) -> None:
    module = data(str(file), validation_fraction=0.25, family="qwen")
    tokenizer = make_tokenizer("qwen")
    sides = []
    for samples in (module.train_samples, module.validation_samples):
        assert samples is not None
        texts = [tokenizer.decode(samples[index][0]) for index in range(len(samples))]
        sides.append({text.split("user\n")[1].split()[0] for text in texts})
    assert len(sides[1]) == 30
    assert sides[0].isdisjoint(sides[1])
    assert sides[0] | sides[1] == set(map(str, range(120)))


def test_several_files_and_a_file_for_validation(file: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.json"
    held_out.write_text("\n".join(json.dumps(chat(f"a {index}", "b")) for index in range(20)))
    module = data([str(file), str(file)], validation=str(held_out), batch_size=2)
    assert module.train_samples is not None
    assert module.validation_samples is not None
    assert (len(module.train_samples), len(module.validation_samples)) == (240, 20)
    assert module.validation_samples.num_counted == 2 * 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence_length=0 of ChatDataModule must be at least 1"),
        ({"batch_size": 2, "global_batch_size": 4}, "both set the size of batches"),
        ({"num_workers": -1}, "num_workers=-1 of ChatDataModule must be at least 0"),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of=8 has no effect with packing=True"),
        ({"validation": "a", "validation_fraction": 0.1}, "both set the validation data"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0 of ChatDataModule must be between 0 and 1"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatDataModule("chats.jsonl", "tokenizer", **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"messages": [\n',
            r"a\.jsonl, line 1 is not JSON: Expecting value; correct the line, or leave it out",
        ),
        ("a.jsonl", b'\n\n{"messages": "\xff"}\n', r"a\.jsonl, line 3 is not JSON: .*utf-8"),
        ("a.jsonl", b'{"text": "a"}\n', r"a\.jsonl, line 1 has no 'messages', but \['text'\]"),
        ("a.jsonl", b"\n", r"a\.jsonl has no chat"),
        (
            "a.csv",
            b"a",
            r"a\.csv is not a file of chats: give JSON lines \(\.jsonl, \.ndjson, \.json\), a table \(\.parquet",
        ),
        ("b/a.jsonl", None, r"a\.jsonl cannot be read: it does not exist"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        data(str(tmp_path / name))


def test_too_few_chats(file: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"training data of ChatDataModule have \d+ rows of .*, but 512 are needed .*batch_size=256, 2 d",
    ):
        data(str(file), num_ranks=2, batch_size=256).train_dataloader()
    with pytest.raises(ConfigError, match=r"no chat can be trained on: .*samples too long for their first turn: 120"):
        data(str(file), sequence_length=5)
    with pytest.raises(RuntimeError, match="call setup"):
        ChatDataModule(str(file), make_tokenizer("chatml")).train_dataloader()
    with pytest.raises(ConfigError, match="tokenizer='/nowhere' does not exist; give another directory"):
        ChatDataModule(str(file), "/nowhere").setup()


def test_a_tokenizer_that_is_larger_than_the_model(file: Path) -> None:
    module, last = ChatDataModule(str(file), make_tokenizer("chatml")), len(make_tokenizer("chatml")) - 1
    config = SimpleNamespace(vocab_size=last)
    module.trainer = run_of(1, 0, lightning_module=SimpleNamespace(config=config))
    with pytest.raises(ConfigError, match=rf"ids of the tokenizer of ChatDataModule go up to {last}, but .*={last};"):
        module.setup()
    config.vocab_size += 1
    module.setup()


def table(chats: list[dict[str, Any]]) -> Any:
    import pyarrow
    from datasets import Dataset

    # With a name of its own: making one of the content fails in datasets 5 with Python 3.11.
    return Dataset(pyarrow.Table.from_pylist(chats), fingerprint="chats")


def as_parquet(path: Path, chats: list[dict[str, Any]]) -> str:
    table(chats).to_parquet(path / "chats.parquet")
    return str(path / "chats.parquet")


def as_saved(path: Path, chats: list[dict[str, Any]]) -> str:
    table(chats).save_to_disk(path / "saved")
    return str(path / "saved")


@pytest.mark.datasets
@pytest.mark.parametrize("write", [as_parquet, as_saved])
def test_tables_have_the_samples_of_json_lines(
    file: Path, tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], str]
) -> None:
    chats = [json.loads(line) for line in file.read_text().splitlines() if line]
    chats[0]["messages"][0]["name"] = "Ann"  # which all others then have as None
    expected, found = (data(path).train_samples for path in (str(file), write(tmp_path, chats)))
    assert expected is not None
    assert found is not None
    assert len(found) == len(expected)
    for index in range(len(found)):
        assert torch.equal(found[index][1], expected[index][1])


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("a.parquet", "pyarrow", "parquet"), ("saved", "datasets", "data")]
)
def test_packages_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "saved").mkdir()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'lightning-d9d\[{extra}\]', or write"):
        data(str(tmp_path / name))


@pytest.mark.datasets
def test_tables_that_are_refused(tmp_path: Path) -> None:
    from datasets import DatasetDict

    DatasetDict(train=table([chat("a", "b")])).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match=r"splits has several splits; give one of .*splits/train"):
        data(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match="is not a directory that `datasets` saved"):
        data(str(tmp_path))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"broken\.parquet cannot be read as parquet"):
        data(str(broken))


# In a Trainer


class Recorder(Qwen3MoePretraining):
    """Keeps the rows of each step, without padding."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(CONFIG, vocab_size=320, num_hidden_layers=2), warmup_steps=1)
        self.steps: dict[int, list[Row]] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        rows = [tuple(row.tolist()) for row in batch["input_ids"]]
        self.steps.setdefault(self.global_step, []).extend(without_padding(rows))


class SaveOnce(Callback):
    """Saves in the second epoch, after its second batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (run.current_epoch, batch_idx) == (1, 1):
            self.step = run.global_step
            run.save_checkpoint(self.path)


def fit(
    module: ChatDataModule, strategy: D9DStrategy, devices: int = 1, path: Path | None = None, **options: Any
) -> Any:
    model = Recorder()
    run = trainer(strategy, devices, **{"max_epochs": 2, "limit_val_batches": 0, "log_every_n_steps": 100, **options})
    run.fit(model, datamodule=module, ckpt_path=path)
    return model.steps


@pytest.mark.parametrize("packing", [True, False])
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(file: Path, tmp_path: Path, packing: bool) -> None:
    """Runs are saved in the middle of the first and of the second epoch, and resumed with another number of workers."""

    def module(num_workers: int) -> ChatDataModule:
        options = {"sequence_length": LENGTH, "batch_size": 4, "packing": packing, "num_workers": num_workers}
        return ChatDataModule(str(file), make_tokenizer("chatml"), **options)

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(module(0), D9DStrategy(), callbacks=[saving], enable_checkpointing=True)
    for step, num_workers in ((2, 1), (len(whole) - 2, 2)):
        rest = fit(module(num_workers), D9DStrategy(), path=tmp_path / f"step={step}.ckpt")
        assert rest == {index: rows for index, rows in whole.items() if index >= step}


@pytest.mark.parametrize(
    "packing",
    [
        pytest.param(True, marks=pytest.mark.ranks(2), id="packed, two ranks"),
        pytest.param(True, marks=[pytest.mark.ranks(4), pytest.mark.meshes], id="packed"),
        pytest.param(False, marks=[pytest.mark.ranks(4), pytest.mark.meshes], id="padded"),
    ],
)
def test_other_data_ranks_go_on_with_the_same_steps(rank: RankContext, packing: bool) -> None:
    """Two data ranks save in the middle of the second epoch; one goes on, and four."""
    file = str(rank.from_first_rank(write_chats, rank.tmp_dir / "chats.jsonl", 48))

    def steps(data_ranks: int, path: Path | None = None, callbacks: Any = ()) -> dict[int, list[Row]]:
        options: dict[str, Any] = {"global_batch_size": ROWS, "packing": packing, "sequence_length": LENGTH}
        options |= {} if packing else {"pad_to_multiple_of": 8}
        module = ChatDataModule(file, make_tokenizer("chatml"), num_workers=data_ranks % 2, **options)
        mesh = MeshConfig(data_parallel_replicate=data_ranks, context_parallel_shard=rank.world_size // data_ranks)
        strategy = D9DStrategy(mesh=mesh)
        own = fit(module, strategy, rank.world_size, path, callbacks=list(callbacks))
        of_ranks = dict(rank.all_gather_object((strategy.mesh.dp_rank, own)))
        assert len(of_ranks) == data_ranks
        found = {step: sorted(row for each in of_ranks.values() for row in each[step]) for step in own}
        assert {len(rows) for rows in found.values()} == {ROWS}
        return found

    saving = SaveOnce(rank.tmp_dir / "middle.ckpt")
    whole = steps(2, callbacks=[saving])
    expected = {step: rows for step, rows in whole.items() if step >= saving.step}
    assert expected
    for data_ranks in {1, rank.world_size} - {2}:
        assert steps(data_ranks, saving.path) == expected
