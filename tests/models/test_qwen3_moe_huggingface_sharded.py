"""Directories of sharded models and of pipeline stages: what many ranks read and write is what one process does."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_d9d.callbacks import HuggingFaceExport
from lightning_d9d.errors import StateError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoePretraining,
    load_huggingface,
    save_huggingface,
)
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.state import writer
from lightning_d9d.state.format import StoredTensor
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind

CONFIG = Qwen3MoeConfig(
    vocab_size=93,  # uneven over any number of ranks
    hidden_size=20,
    intermediate_size=46,
    moe_intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=(1,),
    attention_bias=True,
    initializer_range=0.2,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "split": {"vocab_splits": {"text": 80, "special": 13}},
    "tied and split": {"tie_word_embeddings": True, "vocab_splits": {"text": 80, "special": 13}},
    "dense and tied": {"num_experts": 0, "mlp_only_layers": (), "tie_word_embeddings": True},
}


def make_model(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(dataclasses.replace(CONFIG, **changes))
    for parameter in model.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """What one process writes, in several files."""
    save_huggingface(make_model(), tmp_path / "one", max_shard_bytes=40_000)
    return tmp_path / "one"


def count_reads() -> Callable[[], int]:
    """Count the elements that this rank reads from files from now on. A call of the result returns the number and ends
    it."""
    original, num_read = StoredTensor._read, 0

    def counted(stored: StoredTensor, picked: Tensor, *room: Any) -> Tensor:
        nonlocal num_read
        num_read += picked.numel()
        return original(stored, picked, *room)

    def answer() -> int:
        StoredTensor._read = original  # type: ignore[method-assign]
        return num_read

    StoredTensor._read = counted  # type: ignore[method-assign]
    return answer


def tensors_of(directory: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    assert sum(map(len, files)) == len({name for file in files for name in file}), "a name in two files"
    return {name: tensor for file in files for name, tensor in file.items()}


def assert_same_directory(actual: Path, expected: Path) -> None:
    """Equal but for which tensor is in which file."""
    theirs = tensors_of(expected)
    ours = tensors_of(actual)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert_bitwise_equal(name, tensor, theirs[name])
    for file in ("config.json", "generation_config.json"):
        assert (actual / file).read_text() == (expected / file).read_text()
    index = actual / "model.safetensors.index.json"
    if index.exists():
        values = json.loads(index.read_text())
        assert values["metadata"]["total_size"] == sum(tensor.nbytes for tensor in ours.values())
        for name, file in values["weight_map"].items():
            with safe_open(actual / file, framework="pt") as opened:
                assert name in opened.keys()  # noqa: SIM118
        assert values["weight_map"].keys() == ours.keys()


def assert_same_files(actual: Path, expected: Path) -> None:
    """Byte for byte."""
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in actual.iterdir()) == names
    for name in names:
        assert (actual / name).read_bytes() == (expected / name).read_bytes(), name


@contextmanager
def counted_writes() -> Iterator[list[int]]:
    """The number of bytes of each safetensors file that this rank writes."""
    original, written = writer.write_safetensors, list[int]()

    def count(path: Any, *contents: Any) -> dict[str, int]:
        sums = original(path, *contents)
        written.append(path.stat().st_size)
        return sums

    writer.write_safetensors = count
    try:
        yield written
    finally:
        writer.write_safetensors = original


def assert_same_weights(actual: nn.Module, expected: Qwen3MoeForCausalLM) -> None:
    """Compare weights; of a stage, those that it has."""
    for name, parameter in actual.named_parameters():
        assert_bitwise_equal(name, parameter, expected.get_parameter(name).to(parameter.dtype))


# Placements


def place(
    module: nn.Module, mesh: DeviceMesh, placements: Callable[[str, Tensor], list[Placement]], prefix: str = ""
) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        where = placements(prefix + key, parameter)
        sharded = distribute_tensor(parameter.detach(), mesh, where, src_data_rank=None)
        module.register_parameter(key, nn.Parameter(sharded))
    for key, child in module.named_children():
        place(child, mesh, placements, f"{prefix}{key}.")


def shard_fully(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def along_tensor_axis(name: str, parameter: Tensor) -> list[Placement]:
    return [Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")) else Shard(0)]


def fully_sharded(model: nn.Module, domains: MeshDomains) -> None:
    shard_fully(model, domains.for_axes("dp_replicate", "dp_cp_shard"))


def tensor_axis(model: nn.Module, domains: MeshDomains) -> None:
    """Some parameters are cut along rows, some along columns, and norms are whole."""
    mesh = domains.for_axes("tp", domain="dense")
    place(model, mesh, lambda name, p: [Replicate()] if "norm" in name else along_tensor_axis(name, p))


def tensor_axis_then_fully_sharded(model: nn.Module, domains: MeshDomains) -> None:
    """Shard over the tensor axis, then fully. Tensors that were sharded along rows get strided shards."""
    place(model, domains.for_axes("tp", domain="dense"), along_tensor_axis)
    shard_fully(model, domains.for_axes("dp_replicate", "dp_cp_shard"))


def rows_and_columns(model: nn.Module, domains: MeshDomains) -> None:
    place(model, domains.for_axes("dp_cp_shard", "tp"), lambda _, p: [Shard(0), Shard(p.ndim - 1)])


def experts_only(model: nn.Module, domains: MeshDomains) -> None:
    """All else is plain. On four ranks the last has no expert."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            place(module, domains.expert["ep_shard"], lambda *_: [Shard(0)])


