from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_d9d.ops.collectives import group_named
from lightning_d9d.ops.messages import sending
from lightning_d9d.ops.moe_permute import Permutation
from lightning_d9d.ops.operator import define


def all_to_all_rows(rows: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """Send consecutive blocks of rows to the ranks of a group and return the blocks that they sent. Collective.

    It is one operator, `torch.ops.lightning_d9d.all_to_all_rows`. So a recomputation policy can keep it by name, and
    `torch.compile` takes it whole. Its backward is the same exchange in the other direction. So ranks must agree on
    whether `rows` requires a gradient, and each takes part in the backward, even without rows. The host does not wait.

    Args:
        rows: Shape `[sum(sent), ...]`, with equal dtypes and equal dims after the first on all ranks.
        received: Number of rows that come from each rank of the group; that rank's `sent` for this one.
        sent: Number of rows that go to each rank of the group, in the order of `rows`.
        group_name: `group_name` of a process group of torch.

    Returns:
        Shape `[sum(received), ...]`, in new memory, ordered by the sending rank.
    """
    return _exchange_op(rows, received, sent, group_name)


def all_to_all_copies(
    x: Tensor,
    notes: Tensor,
    copies: tuple[Tensor, Tensor],
    permutation: Permutation,
    received: Sequence[int],
    sent: Sequence[int],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Run `all_to_all_rows` of copies made before the number of rows was known on the host. Collective.

    It is one operator, `torch.ops.lightning_d9d.all_to_all_copies`. Its backward is the exchange in the other
    direction, and `permutation.sum`. Both tensors travel in one turn, there and back: [Note: beside] of `messages`.

    Args:
        x: Tensor that gets a gradient, shape `[tokens, ...]`.
        notes: Another one, such as the weights of these tokens.
        copies: `permutation.copy` of `x` and of `notes`; their first `sum(sent)` rows are sent.
        permutation: Permutation of the copies; copies with places from `sum(sent)` on are not sent.
        received: As for `all_to_all_rows`.
        sent: As for `all_to_all_rows`.
        group_name: As for `all_to_all_rows`.
    """
    of_x, of_notes = (each.detach() for each in copies)
    return _copies_op(x, notes, of_x, of_notes, permutation.places, permutation.counts, received, sent, group_name)


def _new_copies(
    x: Tensor,
    notes: Tensor,
    of_x: Tensor,
    of_notes: Tensor,
    places: Tensor,
    counts: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    return _new_rows(of_x, received, sent, group_name), _new_rows(of_notes, received, sent, group_name)


def _exchange_copies(
    x: Tensor,
    notes: Tensor,
    of_x: Tensor,
    of_notes: Tensor,
    places: Tensor,
    counts: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    with sending() as message:
        rows = _exchange(of_x[: sum(sent)], received, sent, group_name)
        of_rows = _exchange(of_notes[: sum(sent)], received, sent, group_name)
    message.wait(rows, of_rows)
    return rows, of_rows


def _keep_copies(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *_, places, counts, received, sent, ctx.group_name = inputs
    # Not saved in autograd's way; see `_setup_context` of `moe_permute`.
    ctx.permutation = Permutation(places, counts, counts, sum(sent))
    ctx.received, ctx.sent = list(received), list(sent)


def _copies_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    sent: list[Tensor | None] = [None, None]
    with sending() as message:
        for index, gradient in enumerate(gradients):
            if ctx.needs_input_grad[index]:
                sent[index] = all_to_all_rows(gradient, ctx.sent, ctx.received, ctx.group_name)
    message.wait(*(each for each in sent if each is not None))
    return *(None if each is None else ctx.permutation.sum(each) for each in sent), *[None] * 7


def _new_rows(rows: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    return rows.new_empty(sum(received), *rows.shape[1:])


def _exchange(rows: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    with sending() as message:
        rows = rows.contiguous()
        result = _new_rows(rows, received, sent, group_name)
        dist.all_to_all_single(result, rows, list(received), list(sent), group=group_named(group_name))
    message.wait(result)
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, received, sent, ctx.group_name = inputs
    ctx.received, ctx.sent = list(received), list(sent)  # the caller's lists may change before the backward


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return all_to_all_rows(gradient, ctx.sent, ctx.received, ctx.group_name), None, None, None


_exchange_op = define(
    "all_to_all_rows",
    "(Tensor rows, SymInt[] received, SymInt[] sent, str group_name) -> Tensor",
    _exchange,
    _new_rows,
    setup_context=_setup_context,
    backward=_backward,
)
_copies_op = define(
    "all_to_all_copies",
    "(Tensor x, Tensor notes, Tensor of_x, Tensor of_notes, Tensor places, Tensor counts, SymInt[] received, "
    "SymInt[] sent, str group_name) -> (Tensor, Tensor)",
    _exchange_copies,
    _new_copies,
    setup_context=_keep_copies,
    backward=_copies_backward,
)
