"""Expert bias, losses of the router and counts, against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_d9d import ConfigError
from lightning_d9d.modules import BalanceConfig, ExpertBalance, SparseMoE, TopKRouter, expert_load, update_expert_bias
from lightning_d9d.modules.balance import spread_sequences
from lightning_d9d.pipeline.initial_weights import materialize
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind

HIDDEN, NUM_EXPERTS, TOP_K = 16, 6, 2
LOSSES = ["sequence_loss", "global_batch_loss", "z_loss"]
ALL_LOSSES = BalanceConfig(bias_rate=0.5, sequence_loss=0.3, global_batch_loss=0.7, z_loss=0.05)


def make_router(balance: BalanceConfig | None, *, normalize: bool = False) -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(HIDDEN, NUM_EXPERTS, TOP_K, normalize=normalize, initializer_range=0.5, balance=balance)
    return router.double()


def make_moe(balance: BalanceConfig | None) -> SparseMoE:
    torch.manual_seed(0)
    moe = SparseMoE(HIDDEN, 8, NUM_EXPERTS, TOP_K, normalize=True, initializer_range=0.5, balance=balance)
    return moe.double()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64)


def set_bias(router: TopKRouter, *values: float) -> None:
    assert router.balance is not None
    router.balance.bias = torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bias_rate": -0.1}, "bias_rate=-0.1 must be a number of at least 0"),
        ({"z_loss": float("nan")}, "z_loss=nan must be"),
        ({"sequence_loss": float("inf")}, "sequence_loss=inf must be"),
        ({"global_batch_loss": "0.1"}, "global_batch_loss='0.1' must be"),
        ({"forced": 1}, "forced=1 must be true or false"),
        ({"forced": True, "bias_rate": 0.1}, "bias_rate=0.1 has no effect if forced=True"),
    ],
    ids=str,
)
def test_bad_values_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BalanceConfig(**values)


# The choice of experts


@pytest.mark.parametrize("normalize", [True, False])
def test_the_bias_is_for_the_choice_alone(normalize: bool) -> None:
    router = make_router(BalanceConfig(bias_rate=0.1), normalize=normalize)
    set_bias(router, 0, 0.3, -0.4, 0, 0.2, 0)
    x = tokens(9)
    indices, weights, _ = router(x)
    for row, token in enumerate(x):
        probabilities = (router.weight @ token).softmax(0).detach()
        chosen = sorted(range(NUM_EXPERTS), key=lambda e: -float(probabilities[e] + router.balance.bias[e]))[:TOP_K]
        expected = probabilities[chosen] / (probabilities[chosen].sum() if normalize else 1)
        assert indices[row].tolist() == chosen
        assert_close_named(f"weights of token {row}", weights[row], expected, kind=Kind.OUTPUT)
    plain, _, _ = make_router(None)(x)
    assert not torch.equal(indices, plain)


@pytest.mark.parametrize("normalize", [True, False])
def test_forced_experts_take_turns(normalize: bool) -> None:
    router = make_router(BalanceConfig(forced=True), normalize=normalize)
    x = tokens(3, 3)
    indices, weights, _ = router(x)
    assert indices.tolist() == [[token % 3, token % 3 + 3] for token in range(9)]  # NUM_EXPERTS / TOP_K apart
    assert router.balance.tokens_per_expert.tolist() == [3] * NUM_EXPERTS
    expected = (x.flatten(0, 1) @ router.weight.t()).softmax(-1).gather(1, indices)
    expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
    assert_close_named("weights", weights, expected, kind=Kind.OUTPUT)
    assert_bitwise_equal("again", router(x)[1], weights)


def test_forced_experts_that_top_k_does_not_divide_take_turns() -> None:
    balance = ExpertBalance(5, BalanceConfig(forced=True))
    indices, _, _ = balance(torch.zeros(4, 5), 2, normalize=True)
    assert indices.flatten().tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_experts_of_no_probability_have_finite_weights() -> None:
    router = make_router(BalanceConfig(forced=True), normalize=True)
    with torch.no_grad():
        router.weight.mul_(1e5)  # softmax gives nothing but 0 and 1
    _, weights, _ = router(tokens(9))
    weights.sum().backward()
    assert_close_named("sums", weights.sum(-1), torch.ones(9), kind=Kind.OUTPUT)
    assert router.weight.grad.isfinite().all()


# The bias


def test_update_equals_a_loop() -> None:
    """Layers of different sizes, one of them without a bias, as a model of one's own may have."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleList(
        [ExpertBalance(n, BalanceConfig(bias_rate=0.25) if n != 5 else BalanceConfig()) for n in (3, 5, 8)]
    )
    expected = [[0.0] * 3, None, [0.0] * 8]
    for _ in range(4):
        counts = [torch.randint(9, (len(each.tokens_per_expert),), generator=generator) for each in model]
        for each, own in zip(model, counts, strict=True):
            each.tokens_per_expert += own
        returned = update_expert_bias(model, 0.25)
        assert list(returned) == ["0", "1", "2"]
        for values, own, counted in zip(expected, counts, returned.values(), strict=True):
            assert counted.tolist() == own.tolist()
            if values is None:
                continue
            mean = sum(own.tolist()) / len(own)
            for expert, count in enumerate(own.tolist()):
                values[expert] += 0.25 * ((count < mean) - (count > mean))
    assert [None if each.bias is None else each.bias.tolist() for each in model] == expected
    assert not any(each.tokens_per_expert.any() for each in model)