def experts_then_fully_sharded(model: nn.Module, domains: MeshDomains, rows: bool = False) -> None:
    experts_only(model, domains)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            shard_rows = (lambda _: Shard(1)) if rows else None
            fully_shard(module, mesh=domains.expert["ep_replicate"], shard_placement_fn=shard_rows)
    shard_fully(model, domains.for_axes("dp_replicate", "dp_cp_shard"))


def experts_then_rows_fully_sharded(model: nn.Module, domains: MeshDomains) -> None:
    experts_then_fully_sharded(model, domains, rows=True)


Layout = tuple[MeshConfig, Callable[[nn.Module, MeshDomains], None]]
SHARDS: Layout = (MeshConfig(data_parallel_shard=-1), fully_sharded)
STAGES_OF_SHARDS: Layout = (MeshConfig(pipeline_parallel=2, data_parallel_shard=2), fully_sharded)
ON_FOUR: dict[str, Layout] = {
    "shards": SHARDS,
    "copies of shards": (MeshConfig(data_parallel_replicate=2, data_parallel_shard=2), fully_sharded),
    "tensor": (MeshConfig(tensor_parallel=4), tensor_axis),
    "tensor, shards": (MeshConfig(data_parallel_shard=2, tensor_parallel=2), tensor_axis_then_fully_sharded),
    "rows and columns": (MeshConfig(data_parallel_shard=2, tensor_parallel=2), rows_and_columns),
    "experts": (MeshConfig(data_parallel_shard=4, expert_parallel=4), experts_only),
    "experts, shards": (MeshConfig(data_parallel_shard=4, expert_parallel=2), experts_then_fully_sharded),
    "experts, rows": (MeshConfig(data_parallel_shard=4, expert_parallel=2), experts_then_rows_fully_sharded),
}


@contextmanager
def sharded(rank: RankContext, model: nn.Module, layout: Layout = SHARDS) -> Iterator[Any]:
    """The model on the rank's device, cut in place."""
    config, cut = layout
    domains = MeshDomains.build(config, rank.device.type)
    try:
        cut(model.to(rank.device), domains)
        yield model
    finally:
        domains.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ON_FOUR)
