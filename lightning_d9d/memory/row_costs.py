"""The costs of layers on a rank of a mesh, in the form that the simulation and `Auto` take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_d9d.memory.copies import copied_bytes
from lightning_d9d.memory.layers import LayerOfRank
from lightning_d9d.memory.peak import LayerGradients, gathered_bytes
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.step import GPU_OVERHEAD
from lightning_d9d.memory.traffic import Sent, of_head, of_layer
from lightning_d9d.schedule.layers import LayerCosts, Messages, ModelCosts
from lightning_d9d.schedule.schedule import Schedule
from lightning_d9d.schedule.tune import PeakOfCandidate


def microbatch_costs(model: RankModel, layer: LayerOfRank, *, is_head: bool = False) -> LayerCosts:
    """Return a layer's costs for a microbatch on this rank. Local.

    Matrices have their gathered size. Activations are those that recomputation keeps. `state_bytes` has weights,
    states, the gradients of several microbatches, and weights that stay gathered.
    """
    sent = of_head(model, 1) if is_head else of_layer(model, layer, 1) if layer.costs.output_bytes else ()
    gradients = LayerGradients(layer.shares, model.rules([]))
    sums = gradients.whole_units_wide if model.keeps_gathered and not model.reduces_each else gradients.of_shards
    weights = sum(share.numel * share.weight.dtype.itemsize for share in layer.shares)
    states = sum(model.state_bytes(share) for share in layer.shares if share.weight.is_trained)
    gathered = gathered_bytes(layer) if model.keeps_gathered else 0
    return replace(
        layer.costs,
        weight_bytes=float(sum(share.num_gathered * share.weight.dtype.itemsize for share in layer.shares)),
        copied_bytes=copied_bytes(model, layer.shares) / model.num_microbatches,
        activation_bytes=layer.kept,
        state_bytes=float(weights + states + gradients.stays + sums + gathered),
        recomputed=_recomputed(layer),
        messages=_messages(sent),
        is_launched=not (model.parallel.compile or model.parallel.cuda_graphs),
    )


def row_costs(model: RankModel) -> ModelCosts:
    """Return the costs of each part of a model for one row on a rank of its mesh. Local.

    Gradients are counted as for several microbatches.
    """
    one = replace(model, rows=1, num_microbatches=max(2, model.num_microbatches))
    stage = one.stage(range(len(model.costs.layers)), is_first=True, is_last=True)
    assert stage.before is not None
    assert stage.after is not None
    return ModelCosts(
        before=replace(microbatch_costs(one, stage.before), messages=()),
        layers=tuple(microbatch_costs(one, layer) for layer in stage.layers),
        after=_head(one, stage.after),
    )


def peak_of(model: RankModel) -> PeakOfCandidate:
    """Return a function that finds the peak of the rank with the most, for other stages and microbatches. Local.

    Bytes that the allocator keeps apart count as if tensors took them: `Overhead.allocatable` leaves no room for them.
    """

    def most(schedule: Schedule, layers: Sequence[range], rows: int, number: int) -> float:
        tried = replace(model, schedule=schedule, layers_of_stages=tuple(layers), rows=rows, num_microbatches=number)
        needed = max(GPU_OVERHEAD.needed(tried.peak(rank)) for rank in range(model.mesh.pipeline_parallel))
        return float(GPU_OVERHEAD.allocatable(needed))

    return most


def _head(model: RankModel, layer: LayerOfRank) -> LayerCosts:
    """Return the head's costs for a row; the gradient from its forward does not grow with rows."""
    costs = microbatch_costs(model, layer, is_head=True)
    kept = model.costs.after.activation_bytes * model.share_of_row * model.mesh.tensor_parallel
    return replace(costs, activation_bytes=kept)


def _recomputed(layer: LayerOfRank) -> str:
    named = {"selective": "moved", "attention": "attention"}
    return named.get(layer.recompute, "all" if layer.is_recomputed else "nothing")


def _messages(sent: Iterable[Sent]) -> tuple[Messages, ...]:
    return tuple(
        Messages(each.num_bytes, each.num_messages, each.num_ranks, each.span, each.is_ring, each.num_waits)
        for each in sent
    )
