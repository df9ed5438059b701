"""Tokens that go to experts in two halves: the numbers of one process, in one order of messages."""

from itertools import pairwise
from typing import Any

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

HIDDEN, NUM_EXPERTS, TOP_K = 16, 8, 3
NUM_TOKENS = {"equal": [6, 6], "unequal": [7, 4], "one": [1, 1], "none here": [0, 5], "none": [0, 0], "skewed": [6, 5]}
"""How many tokens each rank has; of one token all are in the first half. If skewed, all go to experts of rank 1."""

both_ways = pytest.mark.parametrize("peer", [False, True], ids=["all_to_all", "peer"])


def make_layer(skewed: bool = False) -> SparseMoE:
    """A mixture; if it is skewed, tokens that begin with a 1 choose experts 4 to 6."""
    torch.manual_seed(0)
    layer = SparseMoE(
        HIDDEN, 24, NUM_EXPERTS, TOP_K, normalize=True, initializer_range=0.3, shared_intermediate_size=8
    ).double()
    assert isinstance(layer.dispatch, LocalDispatch)
    if skewed:
        layer.gate.weight.data[4 : 4 + TOP_K, 0] = 50.0
    return layer


def on_ranks(mesh: DeviceMesh, peer: bool, in_halves: bool, skewed: bool = False) -> SparseMoE:
    layer = make_layer(skewed).to(mesh.device_type)
    experts = shard(layer.experts, mesh)
    assert isinstance(experts, GroupedExperts)
    layer.experts = experts
    layer.dispatch = AllToAllDispatch(NUM_EXPERTS, mesh.get_group())
    if peer:
        layer.dispatch = PeerDispatch(NUM_EXPERTS, mesh.get_group())
        layer.dispatch.exchange.capacity = 8.0
    layer.in_halves = in_halves
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


@pytest.mark.ranks(2)
@both_ways
@pytest.mark.parametrize("case", NUM_TOKENS)
def test_equals_one_process(rank: RankContext, case: str, peer: bool) -> None:
    """Again and again in the same bits, so that on CUDA no stream reads what another has not written."""
    mesh = init_device_mesh(rank.device.type, (2,))
    tokens = [make_tokens(count, source) for source, count in enumerate(NUM_TOKENS[case])]
    if is_skewed := case == "skewed":
        for x, _ in tokens:
            x[:, 0] = 1.0
    whole = run(make_layer(is_skewed), *map(torch.cat, zip(*tokens, strict=True)))
    layer = on_ranks(mesh, peer, True, is_skewed)
    own = [each.to(rank.device) for each in tokens[rank.rank]]
    results = [run(layer, *own) for _ in range(5)]
    for first, second in pairwise(results):
        for name, value in second.items():
            assert_bitwise_equal(name, value, first[name])
    expected = {
        name: value.split(NUM_TOKENS[case])[rank.rank] if name in ("output", "x") else value
        for name, value in whole.items()
        if name in ("output", "x") or name.startswith("experts.")
    }
    assert_tensors_close({name: results[0][name] for name in expected}, expected)
    if peer:
        assert isinstance(layer.dispatch, PeerDispatch)
        assert not layer.dispatch.exchange.failures()
        layer.dispatch.exchange.close()


@pytest.mark.ranks(2)
@both_ways
def test_messages_have_one_order_on_all_ranks(rank: RankContext, peer: bool) -> None:
    """Whatever tokens they have: both halves go out before the first products, and each comes back after its own."""
    layer = on_ranks(init_device_mesh(rank.device.type, (2,)), peer, in_halves=True)
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
        out, back = ["all_to_all_rows", "all_to_all_copies", "all_to_all_copies"], "all_to_all_rows"
    assert done == [*out, *out, "experts", "products", back, "products", back]
