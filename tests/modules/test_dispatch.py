"""Experts on other ranks: the numbers of one process."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.modules import AllToAllDispatch, Dispatch, GroupedExperts, LocalDispatch, SparseMoE, dispatch
from lightning_d9d.modules.peer_dispatch import PeerDispatch
from lightning_d9d.ops import WeightGradients, defer, moe_route
from lightning_d9d.ops.backend import using_kernels
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 16, 24, 8
on_2_and_4_ranks = pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])

Tokens = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens, the experts of each, their weights, and the gradient of the result."""
Routing = Callable[[Tensor, int], Tensor]
"""A function from probabilities of experts and `top_k` to the experts of each token."""

ROUTINGS: dict[str, tuple[Sequence[int], Routing]] = {
    "natural": ([6, 6, 6, 6], lambda probabilities, top_k: probabilities.topk(top_k).indices),
    "one expert": ([6, 6, 6, 6], lambda probabilities, top_k: torch.full((len(probabilities), top_k), 5)),
    "experts of one rank": ([6, 6, 6, 6], lambda probabilities, top_k: probabilities[:, 2:4].topk(top_k).indices + 2),
    "unequal numbers": ([3, 9, 1, 4], lambda probabilities, top_k: probabilities.topk(top_k).indices),
    "a rank without tokens": ([6, 0, 5, 2], lambda probabilities, top_k: probabilities.topk(top_k).indices),
    "one token": ([0, 1, 0, 0], lambda probabilities, top_k: probabilities.topk(top_k).indices),
    "no token anywhere": ([0, 0, 0, 0], lambda probabilities, top_k: probabilities.topk(top_k).indices),
}
"""How many tokens each rank has, and where they go."""


def make_experts(dtype: torch.dtype = torch.float64, number: int = NUM_EXPERTS) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(number, HIDDEN, INTERMEDIATE, initializer_range=0.3).to(dtype)


def make_tokens(
    source: int, routing: str, top_k: int = 2, dtype: torch.dtype = torch.float64, num_experts: int = NUM_EXPERTS
) -> Tokens:
    """What rank `source` has."""
    counts, choose = ROUTINGS[routing]
    generator = torch.Generator().manual_seed(source)
    x, gradient, logits = (
        torch.randn(counts[source], width, generator=generator, dtype=torch.float64)
        for width in (HIDDEN, HIDDEN, num_experts)
    )
    probabilities = logits.softmax(-1)
    indices = choose(probabilities, top_k)
    weights = probabilities.gather(1, indices).to(torch.promote_types(dtype, torch.float32))
    return x.to(dtype), indices, weights, gradient.to(dtype)


def shard(experts: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A copy with this rank's experts."""
    experts = copy.deepcopy(experts).to(mesh.device_type)
    for name, parameter in [*experts.named_parameters()]:
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(sharded))
    return experts


