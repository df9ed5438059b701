"""What the package relies on in Lightning: each private name it uses, and each attribute it replaces.

A new private name must be added to `USED`, and what is replaced to `PATCHES` in `lightning_d9d/loop/patches.py`. If a
test here fails after an update of Lightning, look at the file named there, then at Lightning's changes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import distributed, optimizer
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core import saving
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loops import evaluation_loop, fetchers, fit_loop, prediction_loop, training_epoch_loop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import launcher, subprocess_script
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.connectors import data_connector, signal_connector
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities import combined_loader, model_summary
from lightning.pytorch.utilities.combined_loader import CombinedLoader

import lightning_d9d
from lightning_d9d import D9DStrategy
from lightning_d9d.loop.patches import PATCHES, Patch

ROOT = Path(lightning_d9d.__file__).parent


def calls(caller: Callable[..., Any], text: str) -> bool:
    return text in inspect.getsource(caller)


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def trainer(val_check_interval: str | None = None) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=CSVLogger("unused"),
        callbacks=[ModelCheckpoint()],
        enable_progress_bar=False,
        val_check_interval=val_check_interval,
    )


DataConnector = data_connector._DataConnector
EpochLoop = training_epoch_loop._TrainingEpochLoop
EvaluationLoop = evaluation_loop._EvaluationLoop
SignalConnector = signal_connector._SignalConnector

USED: dict[str, Callable[[], bool]] = {
    # loop/shutdown.py replaces these; PATCHES says who calls them
    "_broadcast_sigterm_tensor": lambda: parameters_of(EpochLoop._broadcast_sigterm_tensor) == [],
    "_sigterm_notifier_fn": lambda: parameters_of(SignalConnector._sigterm_notifier_fn) == ["signum", "_"],
    "_slurm_sigusr_handler_fn": lambda: parameters_of(SignalConnector._slurm_sigusr_handler_fn) == ["signum", "_"],
    "_store_dataloader_outputs": lambda: (
        parameters_of(EvaluationLoop._store_dataloader_outputs) == []
        and calls(EvaluationLoop._store_dataloader_outputs, "update_eval_epoch_metrics()")
    ),
    "_should_check_val_fx": lambda: (
        parameters_of(EpochLoop._should_check_val_fx) == ["data_fetcher"]
        and not hasattr(trainer("00:00:01:00"), "val_check_interval")
    ),
    "_original_handlers": lambda: calls(SignalConnector.teardown, "in self._original_handlers.items()"),
    # and reads these
    "_signal_connector": lambda: isinstance(trainer()._signal_connector, SignalConnector),
    "_accelerator_connector": lambda: (
        trainer()._accelerator_connector.use_distributed_sampler is True
        and calls(DataConnector._requires_distributed_sampler, "_accelerator_connector.use_distributed_sampler")
        and calls(L.LightningModule.log, "sync_dist and trainer._accelerator_connector.is_distributed")
    ),
    # loop/samplers.py
    "_data_connector": lambda: isinstance(trainer()._data_connector, DataConnector),
    "_resolve_sampler": lambda: parameters_of(DataConnector._resolve_sampler) == ["dataloader", "shuffle", "mode"],
    "_requires_distributed_sampler": lambda: (
        parameters_of(DataConnector._requires_distributed_sampler) == ["dataloader"]
        and calls(DataConnector._resolve_sampler, "self._requires_distributed_sampler(dataloader)")
    ),
    # loop/shutdown.py reads these, too
    "_data_fetcher": lambda: (
        trainer().fit_loop._data_fetcher is None and calls(fit_loop._FitLoop.setup_data, "self._data_fetcher =")
    ),
    "_results": lambda: isinstance(trainer().validate_loop._results, result._ResultCollection),
    # loop/progress.py
    "_logger_connector": lambda: trainer()._logger_connector is not None,
    # callbacks/progress_lines.py
    "_callback_metrics": lambda: trainer()._logger_connector._callback_metrics == {},
    # loop/logger_runs.py
    "_version": lambda: (
        CSVLogger("unused", version=3)._version == 3 and calls(TensorBoardLogger.version.fget, "self._version")
    ),
    "_experiment": lambda: (
        CSVLogger("unused")._experiment is None
        and calls(CSVLogger.experiment.fget, "ExperimentWriter(log_dir=self.log_dir)")
    ),
    "_id": lambda: calls(WandbLogger.version.fget, "self._id"),
    "_wandb_init": lambda: calls(WandbLogger.experiment.fget, "wandb.init(**self._wandb_init)"),
    "_run_id": lambda: calls(MLFlowLogger.experiment.fget, "self._mlflow_client.get_run(self._run_id)"),
    "_progress_bar_metrics": lambda: trainer()._logger_connector._progress_bar_metrics == {},
    # loop/display.py gives the Trainer's callbacks other classes
    "_get_train_description": lambda: (
        calls(RichProgressBar.on_train_epoch_start, "self._get_train_description(trainer.current_epoch)")
        and calls(RichProgressBar._get_train_description, "{self.trainer.max_epochs - 1}")
    ),
    "_summary": lambda: (
        parameters_of(ModelSummary._summary) == ["trainer", "pl_module"]
        and calls(ModelSummary.on_fit_start, "self._summary(trainer, pl_module)")
    ),
    "_format_summary_table": lambda: (
        parameters_of(model_summary.model_summary._format_summary_table)
        == [
            *("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops"),
            "cols",
        ]
        and calls(ModelSummary.on_fit_start, "total_training_modes,\n                total_flops=total_flops")
    ),
    # loop/interrupt.py
    "_checkpoint_connector": lambda: (
        parameters_of(trainer()._checkpoint_connector._parse_ckpt_path)
        == ["state_fn", "ckpt_path", "model_provided", "model_connected"]
    ),
    # strategy/checkpoints.py
    "_combined_loader": lambda: (
        trainer().fit_loop._combined_loader is None
        and calls(fit_loop._FitLoop.on_run_start, '_call_strategy_hook(trainer, "on_train_start")')
    ),
    "_state_dicts": lambda: calls(fit_loop._FitLoop.on_save_checkpoint, "self._combined_loader._state_dicts()"),
    "_load_state_dicts": lambda: parameters_of(CombinedLoader._load_state_dicts) == ["states"],
    "_set_sampler_epoch": lambda: calls(fit_loop._FitLoop.on_advance_start, "_set_sampler_epoch(dl, self.epoch_p"),
    "_mode": lambda: CombinedLoader([], "max_size")._mode == "max_size",
    "_last_train_dl_reload_epoch": lambda: calls(
        fit_loop._FitLoop.setup_data, "self._last_train_dl_reload_epoch = trainer.current_epoch"
    ),
    "_trainer": lambda: L.LightningModule()._trainer is None,
    "_SUPPORTED_MODES": lambda: combined_loader._SUPPORTED_MODES["sequential"]["iterator"] is not None,
    # loop/uneven.py replaces `dataloader` of one Trainer's data sources; strategy/aligned.py asks which loop runs
    "_data_source": lambda: all(
        calls(loop.setup_data, "_request_dataloader(source)")
        and calls(data_connector._request_dataloader, "data_source.dataloader()")
        for loop in (fit_loop._FitLoop, EvaluationLoop, prediction_loop._PredictionLoop)
    ),
    "_active_loop": lambda: trainer()._active_loop is None,
    "_optimizer_to_device": lambda: parameters_of(optimizer._optimizer_to_device) == ["optimizer", "device"],
    # strategy/offload.py moves a module as its `to` does, but for some tensors
    "_device": lambda: (
        calls(_DeviceDtypeModuleMixin.to, "_update_properties") and L.LightningModule()._device is not None
    ),
    "_apply": lambda: calls(torch.nn.Module.to, "self._apply(convert)"),
    # strategy/module.py
    "_load_state": lambda: parameters_of(saving._load_state) == ["cls", "checkpoint", "strict", "cls_kwargs_new"],
    # strategy/ranks.py, strategy/strategy.py
    "_wrap_closure": lambda: parameters_of(Precision._wrap_closure) == ["model", "optimizer", "closure"],
    "_get_default_process_group_backend_for_device": lambda: (
        parameters_of(distributed._get_default_process_group_backend_for_device) == ["device"]
    ),
    "_init_dist_connection": lambda: (
        parameters_of(distributed._init_dist_connection)[:2] == ["cluster_environment", "torch_distributed_backend"]
    ),
    "_optimizers_to_device": lambda: parameters_of(optimizer._optimizers_to_device) == ["optimizers", "device"],
    "_call_children_scripts": lambda: (
        calls(subprocess_script._SubprocessScriptLauncher.launch, "self._call_children_scripts()")
        and calls(subprocess_script._SubprocessScriptLauncher._call_children_scripts, "os.environ.copy()")
    ),
    "_SubprocessScriptLauncher": lambda: (
        parameters_of(subprocess_script._SubprocessScriptLauncher.__init__)
        == ["cluster_environment", "num_processes", "num_nodes"]
    ),
    # cli/training.py
    "_prepare_subcommand_parser": lambda: (
        parameters_of(LightningCLI._prepare_subcommand_parser) == ["klass", "subcommand", "kwargs"]
        and calls(LightningCLI._add_subcommands, "self._prepare_subcommand_parser(trainer_class, subcommand, **")
    ),
    "_prepare_subcommand_kwargs": lambda: calls(
        LightningCLI._run_subcommand, "self._prepare_subcommand_kwargs(subcommand)"
    ),
    "_run_subcommand": lambda: calls(LightningCLI.__init__, "self._run_subcommand(self.subcommand)"),
    "_add_configure_optimizers_method_to_model": lambda: (
        parameters_of(LightningCLI._add_configure_optimizers_method_to_model) == ["subcommand"]
        and calls(LightningCLI.instantiate_classes, "self._add_configure_optimizers_method_to_model(self.subcommand)")
    ),
    "_parse_ckpt_path": lambda: calls(LightningCLI.__init__, "self._parse_ckpt_path()"),
    # torch's, in strategy/strategy.py
    "_optimizer_step_pre_hooks": lambda: not torch.optim.SGD([torch.zeros(1)])._optimizer_step_pre_hooks,
    "_optimizer_step_post_hooks": lambda: not torch.optim.SGD([torch.zeros(1)])._optimizer_step_post_hooks,
    # only types
    "_DataFetcher": lambda: inspect.isclass(fetchers._DataFetcher),
    "_EvaluationLoop": lambda: inspect.isclass(EvaluationLoop),
    "_Launcher": lambda: inspect.isclass(launcher._Launcher),
    "_ResultCollection": lambda: {"meta"} <= set(vars(_result_metric())),
}

INHERITED: dict[str, Callable[[], bool]] = {
    # attributes of Lightning's Strategy that D9DStrategy reads, sets or defines
    "_checkpoint_io": lambda: calls(ParallelStrategy.checkpoint_io.fget, "self._checkpoint_io"),  # type: ignore[attr-defined]
    "_configure_launcher": lambda: calls(_lazy_init_strategy(), "self.strategy._configure_launcher()"),
    "_launcher": lambda: calls(ParallelStrategy.launcher.fget, "self._launcher"),  # type: ignore[attr-defined]
    "_layer_sync": lambda: calls(_lazy_init_strategy(), "self.strategy._layer_sync = "),
    "_precision_plugin": lambda: calls(ParallelStrategy.precision_plugin.fget, "self._precision_plugin"),  # type: ignore[attr-defined]
}


def _result_metric() -> Any:
    metadata = result._Metadata("training_step", "loss")
    metadata.sync = result._Sync(_should=True)
    assert metadata.sync.should
    return result._ResultMetric(metadata, is_tensor=True)


def _lazy_init_strategy() -> Any:
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    return _AcceleratorConnector._lazy_init_strategy


def test_teardown_has_no_other_parts() -> None:
    """`RankHooks.teardown` does the same for a D9DModule, but for the two moves to the CPU."""
    statements = []
    for each in (ParallelStrategy, Strategy):
        function = ast.parse(textwrap.dedent(inspect.getsource(each.teardown))).body[0]
        assert isinstance(function, ast.FunctionDef)
        statements += [ast.unparse(part) for part in function.body if not _is_text(part)]
    assert [each for each in statements if not each.startswith("assert")] == [
        "self.cluster_environment.teardown()",
        "super().teardown()",
        "_optimizers_to_device(self.optimizers, torch.device('cpu'))",
        "if self.lightning_module is not None:\n"
        "    log.debug(f'{self.__class__.__name__}: moving model to CPU')\n"
        "    self.lightning_module.cpu()",
        "self.precision_plugin.teardown()",
        "self.accelerator.teardown()",
        "self.checkpoint_io.teardown()",
    ]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("name", [*USED, *INHERITED])
def test_lightning_still_has(name: str) -> None:
    assert (USED | INHERITED)[name](), f"Lightning {L.__version__} has changed {name}; see where lightning_d9d uses it"


def uses() -> Iterator[str]:
    """Private names on other objects, imported or overridden, in the files that may know Lightning."""
    for folder in ("strategy", "loop", "callbacks", "datamodules"):
        for path in (ROOT / folder).glob("*.py"):
            yield from uses_in(ast.parse(path.read_text()))
    for patch in PATCHES:
        names = [patch.attribute, *(part for path in patch.paths for part in path.split("."))]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))
    for path in (ROOT / "cli" / "training.py", ROOT / "models" / "qwen3_moe" / "module.py"):
        yield from uses_in(ast.parse(path.read_text()))
    for node in ast.walk(ast.parse((ROOT / "cli" / "training.py").read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and hasattr(LightningCLI, node.name):
            yield from [node.name] if not node.name.startswith("__") else []


def uses_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base = ast.unparse(node.value)
            if (
                base != "self"
                and not hasattr(importlib.import_module("torch"), node.attr)
                and base not in {"os", "sys"}
                and not base.startswith("torch.")
            ):
                yield node.attr


def test_every_use_is_listed() -> None:
    assert set(uses()) == set(USED)


def test_every_inherited_attribute_is_listed() -> None:
    trees = [
        ast.parse((ROOT / "strategy" / name).read_text()) for name in ("rank_hooks.py", "save_hooks.py", "strategy.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
    own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    theirs = {name for name in (*dir(ParallelStrategy), *vars(D9DStrategy())) if name in own and name.startswith("_")}
    inherited = {name for name in theirs if hasattr(ParallelStrategy, name) or name in _set_by_strategy()}
    assert {name for name in inherited if not name.startswith("__")} == set(INHERITED)


def _set_by_strategy() -> set[str]:
    sources = inspect.getsource(Strategy.__init__) + inspect.getsource(ParallelStrategy.__init__)
    return {name for name in vars(D9DStrategy()) if f"self.{name}" in sources}


# What is replaced


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.paths[0]}.{patch.attribute}")
def test_what_is_replaced_is_there_and_used(patch: Patch) -> None:
    run = trainer()
    for path in patch.paths:
        owners = list(replace(patch, paths=(path,)).owners(run))
        assert owners
        assert all(hasattr(owner, patch.attribute) for owner in owners)
    user = pkgutil.resolve_name(f"lightning.pytorch.{patch.user}")
    assert calls(user.fget if isinstance(user, property) else user, patch.text), (
        f"Lightning {L.__version__} has changed {patch.user}, which relied on {patch.text!r}: {patch.why}"
    )


def test_every_patch_is_used() -> None:
    sources = "".join(path.read_text() for path in ROOT.rglob("*.py") if path.name != "patches.py")
    assert "patches.insert_callback(" in sources
    assert not [each.attribute for each in PATCHES if f'"{each.attribute}"' not in sources and each.paths != ("",)]


SET_ELSEWHERE = {
    "self._trainer.should_stop": "each callback may",
    "self._trainer._signal_connector.received_sigterm": "where Lightning's handler of SIGTERM is replaced",
    "fit_loop._last_train_dl_reload_epoch": "the place in an epoch goes on from a checkpoint",
    "setattr(progress, name, getattr(progress, name) + place - num_read)": "likewise",
    "cast(Any, io).checkpoint_io": "a plugin that wraps Lightning's own gets the one that never leaves torn files",
    "part._device": "a module moves as by its `to`",
    "apart.__dict__.update(self.__dict__)": "a copy of a D9DModule",
    "apart.__dict__[kind]": "likewise",
    "vars(block)[_SHARDED_WITH]": "a block of a module",
    "vars(optimizer).pop(name, None)": "an optimizer of torch",
    "vars(logger).pop(name, None)": "what loop/logger_threads.py replaces ends with the logger's run, behind the fit",
    "connector._original_handlers[signal.Signals(number)]": "Lightning puts back what it has found",
    "own._version": "a logger goes on with the run of a checkpoint",
    "own._experiment": "likewise",
}
"""What is set outside of `loop/patches.py`: Lightning or its users do so, or it is not Lightning's."""


