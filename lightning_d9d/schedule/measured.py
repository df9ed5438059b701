"""Measured times of a run's stages in a file, which correct the predicted costs of layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from lightning_d9d.errors import ScheduleError, reason
from lightning_d9d.schedule.layers import LayerSeconds, Machine, ModelCosts, check_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FORMAT = 1

_ROUNDS = 1000

_Read = TypeVar("_Read", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """Times of one stage's actions for one microbatch.

    Raises:
        ScheduleError: A number is negative or not finite, or there is neither a whole backward nor both its halves.
    """

    layers: tuple[int, int]
    """The first layer and the one after the last, by their index in the whole model."""
    forward_seconds: float
    backward_seconds: float | None = None
    """Seconds of a whole backward; None if all were split."""
    backward_input_seconds: float | None = None
    backward_weight_seconds: float | None = None
    activation_bytes: float
    """Bytes that a microbatch keeps from the end of its forward to its backward."""

    def __post_init__(self) -> None:
        check_numbers(self)
        is_pair = isinstance(self.layers, Sequence) and [type(each) for each in self.layers] == [int, int]
        if not is_pair or not 0 <= self.layers[0] < self.layers[1]:
            raise ScheduleError(
                f"MeasuredStage.layers={self.layers} must be its first layer and the one after its last"
            )
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.backward_seconds is None and None in (self.backward_input_seconds, self.backward_weight_seconds):
            raise ScheduleError(
                f"MeasuredStage of layers {self.layers} needs backward_seconds, or backward_input_seconds and "
                "backward_weight_seconds"
            )


@dataclass(frozen=True)
class Calibration:
    """Factors that correct the predicted costs of a model, one for each of `ModelCosts.parts`."""

    seconds: tuple[LayerSeconds, ...]
    activation: tuple[float, ...]
    link_seconds_per_row: float | None = None
    """Seconds of a message for each row; it replaces the prediction."""

    @classmethod
    def none(cls, model: ModelCosts) -> Self:
        """Return factors that leave everything as predicted."""
        number = len(model.parts)
        return cls((LayerSeconds(1.0, 1.0, 1.0, 1.0),) * number, (1.0,) * number)


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Measurements of a run: `write` writes them, `Auto(costs=path)` reads them.

    Raises:
        ScheduleError: A number is negative or not finite, or the stages leave out layers.
    """

    machine: str
    """The machine's name, for readers of the file."""
    sequence_length: int
    """Number of tokens in a row."""
    microbatch_size: int
    """Number of rows in a microbatch."""
    stages: tuple[MeasuredStage, ...]
    """All stages of the model, in order."""
    link_seconds: float | None = None
    """Time of a message of one microbatch from one rank to another. None if not measured."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        check_numbers(self)
        bounds = [stage.layers for stage in self.stages]
        if not bounds or any(before[1] != behind[0] for before, behind in pairwise([(0, 0), *bounds])):
            raise ScheduleError(f"MeasuredCosts.stages have the layers {bounds}; they must follow one another from 0")

    def write(self, path: str | Path) -> None:
        """Write the measurements as JSON."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file that `write` wrote.

        Raises:
            ScheduleError: The file is missing or not a measurement. The message names file and field.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ScheduleError(f"costs={str(path)!r} cannot be read as JSON: {reason(error)}") from error
        try:
            if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
                raise ScheduleError(f"not a measurement of format {_FORMAT}; write one with MeasuredCosts.write")
            stages = values.get("stages", [])
            if not isinstance(stages, list):
                raise ScheduleError(f"MeasuredCosts.stages={stages!r} must be a list")
            if "stages" in values:
                values["stages"] = [_build(MeasuredStage, each, f"stages[{i}]: ") for i, each in enumerate(stages)]
            return _build(cls, values, "")
        except ScheduleError as error:
            raise ScheduleError(f"costs={str(path)!r}: {error}") from error

    def calibrate(self, model: ModelCosts, machine: Machine) -> Calibration:
        """Derive the real costs of layers from the measured stages; `schedule/measured.py` describes how.

        Raises:
            ScheduleError: The model has another number of layers.
        """
        num_layers = len(model.layers)
        if self.stages[-1].layers[1] != num_layers:
            raise ScheduleError(
                f"the measured stages have {self.stages[-1].layers[1]} layers, but the model has {num_layers}"
            )
        predicted = [machine.seconds(part, self.microbatch_size) for part in model.parts]
        forward = self._fit(model, [each.forward for each in predicted], "forward_seconds")
        whole = self._fit(model, [each.backward for each in predicted], "backward_seconds")
        inputs = self._fit(model, [each.backward_input for each in predicted], "backward_input_seconds")
        weights = self._fit(model, [each.backward_weight for each in predicted], "backward_weight_seconds")
        activation = self._fit(
            model, [self.microbatch_size * part.activation_bytes for part in model.parts], "activation_bytes"
        )
        seconds = []
        for each, f, i, w, b in zip(predicted, forward, inputs, weights, whole, strict=True):
            # A stage has a whole backward or both halves.
            i, w = b if i is None else i, b if w is None else w
            assert f is not None
            assert i is not None
            assert w is not None
            if b is None:
                halves = i * each.backward_input + w * each.backward_weight
                b = halves / each.backward if each.backward else 1.0
            seconds.append(LayerSeconds(f, i, w, b))
        link = None if self.link_seconds is None else self.link_seconds / self.microbatch_size
        return Calibration(tuple(seconds), tuple(factor or 0.0 for factor in activation), link)

    def _fit(self, model: ModelCosts, predicted: Sequence[float], field: str) -> list[float | None]:
        """Return the factor between measured and predicted for each part; None if no measured stage has it.

        [Note: stages to layers] Parts of equal costs have one factor. All factors begin at 1. Each is multiplied by the
        mean ratio of measured to predicted time of its stages, weighted by its share in them, until nothing changes.
        These are the multiplicative updates of Richardson 1972 and Lucy 1974. Factors stay positive. Parts that no
        stage separates, such as a head that is always together with the same layers, get a common factor.
        """
        kinds = {part: index for index, part in enumerate(dict.fromkeys(model.parts))}
        rows: list[tuple[float, list[float]]] = []
        """The time of each measured stage, and the prediction for each kind of part in it."""
        seen: set[int] = set()
        for stage in self.stages:
            measured = getattr(stage, field)
            if measured is not None:
                shares = [0.0] * len(kinds)
                for index in self._places_of(stage, len(model.layers)):
                    kind = kinds[model.parts[index]]
                    shares[kind] += predicted[index]
                    seen.add(kind)
                rows.append((measured, shares))
        factors = [1.0] * len(kinds)
        total = [sum(shares[kind] for _, shares in rows) for kind in range(len(kinds))]
        for _ in range(_ROUNDS):
            fitted = [sum(f * share for f, share in zip(factors, shares, strict=True)) for _, shares in rows]
            ratios = [measured / fit if fit else 1.0 for (measured, _), fit in zip(rows, fitted, strict=True)]
            for kind, of_kind in enumerate(total):
                if of_kind:
                    shared = sum(shares[kind] * ratio for (_, shares), ratio in zip(rows, ratios, strict=True))
                    factors[kind] *= shared / of_kind
        return [factors[kinds[part]] if kinds[part] in seen else None for part in model.parts]

    def _places_of(self, stage: MeasuredStage, num_layers: int) -> range:
        """Return the indices in `ModelCosts.parts` of the stage's parts."""
        start, stop = stage.layers
        return range(start + (start > 0), stop + 1 + (stop == num_layers))


def _build(cls: type[_Read], values: Any, where: str) -> _Read:
    """Build an object of the class from a JSON object with its fields.

    Raises:
        ScheduleError: Fields are missing or unknown, or the class refuses them.
    """
    if not isinstance(values, dict):
        raise ScheduleError(f"{where}{values!r} must be an object with fields")
    known = {each.name for each in fields(cls)}
    missing = {each.name for each in fields(cls) if each.default is MISSING} - values.keys()
    if missing or values.keys() - known:
        raise ScheduleError(
            f"{where}missing fields {sorted(missing)}, unknown fields {sorted(values.keys() - known)}; "
            f"it has {sorted(known)}"
        )
    try:
        return cls(**values)
    except ScheduleError as error:
        raise ScheduleError(f"{where}{error}") from error
