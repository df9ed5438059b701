"""Tokens that go to experts in two halves: the numbers of one process, in one order of messages."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9d.modules import AllToAllDispatch, GroupedExperts, LocalDispatch, SparseMoE
from lightning_d9d.modules.peer_dispatch import PeerDispatch
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.modules.test_dispatch import shard

HIDDEN = 16


class Case(NamedTuple):
    """Tokens of each rank, and the experts that they choose."""

    num_tokens: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 3
    first_chosen: int | None = None
    """Tokens that begin with a 1 choose the `top_k` experts from this one on. None: the router chooses."""


CASES = {
    "equal": Case((6, 6)),
    "unequal": Case((7, 4)),
    "one": Case((1, 1)),
    "none here": Case((0, 5)),
    "none": Case((0, 0)),
    "all to one rank": Case((6, 5), first_chosen=4),
    "all to one expert": Case((6, 5), top_k=1, first_chosen=5),
    "three ranks": Case((5, 0, 8), num_experts=9),
    "three ranks, all to one expert": Case((4, 6, 3), num_experts=9, top_k=1, first_chosen=1),
}
"""Of one token all are in the first half."""

both_ways = pytest.mark.parametrize("peer", [False, True], ids=["all_to_all", "peer"])


def make_layer(case: Case) -> SparseMoE:
    torch.manual_seed(0)
    layer = SparseMoE(
        HIDDEN, 24, case.num_experts, case.top_k, normalize=True, initializer_range=0.3, shared_intermediate_size=8
    ).double()
    assert isinstance(layer.dispatch, LocalDispatch)
    if case.first_chosen is not None:
        layer.gate.weight.data[case.first_chosen : case.first_chosen + case.top_k, 0] = 50.0
    return layer


def on_ranks(case: Case, mesh: DeviceMesh, peer: bool) -> SparseMoE:
    layer = make_layer(case).to(mesh.device_type)
    experts = shard(layer.experts, mesh)
    assert isinstance(experts, GroupedExperts)
    layer.experts = experts
    layer.dispatch = AllToAllDispatch(case.num_experts, mesh.get_group())
    if peer:
        layer.dispatch = PeerDispatch(case.num_experts, mesh.get_group())
        layer.dispatch.exchange.capacity = 8.0
    layer.in_halves = True
    return layer


def make_tokens(count: int, source: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(source)
    x, gradient = torch.randn(2, count, HIDDEN, generator=generator, dtype=torch.float64)
    return x, gradient


def run(layer: SparseMoE, x: Tensor, gradient: Tensor) -> dict[str, Any]:
    """The output and all gradients."""
    x = x.detach().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    results = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    return {"output": output.detach(), "x": x.grad, **results}


@both_ways
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ranks(len(case.num_tokens))) for name, case in CASES.items()]
)
def test_equals_one_process(rank: RankContext, name: str, peer: bool) -> None:
    """Again and again in the same bits, so that on CUDA no stream reads what another has not written."""
    case = CASES[name]
    mesh = init_device_mesh(rank.device.type, (len(case.num_tokens),))
    tokens = [make_tokens(count, source) for source, count in enumerate(case.num_tokens)]
    if case.first_chosen is not None:
        for x, _ in tokens:
            x[:, 0] = 1.0
    whole = run(make_layer(case), *map(torch.cat, zip(*tokens, strict=True)))
    layer = on_ranks(case, mesh, peer)
    own = [each.to(rank.device) for each in tokens[rank.rank]]
    if isinstance(layer.dispatch, PeerDispatch):
        run(layer, *own)
        layer.dispatch.exchange.grow()  # one expert gets more than the first batch made room for
    results = [run(layer, *own) for _ in range(5)]
    for first, second in pairwise(results):
        for name, value in second.items():
            assert_bitwise_equal(name, value, first[name])
    expected = {
        name: value.split(case.num_tokens)[rank.rank] if name in ("output", "x") else value
        for name, value in whole.items()
        if name in ("output", "x") or name.startswith("experts.")
    }
    assert_tensors_close({name: results[0][name] for name in expected}, expected)
    if isinstance(layer.dispatch, PeerDispatch):
        assert not layer.dispatch.exchange.failures()
        layer.dispatch.exchange.close()


@pytest.mark.ranks(2)
@both_ways
def test_messages_have_one_order_on_all_ranks(rank: RankContext, peer: bool) -> None:
    """Whatever tokens they have: both halves go out before the first products, and each comes back after its own."""
    layer = on_ranks(CASES["equal"], init_device_mesh(rank.device.type, (2,)), peer)
    own = [each.to(rank.device) for each in make_tokens([7, 0][rank.rank], rank.rank)]
    run(layer, *own)
    done: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = operator._schema.name.removeprefix("lightning_d9d::")
            if name.startswith(("peer_", "all_to_all_")):
                done.append(name)
            return operator(*args, **(kwargs or {}))

    layer.experts.register_forward_pre_hook(lambda *_: done.append("experts"))
    results = layer.experts._results

    def watched(*arguments: Any) -> Tensor:
        done.append("products")
        return results(*arguments)

    with pytest.MonkeyPatch.context() as monkeypatch, Watch():
        monkeypatch.setattr(layer.experts, "_results", watched)
        layer(own[0].requires_grad_())
    assert rank.all_gather_object(done) == [done, done]
    if isinstance(layer.dispatch, PeerDispatch):
        out, back = ["peer_counts", "peer_dispatch"], "peer_combine"
        layer.dispatch.exchange.close()
    else:
        out, back = ["all_to_all_rows", "all_to_all_copies"], "all_to_all_rows"
    assert done == [*out, *out, "experts", "products", back, "products", back]
