"""The choices of `Auto`, against a simulation of everything that it could choose."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule import (
    Auto,
    Choice,
    Costs,
    DualPipeV,
    GPipe,
    HostSeconds,
    Interleaved1F1B,
    LayerCosts,
    LoopedBFS,
    Machine,
    MeasuredCosts,
    MeasuredStage,
    ModelCosts,
    OneForwardOneBackward,
    Schedule,
    ZeroBubble,
    ZeroBubbleV,
    simulate,
)
from lightning_d9d.schedule.partition import level, split_evenly

GIB = 2**30
STATE_RATIO = 5.0
SCHEDULES: list[Schedule] = [
    *(OneForwardOneBackward(), Interleaved1F1B(2), Interleaved1F1B(4), ZeroBubble(1), ZeroBubble(2)),
    *(ZeroBubbleV(), DualPipeV(), GPipe(), LoopedBFS(2)),
]
LAYER = LayerCosts(
    forward_flops=1e12, backward_input_flops=1.2e12, backward_weight_flops=0.9e12, forward_bytes=1e9,
    backward_input_bytes=1e9, weight_bytes=0.5e9, activation_bytes=0.6e9, split_activation_bytes=0.4e9,
    output_bytes=16e6,
)  # fmt: skip


def scaled(layer: LayerCosts, factor: float) -> LayerCosts:
    numbers = {name: value for name, value in vars(layer).items() if type(value) in (int, float)}
    return LayerCosts(**{name: value * factor for name, value in numbers.items()})


EMBEDDING, HEAD = scaled(LAYER, 0.05), scaled(LAYER, 2.5)


def equal_layers(number: int) -> ModelCosts:
    return ModelCosts(before=EMBEDDING, layers=(LAYER,) * number, after=HEAD)


def random_model(seed: int) -> ModelCosts:
    generator = random.Random(seed)

    def layer(size: float) -> LayerCosts:
        flops = generator.uniform(0.5, 2) * 1e12 * size
        return LayerCosts(
            forward_flops=flops,
            backward_input_flops=flops * generator.uniform(1, 1.4),
            backward_weight_flops=flops * generator.uniform(0.7, 1),
            forward_bytes=generator.uniform(0, 3e9),
            weight_bytes=generator.uniform(0.2, 1) * 1e9,
            activation_bytes=generator.uniform(0.3, 1) * 1e9,
            split_activation_bytes=generator.uniform(0.2, 0.6) * 1e9,
            output_bytes=16e6,
        )

    usual = layer(1)
    layers = [usual if generator.random() < 0.7 else layer(1) for _ in range(generator.choice([5, 6, 7]))]
    return ModelCosts(before=layer(0.05), layers=tuple(layers), after=layer(generator.choice([0.5, 3])))


def costs_of(model: ModelCosts, machine: Machine, num_rows: int, cut: list[range]) -> tuple[Costs, list[float]]:
    """Costs of the stages, and the bytes of their state, summed here part by part."""
    stages = [[model.layers[index] for index in layers] for layers in cut]
    stages[0].insert(0, model.before)
    stages[-1].append(model.after)
    seconds = [[machine.seconds(part, num_rows) for part in parts] for parts in stages]
    costs = Costs(
        forward=[sum(each.forward for each in of_stage) + machine.action_seconds for of_stage in seconds],
        backward_input=[sum(each.backward_input for each in of_stage) + machine.action_seconds for of_stage in seconds],
        backward_weight=[
            sum(each.backward_weight for each in of_stage) + machine.action_seconds for of_stage in seconds
        ],
        backward=[sum(each.backward for each in of_stage) + machine.action_seconds for of_stage in seconds],
        transfer=num_rows * 16e6 / machine.link_bytes_per_second,
        latency=machine.link_latency,
        activation=[num_rows * sum(part.activation_bytes for part in parts) for parts in stages],
        split_activation=[num_rows * sum(part.split_activation_bytes for part in parts) for parts in stages],
    )
    return costs, [STATE_RATIO * sum(part.weight_bytes for part in parts) for parts in stages]


def with_host(costs: Costs, seconds: float, cut: list[range], placement: tuple[int, ...]) -> Costs:
    """Costs of stages whose rank has a host that takes so long for a layer."""
    values: dict[str, Any] = vars(costs)
    device, host = ([0.0] * (max(placement) + 1) for _ in range(2))
    for stage, rank in enumerate(placement):
        device[rank] += values["forward"][stage] + values["backward"][stage]
        host[rank] += seconds * len(cut[stage])
    factors = [max(1.0, host[rank] / device[rank]) for rank in placement]
    actions = ("forward", "backward_input", "backward_weight", "backward")
    return replace(costs, **{name: [a * b for a, b in zip(values[name], factors, strict=True)] for name in actions})


def everything(
    num_ranks: int, model: ModelCosts, batch_size: int, machine: Machine, host: float = 0.0
) -> Iterator[tuple[float, float, Schedule, int, list[range]]]:
    """Every schedule with every size of microbatch and every cut: time, memory, and what it is."""
    for schedule in SCHEDULES:
        placement = schedule.placement(num_ranks)
        for num_rows in (rows for rows in range(1, batch_size + 1) if batch_size % rows == 0):
            if len(placement) > len(model.layers) or not schedule.takes(num_ranks, batch_size // num_rows):
                continue
            program = schedule.program(num_ranks, batch_size // num_rows)
            for inner in combinations(range(1, len(model.layers)), len(placement) - 1):
                cut = [range(*bounds) for bounds in pairwise((0, *inner, len(model.layers)))]
                costs, state = costs_of(model, machine, num_rows, cut)
                simulation = simulate(program, with_host(costs, host, cut, placement))
                memory = [
                    peak + sum(state[stage] for stage in schedule.stages_of(rank, num_ranks))
                    for rank, peak in enumerate(simulation.peak_memory)
                ]
                yield simulation.step_time, max(memory), schedule, num_rows, cut


@pytest.mark.parametrize(("seed", "host"), [*((seed, 0.0) for seed in range(6)), (0, 0.012), (1, 0.02), (4, 0.05)])
def test_nothing_is_much_faster(seed: int, host: float) -> None:
    """The whole space is searched here. `Auto` looks at few cuts of each schedule, which costs little.

    Its cuts are even for the device or for the host. Where some ranks wait for one and some for the other, better ones
    are between.
    """
    closely = 1.06 if host else 1.03
    model, num_ranks, batch_size = random_model(seed), 2 + seed % 2, (4, 8)[seed % 2]
    machine = Machine(link_bytes_per_second=(160e9, 2e9)[seed // 3], dense_host_seconds=HostSeconds(host, *[0.0] * 3))
    auto = Auto(batch_size, 4096, machine=machine)
    choice = auto.choose(num_ranks, model, state_ratio=STATE_RATIO)
    found = {
        (type(schedule), schedule.stages_per_rank, num_rows, tuple(cut)): (time, memory)
        for time, memory, schedule, num_rows, cut in everything(num_ranks, model, batch_size, machine, host)
    }
    schedule = choice.schedule
    predicted = found[type(schedule), schedule.stages_per_rank, choice.microbatch_size, choice.layers_of_stage]
    assert (choice.step_time, choice.peak_memory) == pytest.approx(predicted)
    assert choice.step_time <= closely * min(time for time, _ in found.values())
    for cap in (predicted[1] * 0.9, predicted[1] * 0.75):
        within = [time for time, memory in found.values() if memory <= cap]
        capped = Auto(batch_size, 4096, memory_gib=cap / GIB, machine=machine)
        if within:
            under_cap = capped.choose(num_ranks, model, state_ratio=STATE_RATIO)
            assert under_cap.peak_memory <= cap
            assert under_cap.step_time <= 1.05 * min(within)
        else:
            with pytest.raises(ScheduleError, match="no schedule fits"):
                capped.choose(num_ranks, model, state_ratio=STATE_RATIO)


def test_split_backwards_for_a_small_bubble_and_1f1b_for_little_memory() -> None:
    model = ModelCosts(layers=(LAYER,) * 16)
    free = Auto(64, 4096).choose(4, model, state_ratio=STATE_RATIO)
    assert free.name == "zero_bubble_v"
    times = [each.step_time for each in free.alternatives]
    assert times == sorted(times)
    gpipe = next(each for each in free.alternatives if each.name == "gpipe")
    assert gpipe.bubble_ratio > 2 * free.bubble_ratio
    assert gpipe.peak_memory > 2 * free.peak_memory
    capped = Auto(64, 4096, memory_gib=0.95 * free.peak_memory / GIB).choose(4, model, state_ratio=STATE_RATIO)
    assert capped.name == "1f1b"


def test_on_one_rank_there_is_nothing_to_schedule() -> None:
    choice = Auto(8, 4096).choose(1, equal_layers(4), state_ratio=STATE_RATIO)
    assert (choice.name, choice.layers_of_stage, choice.alternatives) == ("1f1b", (range(4),), ())


def test_large_microbatches_where_weights_are_slow_and_small_ones_where_they_are_not() -> None:
    """Reading weights once a microbatch: with many small ones it takes longer than the products."""
    many_weights = replace(LAYER, weight_bytes=50e9)
    slow = Auto(16, 4096).choose(2, ModelCosts(layers=(many_weights,) * 4), state_ratio=0)
    quick = Auto(16, 4096).choose(2, ModelCosts(layers=(LAYER,) * 4), state_ratio=0)
    assert slow.microbatch_size > quick.microbatch_size == 1


def test_large_microbatches_where_the_host_is_slower_than_the_device() -> None:
    """A host that takes four times as long as the device for a row is as fast as the device with four."""
    device = sum(Machine().seconds(LAYER, 1)[::3])
    host = HostSeconds(none=4 * device, attention=0, selective=0, full=0)
    model = ModelCosts(layers=(LAYER,) * 4)
    ahead, slow = (
        Auto(8, 4096, machine=Machine(dense_host_seconds=each)).choose(2, model, state_ratio=0) for each in (None, host)
    )
    assert ahead.microbatch_size == 1
    assert slow.microbatch_size == 4
    (alone,) = (
        Auto(1, 4096, machine=Machine(dense_host_seconds=host)).choose(1, each, state_ratio=0) for each in [model]
    )
    assert alone.step_time == pytest.approx(4 * 4 * device)
    compiled = Auto(1, 4096, machine=Machine(dense_host_seconds=host)).choose(1, model.compiled(), state_ratio=0)
    assert compiled.step_time < 1.1 * 4 * device


def test_seconds_of_the_host_by_hand() -> None:
    machine = Machine(
        sparse_host_seconds=HostSeconds(1, 2, 3, 4),
        dense_host_seconds=HostSeconds(5, 6, 7, 8),
        linear_adapter_host_seconds=HostSeconds(0.1, 0.2, 0.3, 0.4),
        experts_adapter_host_seconds=HostSeconds(0.01, 0.02, 0.03, 0.04),
    )
    sparse = replace(LAYER, grouped_flops=1e9, linear_adapters=4, experts_adapters=2)
    found = [
        machine.host_seconds([replace(sparse, recomputed=kind)]) for kind in ("nothing", "attention", "moved", "all")
    ]
    assert found == pytest.approx([1.42, 2.84, 4.26, 5.68])
    assert machine.host_seconds([LAYER, replace(LAYER, linear_adapters=7), sparse]) == pytest.approx(5 + 5.7 + 1.42)
    assert machine.host_seconds([LAYER, replace(LAYER, is_launched=False)]) is None
    assert Machine(sparse_host_seconds=HostSeconds(1, 2, 3, 4)).host_seconds([LAYER, sparse]) is None


@pytest.mark.parametrize(("embedding", "head", "sizes"), [(0, 0, [6, 6]), (0, 4, [8, 4]), (6, 0, [3, 9])])
def test_a_heavy_end_takes_layers_off_its_stage(embedding: float, head: float, sizes: list[int]) -> None:
    model = ModelCosts(before=scaled(LAYER, embedding), layers=(LAYER,) * 12, after=scaled(LAYER, head))
    choice = Auto(8, 4096).choose(2, model, state_ratio=STATE_RATIO)
    of_two = next(each for each in (choice, *choice.alternatives) if len(each.layers_of_stage) == 2)
    assert [len(layers) for layers in of_two.layers_of_stage] == sizes


def test_the_least_need_is_named_and_is_enough() -> None:
    model = equal_layers(16)
    with pytest.raises(
        ScheduleError, match=r"no schedule fits into 1\.0 GiB a rank; .* raise Auto.memory_gib"
    ) as error:
        Auto(8, 4096, memory_gib=1).choose(4, model, state_ratio=STATE_RATIO)
    need = float(str(error.value).split("needs is ")[1].split(" GiB")[0])
    choice = Auto(8, 4096, memory_gib=need + 0.1).choose(4, model, state_ratio=STATE_RATIO)
    assert need - 0.1 <= choice.peak_memory / GIB <= need + 0.1


def test_memory_of_the_device_where_no_cap_is_given() -> None:
    model = equal_layers(16)
    free = Auto(8, 4096).choose(4, model, state_ratio=STATE_RATIO)
    cap = 0.9 * free.peak_memory
    by_device = Auto(8, 4096).choose(4, model, state_ratio=STATE_RATIO, device_memory=cap)
    assert by_device.peak_memory <= cap
    assert by_device == Auto(8, 4096, memory_gib=cap / GIB).choose(4, model, state_ratio=STATE_RATIO)
    given = Auto(8, 4096, memory_gib=1000).choose(4, model, state_ratio=STATE_RATIO, device_memory=cap)
    assert given == free


# Measured costs


def measured(truth: ModelCosts, machine: Machine, bounds: list[int], num_rows: int, halves: bool) -> MeasuredCosts:
    """Return what a run would have measured of these stages if `truth` were the truth."""
    cut = [range(*pair) for pair in pairwise(bounds)]
    exact = replace(machine, action_seconds=0.0)
    costs, _ = costs_of(truth, exact, num_rows, cut)
    columns = [costs.forward, costs.backward, costs.backward_input, costs.backward_weight, costs.activation]
    stages = [
        MeasuredStage(
            layers=(layers.start, layers.stop),
            forward_seconds=forward,
            backward_seconds=None if halves and index else whole,
            backward_input_seconds=inputs if halves and index else None,
            backward_weight_seconds=weights if halves and index else None,
            activation_bytes=activation,
        )
        for index, (layers, forward, whole, inputs, weights, activation) in enumerate(zip(cut, *columns, strict=True))
    ]
    return MeasuredCosts(
        machine="a device",
        sequence_length=4096,
        microbatch_size=num_rows,
        stages=tuple(stages),
        link_seconds=num_rows * 16e6 / machine.link_bytes_per_second,
    )


def slower(layer: LayerCosts, time: float, memory: float) -> LayerCosts:
    """Return the layer with work that takes `time` times as long and activations of `memory` times the size."""
    phases = ("forward", "backward_input", "backward_weight")
    changed = {f"{phase}_{kind}": time for phase in phases for kind in ("flops", "bytes")}
    changed |= {name: memory for name in vars(layer) if name.endswith("activation_bytes")}
    return replace(layer, **{name: getattr(layer, name) * factor for name, factor in changed.items()})


def in_truth(choice: Choice, num_ranks: int, truth: ModelCosts, machine: Machine) -> float:
    """Return the real time of a step with this choice."""
    program = choice.schedule.program(num_ranks, choice.num_microbatches)
    costs, _ = costs_of(truth, machine, choice.microbatch_size, list(choice.layers_of_stage))
    return simulate(program, costs).step_time


@pytest.mark.parametrize("halves", [False, True], ids=["whole backwards", "halves"])
def test_measured_stages_lead_to_what_is_best_in_truth(tmp_path: Path, halves: bool) -> None:
    """Layers are 2.4 times as slow as predicted and the head as predicted; other sizes of microbatches are too."""
    machine, head = Machine(link_bytes_per_second=40e9), scaled(LAYER, 6)
    predicted = ModelCosts(before=EMBEDDING, layers=(LAYER,) * 22, after=head)
    layers = (slower(LAYER, 2.4, 1.5),) * 22
    truth = ModelCosts(before=slower(EMBEDDING, 2.4, 1.5), layers=layers, after=slower(head, 1, 0.8))
    measured(truth, machine, [0, 6, 12, 18, 22], 2, halves).write(tmp_path / "costs.json")
    informed = Auto(16, 4096, costs=tmp_path / "costs.json").choose(4, predicted, state_ratio=STATE_RATIO)
    assert informed.step_time == pytest.approx(in_truth(informed, 4, truth, machine), rel=1e-3)
    best = Auto(16, 4096, machine=machine).choose(4, truth, state_ratio=STATE_RATIO)
    assert informed.step_time <= 1.002 * best.step_time
    assert informed.peak_memory == pytest.approx(best.peak_memory, rel=0.02)
    blind = Auto(16, 4096).choose(4, predicted, state_ratio=STATE_RATIO)
    assert in_truth(blind, 4, truth, machine) > 1.03 * informed.step_time


def test_what_one_stage_does_not_tell_apart_gets_one_factor(tmp_path: Path) -> None:
    model, machine = equal_layers(4), Machine(action_seconds=0.0, link_latency=0.0)
    before, *layers, after = (slower(part, 3, 3) for part in model.parts)
    truth = ModelCosts(before=before, layers=tuple(layers), after=after)
    measured(truth, machine, [0, 4], 1, halves=False).write(tmp_path / "costs.json")
    informed = Auto(4, 4096, costs=tmp_path / "costs.json", machine=machine).choose(1, model, state_ratio=0)
    predicted = Auto(4, 4096, machine=machine).choose(1, model, state_ratio=0)
    assert informed.step_time == pytest.approx(3 * predicted.step_time, rel=1e-6)
    assert informed.peak_memory == pytest.approx(3 * predicted.peak_memory, rel=1e-6)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    costs = measured(equal_layers(6), Machine(), [0, 2, 6], 2, halves=True)
    costs.write(tmp_path / "costs.json")
    assert MeasuredCosts.read(tmp_path / "costs.json") == costs


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def with_stage(values: dict[str, Any], index: int, **changes: Any) -> dict[str, Any]:
    stages = [dict(stage) for stage in values["stages"]]
    stages[index].update(changes)
    return {**values, "stages": stages}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: [values], "not a measurement of format 1"),
        (lambda values: {**values, "format": 2}, "not a measurement of format 1"),
        (lambda values: without(values, "stages"), r"missing fields \['stages'\]"),
        (lambda values: {**values, "stages": 3}, "MeasuredCosts.stages=3 must be a list"),
        (lambda values: {**values, "stages": []}, r"layers \[\]; they must follow one another"),
        (lambda values: {**values, "stages": ["fast"]}, r"stages\[0\]: 'fast' must be an object with fields"),
        (lambda values: {**values, "speed": 3}, r"unknown fields \['speed'\]"),
        (lambda values: {**values, "microbatch_size": 0}, "MeasuredCosts.microbatch_size=0 must be a whole number"),
        (lambda values: {**values, "microbatch_size": 1.5}, "MeasuredCosts.microbatch_size=1.5 must be a whole number"),
        (lambda values: {**values, "link_seconds": -1.0}, "MeasuredCosts.link_seconds=-1.0 must be a finite number"),
        (lambda values: with_stage(values, 1, forward_seconds="2"), r"stages\[1\]: MeasuredStage.forward_seconds='2'"),
        (lambda values: with_stage(values, 1, forward_seconds=None), r"MeasuredStage.forward_seconds=None must"),
        (lambda values: with_stage(values, 0, forward_seconds=float("nan")), r"MeasuredStage.forward_seconds=nan must"),
        (lambda values: with_stage(values, 0, activation_bytes=True), "MeasuredStage.activation_bytes=True must"),
        (lambda values: with_stage(values, 0, layers=[0, 0]), r"MeasuredStage.layers=\[0, 0\] must"),
        (lambda values: with_stage(values, 0, layers=[0, "2"]), r"MeasuredStage.layers=\[0, '2'\] must"),
        (lambda values: with_stage(values, 0, layers=2), "MeasuredStage.layers=2 must"),
        (lambda values: with_stage(values, 1, layers=[3, 6]), r"layers \[\(0, 2\), \(3, 6\)\]; they must follow"),
        (lambda values: with_stage(values, 1, backward_seconds=None), r"layers \(2, 6\) needs backward_seconds, or"),
    ],
)  # fmt: skip
def test_files_that_are_no_measurement(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "costs.json"
    measured(equal_layers(6), Machine(), [0, 2, 6], 2, halves=False).write(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ScheduleError, match=message) as error:
        Auto(4, 4096, costs=path).choose(2, equal_layers(6), state_ratio=STATE_RATIO)
    assert str(path) in str(error.value)


def test_files_that_are_not_there_or_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ScheduleError, match=r"costs=.*costs.json' cannot be read"):
        Auto(4, 4096, costs=path).choose(2, equal_layers(6), state_ratio=STATE_RATIO)
    path.write_text("{")
    with pytest.raises(ScheduleError, match="cannot be read as JSON"):
        Auto(4, 4096, costs=path).choose(2, equal_layers(6), state_ratio=STATE_RATIO)
    measured(equal_layers(6), Machine(), [0, 2, 6], 2, halves=False).write(path)
    with pytest.raises(ScheduleError, match="measured stages have 6 layers, but the model has 7"):
        Auto(4, 4096, costs=path).choose(2, equal_layers(7), state_ratio=STATE_RATIO)
    with pytest.raises(ScheduleError, match="sequences of 4096 tokens, but Auto has sequence_length=1024"):
        Auto(4, 1024, costs=path).choose(2, equal_layers(6), state_ratio=STATE_RATIO)


# What is refused, saved and shown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Auto(0, 4096), "Auto.batch_size=0 must be a whole number of at least 1"),
        (lambda: Auto(8, 4096.0), "Auto.sequence_length=4096.0 must be"),
        (lambda: Auto(8, 4096, memory_gib=0), "Auto.memory_gib=0 must be greater than 0"),
        (lambda: Auto(8, 4096, memory_gib=float("nan")), "Auto.memory_gib=nan must be"),
        (lambda: Auto(8, 4096).choose(7, equal_layers(6), state_ratio=1), "6 layers for 7 pipeline ranks"),
        (lambda: Auto(8, 4096).choose(0, equal_layers(6), state_ratio=1), "6 layers for 0 pipeline ranks"),
        (lambda: Auto(8, 4096).choose(2, equal_layers(6), state_ratio=-1), "state_ratio=-1 must be finite"),
        (lambda: ModelCosts(layers=()), "ModelCosts.layers is empty"),
        (lambda: LayerCosts(forward_flops=float("inf")), "LayerCosts.forward_flops=inf must be a finite number"),
        (lambda: LayerCosts(weight_bytes=-1), "LayerCosts.weight_bytes=-1 must be"),
        (lambda: Machine(flops_per_second=0), "Machine.flops_per_second=0 must be greater than 0"),
        (
            lambda: Machine(dense_host_seconds=HostSeconds(1, 1, -1, 1)),
            r"Machine.dense_host_seconds=HostSeconds\(.* selective=-1, .*\) must be finite numbers of at least 0",
        ),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()


@pytest.mark.parametrize(
    "use",
    [
        lambda auto: auto.stages_per_rank,
        lambda auto: auto.placement(2),
        lambda auto: auto.takes(2, 4),
        lambda auto: auto.program(2, 4),
        lambda auto: auto.forward_only(2, 4),
    ],
)
def test_before_the_choice_there_is_no_schedule(use: Any) -> None:
    with pytest.raises(ScheduleError, match="Auto has not chosen a schedule yet"):
        use(Auto(8, 4096))


def test_a_choice_survives_json() -> None:
    choice = Auto(8, 4096).choose(2, equal_layers(8), state_ratio=STATE_RATIO)
    again = Choice.from_dict(json.loads(json.dumps(choice.to_dict())))
    assert again == choice
    assert again.schedule.program(2, again.num_microbatches).num_stages == len(again.layers_of_stage)
    assert choice.alternatives


def test_a_saved_choice_that_cannot_be_read() -> None:
    saved = Auto(8, 4096).choose(2, equal_layers(8), state_ratio=STATE_RATIO).to_dict()
    with pytest.raises(ScheduleError, match="names the schedule 'best'; this version knows"):
        Choice.from_dict({**saved, "name": "best"})
    with pytest.raises(ScheduleError, match="cannot be read"):
        Choice.from_dict(without(saved, "layers_of_stage"))
    with pytest.raises(ScheduleError, match="cannot be read"):
        Choice.from_dict({**saved, "speed": 1})


def test_the_table() -> None:
    choice = Choice(
        name="zero_bubble",
        microbatch_size=2,
        num_microbatches=8,
        layers_of_stage=(range(5), range(5, 8)),
        step_time=1.25,
        bubble_ratio=0.031,
        peak_memory=61.5 * GIB,
    )
    slower = replace(choice, name="1f1b", microbatch_size=1, num_microbatches=16, step_time=1.5, bubble_ratio=0.12)
    assert str(replace(choice, alternatives=(slower,))).splitlines() == [
        "schedule     microbatches       step  bubble    memory",
        "zero_bubble        8 of 2  1250.0 ms    3.1%  61.5 GiB",
        "1f1b              16 of 1  1500.0 ms   12.0%  61.5 GiB",
        "Auto takes the first, with stages of 5, 3 layers",
    ]


def test_cuts_are_moved_until_ranks_are_level() -> None:
    """Two stages a rank: no stage is longer than it must be, yet rank 0 has the two longest."""
    weights = [3, 1, 1, 1, 3, 1, 1, 1]

    def loads(cut: list[range]) -> list[tuple[int]]:
        stages = [sum(weights[item] for item in stage) for stage in cut]
        return [(stages[0] + stages[2],), (stages[1] + stages[3],)]

    cut = [range(4), range(4, 5), range(5, 7), range(7, 8)]
    assert loads(cut) == [(8,), (4,)]
    moved = level(cut, (0, 1, 0, 1), loads)
    assert sorted(loads(moved)) == [(6,), (6,)]
    assert level(moved, (0, 1, 0, 1), loads) == moved
    assert level(split_evenly([1, 1], 2), (0, 1), lambda cut: [(9,), (1,)]) == [range(1), range(1, 2)]
