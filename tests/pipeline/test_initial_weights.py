"""Initial weights follow from seed and name alone: on every mesh the bits that one process has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_d9d import ConfigError
from lightning_d9d.mesh.sharding import local_ranges
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.modules import GroupedExperts, Linear, Normal
from lightning_d9d.ops.backend import Kernels, using_kernels
from lightning_d9d.pipeline import initial_weights
from lightning_d9d.pipeline.initial_weights import draw_local, materialize
from tests.harness.ranks import RankContext
from tests.mesh.fake_world import fake_world

CPU = torch.device("cpu")
CONFIG = Qwen3MoeConfig(
    vocab_size=93,  # uneven over any number of ranks
    hidden_size=20,
    intermediate_size=46,
    moe_intermediate_size=18,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=(0,),
    attention_bias=True,
    initializer_range=0.5,
)


class Rotary(nn.Module):
    """A buffer that is computed, and a parameter of torch's to draw."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(7))
        self.register_buffer("inv_freq", torch.empty(16), persistent=False)
        self.register_buffer("num_calls", torch.empty((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)
        self.inv_freq.copy_(10_000 ** (-torch.arange(0, 32, 2) / 32))
        self.num_calls: Tensor = torch.tensor(3)

    def expected_inv_freq(self) -> Tensor:
        return 10_000 ** (-torch.arange(0, 32, 2, dtype=torch.float32) / 32)


class Whole(nn.Module):
    """Our modules, and torch's, which are reset as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Qwen3MoeForCausalLM(CONFIG)
        self.foreign = nn.ModuleDict(
            {
                "linear": nn.Linear(13, 11),
                "embedding": nn.Embedding(19, 6, padding_idx=2),
                "attention": nn.MultiheadAttention(8, 2, add_bias_kv=True),
                "convolution": nn.Conv2d(5, 7, 3),
                "normalization": nn.BatchNorm1d(5),
                "rotary": Rotary(),
            }
        )
        self.tied = nn.Linear(20, 93)
        self.tied.weight = self.network.model.embed_tokens.weight


def on_meta(build: Callable[[], nn.Module] = Whole, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return build().to(dtype)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def initial(
    build: Callable[[], nn.Module] = Whole, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    module = on_meta(build, dtype)
    materialize(module, CPU, seed)
    return values(module)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name].cpu(), expected[name])]
    assert not different


# On many ranks


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placements: Callable[[str, Tensor], list[Placement]]) -> None:
    placed: dict[Tensor, nn.Parameter] = {}
    for prefix, submodule in module.named_modules():
        for key, parameter in list(submodule.named_parameters(recurse=False)):
            if parameter not in placed:
                where = placements(f"{prefix}.{key}", parameter)
                placed[parameter] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, where, src_data_rank=None))
            submodule.register_parameter(key, placed[parameter])


def shard_fully(module: Whole, mesh: DeviceMesh) -> None:
    for layer in module.network.model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def place_experts(dim: int) -> Callable[[nn.Module, DeviceMesh], None]:
    def place(module: nn.Module, mesh: DeviceMesh) -> None:
        shard_parameters(module, mesh, lambda name, _: [Shard(dim) if ".experts." in name else Replicate()])

    return place


def place_experts_then_shard_fully(module: Whole, world: DeviceMesh) -> None:
    """Two axes for experts, of which the inner one has less than an expert a rank; the rest over all ranks."""
    mesh = init_device_mesh(world.device_type, (world.size() // 2, 2), mesh_dim_names=("copies of experts", "experts"))
    experts = next(m for m in module.modules() if isinstance(m, GroupedExperts))
    shard_parameters(experts, mesh["experts"], lambda *_: [Shard(0)])
    fully_shard(experts, mesh=mesh["copies of experts"])
    shard_fully(module, world)


def place_columns_and_rows_then_shard_fully(module: Whole, world: DeviceMesh) -> None:
    """Shard columns and rows as tensor parallelism does, then fully. `fully_shard` makes strided shards of those along
    rows."""
    mesh = init_device_mesh(world.device_type, (world.size() // 2, 2), mesh_dim_names=("shards", "tensor"))

    def along_tp(name: str, parameter: Tensor) -> list[Placement]:
        down = ("o_proj.weight", "down_proj.weight", "embedding.weight")
        return [Shard(1) if name.endswith(down) else Shard(0) if parameter.ndim > 0 else Replicate()]

    del module.tied
    shard_parameters(module, mesh["tensor"], along_tp)
    shard_fully(module, mesh["shards"])


def shard_in_copies(module: Whole, world: DeviceMesh) -> None:
    shard_fully(module, init_device_mesh(world.device_type, (2, world.size() // 2), mesh_dim_names=("copy", "shard")))


LAYOUTS: dict[str, Callable[[Whole, DeviceMesh], None]] = {
    "fully sharded": shard_fully,
    "copies of shards": shard_in_copies,
    "experts along dim 0": place_experts(0),
    "experts along dim 1": place_experts(1),
    "experts along dim 2": place_experts(2),
    "experts, then fully sharded": place_experts_then_shard_fully,
    "tensor axis, then fully sharded": place_columns_and_rows_then_shard_fully,
}


def assert_layout_has_the_bits_of_one_process(rank: RankContext, layout: str) -> None:
    module = on_meta()
    assert isinstance(module, Whole)
    torch.manual_seed(rank.rank)
    LAYOUTS[layout](module, init_device_mesh(rank.device.type, (rank.world_size,), mesh_dim_names=("world",)))
    materialize(module, rank.device, 0)
    expected = initial()
    if layout.startswith("tensor"):
        del expected["tied.bias"]
    whole = {}
    for name, value in values(module).items():
        assert value.device.type == rank.device.type
        if isinstance(value, DTensor):
            whole[name] = value.full_tensor()
            where = tuple(slice(r.start, r.stop) for r in local_ranges(value))
            assert torch.equal(value.to_local().cpu(), expected[name][where]), name
        else:
            whole[name] = value
    assert sum(isinstance(value, DTensor) for value in values(module).values()) > 20
    assert_same(whole, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_the_bits_of_one_process(rank: RankContext, layout: str) -> None:
    assert_layout_has_the_bits_of_one_process(rank, layout)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_have_the_bits_of_one_process(rank: RankContext, layout: str) -> None:
    assert_layout_has_the_bits_of_one_process(rank, layout)


@pytest.mark.ranks(4)
def test_a_sharded_stage_computes_with_its_weights(rank: RankContext) -> None:
    """`fully_shard` has taken notice of the tensors that replaced those on the meta device."""

    def build() -> nn.Module:
        return nn.Sequential(Linear(7, 9, initializer_range=0.3), nn.Linear(9, 5))

    one, sharded = on_meta(build), on_meta(build)
    materialize(one, rank.device, 0)
    for layer in sharded:  # type: ignore[attr-defined]
        fully_shard(layer)
    fully_shard(sharded)
    materialize(sharded, rank.device, 0)
    x = torch.ones(3, 7, device=rank.device)
    for _ in range(2):
        ours, theirs = sharded(x), one(x)
        assert torch.equal(ours, theirs)
        for module, output in ((sharded, ours), (one, theirs)):
            output.sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.5).step()
            module.zero_grad()


# Any slice, of any rank


def ranges_of_all_ranks(
    world_size: int, shape: tuple[int, ...], place: Callable[[int], Tensor]
) -> list[tuple[list[range], Tensor]]:
    found = []
    for rank in range(world_size):
        with fake_world(rank, world_size):
            tensor = place(rank)
            assert tensor.shape == shape
            slices = []
            for kernels in get_args(Kernels):
                with using_kernels(kernels):
                    slices.append(draw_local(Normal(1.0), tensor, seed=0, name="w"))
            assert all(torch.equal(each, slices[0]) for each in slices)
            found.append((local_ranges(tensor), slices[0]))
    return found


@pytest.mark.parametrize("shape", [(5,), (1, 3), (93, 7), (128, 3), (5, 37, 3), (2, 3, 20, 3)], ids=str)
@pytest.mark.parametrize("placed", ["rows", "columns", "rows twice", "rows and columns", "strided", "strided stack"])
def test_slices_of_all_ranks_tile_the_whole(shape: tuple[int, ...], placed: str) -> None:
    ndim = len(shape)
    rows, columns = max(ndim - 2, 0), ndim - 1
    tensor = torch.empty(shape, device="meta")

    def place(rank: int) -> Tensor:
        dp, tp = f"dp of {rank}", f"tp of {rank}"  # DTensor remembers meshes by names, and of which rank they were
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=(dp, tp))
        match placed:
            case "strided" | "strided stack":
                dim = rows if placed == "strided" else 0
                module = nn.Module()
                module.w = nn.Parameter(distribute_tensor(tensor, mesh[tp], [Shard(dim)], src_data_rank=None))
                fully_shard(
                    module,
                    mesh=mesh[dp],
                    shard_placement_fn=None if dim == 0 else lambda _: Shard(dim),
                )
                assert hasattr(module.w.placements[0], "split_factor")  # type: ignore[union-attr, index]
                return module.w  # type: ignore[return-value]
            case "rows":
                placements = [Replicate(), Shard(rows)]
            case "columns":
                placements = [Shard(columns), Replicate()]
            case "rows twice":
                placements = [Shard(rows), Shard(rows)]
            case _:
                placements = [Shard(rows), Shard(columns)]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    if placed == "strided" and rows > 0 and shape[rows] % 8:
        with pytest.raises(NotImplementedError, match="uneven sharding"), fake_world(0, 8):
            place(0)
        return
    whole = draw_local(Normal(1.0), tensor, seed=0, name="w")
    covered = torch.zeros(shape, dtype=torch.int)
    for ranges, local in ranges_of_all_ranks(8, shape, place):
        where = tuple(slice(r.start, r.stop) for r in ranges)
        assert torch.equal(local, whole[where])
        covered[where] += 1
    copies = 4 if placed == "rows" else 2 if placed == "columns" else 1
    if ndim == 1 and placed == "rows and columns":
        copies = 1
    assert (covered == copies).all()


def test_a_rank_draws_no_more_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 ranks has one of 64 experts, some rows of the vocabulary, or some columns, which lie apart."""
    drawn = 0

    class Counted(np.random.Philox):
        def random_raw(self, size: int) -> Any:  # type: ignore[override]
            nonlocal drawn
            drawn += size
            return super().random_raw(size)

    monkeypatch.setattr(np.random, "Philox", Counted)

    def place(module: nn.Module, dim: int = 0) -> tuple[int, int]:
        nonlocal drawn
        with fake_world(37, 64):
            shard_parameters(module, init_device_mesh("cpu", (64,)), lambda *_: [Shard(dim)])
            drawn = 0
            materialize(module, CPU, 0)
        return drawn, sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))

    numbers, held = place(on_meta(lambda: GroupedExperts(64, 8, 5, initializer_range=1.0)))
    assert numbers == held == 8 * 5 * 3
    numbers, held = place(on_meta(lambda: Linear(4, 64 * 16, initializer_range=1.0)))
    assert numbers == held == 4 * 16
    numbers, held = place(on_meta(lambda: Linear(64 * 32, 5, initializer_range=1.0)), dim=1)
    assert numbers == held == 32 * 5


