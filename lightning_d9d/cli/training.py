"""Lightning's subcommands: fit, validate, test and predict, with this package's classes and `${...}` in files."""

from __future__ import annotations

import os
import re
import reprlib
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jsonargparse
import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

# Imported so that their classes can be named without a module path: `model: Qwen3MoePretraining`.
import lightning_d9d.callbacks
import lightning_d9d.datamodules
import lightning_d9d.loggers
import lightning_d9d.models.qwen3_moe  # noqa: F401
from lightning_d9d.callbacks import PredictionWriter
from lightning_d9d.cli import refuse
from lightning_d9d.cli.files import Written, check_checkpoint, check_files, with_class_of_d9d
from lightning_d9d.cli.mistakes import describe_class, essence, explain, explain_interpolation, locate
from lightning_d9d.cli.wording import MistakeError
from lightning_d9d.errors import ConfigError, did_you_mean, printable, reason
from lightning_d9d.loop.interrupt import last_checkpoint
from lightning_d9d.optim.settings import LRSchedulerFactory, OptimizerFactory
from lightning_d9d.paths import check_named
from lightning_d9d.strategy.checkpoint_files import UNREADABLE, check_file, mapped, unreadable
from lightning_d9d.strategy.module import D9DModule

_NO_PARAMETERS = "optimizer got an empty parameter list"
"""Torch's message when Lightning makes an optimizer of a model that is built when the run starts."""
_NO_LOADER = re.compile(r"`(\w+_dataloader)` must be implemented to be used with the Lightning Trainer")
_FEW_BATCHES = re.compile(r" ?`val_check_interval` \((\d+)\) must be less than .* training batches \((\d+)\)")
_NO_METRIC = (
    ("ModelCheckpoint", re.compile(r"`ModelCheckpoint\(monitor='(.+?)'\)` could not find .*?: \[(.*?)\]")),
    ("EarlyStopping", re.compile(r"Early stopping conditioned on metric `(.+?)` which is not available.*: (`.*`)")),
)
"""Classes with a `monitor`, and Lightning's messages in a run that find no metric of that name."""
_NO_LOGGER = re.compile(r"Cannot use `?(\w+)`? callback with `Trainer.* logger")
_NO_GPU = "No supported gpu backend found!"
_OBJECTS_OR_WORDS = {"trainer.strategy": Strategy, "trainer.profiler": Profiler}
"""Settings that are a word or an object, and the class of the object."""


