"""Bytes that a rank reads and writes in a step to gather weights, and to add up, send and apply gradients.

[Note: copies of gradients] Buckets have the dtype of sums. They copy the first gradient of a step, and add later ones
to it. FSDP2 adds up in the same way if it keeps a unit gathered. At each gather it copies shards into a message, and
the gathered message into weights. It copies whole gradients into a message in the dtype of sums. Before the update,
gradients are cast to the dtype of their weights, unless the optimizer takes wide ones. Torch's fused optimizers write
the gradients that they have clipped. Autocast casts matrices in each forward, and their gradients back in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.spread import Part, Share

_CAST = 2
"""Bytes of a number in the dtype of autocast."""


def copied_bytes(model: RankModel, shares: Iterable[Share]) -> float:
    """Return the bytes read and written around the messages of weights and gradients in a step. Local."""
    number, total = model.num_microbatches, 0.0
    for share in shares:
        narrow, wide = share.width, sum_width(model, share)
        whole = share.num_gathered
        if share.is_unit:
            total += gathers(model, share) * 2 * narrow * (whole + share.numel)
        elif model.autocasts and len(share.gathered) > 1 and share.weight.part is not Part.EMBEDDING:
            total += number * whole * (narrow + _CAST) * (2 if share.weight.is_trained else 1)
        if not share.weight.is_trained:
            continue
        adds = (number - 1) * (narrow + 2 * wide)
        if not share.is_unit:
            if is_in_bucket(model, share):
                total += share.numel * (narrow + wide + adds)
        elif model.keeps_gathered and not model.reduces_each and number > 1:
            total += whole * (narrow + wide + adds + 2 * wide)
        else:
            total += whole * number * (narrow + wide)
    return total


def updated_bytes(model: RankModel, shares: Iterable[Share], *, clips: bool) -> float:
    """Return the bytes read and written by the norm, the cast of gradients and the update of a step. Local."""
    total = 0.0
    for share in shares:
        if not share.weight.is_trained:
            continue
        itemsize = share.weight.dtype.itemsize
        wide = sum_width(model, share) if share.is_unit or is_in_bucket(model, share) else itemsize
        taken = itemsize if model.casts_gradients else wide
        of_one = 2 * itemsize + taken + (wide + model.casts_gradients * taken if clips else 0)
        of_one += wide + taken if wide != taken else 0
        total += share.numel * of_one + 2 * model.state_bytes(share)
    return total


def gathers(model: RankModel, share: Share) -> int:
    """Return how often FSDP2 gathers a part of a weight in a step. Local."""
    if model.keeps_gathered:
        return 1
    return model.num_microbatches * (1 if share.stays_gathered else 2)


def sum_width(model: RankModel, share: Share) -> int:
    """Return the bytes of a number in sums of a gradient. Local."""
    return max(model.unit_sum_bytes if share.is_unit else model.sum_bytes, share.weight.dtype.itemsize)


def is_in_bucket(model: RankModel, share: Share) -> bool:
    """Return whether the gradient is kept in a bucket. Local."""
    return not share.is_unit and (share.num_copies > 1 or model.accumulates)
