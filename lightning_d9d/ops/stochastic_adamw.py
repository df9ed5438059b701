"""AdamW of many tensors in one launch, with stochastic rounding to bfloat16 or eight bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.eight_bits import AVERAGE, BLOCK, CUT, LEAST_SQUARE, SQUARE, Codes, decoded, encoded
from lightning_d9d.ops.philox import OTHER_SPREAD, SPREAD, WORD, philox
from lightning_d9d.ops.stochastic import rounded


class Place(NamedTuple):
    """The part of a tensor of `shape` that a rank holds: the indices of each dim."""

    shape: tuple[int, ...]
    ranges: tuple[range, ...]

    def indices(self, device: torch.device) -> Tensor:
        """Return the row-major index in the whole tensor of each held element, int64 in the shape of the part."""
        index = torch.zeros((), dtype=torch.int64, device=device)
        for size, held in zip(self.shape, self.ranges, strict=True):
            index = index.unsqueeze(-1) * size + torch.arange(held.start, held.stop, device=device)
        return index


class AdamWTensors(NamedTuple):
    """Tensors of AdamW for one parameter, on one device; all but scales have one shape."""

    parameter: Tensor
    """Float32 or bfloat16."""
    gradient: Tensor
    """Float32 or bfloat16."""
    exp_avg: Tensor
    """Float32, bfloat16, or uint8: the codes that `ops/eight_bits.py` describes."""
    exp_avg_sq: Tensor
    """A tensor of the same dtype as `exp_avg`."""
    step: Tensor
    """Number of steps with this one, a float32 scalar on the device."""
    place: Place
    """Place of the tensors in a parameter that may be larger. With codes, it begins and ends with blocks of its rows.
    """
    exp_avg_scale: Tensor | None = None
    """Scales of the codes of `exp_avg`, uint8 `[..., blocks]`."""
    exp_avg_sq_scale: Tensor | None = None
    """Scales of the codes of `exp_avg_sq`, uint8 `[..., blocks]`."""


class Scalars(NamedTuple):
    """Hyperparameters of a step. Tensors among them may be on the device: the host does not read them."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    seed: int
    """Seed of the random bits, from 0 to `2**32 - 1`."""
    grad_scale: Tensor | None = None
    """Gradients are divided by this number."""
    found_inf: Tensor | None = None
    """Unless this is 0, nothing changes."""


