"""Cutting a model's layers into consecutive stages: by count, by weight, by hand."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any

from torch import nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.pipeline.types import StageInfo


def distribute_layers(num_layers: int, num_stages: int, before: int = 0, after: int = 0) -> list[range]:
    """Layers of each stage, equally many but for what stands before the first layer and after the last.

    An embedding counts as `before` layers of the first stage and a head as `after` layers of the last. With these
    virtual layers each stage has equally many; what is left over goes to the first stages, one each.

    Args:
        num_layers: Of the whole model.
        num_stages: Of the whole pipeline.
        before: Virtual layers of the first stage.
        after: Virtual layers of the last stage.

    Returns:
        One range of layers a stage, in order, none of them empty.

    Raises:
        ConfigError: A number is negative, or a stage would have no layer.
    """
    _check_stages(num_layers, num_stages)
    if before < 0 or after < 0:
        raise ConfigError(f"{before} virtual layers before and {after} after the layers: both must be at least 0")
    share, more = divmod(num_layers + before + after, num_stages)
    sizes = [share + (stage < more) for stage in range(num_stages)]
    sizes[0] -= before
    sizes[-1] -= after
    if min(sizes) < 1:
        stage = sizes.index(min(sizes))
        raise ConfigError(
            f"{num_layers} layers, with {before} virtual ones before and {after} after them, are {share} or "
            f"{share + 1} for each of {num_stages} stages, which leaves stage {stage} without a real one; use fewer "
            "virtual layers or fewer stages"
        )
    return _ranges(sizes)


def cut_evenly(weights: Sequence[int | float], num_stages: int) -> list[range]:
    """Cut items into consecutive stages so that the heaviest stage is as light as can be.

    Among such cuts it takes one whose other stages are even too (the least sum of squares), and among these the one
    whose first stages have more items. Exact: no rounding, whatever the weights.

    Args:
        weights: Of the items, at least 0; for instance the cost or the number of parameters of each layer.
        num_stages: At most the number of items.

    Returns:
        One range of items a stage, in order, none of them empty.

    Raises:
        ConfigError: There are fewer items than stages, or a weight is negative or not finite.
    """
    num_items = len(weights)
    _check_stages(num_items, num_stages)
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"layer {index} has the weight {weight}; weights must be finite and at least 0")
    fractions = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    starts = [0, *accumulate(int(fraction * unit) for fraction in fractions)]
    # The least limit under which few enough stages hold everything; to cut these further breaks no limit.
    heaviest = max(stop - start for start, stop in pairwise(starts))
    limits = sorted({stop - start for start, stop in combinations(starts, 2) if stop - start >= heaviest})
    limit = limits[bisect_left(limits, True, key=lambda limit: _num_stages_within(limit, starts) <= num_stages)]
    # From the last stage to the first: the best cut of items i, i + 1, ... by its first item.
    best: dict[int, tuple[int, list[range]]] = {num_items: (0, [])}
    for _ in range(num_stages):
        longer: dict[int, tuple[int, list[range]]] = {}
        for first in range(num_items):
            candidates = []
            for stop in range(first + 1, num_items + 1):
                weight = starts[stop] - starts[first]
                if weight > limit:
                    break
                if stop in best:
                    candidates.append((best[stop][0] + weight**2, -stop))
            if candidates:
                squares, minus_stop = min(candidates)
                longer[first] = (squares, [range(first, -minus_stop), *best[-minus_stop][1]])
        best = longer
    return best[0][1]


def _num_stages_within(limit: int, starts: Sequence[int]) -> int:
    """How many stages of at most `limit` the items fill, when each takes what it can."""
    num_stages, stage_start = 1, 0
    for start, stop in pairwise(starts):
        if stop - stage_start > limit:
            num_stages, stage_start = num_stages + 1, start
    return num_stages


def cut_by_hand(sizes: Sequence[int], num_layers: int, num_stages: int, name: str) -> list[range]:
    """Ranges of the given lengths.

    Args:
        sizes: Layers of each stage.
        num_layers: Of the whole model.
        num_stages: Of the whole pipeline.
        name: What the user calls `sizes`, for errors.

    Raises:
        ConfigError: `sizes` has not `num_stages` numbers of at least 1 with the sum `num_layers`.
    """
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"{name}={list(sizes)} has {len(sizes)} stages of together {sum(sizes)} layers, but the pipeline has "
            f"{num_stages} stages and the model {num_layers} layers; give {num_stages} numbers of at least 1 with that "
            "sum, or leave it out"
        )
    return _ranges(sizes)


def check_layers(layers: range, num_layers: int) -> range:
    """The layers of a stage, as given.

    Raises:
        ConfigError: They are no consecutive layers of a model of `num_layers`.
    """
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= num_layers:
        raise ConfigError(
            f"a stage of layers {layers} was asked of a model with {num_layers} layers; StageInfo.layers must be "
            f"consecutive ones out of range(0, {num_layers})"
        )
    return layers


def _check_stages(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_layers} layers cannot be cut into {num_stages} stages, for each has at least one; use 1 to "
            f"{num_layers} stages (pipeline ranks times stages on each)"
            if num_layers > 0
            else f"a model without layers cannot be cut into {num_stages} stages; give it one layer a stage"
        )


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]


class BlockSequence(nn.ModuleDict):
    """One stage of a model that is a list of blocks, each of which takes the output of the one before it.

    Return it from `configure_stage`, where all blocks of the model can be built: on the meta device they cost nothing,
    and those of other stages are dropped. Blocks are named by their index in the whole model, "0", "1", ..., so
    parameters have the names that they have in `nn.Sequential(*blocks)`.

    The model is cut so that the largest number of parameters of a stage is as small as can be, unless `split` or
    `stage.layers` says where.

    Args:
        blocks: All blocks of the model, in order.
        stage: Which stage to keep. Its `layers`, if any, are blocks and go before `split`.
        split: Number of blocks of each stage.

    Raises:
        ConfigError: There are fewer blocks than stages, `split` does not fit, or two stages would share a parameter.

    Example:
        >>> blocks = [nn.Linear(4, 4) for _ in range(5)]
        >>> list(BlockSequence(blocks, StageInfo(1, 2)))
        ['3', '4']
        >>> list(BlockSequence(blocks, StageInfo(1, 2), split=[1, 4]))
        ['1', '2', '3', '4']
    """

    def __init__(self, blocks: Iterable[nn.Module], stage: StageInfo, split: Sequence[int] | None = None) -> None:
        blocks = list(blocks)
        if stage.layers is not None:
            layers = check_layers(stage.layers, len(blocks))
        elif split is not None:
            layers = cut_by_hand(split, len(blocks), stage.num_stages, "split")[stage.index]
        else:
            sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
            layers = cut_evenly(sizes, stage.num_stages)[stage.index]
        _check_nothing_shared(blocks, layers)
        super().__init__({str(index): blocks[index] for index in layers})
        self.num_blocks = len(blocks)

    def forward(self, input: Any, **shared: Any) -> Any:
        """Run the stage's blocks one after the other.

        Args:
            input: What the first block takes as its only positional argument: of the first stage `first["input"]` of
                `microbatch_inputs`, of a later one the previous stage's output. A tensor, or a tuple or dataclass of
                tensors.
            shared: Given to every block as keyword arguments; `shared` of `microbatch_inputs`.

        Returns:
            What the last block returns.

        Raises:
            ConfigError: A block other than the model's last returns a mapping.
        """
        for name, block in self.items():
            input = block(input, **shared)
            if isinstance(input, Mapping) and int(name) < self.num_blocks - 1:
                raise ConfigError(
                    f"block {name} ({type(block).__name__}) returns a mapping, which the next block would get as its "
                    "only argument on the same stage but as keyword arguments on the next; return a tuple or a "
                    "dataclass"
                )
        return input


def _check_nothing_shared(blocks: Sequence[nn.Module], layers: range) -> None:
    here = {parameter: name for index in layers for name, parameter in blocks[index].named_parameters()}
    for index, block in enumerate(blocks):
        if index in layers:
            continue
        for parameter in block.parameters():
            if parameter in here:
                raise ConfigError(
                    f"blocks {layers.start} to {layers.stop - 1} share {here[parameter]!r} with block {index}, which "
                    "is on another stage; move the cut with split=[...], or write a stage of your own in which the "
                    "parameter has the same name on both"
                )