def test_without_tokens_nothing_changes() -> None:
    router = make_router(BalanceConfig(bias_rate=0.1))
    set_bias(router, *range(NUM_EXPERTS))
    router(tokens(0))
    update_expert_bias(router, 0.1)
    assert router.balance.bias.tolist() == list(range(NUM_EXPERTS))
    assert update_expert_bias(nn.Linear(2, 2), 0.1) == {}


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.to("meta", torch.bfloat16),
    ],
    ids=["bfloat16", "half", "double", "device and dtype", "meta"],
)
def test_the_bias_keeps_its_dtype(convert) -> None:
    router = make_router(BalanceConfig(bias_rate=0.1))
    values = [1 / 3, 0.001, 0, 0, 0, 1]
    set_bias(router, *values)
    convert(router)
    assert router.weight.dtype != torch.float32
    assert (router.balance.bias.dtype, router.balance.tokens_per_expert.dtype) == (torch.float32, torch.int64)
    assert router.balance.bias.device == router.weight.device
    if not router.balance.bias.is_meta:
        assert_bitwise_equal("bias", router.balance.bias, torch.tensor(values))
        assert "balance.bias" in router.state_dict()
        assert len(router.state_dict()) == 2


def test_buffers_of_a_model_from_the_meta_device() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            moe = make_moe(ALL_LOSSES).to(torch.bfloat16)
        materialize(moe, torch.device("cpu"), seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    balance = moe.gate.balance
    assert_bitwise_equal("bias", balance.bias, torch.zeros(NUM_EXPERTS))
    assert_bitwise_equal("counts", balance.tokens_per_expert, torch.zeros(NUM_EXPERTS, dtype=torch.int64))
    assert moe.gate.weight.dtype == torch.bfloat16


# Counts


def count_by_hand(indices: Tensor) -> list[int]:
    return [int((indices == expert).sum()) for expert in range(NUM_EXPERTS)]


def test_tokens_are_counted_where_there_is_a_gradient() -> None:
    router = make_router(BalanceConfig())
    first, _, _ = router(tokens(2, 5))
    second, _, _ = router(tokens(3, seed=2))
    with torch.no_grad():
        router(tokens(4))
    router.balance.counts_tokens = False
    router(tokens(4))
    assert router.balance.tokens_per_expert.tolist() == count_by_hand(torch.cat([first, second]))
    assert router.balance.bias is None


def test_a_recomputation_counts_nothing_and_changes_no_gradient() -> None:
    results = []
    for recompute in (False, True):
        moe, x = make_moe(ALL_LOSSES), tokens(2, 7).requires_grad_()
        y, loss = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
        (y.square().sum() + loss).backward()
        results.append((moe, {name: p.grad for name, p in moe.named_parameters()} | {"x": x.grad, "loss": loss}))
    (kept, expected), (recomputed, actual) = results
    for name, gradient in actual.items():
        assert_bitwise_equal(name, gradient, expected[name])
    assert recomputed.gate.balance.tokens_per_expert.tolist() == kept.gate.balance.tokens_per_expert.tolist()
    assert int(kept.gate.balance.tokens_per_expert.sum()) == 14 * TOP_K


def test_load_of_experts() -> None:
    assert expert_load(torch.tensor([3, 3, 3, 3])).tolist() == pytest.approx([1, 1])
    assert expert_load(torch.tensor([0, 8, 0, 0])).tolist() == pytest.approx([4, 0])
    assert expert_load(torch.tensor([2, 2, 0, 0])).tolist() == pytest.approx([2, 0.5])
    assert expert_load(torch.zeros(4, dtype=torch.int64)).tolist() == [0, 0]


# Losses


def losses_by_definition(router: TopKRouter, x: Tensor) -> dict[str, Tensor]:
    """Compute the losses of sequences `[sequences, tokens, hidden]` on one rank, token by token."""

    def of_tokens(rows: Tensor) -> Tensor:
        mean = torch.zeros(NUM_EXPERTS, dtype=torch.float64)
        fractions = torch.zeros(NUM_EXPERTS, dtype=torch.float64)
        for row in rows:
            probabilities = (router.weight @ row).softmax(0)
            mean = mean + probabilities / len(rows)
            for expert in (probabilities + router.balance.bias).topk(TOP_K).indices.tolist():
                fractions[expert] += 1 / (len(rows) * TOP_K)
        return NUM_EXPERTS * (fractions * mean).sum()

    flat = x.flatten(0, 1)
    return {
        "sequence_loss": torch.stack([of_tokens(sequence) for sequence in x]).mean(),
        "global_batch_loss": of_tokens(flat),
        "z_loss": torch.stack([(router.weight @ row).exp().sum().log() ** 2 for row in flat]).mean(),
    }


@pytest.mark.parametrize("kinds", [*[[kind] for kind in LOSSES], LOSSES], ids=str)
def test_losses_are_their_definitions(kinds: list[str]) -> None:
    coefficients = {kind: 0.5 + index for index, kind in enumerate(kinds)}
    router = make_router(BalanceConfig(bias_rate=0.1, **coefficients))
    set_bias(router, 0, 0.3, -0.4, 0, 0.2, 0)
    x = tokens(3, 5).requires_grad_()
    _, _, loss = router(x)
    expected = losses_by_definition(router, x)
    expected = sum(coefficient * expected[kind] for kind, coefficient in coefficients.items())
    assert_close_named("loss", loss, expected, kind=Kind.LOSS)
    actual = torch.autograd.grad(loss, [x, router.weight])
    for name, ours, theirs in zip(
        ("x", "weight"), actual, torch.autograd.grad(expected, [x, router.weight]), strict=True
    ):
        assert_close_named(name, ours, theirs)


def test_balance_losses_are_one_where_the_load_is_even() -> None:
    for kind in ("sequence_loss", "global_batch_loss"):
        _, _, loss = make_router(BalanceConfig(forced=True, **{kind: 1.0}))(tokens(2, NUM_EXPERTS))
        assert float(loss.detach()) == pytest.approx(1)


def test_losses_are_for_training() -> None:
    moe = make_moe(ALL_LOSSES)
    with torch.no_grad():
        y, loss = moe(tokens(2, 5))
    assert loss is None
    assert_bitwise_equal("output", y, make_moe(None)(tokens(2, 5)))
    assert isinstance(make_moe(BalanceConfig(bias_rate=0.1))(tokens(5)), Tensor)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens_give_a_loss_of_zero(shape: tuple[int, ...]) -> None:
    moe = make_moe(ALL_LOSSES)
    y, loss = moe(tokens(*shape))
    (y.sum() + loss).backward()
    assert y.shape == (*shape, HIDDEN)
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in moe.parameters())
    assert not moe.gate.balance.tokens_per_expert.any()


