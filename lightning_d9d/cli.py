"""The command line: `lightning-d9d fit --config run.yaml --trainer.max_steps 100`."""

from __future__ import annotations

import errno
import os
import re
import reprlib
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jsonargparse
import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

# Imported so that their classes can be named without a module path: `model: Qwen3MoePretraining`.
import lightning_d9d.callbacks
import lightning_d9d.datamodules
import lightning_d9d.models.qwen3_moe  # noqa: F401
from lightning_d9d import convert, doctor
from lightning_d9d.errors import ConfigError, StateError, printable, reason
from lightning_d9d.generation import commands
from lightning_d9d.strategy.checkpoint_files import UNREADABLE, mapped, unreadable
from lightning_d9d.strategy.interrupt import last_checkpoint

DESCRIPTION = (
    "lightning_d9d trains from YAML files. `lightning-d9d doctor` tells whether this machine is fit for it; "
    "`lightning-d9d convert` turns weights and checkpoints into other forms; `lightning-d9d generate` shows what a "
    "model writes, `lightning-d9d evaluate` how well it predicts a text."
)

_COMMANDS = {
    "convert": convert.main,
    "generate": commands.main_generate,
    "evaluate": commands.main_evaluate,
}
"""Beside those of LightningCLI."""


class _Parser(LightningArgumentParser):
    """LightningCLI's parser, which saves `${...}` as it was written: `${oc.env:NAME}` may be a secret."""

    written: Mapping[str, Any] | None = None
    """The configuration before `${...}` was replaced; None where there is none."""

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """The configuration as text. OmegaConf replaces `${...}` in the first that has any."""
        text = super().dump(*args, **kwargs)
        if self.written is None and "${" in text:
            self.written = yaml.safe_load(text)
        return text

    def save(self, namespace: Namespace, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Writes the configuration to a file, with `${...}` in place of the values."""
        if self.written is not None:
            namespace = _as_written(namespace.clone(), self.written)
            kwargs["skip_validation"] = True  # it was valid, and `${...}` is no number
        super().save(namespace, path, *args, **kwargs)


def _as_written(value: Any, written: Any) -> Any:
    """The value, with what was written in each place that had a `${...}`."""
    if isinstance(written, str) and "${" in written:
        return written
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_as_written(each, before) for each, before in zip(value, written, strict=True)]
    values = vars(value) if isinstance(value, Namespace) else value
    if isinstance(values, dict) and isinstance(written, Mapping):
        for name in values.keys() & written.keys():
            values[name] = _as_written(values[name], written[name])
    return value


class SaveTrainingConfig(SaveConfigCallback):
    """Lightning's, for fit alone: validating a run must not replace the record of its training."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write `config.yaml` for its owner alone: arguments may be secrets. Collective.

        Raises:
            ConfigError: It cannot be written, for lack of space, say; on every rank.
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
            raise ConfigError(f"{why}; free space, or give another trainer.default_root_dir")

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

    Interpolations are those of OmegaConf, resolved after files and arguments are merged: `${trainer.max_steps}` is
    what the command line says it is, `${oc.env:NAME,default}` reads the environment. The `config.yaml` that fit
    saves has them as they were written, and replaces that of an earlier run in the same folder. Arguments are
    LightningCLI's.
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
        # Else `${trainer.max_steps}` in the file of a subcommand would have to be `${fit.trainer.max_steps}`.
        jsonargparse.set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        super().__init__(
            *args,
            parser_kwargs={"parser_mode": "omegaconf+"} | (parser_kwargs or {}),
            save_config_callback=save_config_callback,
            save_config_kwargs={"overwrite": True} | (save_config_kwargs or {}),
            parser_class=parser_class,
            **kwargs,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses the arguments, and tells the subcommand's parser, which saves them, what the user wrote."""
        super().parse_arguments(parser, args)
        if (subcommand := self.config.get("subcommand")) and isinstance(parser, _Parser) and parser.written:
            cast(_Parser, self._parser(subcommand)).written = parser.written[subcommand]

    def _parse_ckpt_path(self) -> None:
        """Compares the module's arguments in the checkpoint with the configuration, which wins.

        Lightning would import the class that the file names and take the arguments from it.

        Raises:
            ConfigError: The checkpoint is that of another class.
            StateError: The file cannot be read.
        """
        chosen = self.config.get(self.config.get("subcommand") or "", {})
        path = chosen.get("ckpt_path")
        if not path or not Path(path).is_file():
            return
        try:
            content = mapped(path)
        except UNREADABLE as error:
            raise unreadable(path, error) from error
        saved = content.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) if isinstance(content, dict) else None
        if not isinstance(saved, Mapping):
            return
        model = chosen.get("model", {})
        own = f"{self._model_class.__module__}.{self._model_class.__qualname__}"
        configured = model.get("class_path", own)
        if (kind := saved.get("_class_path", configured)) != configured:
            raise ConfigError(
                f"{path} is a checkpoint of {reprlib.repr(kind)}, and model is {configured}; give a checkpoint of that "
                "class, or make model.class_path the checkpoint's class if you trust it"
            )
        given = jsonargparse.namespace_to_dict(model.get("init_args", model))
        if differing := sorted(name for name in saved.keys() & given.keys() if saved[name] != given[name]):
            pairs = ", ".join(
                f"{name}={reprlib.repr(given[name])} (not {reprlib.repr(saved[name])})" for name in differing
            )
            rank_zero_warn(printable(f"The configuration's arguments of model differ from those in {path}: {pairs}."))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Lightning's, with what `ckpt_path` asks for: `auto` is `last` if there is one.

        Raises:
            ConfigError: There is none, and a fit is not to begin without.
        """
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if arguments.get("ckpt_path") in ("last", "auto"):
            arguments["ckpt_path"] = last_checkpoint(self.trainer, arguments["ckpt_path"], subcommand)
        return arguments

    def instantiate_classes(self) -> None:
        """Builds Trainer, model and data; what a constructor refuses becomes a `ConfigError`."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise ConfigError(_constructor_message(error)) from error


def _constructor_message(error: ValueError) -> str:
    """What the constructor said, without the alternatives that jsonargparse lists around it."""
    noise = ("Does not validate", "- Does not validate", "Subtypes:", "Errors:", "- Expected a", "Given value")
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines() if not line.lstrip().startswith(noise)]
    return "\n".join(lines) or str(error)


