"""`lightning-d9d plan` predicts memory, time and messages of a `fit`, on any number of ranks."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml

from lightning_d9d.cli.commands import plan_parser
from lightning_d9d.cli.training import D9DCLI
from lightning_d9d.datamodules.batch_size import check_divides
from lightning_d9d.errors import ConfigError, reason
from lightning_d9d.paths import make_folder_of
from lightning_d9d.plan import Plan, machine_of, search, write_page
from lightning_d9d.plan.changes import plan_with_changes
from lightning_d9d.plan.planning import costs_of_length, rank_model
from lightning_d9d.plan.search import name_of, settings_of
from lightning_d9d.schedule import OneForwardOneBackward
from lightning_d9d.strategy.described import layers_of
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.strategy import D9DStrategy


class _Planning(D9DCLI):
    """Builds model, data and strategy as `fit` does, without a Trainer, and plans."""

    options: Namespace
    arguments: list[str]
    """All arguments, also those of `plan` itself."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Build no Trainer, because it would look for the devices of the run."""

    def _run_subcommand(self, subcommand: str) -> None:
        self._arguments = self.arguments
        with self._placed(ConfigError):
            self._plan(subcommand)

    def _plan(self, subcommand: str) -> None:
        trainer = self.config_init[subcommand]["trainer"]
        strategy, given = trainer["strategy"], self.options
        if not isinstance(strategy, D9DStrategy):
            raise ConfigError(f"plan needs a D9DStrategy, but trainer.strategy is {strategy!r}")
        if not isinstance(self.model, D9DModule):
            raise ConfigError(f"plan needs a D9DModule, whose layers have costs, but got {type(self.model).__name__}")
        world_size = given.world_size
        if world_size is None and not (world_size := _ranks_of(trainer)):
            raise ConfigError(
                f"trainer.devices={trainer['devices']!r} does not say how many ranks run; pass --world_size"
            )
        gpus_per_node = given.gpus_per_node
        if gpus_per_node is None and trainer["num_nodes"] > 1:
            gpus_per_node = _devices(trainer) or None
        machine = machine_of(given.gpu, gpus_per_node=gpus_per_node)
        mesh, schedule = None, None
        if given.search:
            free = {"pipeline_parallel": 1, "data_parallel_shard": 1, "data_parallel_replicate": -1}
            mesh, schedule = replace(strategy.mesh_config, **free, expert_parallel=1), OneForwardOneBackward()
        degrees = (mesh or strategy.mesh_config).resolve(world_size)
        tokens, rows = given.tokens, given.rows
        if tokens is None:
            tokens = _of_data(self.datamodule, "sequence_length", "--tokens, the tokens of a row")
        data_ranks = degrees.data_parallel_replicate * degrees.data_parallel_shard
        accumulated = trainer["accumulate_grad_batches"] or 1
        if rows is None:
            rows = _rows_of_data(self.datamodule, data_ranks, accumulated)
        clips = trainer["gradient_clip_val"] is not None
        precision = str(trainer["precision"] or "32-true")
        model = rank_model(
            self.model,
            strategy,
            world_size,
            rows=rows,
            tokens=tokens,
            precision=precision,
            accumulates_batches=accumulated > 1,
            mesh=mesh,
            schedule=schedule,
            memory=machine.allocatable,
            gpus_per_node=machine.gpus_per_node,
            expert_load=given.expert_load,
        )
        costs = costs_of_length(self.model, precision)
        asynchronous = strategy.checkpoint_config.asynchronous
        if given.search:
            own, num_layers = self.model, len(model.costs.layers)
            plans = search(
                model,
                machine,
                costs,
                lambda num_stages: layers_of(own, num_layers, num_stages),
                asynchronous=asynchronous,
                clips=clips,
            )
            sys.stdout.write(_ranking(plans))
            best = plans[0]
        else:
            best = plan_with_changes(model, machine, costs, asynchronous=asynchronous, clips=clips)
            sys.stdout.write(f"{best}\n")
        _write(best, given, self.datamodule, trainer, accumulated)


