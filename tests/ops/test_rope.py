"""`rope` and `norm_rope`, also of pairs, on their kernels (Triton's interpreter without a GPU) and on torch's."""

from functools import cache
from itertools import product

import pytest
import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import norm_rope, norm_rope_qk, rope, rope_qk
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.norm_rope import norm_rope_reference
from lightning_d9d.ops.rope import rope_reference
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind
from tests.ops.grid import DEVICES, LAYOUTS, check_op, shapes_and_dtypes

SHAPES = [
    (1, 1, 1, 32, 16, 1),
    (2, 5, 3, 14, 5, 6),
    (1, 2, 64, 128, 32, 1),
    (2, 37, 4, 32, 16, 2),
    (1, 7, 1, 1030, 515, 2),
]
"""Batch, sequence, heads, width of a head, pairs, and heads of keys; the last two have more tiles of queries than the
interpreter has programs."""

BOTH = pytest.mark.parametrize("has_norm", [False, True])
PAIRED = pytest.mark.parametrize("is_paired", [False, True], ids=["alone", "paired"])


def inputs(
    batch: int, seq: int, heads: int, dim: int, pairs: int, key_heads: int = 2, *, shared: bool = False
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    angles = 9 * torch.randn(1 if shared else batch, seq, 1, pairs, generator=generator)
    q, k = (torch.randn(batch, seq, number, dim, generator=generator) for number in (heads, key_heads))
    q_weight, k_weight = (torch.randn(dim, generator=generator) for _ in range(2))
    return {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin(), "q_weight": q_weight, "k_weight": k_weight}


def only(tensors, has_norm, is_paired):
    """What the op takes: one tensor alone is the queries'."""
    tensors = {name: tensor for name, tensor in tensors.items() if has_norm or "weight" not in name}
    if is_paired:
        return tensors
    alone = {"q": "x", "q_weight": "weight"}
    return {alone.get(name, name): tensor for name, tensor in tensors.items() if not name.startswith("k")}


def twice(reference):
    """Apply the op to queries and keys, each alone."""

    def both(q, k, q_weight=None, k_weight=None, **options):
        of_q, of_k = ({} if weight is None else {"weight": weight} for weight in (q_weight, k_weight))
        return reference(q, **of_q, **options), reference(k, **of_k, **options)

    return both


def chosen(has_norm, is_paired):
    """The op and its reference."""
    single, pair, reference = (
        (norm_rope, norm_rope_qk, norm_rope_reference) if has_norm else (rope, rope_qk, rope_reference)
    )
    return (pair, twice(reference)) if is_paired else (single, reference)


def check(has_norm, is_paired, tensors, dtype, device, *, gradients_of=None, wide=(), **options):
    tensors = only(tensors, has_norm, is_paired)
    if has_norm:
        options.setdefault("eps", 1e-3)
    names = [name for name in tensors if name not in ("cos", "sin")] if gradients_of is None else gradients_of
    wide = ["cos", "sin", *wide]
    check_op(*chosen(has_norm, is_paired), tensors, dtype, device, gradients_of=names, wide=wide, **options)


@DEVICES
@BOTH
@PAIRED
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_shape_and_dtype(device, has_norm, is_paired, interleaved):
    centering = {"zero_centered": interleaved} if has_norm else {}
    for shape, dtype in shapes_and_dtypes(SHAPES, device, interleaved):
        check(has_norm, is_paired, inputs(*shape), dtype, device, interleaved=interleaved, **centering)


@DEVICES
@BOTH
@PAIRED
def test_tables_shared_by_rows_of_the_batch(device, has_norm, is_paired):
    check(has_norm, is_paired, inputs(3, 5, 2, 16, 8, shared=True), torch.float32, device)


@DEVICES
@BOTH
@PAIRED
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device, has_norm, is_paired, layout):
    check(has_norm, is_paired, inputs(2, 7, 4, 40, 14), torch.float32, device, layout=layout)


@DEVICES
@BOTH
def test_heads_beside_others_and_tables_of_other_strides(device, has_norm):
    tensors = {name: tensor.to(device) for name, tensor in inputs(2, 5, 4, 16, 8).items()}
    q, k, cos, sin, q_weight, k_weight = tensors.values()
    whole = torch.cat([q, torch.full_like(q, torch.nan), k], dim=2)
    other_cos = torch.stack([cos, sin], dim=1)[:, 0]
    single, pair = chosen(has_norm, False)[0], chosen(has_norm, True)[0]
    arguments, both = ((q_weight, 1e-6), (q_weight, k_weight, 1e-6)) if has_norm else ((), ())
    with using_kernels("triton"):
        beside = single(whole[:, :, :4], *arguments, other_cos, sin)
        beside_q, beside_k = pair(whole[:, :, :4], whole[:, :, 8:], *both, other_cos, sin)
        alone_q, alone_k = pair(q, k, *both, cos, sin)
        alone = single(q, *arguments, cos, sin)
    assert_bitwise_equal("beside others", beside, alone)
    assert_bitwise_equal("queries beside others", beside_q, alone_q)
    assert_bitwise_equal("keys beside others", beside_k, alone_k)


