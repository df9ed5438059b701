"""A vocabulary in parts on ranks against the whole in one process."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d import ConfigError
from lightning_d9d.ops import vocab_parallel, vocab_parallel_kernels
from lightning_d9d.ops.kernels import using_kernels
from lightning_d9d.ops.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_reference,
    vocab_parallel_embedding,
)
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.ops.grid import DEVICES, unwritten_memory_is_nan

TOKENS, VOCAB, HIDDEN, IGNORED = 11, 13, 5, -100
PARTS = {2: [7, 6], 3: [8, 0, 5], 4: [4, 4, 5, 0]}
"""How many rows of the vocabulary each rank has."""


def own_rows(rank: RankContext) -> slice:
    parts = PARTS[rank.world_size]
    first = [0, *accumulate(parts)][rank.rank]
    return slice(first, first + parts[rank.rank])


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_labels() -> Tensor:
    labels = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0))
    labels[:2] = torch.tensor([0, VOCAB - 1])
    labels[4:6] = IGNORED
    return labels


# Cross-entropy


def check_cross_entropy(rank: RankContext, dtype: torch.dtype, shift: float = 0.0) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    rows, labels, name = own_rows(rank), make_labels(), rank.group.group_name
    whole = draw(TOKENS, VOCAB, seed=1, dtype=dtype).mul(4).add(shift).requires_grad_()
    dloss = draw(TOKENS, seed=2, dtype=wide)
    expected = F.cross_entropy(whole.to(wide), labels, ignore_index=IGNORED, reduction="none")
    expected.backward(dloss)

    logits = whole.detach()[:, rows].to(rank.device).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, labels.to(rank.device), rows.start, name)
    loss.backward(dloss.to(rank.device))
    assert (loss.dtype, logits.grad.dtype) == (wide, dtype)
    assert not loss[labels == IGNORED].any()
    assert_close_named("loss", loss, expected, kind=Kind.OUTPUT)
    assert_close_named("dlogits", logits.grad, whole.grad[:, rows])
    for other in rank.all_gather_object(loss.detach().cpu()):
        assert_bitwise_equal("loss of another rank", loss.cpu(), other)

    (dlogits,) = torch.autograd.grad(
        vocab_parallel_cross_entropy(logits, labels.to(rank.device), rows.start, name, reduction="sum"), logits
    )
    (expected_dlogits,) = torch.autograd.grad(F.cross_entropy(whole.to(wide), labels, reduction="sum"), whole)
    assert_close_named("dlogits of the sum", dlogits, expected_dlogits[:, rows])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_on_two(rank: RankContext, dtype: torch.dtype) -> None:
    check_cross_entropy(rank, dtype)


@pytest.mark.ranks(3)
def test_cross_entropy_where_a_rank_has_no_columns(rank: RankContext) -> None:
    check_cross_entropy(rank, torch.float64)


@pytest.mark.ranks(4)
def test_cross_entropy_on_four(rank: RankContext) -> None:
    check_cross_entropy(rank, torch.float64)


@pytest.mark.ranks(2)
def test_logits_whose_exponentials_overflow(rank: RankContext) -> None:
    check_cross_entropy(rank, torch.float64, shift=5000.0)


@pytest.mark.ranks(2)
def test_a_few_tokens_at_once(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_parallel, "_NUMBERS_AT_ONCE", 3 * 7)
        check_cross_entropy(rank, torch.float64)


@DEVICES
@pytest.mark.ranks(2)
def test_kernels(rank: RankContext, device: str) -> None:
    assert rank.device.type == device
    with pytest.MonkeyPatch.context() as patch, using_kernels("triton"), unwritten_memory_is_nan():
        patch.setattr(vocab_parallel_kernels, "_COLUMNS", 4)  # two blocks, of which one is not full
        check_cross_entropy(rank, torch.float32)


@DEVICES
@pytest.mark.ranks(1)
def test_kernels_on_logits_that_are_not_in_a_row_or_not_finite(rank: RankContext, device: str) -> None:
    assert rank.device.type == device
    name = rank.group.group_name
    whole = draw(VOCAB, TOKENS, seed=1, dtype=torch.float32).t()
    whole[:, 1::3] = -torch.inf
    labels, dloss = make_labels(), draw(1, seed=2, dtype=torch.float32).expand(TOKENS)
    labels[labels % 3 == 1] = 0
    expected = whole.clone().requires_grad_()
    F.cross_entropy(expected, labels, ignore_index=IGNORED, reduction="none").backward(dloss)
    with pytest.MonkeyPatch.context() as patch, using_kernels("triton"), unwritten_memory_is_nan():
        patch.setattr(vocab_parallel_kernels, "_COLUMNS", 1)  # a block of nothing but -inf
        logits = whole.to(rank.device).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, labels.to(rank.device), 0, name)
    loss.backward(dloss.to(rank.device))
    assert logits.stride() == (1, TOKENS)
    assert_close_named("dlogits", logits.grad, expected.grad)


@DEVICES
@pytest.mark.ranks(1)
def test_kernels_without_rows_or_columns(rank: RankContext, device: str) -> None:
    for tokens, columns in ((0, VOCAB), (TOKENS, 0)):
        logits, labels = torch.ones(tokens, columns, device=device), make_labels()[:tokens].to(device)
        lse, at_label = vocab_parallel_kernels.own_losses(logits, labels, 0)
        assert lse.tolist() == [-torch.inf] * tokens
        assert at_label.tolist() == [0] * tokens
        assert vocab_parallel_kernels.gradient(logits, labels, lse, at_label, 0).shape == logits.shape


@pytest.mark.ranks(3)
def test_reference_equals_cross_entropy(rank: RankContext) -> None:
    rows, labels = own_rows(rank), make_labels()
    whole = draw(TOKENS, VOCAB, seed=1).requires_grad_()
    dloss = draw(TOKENS, seed=2)
    expected = F.cross_entropy(whole, labels, reduction="none")
    expected.backward(dloss)
    logits = whole.detach()[:, rows].to(rank.device).requires_grad_()
    loss = vocab_parallel_cross_entropy_reference(logits, labels.to(rank.device), rows.start, rank.group.group_name)
    loss.backward(dloss.to(rank.device))
    assert_close_named("loss", loss, expected, kind=Kind.OUTPUT)
    assert_close_named("dlogits", logits.grad, whole.grad[:, rows])


@pytest.mark.ranks(2)
def test_nothing_is_kept_but_the_logits(rank: RankContext) -> None:
    kept = []
    rows = own_rows(rank)
    logits = draw(TOKENS, rows.stop - rows.start, seed=1, dtype=torch.bfloat16).to(rank.device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        vocab_parallel_cross_entropy(logits, make_labels().to(rank.device), rows.start, rank.group.group_name)
    assert [each.data_ptr() for each in kept if each.dim() > 1] == [logits.data_ptr()]
    assert len(kept) == 3  # and the labels and one number a token


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_label_counts(rank: RankContext, tokens: int) -> None:
    logits = torch.ones(tokens, 4, device=rank.device, requires_grad=True)
    labels = torch.full((tokens,), 2, device=rank.device)
    name = rank.group.group_name
    loss = vocab_parallel_cross_entropy(logits, labels, 4 * rank.rank, name, ignore_index=2, reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.ranks(2)
def test_other_shapes_and_reductions_are_refused(rank: RankContext) -> None:
    logits, labels = torch.ones(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    name = rank.group.group_name
    with pytest.raises(ConfigError, match=r"logits \[2, 3, 4\] and labels \[2, 3\] must be"):
        vocab_parallel_cross_entropy(logits, labels, 0, name)
    with pytest.raises(ConfigError, match=r"logits \[2, 4\] and labels \[3\] must be"):
        vocab_parallel_cross_entropy(logits[:, 0], labels[0], 0, name)
    with pytest.raises(ConfigError, match="reduction='mean' must be 'none' or 'sum'"):
        vocab_parallel_cross_entropy(logits[0], labels[0], 0, name, reduction="mean")


def test_labels_outside_of_the_vocabulary() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    try:
        for label in (-1, VOCAB):
            with pytest.raises(IndexError, match=f"label {label} is outside of the vocabulary"):
                vocab_parallel_cross_entropy(torch.ones(2, VOCAB), torch.tensor([0, label]), 0, name)
    finally:
        dist.destroy_process_group()


def test_registration_passes_torchs_checks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    ops = torch.ops.lightning_d9d
    try:
        for tokens in (TOKENS, 0):
            logits, labels = draw(tokens, VOCAB, seed=1, dtype=torch.float32), make_labels()[:tokens]
            strided = logits.t().contiguous().t().requires_grad_()
            arguments = (strided, labels, 0, name, IGNORED)
            results = torch.library.opcheck(ops.vocab_parallel_cross_entropy.default, arguments)
            loss, lse = ops.vocab_parallel_cross_entropy(logits, labels, 0, name, IGNORED)
            arguments = (logits, labels, lse, loss, 0, IGNORED, False)
            results |= torch.library.opcheck(ops.vocab_parallel_cross_entropy_backward.default, arguments)
            assert set(results.values()) == {"SUCCESS"}
    finally:
        dist.destroy_process_group()


# Embedding


def check_embedding(rank: RankContext, dtype: torch.dtype) -> None:
    rows = own_rows(rank)
    whole = draw(VOCAB, HIDDEN, seed=1, dtype=dtype).requires_grad_()
    ids = torch.cat([torch.arange(VOCAB), make_labels().clamp(min=0)]).view(2, -1)
    dy = draw(*ids.shape, HIDDEN, seed=2, dtype=dtype)
    expected = F.embedding(ids, whole)
    expected.backward(dy)

    weight = whole.detach()[rows].to(rank.device).requires_grad_()
    first, last = rows.start == 0, rows.stop == VOCAB
    y = vocab_parallel_embedding(ids.to(rank.device), weight, rows.start, is_first=first, is_last=last)
    y.backward(dy.to(rank.device))
    is_ours = (ids >= rows.start) & (ids < rows.stop)
    assert_bitwise_equal("rows", y, torch.where(is_ours.unsqueeze(-1), expected, 0))
    assert_close_named("dweight", weight.grad, whole.grad[rows])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_embedding_on_two(rank: RankContext, dtype: torch.dtype) -> None:
    check_embedding(rank, dtype)


@pytest.mark.ranks(3)
def test_embedding_where_a_rank_has_no_rows(rank: RankContext) -> None:
    check_embedding(rank, torch.float64)


@pytest.mark.ranks(4)
def test_embedding_on_four(rank: RankContext) -> None:
    check_embedding(rank, torch.float64)


@pytest.mark.parametrize("rows", [4, 0], ids=["some rows", "no rows"])
@pytest.mark.parametrize(("is_first", "bad"), [(True, -1), (False, VOCAB)], ids=["before", "behind"])
def test_ids_outside_of_the_vocabulary(rows: int, is_first: bool, bad: int) -> None:
    weight, first = torch.ones(rows, HIDDEN), 0 if is_first else VOCAB - rows
    ids = torch.tensor([0, VOCAB - 1])
    y = vocab_parallel_embedding(ids, weight, first, is_first=is_first, is_last=not is_first)
    assert y.any(1).tolist() == [bool(rows) and is_first, bool(rows) and not is_first]
    ids[0] = bad
    with pytest.raises(IndexError):
        vocab_parallel_embedding(ids, weight, first, is_first=is_first, is_last=not is_first)
