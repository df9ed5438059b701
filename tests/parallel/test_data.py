"""What is gathered together, where it is cut, and when it is reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from lightning_d9d import BlockSequence, ConfigError, MeshConfig, MeshDomains, ParallelConfig, StageInfo
from lightning_d9d.parallel import blocks_of, shard_data, weight_mesh
from lightning_d9d.parallel.data import FullySharded, as_unit, settings, shard_dim
from lightning_d9d.parallel.fsdp import forget_forward
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext


class Only(nn.ModuleDict):
    """A dictionary that is a block itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self["only"](x)


class Tower(nn.Module):
    """Blocks in a list and in a dictionary, one level down; a nested list is a block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Module()
        self.middle.listed = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])[0]), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"7": Only({"only": nn.Linear(4, 4)})})

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, *self.middle.listed, *self.named.values()):  # type: ignore[misc]
            x = block(x).tanh()
        return x


def test_blocks_are_the_entries_of_the_outermost_lists() -> None:
    tower = Tower()
    assert blocks_of(tower) == [*tower.middle.listed, tower.named["7"]]  # type: ignore[misc]
    assert blocks_of(tower, ["Sequential"]) == [tower.middle.listed[0]]  # type: ignore[index]
    with pytest.raises(
        ConfigError, match=r"shard_blocks=\['Sequential', 'Layer'\]: the module has no Layer; its parts"
    ):
        blocks_of(tower, ["Sequential", "Layer"])


def test_a_stage_that_runs_its_entries_has_them_as_blocks() -> None:
    """Whatever lists they have themselves. One that does not run them is looked through."""
    sequence = BlockSequence([nn.Linear(4, 4), Tower()], StageInfo(0, 1))
    assert blocks_of(sequence) == [sequence["0"], sequence["1"]]
    tower = Tower()
    assert blocks_of(nn.ModuleDict({"first": nn.Linear(4, 4), "tower": tower})) == blocks_of(tower)


@pytest.mark.parametrize(
    ("dims", "num_shards", "dim"),
    [((8, 6), 4, 0), ((3, 8), 4, 1), ((3, 6), 4, 0), ((3,), 4, 0), ((1, 4, 5), 2, 1), ((2, 4, 5), 2, 0)],
)
def test_dim_1_is_cut_where_dim_0_runs_out_and_it_divides(dims: tuple[int, ...], num_shards: int, dim: int) -> None:
    assert shard_dim(dims, num_shards) == dim


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float64, {}, (None, torch.float64)),
        (torch.float32, {}, (None, torch.float32)),
        (torch.bfloat16, {}, (None, torch.float32)),
        (torch.float32, {"gather_dtype": "bfloat16"}, (torch.bfloat16, torch.float32)),
        (torch.bfloat16, {"reduce_dtype": "bfloat16"}, (None, torch.bfloat16)),
    ],
)
def test_dtypes_of_messages(dtype: torch.dtype, options: dict[str, Any], expected: tuple[Any, Any]) -> None:
    policy = settings(nn.Linear(2, 2, dtype=dtype), ParallelConfig(**options))["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reshard_after_forward": "never"}, "reshard_after_forward='never' must be one of True, False, 'auto'"),
        ({"recompute": "every_0"}, "recompute='every_0' must be"),
        ({"expert_dispatch": "fast"}, "expert_dispatch='fast' must be one of"),
        ({"overlap_experts": "yes"}, "overlap_experts='yes' must be one of True, False"),
        ({"overlap_experts": True, "compile": True}, "compile=True with overlap_experts=True"),
        ({"overlap_pairs": 1.5}, "overlap_pairs=1.5 must be one of True, False"),
        ({"overlap_pairs": True, "overlap_experts": True}, "overlap_pairs=True with overlap_experts=True"),
        ({"overlap_pairs": True, "expert_dispatch": "peer"}, "overlap_pairs=True with expert_dispatch='peer'"),
        ({"overlap_pairs": True, "compile": True}, "overlap_pairs=True with compile=True"),
        ({"overlap_pairs": True, "cuda_graphs": True}, "overlap_pairs=True with cuda_graphs=True"),
        ({"overlap_pairs": True, "recompute": "offload"}, "overlap_pairs=True with recompute='offload'"),
        ({"gather_dtype": "float16"}, "gather_dtype='float16' must be one of"),
        ({"shard_blocks": "Block"}, "shard_blocks='Block' must be a list"),
        ({"shard_blocks": ()}, "must be a list"),
    ],
)
def test_configurations_that_say_nothing(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ParallelConfig(**options)


def towers(rank: RankContext, **options: Any) -> tuple[Tower, Tower]:
    """A sharded one, and the same whole."""
    torch.manual_seed(0)
    whole = Tower().to(rank.device, torch.float64)
    torch.manual_seed(0)
    tower = Tower().to(rank.device, torch.float64)
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    shard_data(tower, blocks_of(tower), domains, ParallelConfig(**options))
    domains.close()
    return tower, whole


def rows(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "let go"])
@pytest.mark.parametrize("reduces_each", [True, False], ids=["each", "last"])
def test_gradients_are_sums_over_microbatches_and_ranks(rank: RankContext, keeps: bool, reduces_each: bool) -> None:
    tower, whole = towers(rank)
    stage = FullySharded(tower, keeps=keeps, reduces_each=reduces_each)
    for window in range(2):
        tower.zero_grad()
        whole.zero_grad()
        stage.begin(is_first=True, reduces=True, splits_backward=False)
        stage.unshard()
        for microbatch in range(3):
            loss = tower(rows(rank.rank, 3 * window + microbatch).to(rank.device)).square().sum()
            if microbatch == 2:
                stage.last_backward()
            loss.backward()
            for each in range(2):
                whole(rows(each, 3 * window + microbatch).to(rank.device)).square().sum().backward()
        stage.reduce()
        for (name, ours), (_, theirs) in zip(tower.named_parameters(), whole.named_parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            assert theirs.grad is not None
            assert_close_named(name, ours.grad.full_tensor(), theirs.grad)


@pytest.mark.ranks(2)
def test_a_kept_stage_is_gathered_and_reduced_once_a_batch(rank: RankContext) -> None:
    tower, _ = towers(rank)
    stage = FullySharded(tower, keeps=True, reduces_each=False)
    calls: list[str] = []

    def counted(name: str) -> Any:
        call = getattr(_fsdp_param_group, name)
        return lambda *args, **kwargs: (calls.append(name), call(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("foreach_all_gather", "foreach_reduce"):
            monkeypatch.setattr(_fsdp_param_group, name, counted(name))
        for _ in range(2):
            stage.begin(is_first=True, reduces=True, splits_backward=False)
            stage.unshard()
            for microbatch in range(3):
                loss = tower(rows(rank.rank, microbatch).to(rank.device)).sum()
                if microbatch == 2:
                    stage.last_backward()
                loss.backward()
            stage.reduce()
            stage.reshard()
    num_units = 4  # three blocks and the rest
    assert (calls.count("foreach_all_gather"), calls.count("foreach_reduce")) == (2 * num_units, 2 * num_units)


def sequence_with_a_tie() -> nn.Module:
    """Return a sequence whose first and last block share a parameter; another block has no parameters."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return BlockSequence([first, nn.Linear(4, 4), nn.Tanh(), last], StageInfo(0, 1))