def _interpolation_message(error: OmegaConfBaseException) -> str:
    """Where the `${...}` is and what is wrong with it, with the names that the user wrote."""
    place = str(error.full_key or "").removeprefix("fit.")
    reason = re.sub(r" \(resolved to .*?\)", "", (error.msg or "").splitlines()[0])
    reason = re.sub(r"'\.+", "'", reason)  # dots that lead from the place to the top of the file
    return f"{place}: {reason}. In files, not in arguments, ${{...}} is the full name of another value"


def main() -> None:
    """Runs the subcommand of `sys.argv`: fit, validate, test, predict, convert, doctor, generate or evaluate.

    A configuration or a file that cannot work ends with exit code 2 and one message; `JSONARGPARSE_DEBUG=true` shows
    the traceback.
    """
    if sys.argv[1:2] == ["doctor"]:
        sys.exit(doctor.main(sys.argv[2:]))
    try:
        if run := _COMMANDS.get("".join(sys.argv[1:2])):
            run(sys.argv[2:])
        else:
            D9DCLI(parser_kwargs={"description": DESCRIPTION})
    except (ConfigError, StateError, MisconfigurationException, OmegaConfBaseException) as error:
        if "JSONARGPARSE_DEBUG" in os.environ:
            raise
        text = _interpolation_message(error) if isinstance(error, OmegaConfBaseException) else str(error)
        sys.stderr.write(f"error: {text}\ntip: JSONARGPARSE_DEBUG=true shows the traceback\n")
        sys.exit(2)
    except OSError as error:
        if "JSONARGPARSE_DEBUG" in os.environ or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(f"error: {error.filename or 'a file'} cannot be written: {reason(error)}; free space\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
