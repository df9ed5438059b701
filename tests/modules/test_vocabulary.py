"""Embedding and head: a vocabulary in several parts equals one matrix."""

import pytest
import torch
import torch.nn.functional as F

from lightning_d9d import ConfigError
from lightning_d9d.modules import LMHead, SplitLMHead, SplitTokenEmbedding, TokenEmbedding
from lightning_d9d.ops import LossOptions, WeightGradients, defer
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind

HIDDEN, SPLITS = 16, {"text": 20, "image": 5, "special": 7}
VOCAB = sum(SPLITS.values())


@pytest.mark.parametrize("splits", [SPLITS, {"all": VOCAB}], ids=["three parts", "one part"])
def test_split_embedding_equals_one_matrix(splits):
    one = TokenEmbedding(VOCAB, HIDDEN, initializer_range=1.0)
    split = SplitTokenEmbedding(splits, HIDDEN, initializer_range=1.0)
    with torch.no_grad():
        for part, rows in zip(split.values(), one.weight.split(list(splits.values())), strict=True):
            part.weight.copy_(rows)
    assert_bitwise_equal("weight", split.weight.detach(), one.weight.detach())

    ids = torch.cat([torch.arange(VOCAB), torch.randint(VOCAB, (40,))]).view(2, -1)
    gradient = torch.randn(*ids.shape, HIDDEN)
    assert_bitwise_equal("embedded", split(ids), one(ids))
    split(ids).backward(gradient)
    one(ids).backward(gradient)
    assert_close_named("gradient", torch.cat([part.weight.grad for part in split.values()]), one.weight.grad)


@pytest.mark.parametrize("bad", [-1, VOCAB])
@pytest.mark.parametrize("splits", [SPLITS, {"all": VOCAB}], ids=["three parts", "one part"])
def test_id_outside_the_vocabulary_fails(splits, bad):
    embedding = SplitTokenEmbedding(splits, HIDDEN, initializer_range=1.0)
    with pytest.raises(IndexError):
        embedding(torch.tensor([[0, bad]]))


def test_split_head_equals_one_matrix():
    one, split = (
        LMHead(VOCAB, HIDDEN, initializer_range=1.0),
        SplitLMHead(SPLITS, HIDDEN, initializer_range=1.0),
    )
    with torch.no_grad():
        for part, rows in zip(split.values(), one.weight.split(list(SPLITS.values())), strict=True):
            part.weight.copy_(rows)
    x, labels = torch.randn(2, 9, HIDDEN), torch.randint(VOCAB, (2, 9))
    labels[0] = -100
    assert_bitwise_equal("logits", split(x), one(x))
    for reduction in ("none", "sum"):
        assert_bitwise_equal(reduction, split(x, labels, reduction), one(x, labels, reduction))
    split(x, labels, "sum").backward()
    one(x, labels, "sum").backward()
    assert_close_named("gradient", torch.cat([part.weight.grad for part in split.values()]), one.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_loss_of_each_label(dtype):
    head = LMHead(VOCAB, HIDDEN, initializer_range=1.0).to(dtype)
    x, labels = torch.randn(3, 4, HIDDEN, dtype=dtype), torch.randint(VOCAB, (3, 4))
    labels[1], labels[2, 3] = -100, -100
    losses = head(x, labels)
    wide = torch.promote_types(dtype, torch.float32)
    expected = -F.linear(x, head.weight).to(wide).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
    assert losses.dtype == wide
    assert losses.shape == labels.shape
    assert not losses[labels == -100].any()
    assert_close_named("losses", losses, torch.where(labels == -100, 0, expected.squeeze(-1)), kind=Kind.OUTPUT)
    total = head(x, labels, "sum")
    assert (total.shape, total.dtype) == ((), wide)
    assert_close_named("sum", total, losses.sum(), kind=Kind.OUTPUT)


@pytest.mark.parametrize(
    "options",
    [
        LossOptions(soft_cap=2.0),
        LossOptions(z_loss=0.1),
        LossOptions(label_smoothing=0.2),
        LossOptions(ignore_index=3),
        LossOptions(soft_cap=2.0, z_loss=0.1, label_smoothing=0.2, ignore_index=3),
    ],
    ids=["soft cap", "z-loss", "label smoothing", "ignored label", "all"],
)
@pytest.mark.parametrize("is_split", [False, True], ids=["one matrix", "parts"])
def test_options_of_the_loss(is_split, options):
    head = (SplitLMHead if is_split else LMHead)(
        SPLITS if is_split else VOCAB, HIDDEN, initializer_range=1.0, loss_options=options
    ).double()
    x, labels = torch.randn(3, 4, HIDDEN, dtype=torch.float64), torch.randint(VOCAB, (3, 4))
    labels[1] = options.ignore_index
    weights = list(head.parameters())
    logits = F.linear(x, torch.cat(weights))
    if options.soft_cap is not None:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    assert_close_named("logits", head(x), logits, kind=Kind.OUTPUT)
    log_probabilities = logits.log_softmax(-1)
    at_label = log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = -(1 - options.label_smoothing) * at_label - options.label_smoothing * log_probabilities.mean(-1)
    expected = expected + options.z_loss * logits.logsumexp(-1).square()
    expected = torch.where(labels == options.ignore_index, 0, expected)
    assert_close_named("losses", head(x, labels), expected, kind=Kind.OUTPUT)
    actual = head(x, labels, "sum")
    assert_close_named("sum", actual, expected.sum(), kind=Kind.OUTPUT)
    theirs = torch.autograd.grad(expected.sum(), weights)
    for ours, gradient in zip(torch.autograd.grad(actual, weights), theirs, strict=True):
        assert_close_named("gradient", ours, gradient)


@pytest.mark.parametrize("head", [LMHead, SplitLMHead])
def test_options_of_the_loss_that_are_refused(head):
    size = VOCAB if head is LMHead else SPLITS
    for options, message in (
        (LossOptions(soft_cap=0.0), "soft_cap=0.0 must be above 0"),
        (LossOptions(label_smoothing=1.5), "label_smoothing=1.5 must be from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            head(size, HIDDEN, initializer_range=1.0, loss_options=options)


def test_all_labels_ignored_or_none_at_all():
    head = LMHead(VOCAB, HIDDEN, initializer_range=1.0)
    for rows in (3, 0):
        head.zero_grad()
        loss = head(torch.randn(rows, 4, HIDDEN), torch.full((rows, 4), -100), "sum")
        loss.backward()
        assert loss.item() == 0.0
        assert not head.weight.grad.any()


@pytest.mark.parametrize("is_tied", [False, True], ids=["own weight", "tied to the embedding"])
def test_weight_gradient_of_the_head_can_wait(is_tied):
    embedding = TokenEmbedding(VOCAB, HIDDEN, initializer_range=1.0).double()
    head = LMHead(None if is_tied else VOCAB, HIDDEN, initializer_range=1.0).double()
    ids, labels = torch.randint(VOCAB, (2, 2, 9))
    parameters = [*embedding.parameters(), *head.parameters()]

    def loss():
        return head(embedding(ids).sin(), labels, "sum", embedding.weight if is_tied else None)

    expected = torch.autograd.grad(loss(), parameters)
    gradients = WeightGradients()
    with defer(gradients):
        total = loss()
    gradients.backward(total)
    assert embedding.weight.grad is not None  # looking up does not wait
    assert is_tied or head.weight.grad is None
    gradients.accumulate()
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert_close_named("gradient", parameter.grad, gradient)