def tower_with_ties() -> nn.Module:
    """Return a tower with two tied parameters: of a layer outside of blocks and one inside, and of two blocks."""
    tower: Any = Tower()
    tower.middle.listed[1].weight = tower.first.weight
    tower.named["8"] = Only({"only": tower.named["7"]["only"]})
    return tower


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "blocks"),
    [(sequence_with_a_tie, ["1", "2"]), (tower_with_ties, ["middle.listed.0"])],
    ids=["blocks", "rest"],
)
def test_what_shares_a_parameter_is_gathered_together(
    rank: RankContext, make: Callable[[], nn.Module], blocks: list[str]
) -> None:
    torch.manual_seed(0)
    module, whole = make().to(rank.device, torch.float64), make().to(rank.device, torch.float64)
    whole.load_state_dict(module.state_dict())
    names = [name for name, _ in module.named_parameters()]
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    shard_data(module, blocks_of(module), domains, ParallelConfig())
    domains.close()
    units = [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    assert units == ["", *blocks]
    assert [name for name, _ in module.named_parameters()] == names
    stage = FullySharded(module, keeps=False, reduces_each=False)
    stage.begin(is_first=True, reduces=True, splits_backward=False)
    loss = module(rows(rank.rank, 0).to(rank.device)).square().sum()
    stage.last_backward()
    loss.backward()
    stage.reduce()
    for each in range(2):
        whole(rows(each, 0).to(rank.device)).square().sum().backward()
    gradients = [{name: p.grad for name, p in each.named_parameters()} for each in (module, whole)]
    assert_tensors_close(*gradients)


@pytest.mark.ranks(2)
def test_what_a_broken_window_left_is_not_added(rank: RankContext) -> None:
    tower, _ = towers(rank)
    stage = FullySharded(tower, keeps=False, reduces_each=False)

    def gradients() -> list[Tensor]:
        tower.zero_grad()
        stage.begin(is_first=True, reduces=True, splits_backward=False)
        loss = tower(rows(rank.rank, 0).to(rank.device)).sum()
        stage.last_backward()
        loss.backward()
        stage.reduce()
        return [p.grad.full_tensor() for p in tower.parameters() if isinstance(p.grad, DTensor)]

    expected = gradients()
    stage.begin(is_first=True, reduces=False, splits_backward=False)
    loss = tower(rows(rank.rank, 1).to(rank.device)).sum()
    stage.last_backward()
    loss.backward()
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert_bitwise_equal("gradient", ours, theirs)


@pytest.mark.ranks(2)
def test_units_without_one_around_them(rank: RankContext) -> None:
    """Each is a root of its own then."""
    torch.manual_seed(0)
    tower, whole = Tower().double().to(rank.device), Tower().double().to(rank.device)
    whole.load_state_dict(tower.state_dict())
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    for block in blocks_of(tower):
        fully_shard(as_unit(block), mesh=weight_mesh(domains))
    stage = FullySharded(tower, keeps=True, reduces_each=False)
    stage.begin(is_first=True, reduces=True, splits_backward=True)
    stage.unshard()
    tower(rows(rank.rank, 0).to(rank.device)).sum().backward()
    stage.reshard()
    stage.reduce()
    for each in range(2):
        whole(rows(each, 0).to(rank.device)).sum().backward()
    assert sum(isinstance(module, FSDPModule) for module in tower.modules()) == 3
    for (name, ours), (_, theirs) in zip(tower.named_parameters(), whole.named_parameters(), strict=True):
        if isinstance(ours.grad, DTensor):
            assert theirs.grad is not None
            assert_close_named(name, ours.grad.full_tensor(), theirs.grad)
    domains.close()


@pytest.mark.ranks(2)
def test_split_backwards_cannot_reduce_each_microbatch(rank: RankContext) -> None:
    tower, _ = towers(rank)
    stage = FullySharded(tower, keeps=True, reduces_each=True)
    with pytest.raises(ConfigError, match="reduce='every_microbatch' with a schedule that splits backwards"):
        stage.begin(is_first=True, reduces=True, splits_backward=True)


@pytest.mark.ranks(2)
def test_what_is_noted_of_forwards_is_forgotten(rank: RankContext) -> None:
    """Else it grows with every evaluation, and units are gathered for forwards of long ago."""
    tower, _ = towers(rank)
    stage = FullySharded(tower, keeps=False, reduces_each=False)
    order = tower._get_fsdp_state()._comm_ctx.post_forward_order  # type: ignore[operator]
    with torch.no_grad():
        for microbatch in range(3):
            tower(rows(rank.rank, microbatch).to(rank.device))
    assert len(order) == 3 * 4
    forget_forward(stage.units)
    assert len(order) == 0
    with torch.no_grad():
        tower(rows(rank.rank, 0).to(rank.device))
    stage.begin(is_first=True, reduces=True, splits_backward=False)
    assert len(order) == 0


@pytest.mark.ranks(2)
def test_a_closed_stage_is_as_before(rank: RankContext) -> None:
    tower, _ = towers(rank)
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in tower.modules() if isinstance(unit, FSDPModule)]
    for keeps in (True, False):
        stage = FullySharded(tower, keeps=keeps, reduces_each=False)
        if keeps:
            before = [group.post_forward_mesh_info for group in groups]
        stage.begin(is_first=True, reduces=False, splits_backward=False)
        stage.unshard()
        assert [group.post_forward_mesh_info is None for group in groups] == [keeps or b is None for b in before]
        tower(rows(rank.rank, 0).to(rank.device)).sum().backward()
        assert any(each._unsharded_param.grad is not None for group in groups for each in group.fsdp_params)
        stage.close()
        assert [group.post_forward_mesh_info for group in groups] == before
        for group in groups:
            assert "post_backward" not in vars(group)
            assert all(each._unsharded_param.grad is None for each in group.fsdp_params)
            assert all(each.unsharded_accumulated_grad is None for each in group.fsdp_params)