class MultiTensorAdamW:
    """AdamW that updates parameters and states in place: one launch for all tensors of the same dtypes.

    The formulas use the gradient `g` over `grad_scale`, in step `t`, all in float32:

        m = m + (1 - beta1) (g - m)
        v = beta2 v + (1 - beta2) g^2
        p = (1 - lr weight_decay) p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    as in Loshchilov and Hutter, "Decoupled weight decay regularization". Values stored in bfloat16 are rounded like
    `round_stochastic_`. Element `i` of the whole parameter has word `i % 4` of Philox4x32 with the key `(seed, t)` and
    the counter `i // 4`. A number computed from its gradient and its value before the step is added to the word, so
    elements of other parameters have different bits. The sum is as random as the word, because the added number does
    not depend on it. The lower half of the sum rounds `p`, the upper half `m`, and the upper half of a product with the
    sum `v`. Any two of these are independent. The bits are the same for any sharding and any order of parameters.

    For tensors of at least one dim, states in eight bits have the format that `ops/eight_bits.py` describes. In that
    format `2**-126` is added to `v`, so that it is never smaller. Eight consecutive places of a row, from a multiple of
    eight on, share a call of Philox with the key `(seed, t)`. Its counter has the index of the first of them in the
    whole parameter. It also has the sums of the bits of their values and of their gradients, those of even places
    shifted right by 16. Places `k` and `k + 4` have word `k`, and the latter a product with it. The upper 16 bits round
    `p`, the lower 19 `m`, and the upper 19 of another product `v`.

    An instance keeps the addresses of the tensors on the device, so it must be called with the same parameters each
    time. Gradients may move. Products and sums are rounded one by one, so that CPU and GPU agree. With states in eight
    bits, one product of each sum is not rounded before (`fma`).
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}
        self._bases: dict[tuple[torch.device, tuple[float, float]], Tensor] = {}
        """Decay rates on their device."""

    @torch.no_grad()
    def __call__(self, tensors: Sequence[AdamWTensors], scalars: Scalars) -> None:
        """Do one step."""
        for kind, members in itertools.groupby(sorted(tensors, key=_sort_key), key=_kind):
            self._step(kind, [each for each in members if each.parameter.numel()], scalars)

    def _step(self, kind: _Kind, tensors: list[AdamWTensors], scalars: Scalars) -> None:
        if not tensors:
            return
        found_inf = None if scalars.found_inf is None else scalars.found_inf.to(kind.device, non_blocking=True)
        bases = self._bases.get((kind.device, scalars.betas))
        if bases is None:
            bases = torch.tensor(scalars.betas, dtype=torch.float64, device=kind.device)
            self._bases[kind.device, scalars.betas] = bases
        factors = _factors(tensors, scalars, bases)
        if not runs_triton(*tensors[0][:4]):
            if found_inf is None or not found_inf.item():
                for each, own in zip(tensors, factors, strict=True):
                    adamw_reference(each, own, scalars)
            return
        kernels = _kernels(kind)
        names = _WRITTEN if tensors[0].exp_avg_scale is None else (*_WRITTEN, *_SCALES)
        memory = (*names, "gradient")
        dense = [each._replace(**{n: getattr(each, n).contiguous() for n in memory}) for each in tensors]
        key = tuple(tuple(getattr(d, n).data_ptr() for n in names) for d in dense), tuple(each.place for each in dense)
        table = self._tables.get(kind)
        if table is None or table.key != key:
            table = self._tables[kind] = _Table(key, dense, names, kernels.CHUNK)
        kernels.adamw(
            table.blocks,
            table.gradients([each.gradient for each in dense]),
            table.chunks,
            factors,
            found_inf,
            kind.dtypes,
            scalars.betas,
            scalars.eps,
            scalars.seed,
        )
        for each, copy in zip(tensors, dense, strict=True):
            for name in names:
                if getattr(copy, name) is not getattr(each, name):
                    getattr(each, name).copy_(getattr(copy, name))


def _kernels(kind: _Kind) -> Any:
    if kind.dtypes[2] == torch.uint8:
        from lightning_d9d.ops.kernels import eight_bits

        return eight_bits
    from lightning_d9d.ops.kernels import stochastic

    return stochastic


def adamw_reference(tensors: AdamWTensors, factors: Tensor, scalars: Scalars) -> None:
    """Compute `MultiTensorAdamW` for one parameter; `factors` is its row of the kernels' table."""
    step = factors[-1]
    p, g = tensors.parameter.float(), tensors.gradient.float()
    has_codes = tensors.exp_avg_scale is not None
    m = _values(tensors.exp_avg, tensors.exp_avg_scale, AVERAGE)
    v = _values(tensors.exp_avg_sq, tensors.exp_avg_sq_scale, SQUARE)
    targets = tensors.parameter, tensors.exp_avg, tensors.exp_avg_sq
    is_rounded = any(target.dtype != torch.float32 for target in targets)
    random = _random_bits(p, g, tensors.place, scalars.seed, step, has_codes) if is_rounded else [None] * 3
    arguments = p, g, m, v, factors, scalars
    p, m, v = _updated_with_codes(*arguments) if has_codes else _updated(*arguments)
    beside = None, tensors.exp_avg_scale, tensors.exp_avg_sq_scale
    for target, value, bits, scale in zip(targets, (p, m, v), random, beside, strict=True):
        if scale is not None and bits is not None:
            codes, scales = encoded(value, bits & 2**CUT - 1, SQUARE if value is v else AVERAGE)
            target.copy_(codes)
            scale.copy_(scales)
        else:
            target.copy_(rounded(value, bits) if target.dtype == torch.bfloat16 and bits is not None else value)