def test_four_ranks_read_and_write_as_one_process(rank: RankContext, layout: str, one: Path) -> None:
    with sharded(rank, make_model(seed=rank.rank + 1), ON_FOUR[layout]) as model:
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        load_huggingface(model, one)
        assert_same_weights(model, make_model())
        with counted_writes() as written:
            save_huggingface(model, rank.tmp_dir / "many", max_shard_bytes=40_000)
    assert_same_files(rank.tmp_dir / "many", one)
    num_bytes = rank.all_gather_object(sum(written))
    assert max(num_bytes) < 0.4 * sum(num_bytes)


@pytest.mark.ranks(2)
def test_a_sharded_model_computes_with_the_weights(rank: RankContext, one: Path) -> None:
    """`fully_shard` gathers what was read, also after it has gathered other values."""
    ids = torch.arange(40, device=rank.device).view(2, 20)
    with sharded(rank, make_model(seed=1)) as model:
        model(ids).logits.sum().backward()
        load_huggingface(model, one)
        expected = make_model().to(rank.device)(ids).logits
        assert_close_named("logits", model(ids).logits, expected, kind=Kind.OUTPUT)


@pytest.mark.ranks(4)
def test_no_rank_reads_more_than_it_holds(rank: RankContext, one: Path) -> None:
    num_read = count_reads()
    with sharded(rank, make_model(seed=1), ON_FOUR["experts, shards"]) as model:
        load_huggingface(model, one, verify=False)
        assert_same_weights(model, make_model())
        num_held = sum(p.to_local().numel() for p in model.parameters())
    assert num_read() <= num_held
    # What two ranks hold alike one of them reads.
    assert sum(rank.all_gather_object(num_read())) == sum(p.numel() for p in make_model().parameters())


@pytest.mark.ranks(4)
def test_copies_read_the_files_once(rank: RankContext, one: Path) -> None:
    num_read = count_reads()
    model = make_model(seed=1).to(rank.device)
    load_huggingface(model, one, verify=False)
    assert_same_weights(model, make_model())
    total = sum(p.numel() for p in model.parameters())
    shares = rank.all_gather_object(num_read())
    assert sum(shares) == total
    assert max(shares) < 0.4 * total


@pytest.mark.ranks(2)
def test_casts_as_one_process_does(rank: RankContext, tmp_path: Path) -> None:
    whole = make_model()
    save_huggingface(whole, tmp_path / "bf16", dtype=torch.bfloat16)
    save_huggingface(whole.bfloat16().float(), tmp_path / "fp16", dtype=torch.float16)
    with sharded(rank, make_model(seed=1)) as model:
        load_huggingface(model, tmp_path / "bf16")
        assert_same_weights(model, whole)
        save_huggingface(model, tmp_path / "many", dtype=torch.float16)
        assert_same_files(tmp_path / "many", tmp_path / "fp16")
    with sharded(rank, make_model(seed=1).bfloat16()) as half:
        load_huggingface(half, tmp_path / "many")
        assert_same_weights(half, whole.half().bfloat16())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["experts, shards", "experts, rows"])
def test_fused_experts(rank: RankContext, layout: str, tmp_path: Path) -> None:
    whole = make_model().state_dict()
    if rank.rank == 0:
        save_file(whole, tmp_path / "model.safetensors")
    rank.barrier()
    with sharded(rank, make_model(seed=1), ON_FOUR[layout]) as model:
        load_huggingface(model, tmp_path)
        assert_same_weights(model, make_model())
        save_huggingface(model, tmp_path / "many", fused_experts=True)
    written = tensors_of(tmp_path / "many")
    assert written.keys() == whole.keys()
    for name, tensor in whole.items():
        assert_bitwise_equal(name, written[name], tensor)


# Stages


