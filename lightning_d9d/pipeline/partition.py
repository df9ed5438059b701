"""Splits a model's layers into consecutive stages: by count, by given sizes, and by the weights of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.schedule.partition import check_num_stages, split_evenly


def distribute_layers(num_layers: int, num_stages: int, before: int = 0, after: int = 0) -> list[range]:
    """Split layers evenly into stages, counting the parts before the first layer and after the last as layers.

    An embedding counts as `before` layers of the first stage and a head as `after` layers of the last. With these
    virtual layers all stages have equally many; the first stages get one of the remaining layers each.

    Args:
        num_layers: Number of layers of the whole model.
        num_stages: Number of stages of the whole pipeline.
        before: Virtual layers of the first stage.
        after: Virtual layers of the last stage.

    Returns:
        One range of layers for each stage, in order, none of them empty.

    Raises:
        ConfigError: A number is negative, or a stage would have no layer.
    """
    check_num_stages(num_layers, num_stages)
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
            f"{share + 1} for each of {num_stages} stages. Stage {stage} would have no real layer. Use fewer virtual "
            "layers or fewer stages"
        )
    return _ranges(sizes)


def split_by_sizes(sizes: Sequence[int], num_layers: int, num_stages: int, name: str) -> list[range]:
    """Split layers into ranges of the given lengths.

    Args:
        sizes: Layers of each stage.
        num_layers: Number of layers of the whole model.
        num_stages: Number of stages of the whole pipeline.
        name: The user's name of `sizes`, for errors.

    Raises:
        ConfigError: `sizes` does not have `num_stages` numbers of at least 1 with the sum `num_layers`.
    """
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"{name}={list(sizes)} has {len(sizes)} stages with {sum(sizes)} layers in all, but the pipeline has "
            f"{num_stages} stages and the model {num_layers} layers. Give {num_stages} numbers of at least 1 with that "
            "sum, or leave it out"
        )
    return _ranges(sizes)


def check_layers(layers: range, num_layers: int) -> range:
    """Return the given layers of a stage after a check.

    Raises:
        ConfigError: The layers are not consecutive ones of a model of `num_layers`.
    """
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= num_layers:
        raise ConfigError(
            f"a stage of layers {layers} does not fit a model with {num_layers} layers; StageInfo.layers must be "
            f"consecutive ones out of range(0, {num_layers})"
        )
    return layers


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]


class BlockSequence(nn.ModuleDict):
    """One stage of a model that is a list of blocks, each of which takes the output of the one before it.

    Return it from `configure_stage`, where all blocks of the model can be built. They cost nothing on the meta device,
    and blocks of other stages are dropped. Blocks are named by their index in the whole model, "0", "1", ..., so
    parameters have the names that they have in `nn.Sequential(*blocks)`.

    Unless `split` or `stage.layers` sets boundaries, the model is split so that the largest stage has as few parameters
    as possible.

    Args:
        blocks: All blocks of the model, in order.
        stage: The stage to keep. Its `layers`, if set, are blocks and override `split`.
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
            layers = split_by_sizes(split, len(blocks), stage.num_stages, "split")[stage.index]
        else:
            sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
            layers = split_evenly(sizes, stage.num_stages)[stage.index]
        _check_nothing_shared(blocks, layers)
        super().__init__({str(index): blocks[index] for index in layers})
        self.num_blocks = len(blocks)

    def forward(self, input: Any = None, **shared: Any) -> Any:
        """Run the stage's blocks one after the other.

        Args:
            input: The only positional argument of the first block: `first["input"]` of `microbatch_inputs` on the first
                stage, the previous stage's output on later ones. A tensor, or a tuple or dataclass of tensors.
            shared: Keyword arguments for every block; `shared` of `microbatch_inputs`.

        Returns:
            The result of the last block.

        Raises:
            ConfigError: The input is missing, or a block other than the model's last returns a mapping.
        """
        if input is None:
            raise ConfigError(
                f"the first block's input is missing: it must be 'input' of StageInputs.first, but first and shared "
                f'have {", ".join(map(repr, shared)) or "nothing"}. Return StageInputs(first={{"input": ...}}, '
                "shared={...}) from microbatch_inputs; all blocks get what is in shared"
            )
        for name, block in self.items():
            input = block(input, **shared)
            if isinstance(input, Mapping) and int(name) < self.num_blocks - 1:
                raise ConfigError(
                    f"block {name} ({type(block).__name__}) returns a mapping. The next block would get it as its "
                    "only argument on the same stage, but as keyword arguments on another. Return a tuple or a "
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
                    "is on another stage. Move the boundary with split=[...], or write your own stage in which the "
                    "parameter has the same name on both"
                )
