"""A vocabulary in parts on ranks against the whole in one process."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.ops.vocab_parallel import vocab_parallel_embedding
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext

VOCAB, HIDDEN = 13, 5
PARTS = {2: [7, 6], 3: [8, 0, 5], 4: [4, 4, 5, 0]}
"""How many rows of the vocabulary each rank has."""


def own_rows(rank: RankContext) -> slice:
    parts = PARTS[rank.world_size]
    first = [0, *accumulate(parts)][rank.rank]
    return slice(first, first + parts[rank.rank])


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_embedding(rank: RankContext, dtype: torch.dtype) -> None:
    rows = own_rows(rank)
    whole = draw(VOCAB, HIDDEN, seed=1, dtype=dtype).requires_grad_()
    ids = torch.cat([torch.arange(VOCAB), torch.arange(1, VOCAB, 2)[:5]]).view(2, -1)
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