def _ranks_of(trainer: Any) -> int:
    """Return the number of a Trainer's ranks; 0 if `devices` leaves it to the machine."""
    return _devices(trainer) * trainer["num_nodes"]


def _devices(trainer: Any) -> int:
    """Return the number of a Trainer's devices on each node; 0 if it is left to the machine."""
    devices = trainer["devices"]
    return len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0


def _devices_of(plan: Plan, trainer: Any) -> dict[str, Any]:
    """Return a Trainer's settings for the ranks of a plan; none if they do not fill nodes."""
    world_size, devices = plan.model.mesh.world_size, trainer["devices"]
    if _ranks_of(trainer) == world_size:
        return {"devices": devices if isinstance(devices, list) else int(devices), "num_nodes": trainer["num_nodes"]}
    devices = min(world_size, plan.machine.gpus_per_node)
    return {} if world_size % devices else {"devices": devices, "num_nodes": world_size // devices}


def _of_data(data: Any, name: str, option: str) -> int:
    value = getattr(data, name, None)
    if not isinstance(value, int):
        raise ConfigError(f"the data of this configuration do not give their {name}; pass {option}")
    return value


def _rows_of_data(data: Any, data_ranks: int, accumulated: int) -> int:
    """Rows of a batch of one data rank."""
    whole = getattr(data, "global_batch_size", None)
    if not isinstance(whole, int):
        return _of_data(data, "batch_size", "--rows, the rows of a batch of one data rank")
    check_divides(whole, {"data ranks": data_ranks, "accumulated batches": accumulated})
    return whole // (data_ranks * accumulated)


def _ranking(plans: list[Plan]) -> str:
    lines = ["the fastest that fit, by arithmetic:"]
    for number, each in enumerate(plans, 1):
        lines.append(
            f"{number:3}. {each.step_seconds:.3f} s, {each.tokens_per_second:,.0f} tokens/s a GPU, "
            f"{each.most.needed / 2**30:.1f} GiB: {name_of(each)}"
        )
    return "\n".join(lines) + "\n"


def _settings(plan: Plan, data: Any, trainer: Any, accumulated: int) -> dict[str, Any]:
    """Return the settings of a plan with its ranks and rows, the latter by the name that the data use."""
    settings: dict[str, Any] = settings_of(plan)
    settings["trainer"] = _devices_of(plan, trainer) | settings["trainer"]
    model, mesh = plan.model, plan.model.mesh
    rows = model.rows * model.num_microbatches
    sizes = {
        "global_batch_size": rows * mesh.data_parallel_replicate * mesh.data_parallel_shard * accumulated,
        "batch_size": rows,
    }
    name = next((each for each in sizes if isinstance(getattr(data, each, None), int)), None)
    return settings | ({} if name is None else {"data": {"init_args": {name: sizes[name]}}})


def _write(plan: Plan, given: Namespace, data: Any, trainer: Any, accumulated: int) -> None:
    try:
        if given.json:
            Path(given.json).write_text(json.dumps(plan.to_dict(), indent=1) + "\n")
        if given.yaml:
            Path(given.yaml).write_text(yaml.safe_dump(_settings(plan, data, trainer, accumulated), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {reason(error)}; give another file") from error
    if given.page:
        write_page(plan, given.page)


def run(_: object = None) -> None:
    """Run the subcommand of `sys.argv`: its own options, and those of `fit`.

    Raises:
        ConfigError: The mesh is impossible, the GPU unknown, nothing fits, or a file cannot be written.
    """
    own, others = plan_parser().parse_known_args(sys.argv[2:])
    for path in filter(None, (own.json, own.yaml, own.page)):
        make_folder_of(path)
    _Planning.options = cast(Namespace, own)
    _Planning.arguments = sys.argv[2:]
    sys.argv[1:] = ["fit", *others]
    _Planning(parser_kwargs={"prog": "lightning-d9d"})