def make_stage(index: int, num_stages: int = 2, seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """Return a stage with the values of `make_model` of the same seed."""
    whole = make_model(seed, **changes)
    stage = Qwen3MoeForCausalLM(whole.config, StageInfo(index, num_stages))
    stage.load_state_dict({name: whole.get_parameter(name) for name in stage.state_dict()})
    return stage


@pytest.mark.ranks(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_stages_of_two_shards(rank: RankContext, variant: str, tmp_path: Path) -> None:
    changes = VARIANTS[variant]
    save_huggingface(make_model(**changes), tmp_path / "one", max_shard_bytes=20_000)
    with sharded(rank, make_stage(rank.rank // 2, seed=1, **changes), STAGES_OF_SHARDS) as stage:
        load_huggingface(stage, tmp_path / "one")
        assert_same_weights(stage, make_model(**changes))
        with counted_writes() as written:
            save_huggingface(stage, tmp_path / "many", max_shard_bytes=20_000)
    assert_same_files(tmp_path / "many", tmp_path / "one")
    assert all(rank.all_gather_object(written))
    if rank.rank == 0 and "split" not in variant:
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
        ids = torch.arange(40).view(2, 20)
        assert_close_named("logits", make_model(**changes)(ids).logits, reference(ids).logits, kind=Kind.OUTPUT)
    rank.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("variant", ["plain", "tied", "dense and tied"])
@pytest.mark.parametrize("on_rank", [((0, 2), (1,)), ((0, 1), (2,))], ids=["first and last", "neighbours"])
def test_several_stages_on_a_rank(
    rank: RankContext, on_rank: tuple[tuple[int, ...], ...], variant: str, tmp_path: Path
) -> None:
    changes = VARIANTS[variant]
    save_huggingface(make_model(**changes), tmp_path / "one")
    stages = nn.ModuleList(make_stage(index, 3, seed=1, **changes) for index in on_rank[rank.rank])
    load_huggingface(stages, tmp_path / "one")  # type: ignore[arg-type]
    for stage in stages:
        assert_same_weights(stage, make_model(**changes))
    save_huggingface(list(stages), tmp_path / "many")
    assert_same_files(tmp_path / "many", tmp_path / "one")


def test_a_stage_alone_is_loaded_but_not_saved(one: Path) -> None:
    """The stage is in one process, as in a notebook."""
    stage = make_stage(1, seed=1)
    load_huggingface(stage, one)
    assert_same_weights(stage, make_model())
    with pytest.raises(StateError, match=r"the ranks do not hold all of model\.embed_tokens\.weight"):
        save_huggingface(stage, one.parent / "new")
    assert list(one.parent.iterdir()) == [one]


@pytest.mark.ranks(2)
def test_the_lightning_module_starts_from_pretrained_weights(rank: RankContext, one: Path) -> None:
    module = Qwen3MoePretraining(CONFIG, pretrained=str(one))
    module.configure_model()
    assert_same_weights(module.model, make_model())
    HuggingFaceExport(rank.tmp_dir / "export").on_fit_end(None, module)  # type: ignore[arg-type]
    assert_same_directory(rank.tmp_dir / "export", one)


# What fails on one rank fails on all


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def reshape(path: Path) -> None:
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": torch.zeros(21)}, path)


def quantize(path: Path) -> None:
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": torch.zeros(20).to(torch.float8_e4m3fn)}, path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "cannot be read"),
        (os.remove, "cannot be read"),
        (reshape, r"model\.norm\.weight has shape \(21,\)"),
        (quantize, "F8_E4M3"),
    ],
    ids=["truncated", "removed", "other shape", "quantized"],
)
def test_a_file_that_only_the_second_stage_reads(
    rank: RankContext, damage: Callable[[Path], None], message: str, one: Path
) -> None:
    path = next(path for path in one.glob("*.safetensors") if is_in(path, "model.norm.weight"))
    rank.barrier()
    if rank.rank == 0:
        damage(path)
    rank.barrier()
    stage = make_stage(rank.rank, seed=1)
    with pytest.raises(StateError, match=message) as error:
        load_huggingface(stage, one)
    assert path.name in str(error.value)
    assert ": rank 1: " in str(error.value)
    assert_same_weights(stage, make_model(seed=1))


def is_in(path: Path, name: str) -> bool:
    with safe_open(path, framework="pt") as file:
        return name in file.keys()  # noqa: SIM118


@pytest.mark.ranks(2)
def test_names_that_belong_to_no_stage(rank: RankContext, one: Path) -> None:
    index = one / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.layers.3.mlp.up_proj.weight"] = values["weight_map"].pop("model.norm.weight")
    rank.barrier()
    if rank.rank == 0:
        index.write_text(json.dumps(values))
    rank.barrier()
    with pytest.raises(
        StateError,
        match=r"1 missing in the files: model\.norm.*1 unexpected in the files: model\.layers\.3\.mlp\.up_proj",
    ):
        load_huggingface(make_stage(rank.rank), one)


@pytest.mark.ranks(2)
def test_a_head_of_its_own_is_noticed_in_any_shard(rank: RankContext, tmp_path: Path) -> None:
    """A rank compares the rows that it reads."""
    tensors = {name: tensor.clone() for name, tensor in make_model(tie_word_embeddings=True).state_dict().items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    if rank.rank == 0:
        save_file(tensors, tmp_path / "model.safetensors")
    rank.barrier()
    with (
        sharded(rank, make_model(tie_word_embeddings=True)) as model,
        pytest.raises(StateError, match="tie_word_embeddings=False") as error,
    ):
        load_huggingface(model, tmp_path)
    assert ": rank 1: " in str(error.value)


@pytest.mark.ranks(2)
def test_meta_parameters_on_one_rank(rank: RankContext, one: Path) -> None:
    model = make_model()
    if rank.rank == 1:
        model.to("meta")
    for call in (load_huggingface, save_huggingface):
        with pytest.raises(StateError, match="to_empty"):
            call(model, one)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("moment", ["at the start", "at the end"])
def test_a_full_disk_on_one_rank(rank: RankContext, moment: str) -> None:
    """Rank 2 writes for rank 3, which does not wait for it; ranks 0 and 1 are another stage."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner, name = (os, "fsync") if moment == "at the end" else (Path, "open")
    original = getattr(owner, name)
    with sharded(rank, make_stage(rank.rank // 2), STAGES_OF_SHARDS) as stage:
        if rank.rank == 2:
            setattr(owner, name, full)
        try:
            with pytest.raises(StateError, match="No space left on device; free space") as error:
                save_huggingface(stage, rank.tmp_dir / "many", max_shard_bytes=40_000)
        finally:
            setattr(owner, name, original)
        assert str(error.value).startswith(f"weights cannot be saved to {str(rank.tmp_dir / 'many')!r}: rank 2: ")
        rank.barrier()
        assert list(rank.tmp_dir.iterdir()) == []
        save_huggingface(stage, rank.tmp_dir / "many")
    rank.barrier()
    assert [path.name for path in rank.tmp_dir.iterdir()] == ["many"]


@pytest.mark.ranks(2)
def test_an_existing_directory_is_refused_on_all_ranks(rank: RankContext, one: Path) -> None:
    with pytest.raises(StateError, match="overwrite=True"):
        save_huggingface(make_model(), one)
    save_huggingface(make_model(seed=1), one, overwrite=True)
    model = make_model()
    load_huggingface(model, one)
    assert_same_weights(model, make_model(seed=1))


@pytest.mark.ranks(2)
def test_shards_that_are_no_whole(rank: RankContext) -> None:
    """A parameter of one rank is a shard, of a mesh whose other rank has none."""
    mesh = init_device_mesh(rank.device.type, (2,))
    stage = make_stage(rank.rank).to(rank.device)
    if rank.rank == 1:
        norm = stage.model.norm
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Shard(0)], src_data_rank=None))
    with pytest.raises(StateError, match=r"the ranks hold 10 elements of model\.norm\.weight.*it has 20"):
        save_huggingface(stage, rank.tmp_dir / "many")
    rank.barrier()
    assert list(rank.tmp_dir.iterdir()) == []
