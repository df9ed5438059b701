"""`PredictionWriter`: files in the dataset's order, on one process, data ranks and pipelines."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, StateError
from lightning_d9d.callbacks import PredictionWriter
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.state import read_tensors
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind

CONFIG = Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip


class Echo(L.LightningModule):
    """Predicts what it is asked to make of its rows, which are their own numbers."""

    def __init__(self, make: Any = lambda rows: rows * 10) -> None:
        super().__init__()
        self.make = make
        self.given: list[int] = []

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.make(batch)


def predict(module: L.LightningModule, loaders: Any, *callbacks: L.Callback, **options: Any) -> Any:
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    run = L.Trainer(enable_checkpointing=False, callbacks=[*callbacks], **(silent | options))  # type: ignore[arg-type]
    return run.predict(module, loaders, return_predictions=options.get("devices", 1) == 1)


def read(folder: Path, prefix: str = "prediction.") -> Tensor:
    return torch.cat([each for name, each in read_tensors(folder) if name.startswith(prefix)])


def index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "rows.safetensors.index.json").read_text())


def test_files_appear_shard_by_shard_and_hold_all_rows(tmp_path: Path) -> None:
    seen: list[int] = []

    class Look(L.Callback):
        def on_predict_batch_end(self, *_: Any) -> None:
            seen.append(len([*tmp_path.glob(".*/*.safetensors")]))
            assert not (tmp_path / "out").exists()

    loader = DataLoader(range(11), batch_size=3)  # type: ignore[arg-type]
    writer = PredictionWriter(tmp_path / "out", max_shard_bytes=48)
    predict(Echo(), loader, writer, Look(), strategy=D9DStrategy())
    assert seen == [0, 0, 1, 1]
    assert read(tmp_path / "out").tolist() == [10 * row for row in range(11)]
    found = index(tmp_path / "out")
    assert found["metadata"] == {"total_size": 88, "num_rows": 11}
    assert found["weight_map"] == {
        **dict.fromkeys(("prediction.0", "prediction.3"), "rank-0-00001.safetensors"),
        **dict.fromkeys(("prediction.6", "prediction.9"), "rank-0-00002.safetensors"),
    }
    with safe_open(tmp_path / "out" / "rank-0-00002.safetensors", "pt") as file:
        assert file.get_tensor("prediction.9").tolist() == [90, 100]
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_shuffled_dataset_is_written_in_its_own_order(tmp_path: Path) -> None:
    loader = DataLoader(range(10), batch_size=3, sampler=[7, 2, 9, 0, 1, 3, 8, 4, 6, 5])  # type: ignore[arg-type]
    predict(Echo(), loader, PredictionWriter(tmp_path / "out", max_shard_bytes=32))
    assert read(tmp_path / "out").tolist() == [10 * row for row in range(10)]
    assert set(index(tmp_path / "out")["weight_map"]) == {"prediction.0", "prediction.4", "prediction.8"}
    assert {each.name for each in (tmp_path / "out").glob("*.safetensors")} == {
        f"rows-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)
    }


def test_indices_that_are_not_integers_give_the_order_of_batches(tmp_path: Path) -> None:
    rows = {(7, "b"): 7, (2, "a"): 2, (9, "c"): 9}
    loader = DataLoader(rows, batch_size=2, sampler=list(rows))  # type: ignore[arg-type]
    predict(Echo(), loader, PredictionWriter(tmp_path / "out"))
    assert read(tmp_path / "out").tolist() == [70, 20, 90]


@pytest.mark.parametrize("order", [range(6), [5, 0, 3, 1, 2, 4]])
def test_a_url(order: Any) -> None:
    url = f"memory://test_predictions/{len(set(order[:1]) & {5})}"
    loader = DataLoader(range(6), batch_size=2, sampler=order)  # type: ignore[arg-type]
    predict(Echo(), loader, PredictionWriter(url, max_shard_bytes=16))
    assert torch.cat([each for _, each in read_tensors(url)]).tolist() == [0, 10, 20, 30, 40, 50]
    with pytest.raises(
        StateError, match=rf"^predictions cannot be written to '{url}': it already exists and is not an empty"
    ):
        predict(Echo(), loader, PredictionWriter(url))


def test_trees_loaders_lengths_and_streams(tmp_path: Path) -> None:
    def make(rows: Tensor) -> Any:  # rows of the last batch are longer
        width = 2 if int(rows[0]) < 4 else 3
        return {"logits": rows[:, None].float().expand(-1, width), "more": [rows, None]}

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    loaders = [DataLoader(range(6), batch_size=2), DataLoader(Stream(), batch_size=2)]  # type: ignore[arg-type]
    predict(Echo(make), loaders, PredictionWriter(tmp_path / "out"))
    tensors = dict(read_tensors(tmp_path / "out"))
    assert {name: tuple(each.shape) for name, each in tensors.items()} == {
        **{f"loader_0.logits.{first}": (2, 2 if first < 4 else 3) for first in (0, 2, 4)},
        **{f"loader_0.more.0.{first}": (2,) for first in (0, 2, 4)},
        **{"loader_1.logits.0": (2, 2), "loader_1.logits.2": (1, 2)},
        **{"loader_1.more.0.0": (2,), "loader_1.more.0.2": (1,)},
    }
    assert read(tmp_path / "out", "loader_1.more.").tolist() == [0, 1, 2]
    assert index(tmp_path / "out")["metadata"]["num_rows"] == 9


def test_an_occupied_directory_is_refused_before_the_data_are_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("mine")

    def unread() -> Any:
        raise AssertionError("read")

    text = (
        f"predictions cannot be written to '{tmp_path}/out': it already exists and is not an empty directory; choose "
        "another path "
        "or set overwrite=True"
    )
    module = Echo()
    module.predict_dataloader = unread
    with pytest.raises(StateError, match=f"^{re.escape(text)}$"):
        predict(module, None, PredictionWriter(tmp_path / "out"))
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    predict(Echo(), DataLoader(range(2)), PredictionWriter(tmp_path / "out", overwrite=True))  # type: ignore[arg-type]
    assert read(tmp_path / "out").tolist() == [0, 10]
    assert not (tmp_path / "out" / "kept").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rows: {"text": "a"}, "PredictionWriter writes tensors, but predict returned a str 'a' in 'text';"),
        (lambda rows: rows.sum(), "predict returned a tensor int64 [], and the batch has 2 rows: return tensors with"),
        (lambda rows: rows[:1], "predict returned a tensor int64 [1], and the batch has 2 rows: return tensors with"),
        (lambda rows: rows + 0j, "prediction is torch.complex64, which safetensors files do not support; cast it"),
    ],
)  # fmt: skip
def test_what_is_no_rows_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        predict(Echo(make), DataLoader(range(4), batch_size=2), PredictionWriter(tmp_path / "out"))  # type: ignore[arg-type]
    assert str(raised.value).endswith("leave PredictionWriter out (lightning-d9d predict: --predictions.write false)")
    assert [*tmp_path.iterdir()] == []


def test_a_prediction_without_tensors_leaves_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing was predicted: .*out is without rows"):
        predict(Echo(lambda rows: None), DataLoader(range(2)), PredictionWriter(tmp_path / "out"))  # type: ignore[arg-type]
    assert index(tmp_path / "out")["weight_map"] == {}


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands for it: it ends a write in the same way, with another number."""
    loader = DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
    writer = PredictionWriter(tmp_path / "out", max_shard_bytes=1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StateError) as raised:
            predict(Echo(lambda rows: torch.zeros(2, 1024)), loader, writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(raised.value).startswith(f"predictions cannot be written to '{tmp_path}/out': [Errno 27] rank-0-00001.")
    assert str(raised.value).endswith("File too large; free space, raise the limit or save to another file system")
    assert [*tmp_path.iterdir()] == []


# Ranks


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["d9d", "ddp"])
def test_data_ranks_take_turns(rank: RankContext, strategy: str) -> None:
    """There are 7 rows. A user's own sampler fills up with row 0; Lightning's leaves a rank with less."""
    for own in (False, True):
        folder = rank.tmp_dir / f"out-{own}"
        sampler = DistributedSampler(range(7), 2, rank.rank, shuffle=False) if own else None  # type: ignore[arg-type]
        loader = DataLoader(range(7), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        options = {"strategy": D9DStrategy() if strategy == "d9d" else "ddp", "devices": 2}
        predict(Echo(), loader, PredictionWriter(folder, max_shard_bytes=32), **options)
        assert read(folder).tolist() == [10 * row for row in range(7)]
        assert index(folder)["metadata"]["num_rows"] == 7
        assert sorted(each.name for each in folder.iterdir()) == [
            "rows-00001-of-00002.safetensors", "rows-00002-of-00002.safetensors", "rows.safetensors.index.json"
        ]  # fmt: skip


@pytest.mark.ranks(2)
def test_streams_of_ranks_and_an_occupied_directory(rank: RankContext) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(rank.rank, 5 - rank.rank, 2))  # 0, 2, 4 and 1, 3

    writer = PredictionWriter(rank.tmp_dir / "out")
    predict(Echo(), DataLoader(Stream(), batch_size=1), writer, strategy=D9DStrategy(), devices=2)
    assert read(rank.tmp_dir / "out").tolist() == [0, 10, 20, 30, 40]
    with pytest.raises(
        StateError, match="out': rank 0: it already exists and is not an empty directory; choose another"
    ):
        predict(Echo(), DataLoader(Stream()), writer, strategy=D9DStrategy(), devices=2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(pipeline_parallel=2, data_parallel_shard=2),
        MeshConfig(tensor_parallel=2, context_parallel_shard=2),
        MeshConfig(data_parallel_replicate=4),
    ],
    ids=["pp2 dp2", "tp2 cp2", "dp4"],
)
@pytest.mark.parametrize("share", [True, False])
def test_meshes_write_what_one_process_does(rank: RankContext, mesh: MeshConfig, share: bool) -> None:
    ids = torch.randint(32, (6, 8), generator=torch.Generator().manual_seed(3))
    loader: Any = DataLoader([{"input_ids": row} for row in ids], batch_size=2)  # type: ignore[arg-type]

    def write(folder: Path, **options: Any) -> Any:
        torch.manual_seed(0)
        module = Qwen3MoePretraining(CONFIG)
        module.share_predictions = share
        return predict(module, loader, PredictionWriter(folder), accelerator=rank.device.type, **options)

    L.seed_everything(0, verbose=False)
    write(rank.tmp_dir / "mesh", strategy=D9DStrategy(mesh=mesh, microbatch_size=1), devices=4)
    written = read(rank.tmp_dir / "mesh")
    assert written.shape == (6, 8, 32)
    module = Qwen3MoePretraining(CONFIG)
    L.seed_everything(0, verbose=False)
    module.configure_model()
    expected = module({"input_ids": ids}).logits
    assert_close_named("logits", written, expected, kind=Kind.OUTPUT)