@DEVICES
@pytest.mark.parametrize(
    ("has_norm", "is_paired", "names"),
    [(True, False, ("x", "weight")), (True, True, ("q", "k", "q_weight", "k_weight")), (False, True, ("q", "k"))],
    ids=str,
)
def test_every_gradient_alone_and_together(device, has_norm, is_paired, names):
    tensors = inputs(1, 5, 3, 24, 8)
    for number, gradients_of in enumerate(alone_and_together(*names)):
        options = {"gradients_of": gradients_of, "interleaved": number % 2 == 1}
        check(has_norm, is_paired, tensors, torch.float16, device, **options)


def alone_and_together(*names):
    return [(), *((name,) for name in names), names]


@DEVICES
@BOTH
@pytest.mark.parametrize("key_heads", [1, 12])
def test_a_pair_is_each_alone(device, has_norm, key_heads):
    tensors = {name: tensor.to(device) for name, tensor in inputs(2, 5, 4, 60, 24, key_heads).items()}
    cos, sin = tensors.pop("cos"), tensors.pop("sin")
    q, k, q_weight, k_weight = (tensor.requires_grad_() for tensor in tensors.values())
    single, pair = chosen(has_norm, False)[0], chosen(has_norm, True)[0]
    of_q, of_k = ((weight,) if has_norm else () for weight in (q_weight, k_weight))
    eps = (1e-6,) if has_norm else ()
    with using_kernels("triton"):
        together = pair(q, k, *of_q, *of_k, *eps, cos, sin)
        alone = single(q, *of_q, *eps, cos, sin), single(k, *of_k, *eps, cos, sin)
    loss = sum(y.square().sum() for y in together)
    assert isinstance(loss, torch.Tensor)
    given = torch.autograd.grad(loss, [q, k], retain_graph=True)
    for name, ours, theirs, gradient, leaf, weight in zip(
        ("queries", "keys"), together, alone, given, (q, k), (of_q, of_k), strict=True
    ):
        assert_bitwise_equal(name, ours, theirs)
        expected = torch.autograd.grad(theirs.square().sum(), [leaf, *weight])
        assert_bitwise_equal(f"gradient of {name}", gradient, expected[0])
        # One result that nobody used has no gradient.
        leaves = [q, k, *of_q, *of_k]
        used = torch.autograd.grad(ours.square().sum(), leaves, retain_graph=True, allow_unused=True)
        got = {id(each): value for each, value in zip(leaves, used, strict=True) if value is not None}
        assert set(got) == {id(leaf), *map(id, weight)}
        for part, value in zip([leaf, *weight], expected, strict=True):
            assert_bitwise_equal(f"from {name} alone", got[id(part)], value)


@DEVICES
@BOTH
def test_what_is_frozen_needs_no_gradient(device, has_norm):
    q, k, cos, sin, q_weight, k_weight = (tensor.to(device) for tensor in inputs(2, 3, 4, 8, 4).values())
    weights = (q_weight, k_weight, 1e-6) if has_norm else ()
    with using_kernels("triton"):
        of_q, of_k = chosen(has_norm, True)[0](q, k.requires_grad_(), *weights, cos, sin)
    assert not of_q.requires_grad
    assert of_k.requires_grad


@DEVICES
@BOTH
def test_pairs_of_two_dtypes_are_turned_each_alone(device, has_norm):
    q, k, cos, sin, q_weight, k_weight = (tensor.to(device) for tensor in inputs(2, 3, 4, 8, 4).values())
    single, pair = chosen(has_norm, False)[0], chosen(has_norm, True)[0]
    eps = (1e-6,) if has_norm else ()
    with using_kernels("triton"):
        for k_dtype, weight_dtype in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
            k, k_weight = k.to(k_dtype), k_weight.to(weight_dtype)
            of_q, of_k = ((weight,) if has_norm else () for weight in (q_weight, k_weight))
            turned_q, turned_k = pair(q, k, *of_q, *of_k, *eps, cos, sin)
            assert_bitwise_equal("queries", turned_q, single(q, *of_q, *eps, cos, sin))
            assert_bitwise_equal("keys", turned_k, single(k, *of_k, *eps, cos, sin))