def mixture(dispatch: Dispatch, experts: nn.Module, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    tokens = dispatch.dispatch(x, indices, weights)
    return dispatch.combine(experts(tokens.x, tokens.weights, tokens.offsets), tokens)


def run(
    dispatch: Dispatch,
    experts: nn.Module,
    tokens: Tokens,
    forward: Callable[..., Tensor] = mixture,
    split: bool = False,
) -> dict[str, Tensor]:
    """The output and all gradients."""
    x, indices, weights, gradient = tokens
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    gradients = WeightGradients()
    if split:
        with defer(gradients):
            output = forward(dispatch, experts, x, indices, weights)
        gradients.backward(output, gradient)
        assert all(parameter.grad is None for parameter in experts.parameters())
        gradients.accumulate()
    else:
        output = forward(dispatch, experts, x, indices, weights)
        output.backward(gradient)
    results = {name: parameter.grad for name, parameter in experts.named_parameters()}
    experts.zero_grad()
    return {"output": output.detach(), "x": x.grad, "weights": weights.grad, **results}


def in_one_process(experts: GroupedExperts, tokens: Sequence[Tokens], rank: RankContext) -> dict[str, Tensor]:
    """What rank `rank` must get: its rows, and the experts' gradients of all ranks' tokens."""
    results = run(LocalDispatch(len(experts.gate_up_proj)), experts, tuple(map(torch.cat, zip(*tokens, strict=True))))
    counts = [len(part[0]) for part in tokens]
    return {
        name: value.split(counts)[rank.rank] if name in ("output", "x", "weights") else value
        for name, value in results.items()
    }


def on_device(tokens: Tokens, rank: RankContext) -> Tokens:
    return tuple(tensor.to(rank.device) for tensor in tokens)


def check(rank: RankContext, routing: str, top_k: int, dtype: torch.dtype = torch.float64) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    tokens = [make_tokens(source, routing, top_k, dtype) for source in range(rank.world_size)]
    expected = in_one_process(make_experts(dtype), tokens, rank)
    experts = shard(make_experts(dtype), mesh)
    dispatch = AllToAllDispatch(NUM_EXPERTS, mesh.get_group())
    own = on_device(tokens[rank.rank], rank)
    actual = run(dispatch, experts, own)
    assert actual["gate_up_proj"].placements == (Shard(0),)
    assert_tensors_close(actual, expected)
    again = run(dispatch, experts, own)
    for name, value in again.items():
        assert_bitwise_equal(name, value, actual[name])


@on_2_and_4_ranks
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_one_process(rank: RankContext, routing: str, num_ranks: int) -> None:
    assert rank.world_size == num_ranks
    check(rank, routing, top_k=2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [AllToAllDispatch, PeerDispatch])
def test_three_ranks_with_three_experts_each(rank: RankContext, kind: Callable[..., Dispatch]) -> None:
    mesh = init_device_mesh(rank.device.type, (3,))
    tokens = [make_tokens(source, "unequal numbers", 4, num_experts=9) for source in range(3)]
    expected = in_one_process(make_experts(number=9), tokens, rank)
    dispatch = kind(9, mesh.get_group())
    actual = run(dispatch, shard(make_experts(number=9), mesh), on_device(tokens[rank.rank], rank))
    assert_tensors_close(actual, expected)
    if isinstance(dispatch, PeerDispatch):
        assert not dispatch.exchange.failures()
        dispatch.exchange.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_equals_one_process_with_any_number_of_experts_a_token(rank: RankContext, top_k: int) -> None:
    check(rank, "unequal numbers", top_k)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("routing", ["unequal numbers", "a rank without tokens", "no token anywhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_process_in_lower_precision(rank: RankContext, routing: str, dtype: torch.dtype) -> None:
    check(rank, routing, top_k=2, dtype=dtype)


@pytest.mark.ranks(4)
def test_rows_of_an_expert_are_ordered_by_rank_and_token(rank: RankContext) -> None:
    dispatch = AllToAllDispatch(NUM_EXPERTS, rank.group)
    tokens = [make_tokens(source, "unequal numbers", top_k=3) for source in range(4)]
    _, indices, weights, _ = on_device(tokens[rank.rank], rank)
    x = torch.arange(len(indices), dtype=torch.float32, device=rank.device).add(100 * rank.rank).unsqueeze(1)
    received = dispatch.dispatch(x, indices, weights)
    start = 0
    for expert, end in zip((2 * rank.rank, 2 * rank.rank + 1), received.offsets.tolist(), strict=True):
        visits = [
            (100 * source + token, weight)
            for source, (_, experts_of_token, weights_of_token, _) in enumerate(tokens)
            for token in range(len(experts_of_token))
            for visited, weight in zip(experts_of_token[token].tolist(), weights_of_token[token].tolist(), strict=True)
            if visited == expert
        ]
        assert [*zip(received.x[start:end, 0].tolist(), received.weights[start:end].tolist(), strict=True)] == visits
        start = end
    assert start == len(received.x)
    assert received.offsets.dtype == torch.int32


@pytest.mark.ranks(4)
@pytest.mark.parametrize("routing", ["natural", "one expert", "experts of one rank"])
def test_a_token_goes_to_a_rank_at_most_once(rank: RankContext, routing: str) -> None:
    """This also holds if all its experts are there. The numbers and weights of its experts come with it."""
    dispatch = AllToAllDispatch(NUM_EXPERTS, rank.group)
    x, indices, weights, _ = on_device(make_tokens(rank.rank, routing, top_k=2), rank)
    splits = []
    all_to_all_single = dist.all_to_all_single

    def counted(result: Tensor, rows: Tensor, received: list[int], sent: list[int], **options: object) -> object:
        splits.append((tuple(rows.shape[1:]), sent))
        return all_to_all_single(result, rows, received, sent, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "all_to_all_single", counted)
        tokens = dispatch.dispatch(x, indices, weights)
        dispatch.combine(tokens.x, tokens)
    ranks = indices // (NUM_EXPERTS // 4)
    num_tokens = [int((ranks == each).any(1).sum()) for each in range(4)]
    assert splits[:3] == [((2, 4), [1] * 4), ((HIDDEN,), num_tokens), ((2 * 2,), num_tokens)]
    _, (width, back) = splits[2:]
    assert (width, sum(back)) == ((HIDDEN,), len(tokens.copies.places))


def recomputed(*arguments: object) -> Tensor:
    return checkpoint(mixture, *arguments, use_reentrant=False)


def recomputed_but(names: Sequence[str], *arguments: object) -> Tensor:
    """Return `mixture` recomputed in the backward, but for operators of this package whose results are kept."""
    kept = [getattr(torch.ops.lightning_d9d, name).default for name in names]

    def keep(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> object:
        return create_selective_checkpoint_contexts(keep)

    return checkpoint(mixture, *arguments, use_reentrant=False, context_fn=contexts)


# A partial and not a closure: ranks get it by pickle.
but_exchanges = partial(recomputed_but, ("all_to_all_rows", "all_to_all_copies"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
@pytest.mark.parametrize(
    ("forward", "num_again"),
    [(mixture, 0), (recomputed, 3), (but_exchanges, 0)],
    ids=["none", "full", "ops"],
)
def test_recomputation_and_split_backward(
    rank: RankContext, forward: Callable[..., Tensor], num_again: int, split: bool
) -> None:
    """Equal bit by bit; the counts, the rows and their weights are exchanged again only where they are not kept."""
    mesh = init_device_mesh(rank.device.type, (2,))
    dispatch, experts = AllToAllDispatch(NUM_EXPERTS, mesh.get_group()), shard(make_experts(), mesh)
    tokens = on_device(make_tokens(rank.rank, "a rank without tokens"), rank)
    exchanges = []
    all_to_all_single = dist.all_to_all_single

    def counted(*arguments: object, **options: object) -> object:
        exchanges.append(arguments)
        return all_to_all_single(*arguments, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "all_to_all_single", counted)
        expected = run(dispatch, experts, tokens)
        num_exchanges = len(exchanges)
        assert num_exchanges == 4 + 3
        actual = run(dispatch, experts, tokens, forward, split)
    assert len(exchanges) - num_exchanges == num_exchanges + num_again
    for name, value in actual.items():
        assert_bitwise_equal(name, value, expected[name])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
def test_experts_that_are_fully_sharded_over_replicas(rank: RankContext, split: bool) -> None:
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=4, expert_parallel=2), rank.device.type)
    replicas, parts = domains.expert["ep_replicate"], domains.expert["ep_shard"]
    tokens = [make_tokens(source, "a rank without tokens") for source in range(4)]
    expected = in_one_process(make_experts(), tokens, rank)
    experts = fully_shard(shard(make_experts(), parts), mesh=replicas)
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    experts.set_reshard_after_forward(False)
    dispatch = AllToAllDispatch(NUM_EXPERTS, parts.get_group())
    x, indices, weights, gradient = on_device(tokens[rank.rank], rank)
    x.requires_grad_()
    weights.requires_grad_()
    gradients = WeightGradients()
    if split:
        experts.set_is_last_backward(False)
        experts.set_reshard_after_backward(False)
        experts.set_requires_gradient_sync(False)
        with defer(gradients):
            output = mixture(dispatch, experts, x, indices, weights)
        gradients.backward(output, gradient)
        gradients.accumulate()
        experts.set_is_last_backward(True)
        experts.set_reshard_after_backward(True)
        experts.set_requires_gradient_sync(True)
        (0 * mixture(dispatch, experts, x.detach().requires_grad_(), indices, weights.detach())).sum().backward()
    else:
        output = mixture(dispatch, experts, x, indices, weights)
        output.backward(gradient)
    actual = {"output": output, "x": x.grad, "weights": weights.grad}
    actual |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert_tensors_close(actual, expected)
    domains.close()


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_the_host_waits_for_nothing_but_the_counts(rank: RankContext) -> None:
    """A wait that torch knows of raises here; the one for the counts is for an event, which it does not know of."""
    mesh = init_device_mesh(rank.device.type, (2,))
    dispatch, experts = AllToAllDispatch(NUM_EXPERTS, mesh.get_group()), shard(make_experts(torch.bfloat16), mesh)
    tokens = on_device(make_tokens(rank.rank, "unequal numbers", dtype=torch.bfloat16), rank)
    run(dispatch, experts, tokens)  # what is set up at the first call may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(dispatch, experts, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.ranks(2)
def test_a_compiler_breaks_only_where_the_host_reads_the_counts(rank: RankContext) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    moe = SparseMoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, 3, normalize=True, initializer_range=0.3).to(rank.device)
    moe.experts = shard(moe.experts, mesh)
    moe.dispatch = AllToAllDispatch(NUM_EXPERTS, mesh.get_group())
    explain = torch._dynamo.explain(moe)
    x = torch.randn(4 + rank.rank, HIDDEN, device=rank.device)
    if Version(torch.__version__) < Version("2.13"):  # no tuple with names may live across a break
        with pytest.raises(AssertionError, match="from user code"):
            explain(x)
        return
    found = explain(x)
    places = {(each.user_stack[-1].filename, each.user_stack[-1].lineno) for each in found.break_reasons}
    assert len(places) == 1
    assert places.pop()[0] == dispatch.__file__


@pytest.mark.ranks(2)
def test_a_whole_mixture(rank: RankContext) -> None:
    """The mixture has its router, whose parameter each rank holds."""
    mesh = init_device_mesh(rank.device.type, (2,))
    torch.manual_seed(0)
    moe = SparseMoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, 3, normalize=True, initializer_range=0.3).double()
    inputs = [make_tokens(source, "unequal numbers")[0] for source in range(2)]
    expected = moe(torch.cat(inputs))
    expected.square().sum().backward()
    sharded = copy.deepcopy(moe).to(rank.device)
    sharded.experts = shard(moe.experts, mesh)
    sharded.dispatch = AllToAllDispatch(NUM_EXPERTS, mesh.get_group())
    sharded = copy.deepcopy(sharded)  # as users do; the process group is not copied
    sharded.zero_grad()
    output = sharded(inputs[rank.rank].to(rank.device))
    output.square().sum().backward()
    assert_close_named("output", output, expected.split([len(x) for x in inputs])[rank.rank])
    dist.all_reduce(sharded.gate.weight.grad)
    assert_tensors_close(
        {name: parameter.grad for name, parameter in sharded.named_parameters()},
        {name: parameter.grad for name, parameter in moe.named_parameters()},
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_come_back_as_nan_to_their_tokens_alone(
    rank: RankContext, value: float, kernels: str
) -> None:
    """No rank raises or waits, forward or backward; what other tokens get is what they get without them."""
    x, _, _, _ = on_device(make_tokens(rank.rank, "natural"), rank)
    x, num_bad = x.float(), len(x) // 2 if rank.rank in (1, 3) else 0
    generator = torch.Generator().manual_seed(rank.rank)
    sound = torch.randn(len(x), NUM_EXPERTS, generator=generator).to(x.device)
    dispatch = AllToAllDispatch(NUM_EXPERTS, rank.group)
    results = []
    with using_kernels(kernels):
        for bad in (0, num_bad):
            logits = sound.clone()
            logits[:bad] = value
            logits.requires_grad_()
            routes = moe_route(logits, 2)
            tokens = dispatch.dispatch(x, routes.indices, routes.weights)
            results.append(dispatch.combine(tokens.x * tokens.weights.unsqueeze(-1), tokens))
            results[-1].sum().backward()
            assert logits.grad is not None
            assert logits.grad[:bad].isnan().any(1).all()
            assert logits.grad[bad:].isfinite().all()
    assert results[1][:num_bad].isnan().all()
    assert_bitwise_equal("other tokens", results[1][num_bad:], results[0][num_bad:])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (17, "rank 1 sends 18 copies of tokens .* more than the 17 that int32 counts: take smaller microbatches"),
        (18, "rank 1 receives 24 copies of tokens .* more than the 18"),
    ],
)
def test_more_rows_than_can_be_counted_raise_on_every_rank(rank: RankContext, limit: int, message: str) -> None:
    x, indices, weights, _ = on_device(make_tokens(rank.rank, "unequal numbers"), rank)
    indices[:] = NUM_EXPERTS - 1
    if rank.rank == 1 and limit == 17:
        x = x[:, :1].expand(-1, 2**50)  # there is no memory for copies: the error comes before
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "MAX_ROWS", limit)
        with pytest.raises(ConfigError, match=message):
            AllToAllDispatch(NUM_EXPERTS, rank.group).dispatch(x, indices, weights)


def test_more_local_rows_than_can_be_counted_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_ROWS", 11)
    with pytest.raises(ConfigError, match=r"there are 12 copies of tokens .* more than the 11"):
        LocalDispatch(NUM_EXPERTS).dispatch(*make_tokens(0, "natural")[:3])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("num_experts", "legal"), [(6, "3 and 6"), (10, "2 and 5"), (3, "3")], ids=["between", "above", "too few"]
)
def test_experts_that_cannot_be_spread_evenly_are_refused(rank: RankContext, num_experts: int, legal: str) -> None:
    message = rf"{num_experts} experts .* over the 4 ranks \[0, 1, 2, 3\]: .* number of experts, as {legal} do"
    with pytest.raises(ConfigError, match=message):
        AllToAllDispatch(num_experts, rank.group)
