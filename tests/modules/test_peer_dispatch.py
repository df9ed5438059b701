"""Experts on other ranks, whose memory tokens are written to: the numbers of one process, and of all-to-all."""

import resource
import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.modules import AllToAllDispatch, Dispatch
from lightning_d9d.modules.peer_dispatch import PeerDispatch, PeerExchange, peer_exchange
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.state.threads import uncollected
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.modules.test_dispatch import (
    NUM_EXPERTS,
    ROUTINGS,
    Tokens,
    in_one_process,
    make_experts,
    make_tokens,
    mixture,
    on_2_and_4_ranks,
    on_device,
    recomputed,
    recomputed_but,
    run,
    shard,
)

SKEWED = ("one expert", "experts of one rank")


def fits(dispatch: PeerDispatch, rank: RankContext) -> bool:
    """Whether the tokens of all ranks had room since it was asked for last."""
    failures = dispatch.exchange.failures()
    assert failures is not None
    return not any(rank.all_gather_object(failures.item()))


@on_2_and_4_ranks
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_one_process(rank: RankContext, routing: str, num_ranks: int) -> None:
    assert rank.world_size == num_ranks
    mesh = init_device_mesh(rank.device.type, (num_ranks,))
    tokens = [make_tokens(source, routing, 2) for source in range(num_ranks)]
    expected = in_one_process(make_experts(), tokens, rank)
    experts = shard(make_experts(), mesh)
    dispatch = PeerDispatch(NUM_EXPERTS, mesh.get_group())
    own = on_device(tokens[rank.rank], rank)
    run(dispatch, experts, own)
    has_room = fits(dispatch, rank)
    assert has_room == (routing not in SKEWED)
    if not has_room:
        dispatch.exchange.grow()
    actual = run(dispatch, experts, own)
    assert_tensors_close(actual, expected)
    for name, value in run(dispatch, experts, own).items():
        assert_bitwise_equal(name, value, actual[name])
    assert fits(dispatch, rank)
    dispatch.exchange.close()


@on_2_and_4_ranks
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_all_to_all_bit_by_bit(rank: RankContext, dtype: torch.dtype, kernels: str, num_ranks: int) -> None:
    """The same rows in the same order, and sums in the same order and dtype."""
    mesh = init_device_mesh(rank.device.type, (num_ranks,))
    experts = shard(make_experts(dtype), mesh)
    own = on_device(make_tokens(rank.rank, "unequal numbers", 3, dtype), rank)
    dispatch = PeerDispatch(NUM_EXPERTS, mesh.get_group())
    dispatch.exchange.capacity = 4.0
    with using_kernels(kernels):
        expected = run(AllToAllDispatch(NUM_EXPERTS, mesh.get_group()), experts, own)
        for _ in range(3):
            for name, value in run(dispatch, experts, own).items():
                assert_bitwise_equal(name, value, expected[name])
    dispatch.exchange.close()