def test_nothing_is_replaced_elsewhere() -> None:
    """All changes of Lightning's objects are in one room; a new one needs a row of PATCHES."""
    names = _names_of_lightning()
    found = {}
    for path in _faces():
        for node in ast.walk(ast.parse(path.read_text())):
            found.update({text: path.relative_to(ROOT) for text in _set_by(node, names)})
    assert found.keys() == SET_ELSEWHERE.keys(), {k: found.get(k) for k in found.keys() ^ SET_ELSEWHERE}


@pytest.mark.parametrize(
    "source",
    [
        "trainer.fit_loop.run = hook",
        "trainer.anything, x = hook, 1",
        "loop.epoch_loop.anything += 1",
        "del connector.register_signal_handlers",
        "plugin.clip_grad_by_norm = hook",
        "callback.__class__ = Other",
        "bar._progress_bar_metrics['loss'] = 1",
        "setattr(where, name, hook)",
        "delattr(where, name)",
        "vars(where).pop(name)",
        "vars(where)[name] = hook",
        "where.__dict__.update(run=hook)",
    ],
)
def test_a_new_change_is_found(source: str) -> None:
    names = _names_of_lightning()
    assert [text for node in ast.walk(ast.parse(source)) for text in _set_by(node, names)]


def _faces() -> Iterator[Path]:
    """Files that may know Lightning, by the contract of pyproject.toml, but for the room where it is changed."""
    contracts = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    without = next(each["source_modules"] for each in contracts if "lightning" in each.get("forbidden_modules", [])[:1])
    for path in ROOT.rglob("*.py"):
        module = ".".join(("lightning_d9d", *path.relative_to(ROOT).with_suffix("").parts))
        if module != "lightning_d9d.loop.patches" and not any(f"{module}.".startswith(f"{each}.") for each in without):
            yield path