class _Parser(LightningArgumentParser):
    """LightningCLI's parser, which saves `${...}` as written: `${oc.env:NAME}` may be a secret."""

    written: Mapping[str, Any] | None = None
    """The configuration before `${...}` was replaced; None if there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The beginning of an option is a mistake: it could mean another one when there are more options.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """Parse the arguments; options of `trainer.strategy` may follow its name `d9d`."""
        arguments = sys.argv[1:] if args is None else list(args)
        with suppress(MistakeError):  # a file that cannot be read, which jsonargparse refuses, too
            arguments = with_class_of_d9d(arguments)
        return super().parse_args(arguments, *others, **kwargs)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Return the configuration as text. OmegaConf replaces `${...}` in the first part that has any."""
        text = super().dump(*args, **kwargs)
        if self.written is None and "${" in text:
            self.written = yaml.safe_load(text)
        return text

    def save(self, namespace: Namespace, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the configuration to a file, with the original `${...}` in place of the values."""
        if self.written is not None:
            namespace = _as_written(namespace.clone(), self.written)
            kwargs["skip_validation"] = True  # it was valid, and `${...}` is no number
        super().save(namespace, path, *args, **kwargs)


def _as_written(value: Any, written: Any) -> Any:
    """Return the value, with the original text in each place that had a `${...}`."""
    if isinstance(written, str) and "${" in written:
        return written
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_as_written(each, before) for each, before in zip(value, written, strict=True)]
    values = vars(value) if isinstance(value, Namespace) else value
    if isinstance(values, dict) and isinstance(written, Mapping):
        for name in values.keys() & written.keys():
            values[name] = _as_written(values[name], written[name])
    return value


@dataclass
class PredictionFiles:
    """Settings for the predictions of `predict`: see `PredictionWriter`."""

    write: bool = True
    """If True, write the predictions, unless a callback of the Trainer already writes them."""
    directory: str | None = None
    """Directory of the files; by default `predictions` in the Trainer's default_root_dir."""
    overwrite: bool = False
    """If True, replace an existing directory, with everything in it."""


class SaveTrainingConfig(SaveConfigCallback):
    """Lightning's callback, only for fit: validating a run must not replace the record of its training."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write `config.yaml` readable only by its owner: arguments may be secrets. Collective.

        Raises:
            ConfigError: The file cannot be written, for example for lack of space; raised on every rank.
        """
        if stage != "fit":
            return
        why = ""
        try:
            self._save(trainer, pl_module, stage)
        except OSError as error:
            why = f"{error.filename or self.config_filename} cannot be written at the start of the run: {reason(error)}"
            trainer.strategy.broadcast(False)  # the other ranks wait to hear that it is saved
        if why := trainer.strategy.broadcast(why):
            raise ConfigError(f"{why}; free some space, or set another trainer.default_root_dir")

    def _save(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = str(trainer.log_dir)  # this broadcasts the directory
        if trainer.is_global_zero and self.overwrite and not self.already_saved and "://" not in folder:
            path = Path(folder) / self.config_filename
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # with a link, too
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        super().setup(trainer, pl_module, stage)


class D9DCLI(LightningCLI):
    """LightningCLI with `${...}` in its files and short names for the classes of this package.

    Interpolations are those of OmegaConf, resolved after files and arguments are merged: `${trainer.max_steps}` follows
    the command line, and `${oc.env:NAME,default}` reads the environment. The `config.yaml` that fit saves has them as
    written, and replaces the file of an earlier run in the same folder. Arguments are LightningCLI's.
    """

    def __init__(
        self,
        *args: Any,
        parser_kwargs: dict[str, Any] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveTrainingConfig,
        save_config_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = _Parser,
        **kwargs: Any,
    ) -> None:
        warnings.filterwarnings("ignore", r"\s*skip_none parameter was deprecated")  # Lightning's way to save
        warnings.filterwarnings("ignore", "No seed found")  # the seed that was set is shown
        arguments = _words(kwargs.get("args"))
        self._first = arguments[0] if arguments else None
        jsonargparse.set_parsing_settings(
            # Else `${trainer.max_steps}` in the file of a subcommand would have to be `${fit.trainer.max_steps}`.
            omegaconf_absolute_to_relative_paths=True,
            # Help of dataclasses' fields; reading it takes as long as all other parsing.
            docstring_parse_attribute_docstrings=any(each == "-h" or "help" in each for each in arguments),
        )
        super().__init__(
            *args,
            parser_kwargs={"parser_mode": "omegaconf+", "exit_on_error": False} | (parser_kwargs or {}),
            save_config_callback=save_config_callback,
            save_config_kwargs={"overwrite": True} | (save_config_kwargs or {}),
            parser_class=parser_class,
            **kwargs,
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add options only to the subcommand that the arguments name: the others would take half of the time."""
        if self._first != subcommand and self._first in self.subcommands():
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `predictions`, which only predict uses: all subcommands read the same files."""
        parser.add_argument("--predictions", type=PredictionFiles, default=PredictionFiles())

    def after_fit(self) -> None:
        """Log why an EarlyStopping ended the run, which the callback itself does only if it is `verbose`."""
        for each in self.trainer.early_stopping_callbacks:
            if self.trainer.should_stop and each.stopping_reason_message and not each.verbose:
                why = each.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
                rank_zero_info(f"`Trainer.fit` stopped: {why}")

    def before_predict(self) -> None:
        """Make predict write its predictions, and not keep them in memory, too."""
        chosen = self.config_init["predict"]["predictions"]
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if not chosen.write or any(isinstance(each, BasePredictionWriter) for each in callbacks):
            return
        directory = chosen.directory or f"{self.trainer.default_root_dir}/predictions"
        callbacks.append(PredictionWriter(directory, chosen.overwrite))
        if self.config_init["predict"]["return_predictions"] is None:
            self.config_init["predict"]["return_predictions"] = False

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, and pass the user's original text to the subcommand's parser, which saves it.

        A mistake in them ends the process with exit code 2; `JSONARGPARSE_DEBUG=true` raises jsonargparse's own error.
        """
        self._arguments = _words(args)
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, OmegaConfBaseException) as error:
            if "JSONARGPARSE_DEBUG" in os.environ:
                raise
            refuse(self._explain(error, parser))
        if (subcommand := self.config.get("subcommand")) and isinstance(parser, _Parser) and parser.written:
            cast(_Parser, self._parser(subcommand)).written = parser.written[subcommand]

    def _explain(self, error: ArgumentError | OmegaConfBaseException, parser: LightningArgumentParser) -> str:
        subcommand = next((each for each in self._arguments if each in self.subcommands()), None)
        try:
            check_files(self._arguments)
        except MistakeError as mistake:
            return str(mistake)
        if isinstance(error, ArgumentError):
            return explain(str(error), self._arguments, self._parser(subcommand))
        written = (isinstance(parser, _Parser) and parser.written) or {}
        return explain_interpolation(error, self._arguments, written.get(subcommand or "", written))

    def _parse_ckpt_path(self) -> None:
        """Compare the module's arguments in the checkpoint with the configuration, which takes precedence.

        Lightning would import the class that the file names, and take the arguments from it.

        Raises:
            ConfigError: The checkpoint is that of another class.
            StateError: The file cannot be read.
        """
        chosen = self.config.get(self.config.get("subcommand") or "", {})
        path = chosen.get("ckpt_path")
        if path:
            check_checkpoint(path, locate(Written(self._arguments), ["ckpt_path"], path))
        if not path or not Path(path).is_file():
            return
        check_file(path)
        try:
            content = mapped(path)
        except UNREADABLE as error:
            raise unreadable(path, error) from error
        saved = content.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) if isinstance(content, dict) else None
        if not isinstance(saved, Mapping):
            return
        model = chosen.get("model", Namespace())
        own = f"{self._model_class.__module__}.{self._model_class.__qualname__}"
        configured = model.get("class_path", own)
        if (kind := saved.get("_class_path", configured)) != configured:
            raise ConfigError(
                f"{path} is a checkpoint of {reprlib.repr(kind)}, but model is {configured}. Give a checkpoint of that "
                "class, or set model.class_path to the checkpoint's class if you trust it"
            )
        given = model.get("init_args", model).as_dict()
        if differing := sorted(name for name in saved.keys() & given.keys() if not _is_same(saved[name], given[name])):
            pairs = ", ".join(
                f"{name}={reprlib.repr(given[name])} (not {reprlib.repr(saved[name])})" for name in differing
            )
            rank_zero_warn(printable(f"The configuration's arguments of model differ from those in {path}: {pairs}."))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Prepare the arguments as Lightning does, and resolve `ckpt_path`: `auto` is `last` if there is one.

        Raises:
            ConfigError: The checkpoint is missing, and fit must not begin without one. Or model, data or callbacks name
                a path that does not exist; other ranks have not been started yet.
        """
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if arguments.get("ckpt_path") in ("last", "auto"):
            arguments["ckpt_path"] = last_checkpoint(self.trainer, arguments["ckpt_path"], subcommand)
        callbacks = self.trainer.callbacks if subcommand == "fit" else []  # type: ignore[attr-defined]
        check_named(self.model, self.datamodule, *callbacks, resumes=arguments.get("ckpt_path") is not None)
        begins_anew = arguments.get("ckpt_path") is None and getattr(self.model, "pretrained", None) is None
        if subcommand in ("validate", "test", "predict") and begins_anew:
            rank_zero_warn(f"{subcommand} uses the model's initial weights; give --ckpt_path for those of a checkpoint")
        return arguments

    def instantiate_classes(self) -> None:
        """Build Trainer, model and data.

        Raises:
            ConfigError: A constructor refused a value; the message names its place.
        """
        self._check_objects()
        self._check_strategy()
        with self._placed(ValueError, TypeError, MisconfigurationException):
            super().instantiate_classes()

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Pass `optimizer` and `lr_scheduler` to a D9DModule, which groups parameters and steps the schedule itself.

        Raises:
            ConfigError: The module has its own optimizer, or arguments for one.
        """
        if not isinstance(self.model, D9DModule) or not self.auto_configure_optimizers:
            super()._add_configure_optimizers_method_to_model(subcommand)
            return
        kinds: dict[str, Any] = {"optimizer": OptimizerFactory, "lr_scheduler": LRSchedulerFactory}
        chosen = {name: _factory(self._get(self.config_init, name), kind) for name, kind in kinds.items()}
        if chosen["optimizer"] and self.model.optimizer_settings:
            raise ConfigError("`optimizer` is given as well as model.optimizer; leave one of them out")
        if any(chosen.values()):
            self.model.use_optimizer(**chosen)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run as Lightning does, and add the place of a value that the run refuses."""
        with self._placed(ConfigError):
            try:
                super()._run_subcommand(subcommand)
            except (MisconfigurationException, ValueError, RuntimeError) as error:
                if isinstance(error, MisconfigurationException) and (found := _NO_LOADER.search(str(error))):
                    raise MistakeError(self._without(found[1], subcommand)) from error
                if (refused := _refused_setting(str(error))) is None:
                    raise
                raise ConfigError(refused) from error

    def _without(self, loader: str, subcommand: str) -> str:
        """Return a message that the data lack a loader, with the place where they are configured."""
        if self.datamodule is None:
            return f"{subcommand} needs data with a {loader}; give --data CLASS, or data: in a file"
        place = locate(Written(self._arguments), ["data"])
        return f"{place}: {type(self.datamodule).__name__} has no {loader}, which {subcommand} reads; add that method"

    @contextmanager
    def _placed(self, *kinds: type[Exception]) -> Iterator[None]:
        """Prefix an error with the place of the setting that it names as `name=value` or in backticks."""
        try:
            yield
        except MistakeError:
            raise
        except (*kinds, MisconfigurationException) as error:
            message = str(error) if isinstance(error, ConfigError) else essence(str(error))
            if message == _NO_PARAMETERS:
                message = (
                    f"{type(self.model).__name__} has no parameters before the run, which `optimizer` needs; let its "
                    "configure_optimizers make the optimizer"
                )
            if message == _NO_GPU:
                message = "accelerator=gpu needs a GPU, and torch sees none; choose auto or cpu"
            is_placed = isinstance(error, kinds)  # what Lightning refuses in a run may be in the user's code
            if is_placed and (place := Written(self._arguments).find_named(message)):
                raise MistakeError(f"{place}: {message}") from error
            raise error if isinstance(error, ConfigError) else ConfigError(message) from error

    def _check_objects(self) -> None:
        """Refuse the text of an object in which something is wrong. As a word is legal too, jsonargparse has kept it.

        Raises:
            MistakeError: Raised with what is wrong in it.
        """
        subcommand = self.config.get("subcommand")
        for key, kind in _OBJECTS_OR_WORDS.items():
            text = self.config.get(subcommand or "", self.config).get(key)
            if not isinstance(text, str) or not text.lstrip().startswith("{"):
                continue
            subject = locate(Written(self._arguments), key.split("."), text)
            parser = jsonargparse.ArgumentParser(exit_on_error=False)
            parser.add_argument(f"--{key}", type=kind | None)
            try:
                if "class_path" not in yaml.safe_load(text):
                    raise MistakeError(f"{subject} takes an object as class_path: CLASS and init_args: SETTINGS")
                parser.parse_args([f"--{key}={text}"])
            except yaml.MarkedYAMLError as error:
                raise MistakeError(f"{subject}: not YAML: {error.problem}") from error
            except ArgumentError as error:
                raise MistakeError(explain(str(error), self._arguments, self._parser(subcommand))) from error

    def _check_strategy(self) -> None:
        """Refuse an unknown word with the names that may be used; Lightning would list only some of them."""
        key, words = "trainer.strategy", ["d9d", "auto", *StrategyRegistry.available_strategies()]
        strategy = self.config.get(self.config.get("subcommand") or "", self.config).get(key)
        if isinstance(strategy, str) and strategy.lower() not in words:
            subject = locate(Written(self._arguments), key.split("."), strategy)
            raise MistakeError(describe_class(strategy, subject, key, [Strategy], words))


def _refused_setting(message: str) -> str | None:
    """Return the setting that Lightning refuses in a run, with the remedy; None if the message is another one."""
    if found := _FEW_BATCHES.match(message):
        return (
            f"val_check_interval={found[1]} is more than the {found[2]} training batches of an epoch; choose at most "
            f"{found[2]}, or set check_val_every_n_epoch to null, which counts batches over epochs"
        )
    if found := _NO_LOGGER.match(message):
        return f"{found[1]} needs a logger, but logger=false; choose one, such as CSVLogger, or leave {found[1]} out"
    for kind, pattern in _NO_METRIC:
        if found := pattern.match(message):
            name, logged = found[1], re.findall(r"['`](.+?)['`]", found[2])
            return (
                f"monitor={name!r} of {kind} is not logged; choose one of {', '.join(logged)}, or log it with "
                f"self.log({name!r}, ...){did_you_mean(name, logged)}"
            )
    return None


def _factory(chosen: Namespace | None, kind: Any) -> Any:
    """Return a function that makes an object from settings, which Lightning has parsed but not instantiated."""
    if not chosen:
        return None
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--chosen", type=kind)
    return parser.instantiate_classes(parser.parse_object({"chosen": chosen.as_dict()}))["chosen"]


def _is_same(saved: object, given: object) -> bool:
    try:
        return bool(saved == given)
    except RuntimeError:  # a tensor, which no configuration has
        return False


def _words(args: ArgsType) -> list[str]:
    """Return the words of a command line; none for a configuration that is given as an object."""
    return sys.argv[1:] if args is None else args if isinstance(args, list) else []


def run(_: object = None) -> None:
    """Run the subcommand of `sys.argv`, which is one of Lightning's.

    Raises:
        ConfigError: The arguments ask for something impossible.
        StateError: A checkpoint cannot be read.
    """
    D9DCLI(parser_kwargs={"prog": "lightning-d9d"})