but_exchanges = partial(recomputed_but, ("peer_counts", "peer_dispatch", "peer_combine", "moe_sort"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
@pytest.mark.parametrize(
    ("forward", "num_again"),
    [(mixture, 0), (recomputed, 2), (but_exchanges, 0)],
    ids=["none", "full", "ops"],
)
def test_recomputation_and_split_backward(
    rank: RankContext, forward: Callable[..., Tensor], num_again: int, split: bool
) -> None:
    """Equal bit by bit; counts, tokens and results are exchanged, both gradients, and again what is not kept."""
    mesh = init_device_mesh(rank.device.type, (2,))
    dispatch, experts = PeerDispatch(NUM_EXPERTS, mesh.get_group()), shard(make_experts(), mesh)
    tokens = on_device(make_tokens(rank.rank, "a rank without tokens"), rank)
    expected = run(dispatch, experts, tokens)
    memory = dispatch.exchange.memory
    assert memory is not None
    assert memory.state[0] == 3 + 3
    for name, value in run(dispatch, experts, tokens, forward, split).items():
        assert_bitwise_equal(name, value, expected[name])
    assert memory.state[0] == 2 * (3 + 3) + num_again
    assert fits(dispatch, rank)
    dispatch.exchange.close()


@pytest.mark.ranks(2)
def test_more_tokens_than_the_first_batch_had(rank: RankContext) -> None:
    """No rank waits for another one; all know that the results are worthless; then there is memory for them."""
    mesh = init_device_mesh(rank.device.type, (2,))
    experts = shard(make_experts(), mesh)
    dispatch, plain = PeerDispatch(NUM_EXPERTS, mesh.get_group()), AllToAllDispatch(NUM_EXPERTS, mesh.get_group())
    run(dispatch, experts, on_device(make_tokens(rank.rank, "natural"), rank))
    assert fits(dispatch, rank)
    x, indices, weights, gradient = make_tokens(rank.rank, "natural")
    times = 5 if rank.rank == 0 else 1
    more = on_device(
        (x.repeat(times, 1), indices.repeat(times, 1), weights.repeat(times, 1), gradient.repeat(times, 1)), rank
    )
    expected = run(plain, experts, more)
    run(dispatch, experts, more)
    assert not fits(dispatch, rank)
    dispatch.exchange.is_off = True
    assert_tensors_close(run(dispatch, experts, more), expected)
    dispatch.exchange.is_off = False
    dispatch.exchange.grow()
    assert_tensors_close(run(dispatch, experts, more), expected)
    assert fits(dispatch, rank)
    dispatch.exchange.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_rank_that_does_not_come_is_noticed(rank: RankContext, kernels: str) -> None:
    """Waits end, later ones at once, and the error names the ranks."""
    dispatch = PeerDispatch(NUM_EXPERTS, rank.group, PeerExchange(rank.group, timeout_s=0.2))
    x, indices, weights, _ = on_device(make_tokens(rank.rank, "natural", dtype=torch.float32), rank)
    with using_kernels(kernels), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_d9d.ops.kernels.peer_words._LOOKS_ON_CPU", 50)
        dispatch.exchange.prepare(x, 2, NUM_EXPERTS // 2)
        if rank.rank == 0:
            x.requires_grad_()
            tokens = dispatch.dispatch(x, indices, weights)
            dispatch.combine(tokens.x, tokens)
            failures = dispatch.exchange.failures()
            assert failures is not None
            with pytest.raises(RuntimeError, match=r"a rank of \[0, 1\] did not write its tokens within 0.2 s"):
                dispatch.exchange.check(int(failures.item()))
    rank.barrier()
    dispatch.exchange.close()


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_the_host_waits_for_nothing(rank: RankContext) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    dispatch, experts = PeerDispatch(NUM_EXPERTS, mesh.get_group()), shard(make_experts(torch.bfloat16), mesh)
    tokens = on_device(make_tokens(rank.rank, "unequal numbers", dtype=torch.bfloat16), rank)
    run(dispatch, experts, tokens)  # what is set up at the first call may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(dispatch, experts, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fits(dispatch, rank)
    dispatch.exchange.close()


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_a_cuda_graph(rank: RankContext) -> None:
    """Forward and backward are captured once, and replayed with other tokens."""
    dispatch = PeerDispatch(NUM_EXPERTS, rank.group)
    plain = AllToAllDispatch(NUM_EXPERTS, rank.group)
    first, second = (
        on_device(make_tokens(2 * step + rank.rank, "natural", dtype=torch.bfloat16), rank) for step in (0, 1)
    )

    def step(dispatch: Dispatch, tokens: Tokens) -> dict[str, Tensor]:
        x, indices, weights, gradient = tokens
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        sent = dispatch.dispatch(x, indices, weights)
        output = dispatch.combine(sent.x * sent.weights.unsqueeze(1).to(sent.x.dtype), sent)
        gradients = torch.autograd.grad(output, [x, weights], gradient)
        return {"output": output, "x": gradients[0], "weights": gradients[1]}

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(dispatch, first)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    held = tuple(each.clone() for each in first)
    with uncollected(), torch.cuda.graph(graph, stream=stream):
        captured = step(dispatch, held)
    for tokens in (second, first, second):
        for each, value in zip(held, tokens, strict=True):
            each.copy_(value)
        graph.replay()
        for name, value in step(plain, tokens).items():
            assert_bitwise_equal(name, captured[name], value)
    assert fits(dispatch, rank)
    dispatch.exchange.close()


@pytest.mark.ranks(2)
def test_a_rank_on_another_host_is_refused_on_every_rank(rank: RankContext) -> None:
    """It is refused before any memory is made, so no rank waits for another."""
    mesh = init_device_mesh(rank.device.type, (2,))
    dispatch = PeerDispatch(NUM_EXPERTS, mesh.get_group())
    own = on_device(make_tokens(rank.rank, "natural", 2), rank)
    experts, name = shard(make_experts(), mesh), ["node-a", "node-b"][rank.rank]
    match = r"rank 0: rank 1 is on another host \(node-b\); choose 'all_to_all'"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        with pytest.raises(ConfigError, match=match):
            run(dispatch, experts, own)
    assert dispatch.exchange.memory is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_optional", [True, False], ids=["chosen", "configured"])
def test_memory_that_a_rank_does_not_have(rank: RankContext, is_optional: bool) -> None:
    """Files of rank 1 may have 16 MiB. Both ranks take all-to-all instead, if they may, or both refuse."""
    dispatch = PeerDispatch(NUM_EXPERTS, rank.group)
    dispatch.exchange.is_optional = is_optional
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = pytest.raises(ConfigError, match=r"rank 1: .*File too large; choose 'all_to_all'")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**24 if rank.rank == 1 else before[0], before[1]))
    try:
        with nullcontext() if is_optional else refused:
            assert not dispatch.exchange.prepare(torch.empty(1, 2**22), 2, NUM_EXPERTS // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert dispatch.exchange.memory is None
    if is_optional:
        mesh = init_device_mesh(rank.device.type, (2,))
        experts, own = shard(make_experts(), mesh), on_device(make_tokens(rank.rank, "natural", 2), rank)
        expected = run(AllToAllDispatch(NUM_EXPERTS, rank.group), experts, own)
        for name, value in run(dispatch, experts, own).items():
            assert_bitwise_equal(name, value, expected[name])


@pytest.mark.ranks(2)
def test_exchanges_of_two_models_in_turn(rank: RankContext) -> None:
    """Rank 0 still has the first model, and rank 1 not: both allocate memory for the second one."""
    x, indices, weights, _ = on_device(make_tokens(rank.rank, "natural", dtype=torch.float32), rank)
    before = None
    for number in range(2):
        owner = MeshDomains.build(MeshConfig(data_parallel_replicate=2, expert_parallel=2), rank.device.type)
        exchange = peer_exchange(owner, rank.group, 1.5)
        assert exchange is peer_exchange(owner, rank.group, 1.5)
        assert exchange is not before
        tokens = PeerDispatch(NUM_EXPERTS, rank.group, exchange).dispatch(x.requires_grad_(), indices, weights)
        assert tokens.x.isfinite().any()
        if rank.rank == 0 and number == 0:
            before = exchange
    exchange.close()


@pytest.mark.ranks(2)
def test_a_layer_with_other_numbers_of_experts_is_refused(rank: RankContext) -> None:
    exchange = PeerExchange(rank.group)
    x, indices, weights, _ = on_device(make_tokens(rank.rank, "natural", dtype=torch.float32), rank)
    PeerDispatch(NUM_EXPERTS, rank.group, exchange).dispatch(x.requires_grad_(), indices, weights)
    num_local, top_k = NUM_EXPERTS // 2, indices.shape[1]
    for more, fewer in ((1, 0), (0, 1)):
        own, chosen = num_local + more, top_k - fewer
        match = (
            f"{own} experts a rank and {chosen} a token cannot share memory with one that has {num_local} and {top_k}"
        )
        with pytest.raises(ConfigError, match=match):
            PeerDispatch(2 * own, rank.group, exchange).dispatch(x, indices[:, :chosen], weights[:, :chosen])
    exchange.close()


@pytest.mark.ranks(2)
def test_experts_that_ranks_do_not_divide_are_refused(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"7 experts cannot be distributed evenly over the 2 ranks \[0, 1\]"):
        PeerDispatch(7, rank.group)
