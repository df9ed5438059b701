"""Cross-entropy in chunks against all logits at once."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from lightning_d9d import ConfigError
from lightning_d9d.ops import WeightGradients, defer, linear_cross_entropy
from lightning_d9d.ops.backend import Kernels, using_kernels
from lightning_d9d.ops.linear_cross_entropy import LossOptions, VocabShard, linear_cross_entropy_reference
from lightning_d9d.ops.linear_cross_entropy_chunks import ChunkOptions, rows_at_once
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.ops.grid import DEVICES, LAYOUTS, MOST_ERROR, check_op, dtypes, unwritten_memory_is_nan

TOKENS, VOCAB, HIDDEN, IGNORED = 7, 13, 5, -100
ONE_CHUNK, FEW_TOKENS = 2**30, 4 * 64 * 4
"""Bytes; the latter are those of 4 tokens in float32 and of 2 in float64."""
PARTS = {2: [7, 6], 3: [8, 0, 5]}
"""How many rows of the matrix each rank has."""
EVERYTHING: dict[str, Any] = {"options": LossOptions(soft_cap=3.0, z_loss=0.05, label_smoothing=0.1)}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_labels(tokens: int = TOKENS, vocab: int = VOCAB) -> Tensor:
    labels = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    labels[:2] = torch.tensor([0, vocab - 1])[:tokens]
    labels[3:5] = IGNORED
    return labels


def make_tensors(
    tokens: int = TOKENS, vocab: int = VOCAB, hidden: int = HIDDEN, *, has_bias: bool = False
) -> dict[str, Any]:
    bias = {"bias": draw(vocab, seed=3)} if has_bias else {}
    labels = {"labels": make_labels(tokens, vocab)}
    return {"x": draw(tokens, hidden, seed=1), "weight": draw(vocab, hidden, seed=2), **bias, **labels}


def op(**arguments: Any) -> tuple[Tensor, Tensor]:
    return linear_cross_entropy(**arguments, return_lse=True)


def reference(**arguments: Any) -> tuple[Tensor, Tensor]:
    del arguments["chunk_bytes"]
    loss, lse = linear_cross_entropy_reference(**arguments)
    return loss, lse.detach() if arguments["reduction"] == "sum" else lse


# The grid


@DEVICES
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("chunk_bytes", [ONE_CHUNK, FEW_TOKENS], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_dtypes(device, reduction, chunk_bytes, options):
    tensors = make_tensors(has_bias=bool(options))
    for dtype in dtypes(device):
        check_op(op, reference, tensors, dtype, device, reduction=reduction, chunk_bytes=chunk_bytes, **options)


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_layouts(device, layout, reduction):
    # An expanded matrix would have equal logits: all that is left of some gradients is rounding.
    names = ["x", "weight", "bias"] if layout != "expanded" else ["x"]
    options = {"reduction": reduction, "chunk_bytes": FEW_TOKENS}
    check_op(
        op,
        reference,
        make_tensors(has_bias=True),
        torch.float32,
        device,
        layout=layout,
        gradients_of=names,
        **options,
    )


@DEVICES
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("names", [[], ["x"], ["weight"], ["bias"], ["x", "weight"]], ids=str)
def test_some_gradients(device, names, reduction):
    tensors = make_tensors(has_bias=True)
    check_op(
        op,
        reference,
        tensors,
        torch.float32,
        device,
        gradients_of=names,
        reduction=reduction,
        chunk_bytes=FEW_TOKENS,
    )


@DEVICES
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize(("tokens", "vocab", "hidden"), [(0, 7, 4), (1, 1, 1), (3, 64, 8), (2, 16384 + 9, 4)], ids=str)
def test_shapes(device, tokens, vocab, hidden, reduction):
    options = {"reduction": reduction, "chunk_bytes": ONE_CHUNK}
    check_op(op, reference, make_tensors(tokens, vocab, hidden), torch.float32, device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_and_many_tokens(dtype, reduction):
    tensors = make_tensors(2100, 50257, 64)
    tensors["x"] /= 4  # logits of about 2
    options = {"reduction": reduction, "chunk_bytes": 300 * 50304 * dtype.itemsize}
    check_op(op, reference, tensors, dtype, "cuda", **options)


@pytest.mark.gpu
def test_logits_behind_32_bits():
    tokens, vocab, hidden = 17000, 151936, 16
    x, weight = (draw(n, hidden, seed=n).to("cuda", torch.bfloat16).requires_grad_() for n in (tokens, vocab))
    labels = torch.randint(vocab, (tokens,), device="cuda")
    whole = linear_cross_entropy(x, weight, labels, reduction="sum", chunk_bytes=2**33)
    expected = torch.autograd.grad(whole, [x, weight])
    parts = linear_cross_entropy(x, weight, labels, reduction="sum")
    for ours, theirs in zip(torch.autograd.grad(parts, [x, weight]), expected, strict=True):
        assert_close_named("gradient", ours, theirs)
    assert_close_named("loss", parts / tokens, whole / tokens, kind=Kind.LOSS)


# What is kept, and when what is computed


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_in_float64_and_of_more_dims(reduction):
    shape = (2, 3, 4)
    x, weight = draw(*shape, HIDDEN, seed=1).double(), draw(VOCAB, HIDDEN, seed=2).double()
    leaves = x.requires_grad_(), weight.requires_grad_()
    labels = torch.randint(VOCAB, shape)
    labels[1, 2] = IGNORED
    logits = F.linear(x, weight).flatten(0, -2)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction=reduction, label_smoothing=0.3)
    options = LossOptions(label_smoothing=0.3)
    loss, lse = linear_cross_entropy(
        x, weight, labels, options=options, reduction=reduction, return_lse=True, chunk_bytes=FEW_TOKENS
    )
    assert_close_named("loss", loss, expected.view_as(loss), kind=Kind.OUTPUT)
    assert_close_named("lse", lse, logits.logsumexp(-1).view(shape), kind=Kind.OUTPUT)
    dloss = torch.linspace(-1, 1, 24, dtype=torch.float64).view(shape) if loss.dim() else torch.tensor(3.0).double()
    gradients = torch.autograd.grad(expected.view_as(loss), leaves, dloss)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves, dloss), gradients, strict=True):
        assert_close_named("gradient", ours, theirs)


def products_of(run: Callable[[], object]) -> int:
    """How many matrix products it takes."""
    with profile() as profiler:
        run()
    return sum(event.name in ("aten::mm", "aten::addmm") for event in profiler.events() or ())


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(("reduction", "expected"), [("sum", (6, 0)), ("none", (2, 6))])
def test_when_products_are_made(reduction, expected, kernels):
    tensors = make_tensors()
    x, weight = (tensors[name].requires_grad_() for name in ("x", "weight"))
    kept, losses = [], []

    def forward() -> None:
        with using_kernels(kernels):
            options = {"reduction": reduction, "chunk_bytes": FEW_TOKENS}
            losses.append(linear_cross_entropy(x, weight, tensors["labels"], **options).sum())

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert products_of(forward) == expected[0]
    assert max(each.numel() for each in kept) < TOKENS * VOCAB
    assert products_of(losses[0].backward) == expected[1]
    with torch.no_grad():
        assert products_of(forward) == 2


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_graph_that_is_kept_gives_gradients_again(reduction):
    tensors = make_tensors()
    leaves = x, weight = [tensors[name].requires_grad_() for name in ("x", "weight")]
    with using_kernels("triton"):
        loss = linear_cross_entropy(x, weight, tensors["labels"], reduction=reduction).sum()
    first = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    for again, once in zip(torch.autograd.grad(6 * loss, leaves), first, strict=True):
        assert_close_named("gradient", again, 2 * once)


def test_second_derivatives_are_refused():
    tensors = make_tensors()
    loss = linear_cross_entropy(tensors["x"].requires_grad_(), tensors["weight"], tensors["labels"], reduction="sum")
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, tensors["x"], create_graph=True)


@pytest.mark.parametrize("num_chunks", [8, 16])
def test_error_of_a_narrow_gradient_over_many_chunks(num_chunks):
    tokens, vocab, hidden = 256, 64, 32
    x, weight = draw(tokens, hidden, seed=1).bfloat16(), draw(vocab, hidden, seed=2).mul(0.2).bfloat16()
    weight.requires_grad_()
    labels = make_labels(tokens, vocab)
    exact = weight.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(F.linear(x.double(), exact), labels, reduction="sum"), exact)
    (own,) = torch.autograd.grad(F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum"), weight)
    chunk_bytes = tokens // num_chunks * vocab * 4
    loss = linear_cross_entropy(x, weight, labels, reduction="sum", chunk_bytes=chunk_bytes)
    (actual,) = torch.autograd.grad(loss, weight)
    assert (actual - truth).norm() <= MOST_ERROR * (own - truth).norm()


# Beside other features


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("reduction", "chunk_bytes", "expected"),
    [
        ("sum", ONE_CHUNK, (2, 0, 1)),
        ("sum", 2 * FEW_TOKENS, (6, 0, 0)),
        ("none", ONE_CHUNK, (1, 2, 1)),
        ("none", 2 * FEW_TOKENS, (2, 4, 4)),
    ],
)
def test_weight_gradient_that_waits(reduction, chunk_bytes, expected, has_bias):
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in make_tensors(has_bias=has_bias).items()}
    leaves = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
    options = {"reduction": reduction, "chunk_bytes": chunk_bytes, **EVERYTHING}
    dloss = torch.linspace(-1, 1, TOKENS).double() if reduction == "none" else torch.tensor(3.0).double()
    truth = torch.autograd.grad(
        linear_cross_entropy_reference(**tensors, reduction=reduction, **EVERYTHING)[0], leaves, dloss
    )
    gradients, losses = WeightGradients(), []

    def forward() -> None:
        with defer(gradients):
            losses.append(linear_cross_entropy(**tensors, **options))

    made = [products_of(forward), products_of(lambda: gradients.backward(losses[0], dloss))]
    is_deferred = chunk_bytes == ONE_CHUNK or reduction == "none"
    assert (tensors["weight"].grad is None) == is_deferred
    logits = TOKENS * VOCAB
    assert (max((each.numel() for each in gradients.noted), default=0) >= logits) == (chunk_bytes == ONE_CHUNK)
    made.append(products_of(gradients.accumulate))
    if not has_bias:
        assert tuple(made) == expected
    for leaf, theirs in zip(leaves, truth, strict=True):
        assert_close_named("gradient", leaf.grad, theirs)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("waits", [False, True], ids=["", "waits"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_recomputation(reduction, waits, use_reentrant):
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in make_tensors().items()}
    leaves = x, weight = [tensors[name].requires_grad_() for name in ("x", "weight")]
    labels = tensors["labels"]
    truth = torch.autograd.grad(linear_cross_entropy_reference(x, weight, labels, reduction="sum")[0], leaves)

    def loss(x: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, labels, reduction=reduction).sum()

    gradients = WeightGradients()
    with defer(gradients) if waits else nullcontext():
        total = checkpoint(loss, x, use_reentrant=use_reentrant)
    if waits:
        gradients.backward(total)
        gradients.accumulate()
    else:
        total.backward()
    for leaf, theirs in zip(leaves, truth, strict=True):
        assert_close_named("gradient", leaf.grad, theirs)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_autocast(reduction):
    tensors = make_tensors()
    leaves = [tensors[name].requires_grad_() for name in ("x", "weight")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(**tensors, reduction=reduction).sum()
        logits = F.linear(tensors["x"], tensors["weight"])
        expected = F.cross_entropy(logits.float(), tensors["labels"], reduction="sum")
    assert_close_named("loss", loss, expected, kind=Kind.OUTPUT)
    ours, theirs = torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)
    assert [each.dtype for each in ours] == [torch.float32] * 2
    for name, one, other in zip(("dx", "dweight"), ours, theirs, strict=True):
        assert_close_named(name, one.bfloat16(), other)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_compiled(reduction):
    tensors = make_tensors(has_bias=True)
    leaves = [tensors[name].requires_grad_() for name in ("x", "weight", "bias")]

    def loss(**tensors: Any) -> Tensor:
        return 2 * linear_cross_entropy(**tensors, reduction=reduction, chunk_bytes=FEW_TOKENS, **EVERYTHING).sum()

    expected = loss(**tensors)
    actual = torch.compile(loss, backend="aot_eager", fullgraph=True)(**tensors)
    assert_bitwise_equal("loss", actual.detach(), expected.detach())
    for ours, theirs in zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert_bitwise_equal("gradient", ours, theirs)


def test_registration_passes_torchs_checks():
    ops = torch.ops.lightning_d9d
    for tokens in (TOKENS, 0):
        tensors = make_tensors(tokens, has_bias=True)
        x, weight, labels, bias = (tensors[name] for name in ("x", "weight", "labels", "bias"))
        options = (IGNORED, 3.0, 0.1, 0.1, ONE_CHUNK, 0, VOCAB, "", False)
        results = {}
        for wanted in ((False,) * 4, (True,) * 4):
            arguments = (x, weight, bias, labels, *options, *wanted)
            results |= torch.library.opcheck(ops.linear_cross_entropy.default, arguments)
        lse = ops.linear_cross_entropy(*arguments)[1]
        arguments = (x, weight, bias, labels, lse, lse, lse, *options, *wanted)
        results |= torch.library.opcheck(ops.linear_cross_entropy_backward.default, arguments)
        assert set(results.values()) == {"SUCCESS"}


# On ranks


def check_on_ranks(rank: RankContext, dtype: torch.dtype, reduction: Literal["none", "sum"], **options: Any) -> None:
    first = [0, *accumulate(PARTS[rank.world_size])][rank.rank]
    rows = slice(first, first + PARTS[rank.world_size][rank.rank])
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in make_tensors(has_bias=True).items()}
    leaves = [tensors[name].requires_grad_() for name in ("x", "weight", "bias")]
    loss, lse = linear_cross_entropy_reference(**tensors, reduction=reduction, **options)
    dloss = torch.linspace(-1, 1, TOKENS).to(loss) if reduction == "none" else torch.tensor(3.0).to(loss)
    truth = torch.autograd.grad(loss, leaves, dloss)

    ours = {n: t.detach()[rows] if n in ("weight", "bias") else t.detach() for n, t in tensors.items()}
    ours = {n: t.to(rank.device, copy=True) for n, t in ours.items()}
    leaves = [ours[name].requires_grad_() for name in ("x", "weight", "bias")]
    shard = VocabShard(rank.group.group_name, first, VOCAB)
    reference_loss, _ = linear_cross_entropy_reference(**ours, reduction=reduction, **options, shard=shard)
    assert_close_named("loss of the reference", reference_loss, loss, kind=Kind.OUTPUT)
    for chunk_bytes in (ONE_CHUNK, FEW_TOKENS):
        actual, actual_lse = linear_cross_entropy(
            **ours, reduction=reduction, **options, shard=shard, chunk_bytes=chunk_bytes, return_lse=True
        )
        assert_close_named("loss", actual, loss, kind=Kind.OUTPUT)
        assert_close_named("lse", actual_lse, lse, kind=Kind.OUTPUT)
        for other in rank.all_gather_object(actual.detach().cpu()):
            assert_bitwise_equal("loss of another rank", actual.detach().cpu(), other)
        dx, dweight, dbias = torch.autograd.grad(actual, leaves, dloss.to(rank.device))
        dist.all_reduce(dx)
        assert_close_named("dx", dx, truth[0])
        assert_close_named("dweight", dweight, truth[1][rows])
        assert_close_named("dbias", dbias, truth[2][rows])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_vocabulary_on_two(rank: RankContext, reduction: Literal["none", "sum"], options: dict[str, Any]) -> None:
    check_on_ranks(rank, torch.float64, reduction, **options)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_vocabulary_where_a_rank_has_no_rows(
    rank: RankContext, reduction: Literal["none", "sum"], kernels: Kernels
) -> None:
    with using_kernels(kernels), unwritten_memory_is_nan():
        check_on_ranks(rank, torch.float32, reduction, **EVERYTHING)


@pytest.mark.ranks(2)
def test_matrices_that_are_dtensors(rank: RankContext) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    tensors = {n: t.to(rank.device) for n, t in make_tensors(vocab=14).items()}
    x, labels = tensors["x"], tensors["labels"]
    expected = linear_cross_entropy_reference(**tensors)[0]
    for placement in (Replicate(), Shard(0)):
        weight = distribute_tensor(tensors["weight"], mesh, [placement]).requires_grad_()
        shard = VocabShard(rank.group.group_name, 7 * rank.rank, 14) if placement.is_shard() else None
        loss = linear_cross_entropy(x, weight, labels, shard=shard)
        loss.sum().backward()
        assert_close_named("loss", loss, expected, kind=Kind.OUTPUT)
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.placements == (placement,)
    with pytest.raises(ConfigError, match="weight is a sharded DTensor; name the group"):
        linear_cross_entropy(x, weight, labels)
    with pytest.raises(ConfigError, match="x is a DTensor"):
        linear_cross_entropy(distribute_tensor(x, mesh, [Replicate()]), weight, labels)


# What is refused


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_labels_outside_of_the_vocabulary(bad):
    tensors = make_tensors()
    tensors["labels"][1] = bad
    with pytest.raises(IndexError, match=f"label {bad} is outside of the vocabulary"):
        linear_cross_entropy(**tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"x \[7, 5\], weight \[13, 5\] and labels \[3\] must be"),
        ({"weight": torch.zeros(VOCAB, 4)}, r"weight \[13, 4\]"),
        ({"weight": torch.zeros(VOCAB, HIDDEN).half()}, "weight is torch.float16, but x is torch.float32"),
        ({"bias": torch.zeros(2)}, r"bias \[2\] must be \[13\]"),
        ({"reduction": "mean"}, "reduction='mean' must be 'none' or 'sum'"),
        ({"options": LossOptions(soft_cap=0.0)}, "soft_cap=0.0 must be above 0"),
        ({"options": LossOptions(label_smoothing=1.5)}, "label_smoothing=1.5 must be from 0 to 1"),
        ({"chunk_bytes": 0}, "chunk_bytes=0 must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError, match=message):
        linear_cross_entropy(**{**make_tensors(), **changes})


def test_chunks_grow_where_that_takes_less_memory_than_a_wide_gradient():
    """Tokens of a chunk, for 151,936 ids and a hidden size of 2048 in bfloat16."""
    rows = {}
    for tokens in (2_000, 16_384, 32_768, 65_536, 1_048_576):
        for chunk_bytes in (0, 2**30):
            x = torch.empty(tokens, 2048, dtype=torch.bfloat16, device="meta")
            options = ChunkOptions(-100, 0.0, 0.0, 0.0, chunk_bytes, 0, 151_936, "", True)
            rows[tokens, chunk_bytes] = rows_at_once(x, options)
    assert [rows[tokens, 2**30] for tokens in (2_000, 16_384, 32_768, 65_536, 1_048_576)] == [2_000, *[2_048] * 4]
    assert [rows[tokens, 0] for tokens in (2_000, 16_384, 32_768)] == [2_000, 2_048, 4_096]
    assert [rows[tokens, 0] for tokens in (65_536, 1_048_576)] == [2_048, 2_048]


def test_chunks_of_which_there_are_no_more_than_eight_stay():
    """Tokens of a chunk, for 1,048,576 ids and a hidden size of 2048 in float32: 4 MiB each."""
    rows = []
    for tokens in (2_048, 2_049):
        options = ChunkOptions(-100, 0.0, 0.0, 0.0, 0, 0, 2**20, "", True)
        rows.append(rows_at_once(torch.empty(tokens, 2048, device="meta"), options))
    assert rows == [256, 2_048]  # the ninth chunk would need a gradient of 8 GiB in float32