def test_programs_are_shared_as_tiles_are():
    from lightning_d9d.ops.kernels.rope import _shared_programs

    shares = {
        tiles: _shared_programs(*tiles, torch.device("cpu")) for tiles in product((0, 1, 2, 9, 1000), (0, 1, 5, 2000))
    }
    for (q_tiles, k_tiles), (of_queries, of_keys) in shares.items():
        assert of_queries + of_keys == min(3, q_tiles + k_tiles)
        assert min(q_tiles, 1) <= of_queries <= q_tiles
        assert min(k_tiles, 1) <= of_keys <= k_tiles
    assert shares[1000, 2000] == (1, 2)


@DEVICES
@PAIRED
def test_weight_may_be_wider(device, is_paired):
    check(True, is_paired, inputs(2, 5, 3, 24, 12), torch.float16, device, wide=["weight", "q_weight", "k_weight"])


@DEVICES
@BOTH
def test_tables_may_be_narrower(device, has_norm):
    q, k, cos, sin, q_weight, k_weight = (tensor.to(device) for tensor in inputs(1, 7, 5, 600, 200).values())
    cos, sin = cos.half(), sin.half()
    leaves = [leaf.requires_grad_() for leaf in ([q, k, q_weight, k_weight] if has_norm else [q, k])]
    results = []
    with using_kernels("triton"):
        for tables in ((cos, sin), (cos.float(), sin.float())):
            y = norm_rope_qk(*leaves, 1e-6, *tables) if has_norm else rope_qk(*leaves, *tables)
            results.append([*y, *torch.autograd.grad(sum(each.square().sum() for each in y), leaves)])
    for narrow, wide in zip(*results, strict=True):
        assert_bitwise_equal("turned", narrow, wide)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_pairs_are_complex_numbers(interleaved, kernels):
    x, angles = torch.randn(2, 3, 2, 10), torch.randn(2, 3, 1, 4)
    with using_kernels(kernels):
        y = rope(x, angles.cos(), angles.sin(), interleaved=interleaved)
    assert_bitwise_equal("rest", y[..., 8:], x[..., 8:])
    before, after = (t[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4)) for t in (x, y))
    before, after = (t if interleaved else t.transpose(-1, -2) for t in (before, after))
    expected = torch.view_as_complex(before.contiguous()) * torch.polar(torch.ones(()), angles)
    assert_close_named("turned", after, torch.view_as_real(expected), kind=Kind.OUTPUT)


@DEVICES
def test_positions_are_looked_up(device):
    tensors = {name: tensor.to(device) for name, tensor in inputs(2, 5, 4, 16, 6).items()}
    cos, sin = (torch.randn(40, 6, device=device) for _ in range(2))
    position_ids = torch.tensor([[3, 0, 39, 39, 7]], device=device)
    for kernels in ("torch", "triton"):
        with using_kernels(kernels):
            looked_up = rope(tensors["q"], cos, sin, position_ids)
            expected = rope(tensors["q"], *(t[position_ids][:, :, None] for t in (cos, sin)))
            pair = rope_qk(tensors["q"], tensors["k"], cos, sin, position_ids)
        assert_bitwise_equal(kernels, looked_up, expected)
        assert_bitwise_equal(f"{kernels}, paired", pair[0], expected)
    assert_close_named("reference", looked_up, rope_reference(tensors["q"], cos, sin, position_ids), kind=Kind.OUTPUT)


@DEVICES
@BOTH
@PAIRED
@pytest.mark.parametrize(
    "shape",
    [(0, 3, 2, 8, 4), (2, 0, 2, 8, 4), (2, 3, 0, 8, 4), (2, 3, 2, 8, 0), (2, 3, 2, 8, 4, 0), (2, 3, 0, 8, 4, 0)],
)
def test_nothing_to_turn(device, has_norm, is_paired, shape):
    tensors = only({name: t.to(device).requires_grad_() for name, t in inputs(*shape).items()}, has_norm, is_paired)
    options = {"cos": tensors.pop("cos").detach(), "sin": tensors.pop("sin").detach()}
    if has_norm:
        options["eps"] = 1e-6
    with using_kernels("triton"):
        results = chosen(has_norm, is_paired)[0](**tensors, **options)
        results = results if is_paired else (results,)
        sum(y.sum() for y in results).backward()
    for y, (name, x) in zip(results, tensors.items(), strict=False):  # weights are behind
        assert y.shape == x.shape == x.grad.shape
        weight = tensors.get("weight" if name == "x" else f"{name}_weight")
        if weight is not None and not y.numel():
            assert_bitwise_equal("weight", weight.grad, torch.zeros_like(weight))