def test_a_slice_does_not_keep_the_whole() -> None:
    """This also holds for a layer that was drawn as a whole."""
    module = on_meta(lambda: nn.Linear(9, 30))
    with fake_world(3, 4):
        shard_parameters(module, init_device_mesh("cpu", (4,)), lambda *_: [Shard(0)])
        materialize(module, CPU, 0)
        local = [p.to_local() for p in module.parameters() if isinstance(p, DTensor)]
    assert [tuple(part.shape) for part in local] == [(6, 9), (6,)]
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in local)


def test_experts_are_matrices_of_their_own() -> None:
    """No two are alike, and an expert does not depend on the number of experts."""
    few, many = (initial(lambda n=n: GroupedExperts(n, 33, 40, initializer_range=1.0))["gate_up_proj"] for n in (3, 64))
    assert torch.equal(few, many[:3])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(many[:, 0, :8], 2))
    assert len(many.flatten(0, 1)[:, :8].unique(dim=0)) == 64 * 80


# What they depend on


def test_seed_and_name_decide() -> None:
    one, other = initial(seed=0), initial(seed=1)
    same = {name for name in one if torch.equal(one[name], other[name])}
    constant = {name for name in one if (one[name] == one[name].flatten()[0]).all() or name.endswith("inv_freq")}
    assert same == constant
    assert {"network.model.layers.0.self_attn.q_proj.weight", "foreign.linear.bias"} <= one.keys() - same
    drawn = [one[name].flatten()[:5].tolist() for name in one.keys() - same if one[name].numel() >= 5]
    assert len({tuple(row) for row in drawn}) == len(drawn)  # no name starts as another