def test_losses_are_float32_in_bfloat16() -> None:
    moe = make_moe(ALL_LOSSES).to(torch.bfloat16)
    _, loss = moe(tokens(2, 5).to(torch.bfloat16))
    assert loss.dtype == torch.float32
    loss.backward()
    assert moe.gate.weight.grad.any()


def test_nothing_is_read_on_the_host() -> None:
    with torch.device("meta"):  # without values, whatever would read one on the host raises
        moe = make_moe(ALL_LOSSES).to(torch.bfloat16)
        y, loss = moe(torch.randn(2, 9, HIDDEN, dtype=torch.bfloat16))
        (y.sum() + loss).backward()
        update_expert_bias(moe, 0.1)


# On ranks


def count_all_reduces(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    dtypes: list[torch.dtype] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args, **kwargs):
        dtypes.append(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    monkeypatch.setattr("lightning_d9d.modules.balance.dist.all_reduce", counted)
    return dtypes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_global_batch_loss_has_the_load_of_all_ranks(rank: RankContext, recompute: bool) -> None:
    """One all-reduce for each forward, and none in a recomputation. Rank 1 has fewer tokens."""
    of_ranks = [tokens(2, 5, seed=1).to(rank.device), tokens(1, 3, seed=2).to(rank.device)]
    moe = make_moe(BalanceConfig(global_batch_loss=1.0)).to(rank.device)
    alone = make_router(None).to(rank.device)
    moe.gate.balance.group = dist.group.WORLD
    x = of_ranks[rank.rank].requires_grad_()
    with pytest.MonkeyPatch.context() as monkeypatch:
        all_reduces = count_all_reduces(monkeypatch)
        _, loss = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
        loss.backward()
        assert len(all_reduces) == 1
    indices = torch.cat([alone(each)[0] for each in of_ranks])
    fractions = torch.tensor(count_by_hand(indices), dtype=torch.float64, device=rank.device) / indices.numel()
    means = (x.flatten(0, 1) @ alone.weight.t()).softmax(-1).mean(0)
    expected = NUM_EXPERTS * (fractions * means).sum()
    assert_close_named("loss", loss, expected, kind=Kind.LOSS)
    assert_close_named("gradient", moe.gate.weight.grad, torch.autograd.grad(expected, alone.weight)[0])


@pytest.mark.ranks(2)
def test_dummies_are_no_part_of_the_global_batch(rank: RankContext) -> None:
    moe = make_moe(BalanceConfig(global_batch_loss=1.0)).to(rank.device)
    moe.gate.balance.group = dist.group.WORLD
    moe.gate.balance.counts_tokens = rank.rank == 0
    _, loss = moe(tokens(2, 5, seed=rank.rank).to(rank.device))
    if rank.rank == 0:
        alone = make_moe(BalanceConfig(global_batch_loss=1.0)).to(rank.device)
        assert_bitwise_equal("loss", loss, alone(tokens(2, 5, seed=0).to(rank.device))[1])


@pytest.mark.ranks(2)
def test_one_message_updates_all_layers_on_all_ranks_alike(rank: RankContext) -> None:
    config = BalanceConfig(bias_rate=0.1)
    model = nn.Sequential(make_router(config), make_router(config)).to(rank.device)
    for layer, router in enumerate(model):
        router(tokens(4, seed=2 * layer + rank.rank).to(rank.device))
    with pytest.MonkeyPatch.context() as monkeypatch:
        all_reduces = count_all_reduces(monkeypatch)
        update_expert_bias(model, 0.1)
        assert all_reduces == [torch.int64]
    one = nn.Sequential(make_router(config), make_router(config)).to(rank.device)
    for layer, router in enumerate(one):
        for source in range(2):
            router(tokens(4, seed=2 * layer + source).to(rank.device))
    for name, router in one.named_children():
        counts = router.balance.tokens_per_expert.double()
        expected = 0.1 * (counts.mean() - counts).sign().float()
        assert expected.any()
        assert_bitwise_equal(name, model.get_buffer(f"{name}.balance.bias"), expected)


def check_spread_sequences(
    rank: RankContext, sharing: dist.ProcessGroup, whole_batches: dist.ProcessGroup | None, *, recompute: bool = False
) -> None:
    """Ranks of `sharing` have some tokens of each sequence; as many ranks as data ranks do it again with whole ones.

    Args:
        whole_batches: One rank of each group of `sharing`, this one among them.
    """
    data_rank, size, part = rank.rank // sharing.size(), sharing.size(), sharing.rank()
    whole = tokens(3, 8, seed=data_rank).to(rank.device).requires_grad_()
    one = make_moe(ALL_LOSSES).to(rank.device)
    one.gate.balance.group = whole_batches
    _, expected = one(whole)
    expected.backward()

    moe = make_moe(ALL_LOSSES).to(rank.device)
    moe.gate.balance.group = dist.group.WORLD
    spread_sequences(moe, sharing)
    x = whole.detach()[:, part::size].requires_grad_()
    with pytest.MonkeyPatch.context() as monkeypatch:
        all_reduces = count_all_reduces(monkeypatch)
        _, loss = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
        (loss / size).backward()
        assert len(all_reduces) == 2  # of sequences, of the global batch

    sums = {"loss": loss.detach() / size, "weight": moe.gate.weight.grad, "counts": moe.gate.balance.tokens_per_expert}
    for summed in sums.values():
        dist.all_reduce(summed, group=sharing)
    assert_close_named("loss", sums["loss"], expected, kind=Kind.LOSS)
    assert_close_named("gradient of the weight", sums["weight"], one.gate.weight.grad)
    assert_close_named("gradient of own tokens", x.grad, whole.grad[:, part::size])
    assert sums["counts"].tolist() == one.gate.balance.tokens_per_expert.tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_sequences_on_two_ranks(rank: RankContext, recompute: bool) -> None:
    check_spread_sequences(rank, rank.group, None, recompute=recompute)


@pytest.mark.ranks(4)
def test_sequences_on_four_ranks(rank: RankContext) -> None:
    check_spread_sequences(rank, rank.group, None)


@pytest.mark.ranks(4)
def test_sequences_on_two_ranks_of_four(rank: RankContext) -> None:
    sharing, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    whole_batches, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    check_spread_sequences(rank, sharing, whole_batches)
    for group in (sharing, whole_batches):
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_forced_experts_take_turns_over_ranks(rank: RankContext) -> None:
    moe = make_moe(BalanceConfig(forced=True)).to(rank.device)
    spread_sequences(moe, rank.group)
    moe(tokens(1, 2).to(rank.device))
    expected = [[1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 1]]
    assert moe.gate.balance.tokens_per_expert.tolist() == expected[rank.rank]


@pytest.mark.gpu
@pytest.mark.parametrize("forced", [False, True])
def test_cuda_never_waits_for_the_host(forced: bool) -> None:
    config = BalanceConfig(forced=True, z_loss=0.1) if forced else ALL_LOSSES
    moe, x = make_moe(config).to("cuda", torch.bfloat16), tokens(2, 64).to("cuda", torch.bfloat16)

    def step() -> None:
        y, loss = moe(x)
        (y.sum() + loss).backward()
        expert_load(update_expert_bias(moe, 0.1)["gate.balance"])

    step()  # libraries may wait when they start
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    losses = []
    for device in ("cpu", "cuda"):
        moe = make_moe(ALL_LOSSES).to(device)
        y, loss = moe(tokens(3, 7).to(device))
        (y.square().sum() + loss).backward()
        losses.append((loss, moe.gate.weight.grad, moe.gate.balance.tokens_per_expert))
    (loss, gradient, counts), (on_gpu, gradient_on_gpu, counts_on_gpu) = losses
    assert_close_named("loss", on_gpu, loss, kind=Kind.LOSS)
    assert_close_named("gradient", gradient_on_gpu, gradient)
    assert counts_on_gpu.tolist() == counts.tolist()