def _names_of_lightning() -> set[str]:
    """The attributes of all of Lightning's objects that a Trainer has."""
    seen: dict[int, Any] = {}
    left: list[Any] = [
        L.Trainer(
            accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(), RichProgressBar(), RichModelSummary()]
        ),
        trainer(),
    ]
    while left:
        owner = left.pop()
        if isinstance(owner, list | tuple):
            left += owner
        elif type(owner).__module__.startswith("lightning.") and id(owner) not in seen:
            seen[id(owner)] = owner
            left += vars(owner).values() if hasattr(owner, "__dict__") else []
    return {"_device", *(name for owner in seen.values() for name in dir(owner))}


def _set_by(node: ast.AST, names: set[str]) -> Iterator[str]:
    """What a node sets or deletes on an object other than `self`, if that may be one of Lightning's."""
    match node:
        case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
            of_trainer = re.search("trainer|loop|connector|callback|plugin|saver", ast.unparse(owner))
            if ast.unparse(owner) != "self" and (name in names or of_trainer):
                yield ast.unparse(node)
        case ast.Subscript(value=ast.Attribute(value=owner, attr=name), ctx=ast.Store() | ast.Del()):
            if ast.unparse(owner) != "self" and name in names:
                yield ast.unparse(node)
        case ast.Call(func=ast.Name(id="setattr" | "delattr")):
            yield ast.unparse(node)
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), ctx=ast.Store() | ast.Del()):
            yield ast.unparse(node)
        case ast.Call(func=ast.Attribute(value=owner, attr="pop" | "update" | "clear" | "setdefault")):
            if re.fullmatch(r"vars\(.*\)|.*\.__dict__", ast.unparse(owner)):
                yield ast.unparse(node)