class Doubled(nn.Module):
    """Two linears that are one unit, the second of which fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.fails:
            raise ValueError("between")
        return self.two(x)


@pytest.mark.ranks(2)
def test_a_unit_of_two_modules_goes_on_after_an_error_between_them(rank: RankContext) -> None:
    torch.manual_seed(0)
    module = Doubled().to(rank.device, torch.float64)
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    shard_data(module, [[module.one, module.two]], domains, ParallelConfig())
    stage = FullySharded(module, keeps=False, reduces_each=False)
    x = rows(rank.rank, 0).to(rank.device)
    expected = module(x).detach()
    module.fails = True
    with pytest.raises(ValueError, match="between"):
        module(x)
    module.fails = False
    stage.drop()
    assert_bitwise_equal("output", module(x).detach(), expected)
    domains.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "let go"])
def test_one_use_in_a_window_of_narrow_gradients(rank: RankContext, keeps: bool) -> None:
    """A parameter unused in the last batch, or in the first: FSDP2 reduces gradients of one dtype alone."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor, index: int) -> Tensor:
            return self.always(x) + (self.first(x) if index == 0 else self.last(x))

    torch.manual_seed(0)
    module = Sometimes().to(rank.device, torch.bfloat16)
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    shard_data(module, [], domains, ParallelConfig())
    stage = FullySharded(module, keeps=keeps, reduces_each=False)
    for index in range(2):
        stage.begin(is_first=index == 0, reduces=index == 1, splits_backward=False)
        stage.unshard()
        loss = module(rows(rank.rank, index).to(rank.device, torch.bfloat16), index).float().sum()
        stage.last_backward()
        loss.backward()
        stage.reduce()
        stage.reshard()
    for parameter in module.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.full_tensor().any()
    domains.close()