def _updated(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Tensor, scalars: Scalars
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a step with products and sums that are rounded one by one."""
    step_size, inverse_root, decay, unscale, _ = factors.unbind()
    beta1, beta2 = scalars.betas
    g = g * unscale
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    return p * decay - m / (_root(v) * inverse_root + scalars.eps) * step_size, m, v


def _updated_with_codes(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Tensor, scalars: Scalars
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a step with fused multiply-adds, as time for instructions is short where states have eight bits."""
    step_size, inverse_root, decay, unscale, _ = factors.unbind()
    beta1, beta2 = scalars.betas
    m = fma(g, unscale * (1 - beta1), m * beta1)
    scaled = g * (unscale * math.sqrt(1 - beta2))
    v = fma(scaled, scaled, fma(v, beta2, LEAST_SQUARE))
    return fma(-m / fma(_root(v), inverse_root, scalars.eps), step_size, p * decay), m, v


def _root(v: Tensor) -> Tensor:
    return v.double().sqrt().float()  # rounded correctly; torch's float32 root is not on every CPU


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Compute `a * b + c` in float32, rounded once, as GPUs do. Numbers are rounded to float32 before.

    The product of two float32 is exact in float64. The sum is rounded to odd there: to the neighbour whose last bit is
    1 if it is not exact. So rounding it once more, to float32, is as good as rounding once.
    """
    b, c = (torch.as_tensor(each, dtype=torch.float32, device=a.device).double() for each in (b, c))
    product = a.double() * b
    total = product + c
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    is_rounded = ((error < 0) | (error > 0)) & (bits % 2 == 0)
    return (bits + toward * is_rounded).view(torch.float64).float()


def _values(stored: Tensor, scales: Tensor | None, kind: Codes) -> Tensor:
    return stored.float() if scales is None else decoded(stored, scales, kind)


def _random_bits(p: Tensor, g: Tensor, place: Place, seed: int, step: Tensor, has_codes: bool) -> Sequence[Tensor]:
    """Return the random bits for each element of the parameter, its first and its second average, in the lower bits."""
    index = place.indices(p.device)
    key = torch.stack([torch.full_like(step, seed, dtype=torch.int64), step.long()])
    if has_codes:
        word = _word_of_octets(p, g, index, key)
        return word >> 16, word, (word * SPREAD & WORD) >> 32 - CUT
    quad = index // 4
    words = torch.stack(philox((quad & WORD, quad >> 32, 0 * quad, 0 * quad), key), -1)
    word = words.gather(-1, (index % 4).unsqueeze(-1)).squeeze(-1)
    of_gradient, of_value = (each.contiguous().view(torch.int32).long() & WORD for each in (g, p))
    mixed = (of_gradient ^ of_value >> 16) * SPREAD & WORD
    word = word + (mixed ^ mixed >> 16) & WORD
    return word, word >> 16, (word * SPREAD & WORD) >> 16


def _word_of_octets(p: Tensor, g: Tensor, index: Tensor, key: Tensor) -> Tensor:
    """Return the random word of each element of a parameter with states in eight bits."""
    columns = p.shape[-1]
    place = torch.arange(columns, device=p.device) % 8

    def octets(values: Tensor) -> Tensor:
        return F.pad(values, (0, -columns % 8)).unflatten(-1, (-1, 8))

    def sums(values: Tensor) -> Tensor:
        bits = values.contiguous().view(torch.int32).long() & WORD
        return octets(torch.where(place % 2 == 0, bits >> 16, bits)).sum(-1) & WORD

    first = octets(index)[..., 0]
    words = torch.stack(philox((first & WORD, first >> 32, sums(p), sums(g)), key), -1)
    words = torch.cat([words, words * OTHER_SPREAD & WORD], -1)
    return words.flatten(-2)[..., :columns]


class Block(NamedTuple):
    """Consecutive elements of a part of a tensor; element `i` is `first + i // length * stride + i % length` there."""

    start: int
    """Start in the part."""
    size: int
    first: int
    length: int
    stride: int


def blocks_of(place: Place) -> Iterator[Block]:
    """The table has the addresses of the elements of many tensors, on their device."""
    sizes: list[int] = []  # of the whole tensor, with unsharded dims merged into the dim before
    held: list[range] = []
    for size, own in zip(place.shape, place.ranges, strict=True):
        if sizes and len(own) == size:
            sizes[-1] *= size
            held[-1] = range(held[-1].start * size, held[-1].stop * size)
        else:
            sizes.append(size)
            held.append(own)
    if not sizes:
        sizes, held = [1], [range(1)]
    length, stride = len(held[-1]), sizes[-1]
    inner = 2 if len(held) > 1 and length < 2**31 else 1  # kernels count columns in 32 bits
    block_size = math.prod(map(len, held[-inner:]))
    for number, outer in enumerate(itertools.product(*held[:-inner])):
        first = 0
        for size, index in zip(sizes, [*outer, *(own.start for own in held[-inner:])], strict=True):
            first = first * size + index
        yield Block(number * block_size, block_size, first, length, stride)


class _Kind(NamedTuple):
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]


_WRITTEN = ("parameter", "exp_avg", "exp_avg_sq")
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


def _kind(tensors: AdamWTensors) -> _Kind:
    parameter, gradient, exp_avg = tensors[:3]
    return _Kind(parameter.device, (parameter.dtype, gradient.dtype, exp_avg.dtype))


def _sort_key(tensors: AdamWTensors) -> str:
    return str(_kind(tensors))


class _Table:
    """Return the fewest blocks that make up a shard: one, unless three separate dims are sharded.

    Attributes:
        key: Key of the tensors it was built from.
        blocks: Table for the kernel.
        chunks: Chunks in the kernel's form.
    """

    def __init__(self, key: Hashable, tensors: Sequence[AdamWTensors], names: Sequence[str], chunk: int) -> None:
        self.key = key
        self._device = tensors[0].parameter.device
        self._starts: list[tuple[int, int]] = []
        self._addresses: list[int] = []
        self._gradients = torch.empty(0)
        rows: list[list[int]] = []
        counts: list[int] = []
        for row, each in enumerate(tensors):
            columns = each.parameter.shape[-1] if each.parameter.dim() else 1
            of_row = -(-columns // BLOCK)
            for block in blocks_of(each.place):
                begins = dict.fromkeys(names, block.start) | dict.fromkeys(_SCALES, block.start // columns * of_row)
                written = [(getattr(each, name), begins[name]) for name in names]
                addresses = [tensor.data_ptr() + begin * tensor.element_size() for tensor, begin in written]
                rows.append([*addresses, row, block.size, block.first, block.length, block.stride])
                if each.exp_avg_scale is not None:
                    rows[-1].append(columns)
                counts.append(block.size if each.exp_avg_scale is None else block.size // columns * of_row)
                self._starts.append((row, block.start))
        blocks = torch.tensor(rows, dtype=torch.int64)
        of_block = (torch.tensor(counts) + chunk - 1) // chunk
        block = torch.arange(len(blocks)).repeat_interleave(of_block)
        number = torch.arange(len(block)) - (of_block.cumsum(0) - of_block)[block]
        self.blocks = blocks.to(self._device)
        self.chunks = torch.stack([block, number], 1).int().to(self._device)

    def gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the address of each block's gradient, int64 `[blocks]`; copied without waiting if they have moved."""
        first = [gradient.data_ptr() for gradient in gradients]
        size = gradients[0].element_size()
        addresses = [first[row] + start * size for row, start in self._starts]
        if addresses != self._addresses:
            self._addresses = addresses
            host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._gradients = host.to(self._device, non_blocking=True)
        return self._gradients


def _factors(tensors: Sequence[AdamWTensors], scalars: Scalars, betas: Tensor) -> Tensor:
    """Return the factors that differ between parameters, float32 `[tensors, 5]`, in the kernel's order.

    Args:
        tensors: Tensors on one device.
        scalars: Hyperparameters of the step.
        betas: Decay rates, float64 on that device.
    """
    steps = torch.stack([each.step for each in tensors]).double()
    first, second = (1 - betas ** steps.unsqueeze(1)).unbind(1)
    one = torch.ones_like(steps)
    scale = scalars.grad_scale
    columns = (
        scalars.lr / first,
        second.rsqrt(),
        one * (1 - scalars.lr * scalars.weight_decay),
        one if scale is None else one / scale.to(steps.device, non_blocking=True),
        steps,
    )
    return torch.stack(columns, 1).float()