def test_torchs_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    one = initial()
    torch.manual_seed(2)
    torch.rand(3)
    before = torch.get_rng_state()
    assert_same(initial(), one)
    assert torch.equal(torch.get_rng_state(), before)


class Backwards(Whole):
    """The same parts, made and listed in another order."""

    def __init__(self) -> None:
        super().__init__()
        modules, foreign = dict(reversed(self._modules.items())), self.foreign
        foreign._modules = dict(reversed(foreign._modules.items()))
        self._modules = {"network": modules.pop("network"), **modules}


def test_order_and_neighbours_do_not_matter() -> None:
    assert_same(dict(sorted(initial(Backwards).items())), dict(sorted(initial().items())))


def test_a_later_stage_has_the_layers_of_the_whole_model() -> None:
    def last() -> nn.Module:
        whole = Whole()
        del whole.network.model.layers["0"], whole.network.model.embed_tokens, whole.foreign, whole.tied
        return whole

    whole, stage = initial(), initial(last)
    assert 10 < len(stage) < len(whole) / 2
    assert_same(stage, {name: whole[name] for name in stage})


def test_wrappers_of_recomputing_and_compiling_have_no_name() -> None:
    def wrapped() -> nn.Module:
        whole = Whole()
        layers = whole.network.model.layers
        layers["0"] = checkpoint_wrapper(layers["0"])
        layers["1"] = torch.compile(layers["1"])  # type: ignore[assignment]
        whole.foreign["linear"] = checkpoint_wrapper(whole.foreign["linear"])
        return whole

    found = {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): value
        for name, value in initial(wrapped).items()
    }
    assert_same(found, initial())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_float32_cast(dtype: torch.dtype) -> None:
    expected = {name: v.to(dtype) if v.is_floating_point() else v for name, v in initial().items()}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as precision="bf16-true" does while a model is built
    try:
        found = initial(dtype=dtype)
    finally:
        torch.set_default_dtype(default)
    if dtype == torch.float64:  # buffers are computed in it
        name = "foreign.rotary.inv_freq"
        torch.testing.assert_close(found.pop(name), expected.pop(name), rtol=1e-6, atol=0)
    assert_same(found, expected)


