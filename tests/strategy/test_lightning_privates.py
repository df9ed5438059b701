"""Every private name of Lightning that the package uses, and what it relies on. A new use must be added here.

If a test here fails after an update of Lightning, look at the file named in `USED`, then at Lightning's changes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import distributed, optimizer
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.callbacks import ModelSummary, RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core import saving
from lightning.pytorch.loops import evaluation_loop, fetchers, fit_loop, prediction_loop, training_epoch_loop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import launcher, subprocess_script
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.connectors import data_connector, signal_connector
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities import combined_loader, model_summary
from lightning.pytorch.utilities.combined_loader import CombinedLoader

import lightning_d9d
from lightning_d9d import D9DStrategy

ROOT = Path(lightning_d9d.__file__).parent


def calls(caller: Callable[..., Any], text: str) -> bool:
    return text in inspect.getsource(caller)


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def trainer() -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


DataConnector = data_connector._DataConnector
EpochLoop = training_epoch_loop._TrainingEpochLoop
EvaluationLoop = evaluation_loop._EvaluationLoop
SignalConnector = signal_connector._SignalConnector

USED: dict[str, Callable[[], bool]] = {
    # strategy/shutdown.py replaces these on one Trainer's objects
    "_broadcast_sigterm_tensor": lambda: calls(EpochLoop.advance, "self._broadcast_sigterm_tensor()"),
    "_sigterm_notifier_fn": lambda: (
        parameters_of(SignalConnector._sigterm_notifier_fn) == ["signum", "_"]
        and calls(SignalConnector.register_signal_handlers, "_sigterm_notifier_fn")
    ),
    "_slurm_sigusr_handler_fn": lambda: (
        parameters_of(SignalConnector._slurm_sigusr_handler_fn) == ["signum", "_"]
        and calls(SignalConnector.register_signal_handlers, "sigusr_handlers.append(self._slurm_sigusr_handler_fn)")
    ),
    "_store_dataloader_outputs": lambda: (
        parameters_of(EvaluationLoop._store_dataloader_outputs) == []
        and calls(EvaluationLoop, "self._store_dataloader_outputs()\n        return self.on_run_end()")
        and calls(EvaluationLoop._store_dataloader_outputs, "update_eval_epoch_metrics()")
    ),
    # and reads these
    "_signal_connector": lambda: isinstance(trainer()._signal_connector, SignalConnector),
    "_accelerator_connector": lambda: (
        trainer()._accelerator_connector.use_distributed_sampler is True
        and calls(DataConnector._requires_distributed_sampler, "_accelerator_connector.use_distributed_sampler")
        and calls(L.LightningModule.log, "sync_dist and trainer._accelerator_connector.is_distributed")
    ),
    "_data_fetcher": lambda: (
        trainer().fit_loop._data_fetcher is None and calls(fit_loop._FitLoop.setup_data, "self._data_fetcher =")
    ),
    "_results": lambda: isinstance(trainer().validate_loop._results, result._ResultCollection),
    # strategy/progress.py
    "_logger_connector": lambda: trainer()._logger_connector is not None,
    "_progress_bar_metrics": lambda: trainer()._logger_connector._progress_bar_metrics == {},
    # strategy/display.py gives the Trainer's callbacks other classes
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
    # strategy/interrupt.py
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
    # strategy/uneven.py replaces `dataloader` of one Trainer's data sources; strategy/aligned.py asks which loop runs
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
    "_parse_ckpt_path": lambda: calls(LightningCLI.__init__, "self._parse_ckpt_path()"),
    # torch's, in strategy/strategy.py
    "_optimizer_step_pre_hooks": lambda: not torch.optim.SGD([torch.zeros(1)])._optimizer_step_pre_hooks,
    # only types
    "_DataFetcher": lambda: inspect.isclass(fetchers._DataFetcher),
    "_EvaluationLoop": lambda: inspect.isclass(EvaluationLoop),
    "_Launcher": lambda: inspect.isclass(launcher._Launcher),
    "_ResultCollection": lambda: {"meta"} <= set(vars(_result_metric())),
}

INHERITED: dict[str, Callable[[], bool]] = {
    # attributes of Lightning's Strategy that D9DStrategy reads, sets or defines
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


@pytest.mark.parametrize("name", [*USED, *INHERITED])
def test_lightning_still_has(name: str) -> None:
    assert (USED | INHERITED)[name](), f"Lightning {L.__version__} has changed {name}; see where lightning_d9d uses it"


def uses() -> Iterator[str]:
    """Private names on other objects, imported or overridden, in the files that may know Lightning."""
    for folder in ("strategy", "callbacks", "datamodules"):
        for path in (ROOT / folder).glob("*.py"):
            yield from uses_in(ast.parse(path.read_text()))
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
            ):
                yield node.attr


def test_every_use_is_listed() -> None:
    assert set(uses()) == set(USED)


def test_every_inherited_attribute_is_listed() -> None:
    trees = [ast.parse((ROOT / "strategy" / name).read_text()) for name in ("ranks.py", "strategy.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
    own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    theirs = {name for name in (*dir(ParallelStrategy), *vars(D9DStrategy())) if name in own and name.startswith("_")}
    inherited = {name for name in theirs if hasattr(ParallelStrategy, name) or name in _set_by_strategy()}
    assert {name for name in inherited if not name.startswith("__")} == set(INHERITED)


def _set_by_strategy() -> set[str]:
    from lightning.pytorch.strategies.strategy import Strategy

    sources = inspect.getsource(Strategy.__init__) + inspect.getsource(ParallelStrategy.__init__)
    return {name for name in vars(D9DStrategy()) if f"self.{name}" in sources}