@DEVICES
def test_tables_may_be_trained(device):
    tensors = {name: tensor.to(device).requires_grad_() for name, tensor in inputs(2, 3, 2, 8, 4).items()}
    both = torch.cat([tensors["q"], tensors["k"]], dim=2).detach()
    for op, names in ((rope, ["q"]), (rope_qk, ["q", "k"])):
        with using_kernels("triton"):
            results = op(*(tensors[name] for name in names), tensors["cos"], tensors["sin"])
            loss = sum(y.sum() for y in (results if len(names) > 1 else [results]))
        (gradient,) = torch.autograd.grad(loss, [tensors["cos"]])
        first, second = both[:, :, : 2 * len(names)].chunk(2, dim=-1)
        assert_close_named("cos", gradient, (first + second).sum(2, keepdim=True))


@DEVICES
def test_without_eps(device):
    """The last rows of a tile may be missing."""
    for shape in ((1, 37, 4, 32, 16), (1, 3, 2, 14, 5), (3, 37, 1, 32, 16)):
        check(True, True, inputs(*shape), torch.float32, device, eps=0.0)


def far_apart(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy whose offsets along `dim` need more than 31 bits. On a host memory that is never touched is not there."""
    strides = [2**30 if i == dim else stride for i, stride in enumerate(tensor.stride())]
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return tensor.new_empty(last + 1).as_strided(tensor.shape, strides).copy_(tensor)


def of_rows(device, has_norm, moved=(), dim=0):
    """Results and gradients of a pair, some of whose tensors have their rows far apart along `dim`."""
    tensors = {name: tensor.half() for name, tensor in inputs(3, 3, 4, 8, 4, 4).items()}
    tensors |= {"dq": tensors["q"].cos(), "dk": tensors["k"].cos()}
    near = {name: tensor.to(device) for name, tensor in tensors.items() if has_norm or "weight" not in name}
    options = {"eps": 1e-6} if has_norm else {}
    at = {name: far_apart(tensor, dim) if name in moved else tensor for name, tensor in near.items()}
    gradients = [at.pop(name) for name in ("dq", "dk")]
    leaves = [each.detach().requires_grad_() for name, each in at.items() if name not in ("cos", "sin")]
    at |= zip([name for name in at if name not in ("cos", "sin")], leaves, strict=True)
    with using_kernels("triton"):
        turned = chosen(has_norm, True)[0](**at, **options)
        return [*turned, *torch.autograd.grad(turned, leaves, gradients)]


of_near_rows = cache(of_rows)


@DEVICES
@BOTH
@pytest.mark.parametrize(
    ("names", "dim"),
    [*product((["q"], ["k"], ["dq"], ["dk"]), range(3)), *product([["cos", "sin"]], range(2))],
    ids=str,
)
def test_rows_far_apart(device, has_norm, names, dim):
    for of_near, of_far in zip(of_near_rows(device, has_norm), of_rows(device, has_norm, names, dim), strict=True):
        assert_bitwise_equal("far", of_far, of_near)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    x = torch.randn(1, 2**31 // 4096 + 5, 32, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(1, x.shape[1], 1, 64, device="cuda")
    cos, sin, weight = angles.cos(), angles.sin(), torch.randn(128, device="cuda", dtype=torch.bfloat16)
    last = rope(x[:, -5:], cos[:, -5:], sin[:, -5:])
    assert_bitwise_equal("turned", rope(x, cos, sin)[:, -5:], last)
    last = norm_rope(x[:, -5:], weight, 1e-6, cos[:, -5:], sin[:, -5:])
    assert_bitwise_equal("normed and turned", norm_rope(x, weight, 1e-6, cos, sin)[:, -5:], last)
    few = x[:, :, :2]
    for turned in (rope_qk(few, x, cos, sin)[1], rope_qk(x, few, cos, sin)[0]):
        assert_bitwise_equal("turned in a pair", turned[:, -5:], rope(x[:, -5:], cos[:, -5:], sin[:, -5:]))


def test_float64_runs_on_torch():
    tensors = {name: tensor.double() for name, tensor in inputs(2, 3, 2, 8, 4).items()}
    x, _, cos, sin, weight, _ = tensors.values()
    first, second = (x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight).chunk(2, dim=-1)
    with using_kernels("triton"):
        y = norm_rope(x, weight, 0.5, cos, sin)
    assert_close_named("turned", y, torch.cat([first * cos - second * sin, second * cos + first * sin], -1))


def test_shapes_that_do_not_fit():
    x, table = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 1, 4)
    for cos, sin in [
        (table[0], table[0]),
        (table, table[..., :2]),
        (torch.ones(2, 3, 1, 5), torch.ones(2, 3, 1, 5)),
        (torch.ones(3, 3, 1, 4), torch.ones(3, 3, 1, 4)),
        (torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4)),
        (torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4)),
    ]:
        with pytest.raises(ConfigError, match="do not fit x"):
            rope(x, cos, sin)
        with pytest.raises(ConfigError, match="do not fit x"):
            rope_qk(x, x, cos, sin)
    with pytest.raises(ConfigError, match=r"weight \[7\] of a norm"):
        norm_rope(x, torch.ones(7), 1e-6, table, table)
    for weights in ((torch.ones(7), torch.ones(8)), (torch.ones(8), torch.ones(7))):
        with pytest.raises(ConfigError, match=r"weight \[7\] of a norm"):
            norm_rope_qk(x, x, *weights, 1e-6, table, table)
    for k in (x[0], x[:1], x[:, :2], x[..., :7]):
        with pytest.raises(ConfigError, match=r"do not fit queries \[2, 3, 4, 8\]: .* only their numbers of heads"):
            rope_qk(x, k, table, table)
        with pytest.raises(ConfigError, match="do not fit queries"):
            norm_rope_qk(x, k, torch.ones(8), torch.ones(8), 1e-6, table, table)


@DEVICES
def test_the_operators_are_what_torch_takes_them_for(device):
    q, k, cos, sin, q_weight, k_weight = (tensor.to(device) for tensor in inputs(2, 3, 3, 8, 4).values())
    leaves = [leaf.requires_grad_() for leaf in (q, k, q_weight, k_weight)]
    frozen = [leaf.detach() for leaf in leaves]
    ops, quick = torch.ops.lightning_d9d, ("test_schema", "test_faketensor")
    options = 1e-6, cos, sin, True, False
    torch.library.opcheck(ops.norm_rope.default, (*leaves, *options))
    torch.library.opcheck(ops.norm_rope.default, (q, None, q_weight, None, *options))
    torch.library.opcheck(ops.rope.default, (q, k, cos, sin, False, False))
    torch.library.opcheck(ops.rope.default, (frozen[0], k, cos, sin, False, False))
    torch.library.opcheck(ops.rope.default, (q, None, cos, sin, False, True))
    gradients, options = frozen[:2], (cos, sin, 1e-6, False, False)
    for needs in product([False, True], repeat=2):
        arguments = (*gradients, *frozen, *options, *needs)
        torch.library.opcheck(ops.norm_rope_backward.default, arguments, test_utils=quick)
    arguments = (gradients[0], None, frozen[0], None, frozen[2], None, *options, False, True)
    torch.library.opcheck(ops.norm_rope_backward.default, arguments, test_utils=quick)


@DEVICES
@BOTH
@PAIRED
def test_compiled_whole(device, has_norm, is_paired):
    # with a norm one tile each, so that one result's gradient alone sums a weight's in the order of both
    batch = 1 if has_norm else 2
    tensors = {name: tensor.to(device) for name, tensor in inputs(batch, 3, 2, 8, 3, 1).items()}
    tensors = only(tensors, has_norm, is_paired)
    options = {"cos": tensors.pop("cos"), "sin": tensors.pop("sin")}
    if has_norm:
        options["eps"] = 1e-6
    op, leaves = chosen(has_norm, is_paired)[0], [tensor.requires_grad_() for tensor in tensors.values()]

    def run(**tensors):
        return op(**tensors, **options)

    results = []
    with using_kernels("triton"):
        for each in (torch.compile(run, backend="aot_eager", fullgraph=True), run):
            y = each(**tensors)
            y = y if is_paired else (y,)
            first = torch.autograd.grad(y[0].square().sum(), leaves, retain_graph=True, allow_unused=True)
            both = torch.autograd.grad(sum(part.square().sum() for part in y), leaves)
            results.append([*y, *first, *both])
    for ours, theirs in zip(*results, strict=True):
        if theirs is None:  # what is not used has no gradient; where it is compiled, zeros
            assert not ours.any()
        else:
            assert_bitwise_equal("compiled", ours, theirs)