@pytest.mark.gpu
def test_a_gpu_has_the_bits_of_the_cpu() -> None:
    module = on_meta()
    materialize(module, torch.device("cuda"), 0)
    assert all(value.is_cuda for value in values(module).values())
    assert_same(values(module), initial())


def test_the_stream_of_a_seed_is_pinned() -> None:
    """Runs can be repeated by a later version only if these stay."""
    row = draw_local(Normal(1.0), torch.empty(3, 40, 4), seed=5, name="model.w")[2, 20]
    assert row.tolist() == PINNED


PINNED = [0.2783142030239105, -1.1244750022888184, -0.9448822140693665, -0.15474833548069]


# What they are


@pytest.mark.parametrize(
    "shape", [(1, 40_000), (40_000, 1), (20_000, 2), (50, 20, 40), (40_000,), (3, 13_331)], ids=str
)
def test_normal_whatever_the_shape(shape: tuple[int, ...]) -> None:
    x = draw_local(Normal(0.02), torch.empty(shape), seed=0, name="w").double() / 0.02
    n = x.numel()
    assert abs(x.mean()) < 4 / n**0.5
    assert abs(x.std() - 1) < 4 / (2 * n) ** 0.5
    assert abs((x**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 2.94) < 4 * (96 / n) ** 0.5
    flat = x.flatten()
    for lag in (1, 2, 3, 4, 5, 16, shape[-1], 16 * shape[-1]):
        if lag < n // 2:
            assert abs((flat[lag:] * flat[:-lag]).mean()) < 4 / (n - lag) ** 0.5


def test_every_part_starts_as_its_class_says() -> None:
    for name, value in initial().items():
        if name.startswith("network."):
            if name.endswith("norm.weight"):
                assert (value == 1).all(), name
            elif name.endswith("bias"):
                assert (value == 0).all(), name
            else:
                assert abs(value.std() / CONFIG.initializer_range - 1) < 4 / (2 * value.numel()) ** 0.5, name
    rest = initial()
    assert (rest["foreign.embedding.weight"][2] == 0).all()
    assert (rest["foreign.attention.out_proj.bias"] == 0).all()  # set by the parent, the child draws it
    bound = 13**-0.5
    assert bound * 0.95 < rest["foreign.linear.weight"].abs().max() <= bound
    assert abs(rest["foreign.linear.weight"].mean()) < 4 * bound / (3 * 13 * 11) ** 0.5
    assert torch.equal(rest["foreign.rotary.inv_freq"], Rotary().expected_inv_freq())
    assert rest["foreign.rotary.num_calls"] == 3
    assert (rest["foreign.normalization.running_var"] == 1).all()


def test_tied_tensors_stay_tied() -> None:
    module = on_meta()
    assert isinstance(module, Whole)
    materialize(module, CPU, 0)
    embedding = module.network.model.embed_tokens.weight
    assert module.tied.weight is embedding
    assert torch.equal(embedding, draw_local(Normal(0.5), embedding, seed=0, name="network.model.embed_tokens.weight"))
    assert module.tied.bias.abs().max() > 0  # drawn by a reset that draws the shared weight as well


def test_a_submodule_at_two_places_has_the_first_name() -> None:
    def shared() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.ModuleDict({"a": layer, "b": layer})

    module = on_meta(shared)
    materialize(module, CPU, 0)
    assert module.a is module.b  # type: ignore[union-attr]
    assert_same(values(module), initial(lambda: nn.ModuleDict({"a": nn.Linear(4, 4)})))


def test_requires_grad_and_storage_are_as_asked() -> None:
    def frozen() -> nn.Module:
        module = nn.ModuleDict({"a": nn.Linear(3, 4), "b": Linear(3, 4, initializer_range=1.0)})
        for part in module.values():
            part.weight.requires_grad_(False)  # type: ignore[union-attr]
        return module

    module = on_meta(frozen)
    materialize(module, CPU, 0)
    assert {name: p.requires_grad for name, p in module.named_parameters()} == {
        "a.weight": False,
        "a.bias": True,
        "b.weight": False,
    }
    assert all(p.is_leaf and p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


def test_pretrained_tensors_keep_their_values() -> None:
    module = on_meta(
        lambda: nn.ModuleDict({"theirs": nn.Linear(3, 4), "ours": Linear(3, 4, bias=True, initializer_range=1.0)})
    )
    for part in module.values():  # type: ignore[operator]
        part.weight = nn.Parameter(torch.full((4, 3), 7.0))
    kept = {name: part.weight for name, part in module.items()}  # type: ignore[operator]
    materialize(module, CPU, 0)
    for name, part in module.items():  # type: ignore[operator]
        assert part.weight is kept[name]
        assert (part.weight == 7).all()
    expected = initial(lambda: nn.ModuleDict({"theirs": nn.Linear(3, 4)}))
    assert torch.equal(module.theirs.bias, expected["theirs.bias"])  # type: ignore[union-attr, arg-type]


# Classes


class Doubled(Linear):
    """Overrides what the declared values would have been."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)


class DoubledAgain(Doubled):
    def initial_values(self):
        return {"weight": Normal(3.0)}


def test_the_more_derived_class_decides() -> None:
    assert (initial(lambda: Doubled(3, 4, initializer_range=1.0))["weight"] == 2).all()
    again = initial(lambda: DoubledAgain(30, 40, initializer_range=1.0))["weight"]
    assert abs(again.std() - 3) < 0.4


def test_values_that_nobody_gives_are_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.scale = nn.Parameter(torch.ones(4))

    class OursScaled(Linear):
        def __init__(self) -> None:
            super().__init__(3, 4, initializer_range=1.0)
            self.scale = nn.Parameter(torch.ones(4))

    for build, message in (
        (Bare, r"'part' \(Bare\) owns scale on the meta device but lacks a reset_parameters\(\)"),
        (Scaled, r"reset_parameters\(\) of submodule 'part' \(Scaled\) does not set 'scale'"),
        (OursScaled, r"initial_values\(\) of submodule 'part' \(OursScaled\) lacks 'scale'"),
    ):
        with pytest.raises(ConfigError, match=message):
            initial(lambda build=build: nn.ModuleDict({"part": build()}))


def test_a_long_start_says_once_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    initial()
    assert not caplog.records
    monkeypatch.setattr(initial_weights, "LONG_S", -1.0)
    initial()
    assert [record.getMessage() for record in caplog.records] == [MESSAGE]


MESSAGE = "initial weights: 0.00 B of 0.00 B values of this rank after 0 s; the rest follows"
