"""The command line: `lightning-d9d fit --config run.yaml --trainer.max_steps 100`.

Before torch is imported, `main` checks the subcommand, the files of `--config` (`files.py`), and the arguments of
subcommands that are not Lightning's (`commands.py`). `training.py` runs Lightning's subcommands. `mistakes.py`
translates refusals of jsonargparse into the user's words.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from argparse import Namespace
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_d9d.cli.commands import PARSERS, check_paths, check_picture, check_plan, parse
from lightning_d9d.cli.files import check_files
from lightning_d9d.cli.wording import MistakeError
from lightning_d9d.errors import ConfigError, StateError, did_you_mean, first_of_others, reason

if TYPE_CHECKING:
    from lightning_d9d.cli.training import D9DCLI

__all__ = ["D9DCLI", "SUBCOMMANDS", "main", "program"]

_TRAINING = ("lightning_d9d.cli.training", "run")

SUBCOMMANDS: dict[str, tuple[str, tuple[str, str]]] = {
    "fit": ("trains a model", _TRAINING),
    "validate": ("computes the validation metrics of a checkpoint", _TRAINING),
    "test": ("computes the test metrics of a checkpoint", _TRAINING),
    "predict": ("runs a model on data and keeps what it returns", _TRAINING),
    "learning-rate": ("draws the learning rate of a run", ("lightning_d9d.cli.rates", "run")),
    "plan": ("tells what a run holds, sends and takes", ("lightning_d9d.cli.plans", "run")),
    "convert": ("turns weights and checkpoints into other forms", ("lightning_d9d.convert", "main")),
    "prepare-data": ("turns texts into files of tokens", ("lightning_d9d.prepare", "main")),
    "doctor": ("checks whether this machine is fit for training", ("lightning_d9d.cli.measuring", "run")),
    "report": ("draws what a run has logged", ("lightning_d9d.report.command", "main")),
    "generate": ("shows what a model writes", ("lightning_d9d.generation.commands", "main_generate")),
    "evaluate": ("tells how well a model predicts a text", ("lightning_d9d.generation.commands", "main_evaluate")),
}
"""Each subcommand with its description, and the module and the function that run it on its arguments."""


def __getattr__(name: str) -> Any:
    if name == "D9DCLI":
        return import_module("lightning_d9d.cli.training").D9DCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the subcommand of `sys.argv`, one of `SUBCOMMANDS`.

    A configuration or a file that cannot work ends with exit code 2 and one message; `JSONARGPARSE_DEBUG=true` shows
    the traceback. A failure of another rank ends with exit code 1 and that rank's message.
    """
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return
    try:
        module, function, chosen = _parse(arguments)
        if code := getattr(_import(module), function)(chosen):
            sys.exit(code)
    except (ConfigError, StateError) as error:
        if "JSONARGPARSE_DEBUG" in os.environ:
            raise
        refuse(str(error))
    except OSError as error:
        if "JSONARGPARSE_DEBUG" in os.environ or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        refuse(f"{error.filename or 'a file'} cannot be written: {reason(error)}; free space")
    except Exception as error:
        if "JSONARGPARSE_DEBUG" in os.environ or (first := first_of_others(error)) is None:
            raise
        sys.stderr.write(f"error: {first}\n")  # the rank that failed shows its traceback, this one has no part in it
        sys.exit(1)


def program() -> None:
    """Run `main` as the program of this process, and end it.

    Python would free all that torch and Lightning have made, which takes a second. A plan leaves that to the system.
    """
    is_plan = sys.argv[1:2] == ["plan"]
    main()
    if is_plan:
        with suppress(OSError):  # which Python reports as it ends
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def refuse(message: str) -> NoReturn:
    """Exit with code 2; the first rank on a machine prints the whole message, the others its first line."""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    if local_rank != "0":
        message = f"local rank {local_rank}: {message.splitlines()[0]}"
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


def _parse(arguments: list[str]) -> tuple[str, str, Namespace | None]:
    """Return the module and the function that run the subcommand, and its arguments unless Lightning reads them.

    Raises:
        MistakeError: The subcommand or its arguments cannot be used, or a file of `--config` cannot be read.
    """
    name = arguments[0]
    if name in PARSERS:
        chosen = parse(name, arguments[1:])
        check_paths(name, chosen)
        return *SUBCOMMANDS[name][1], chosen
    if not name.startswith("-") and name not in SUBCOMMANDS:  # else options, before one of Lightning's subcommands
        raise MistakeError(
            f"subcommand {name!r} is unknown{did_you_mean(name, SUBCOMMANDS)}\nchoose one of {', '.join(SUBCOMMANDS)}"
        )
    if name == "learning-rate":
        check_picture(arguments[1:])
    if name == "plan":
        check_plan(arguments[1:])
    check_files(arguments)
    return *SUBCOMMANDS.get(name, ("", _TRAINING))[1], None


def _import(module: str) -> ModuleType:
    """Import without the garbage collector, which would examine all of torch several times and find nothing."""
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()  # nor does it look at it later
        atexit.register(gc.unfreeze)  # or extensions report at the end that their objects were not freed
        gc.enable()


def _overview() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (what, _) in SUBCOMMANDS.items()]
    return "\n".join([
        "usage: lightning-d9d SUBCOMMAND [options]",
        "",
        *lines,
        "",
        "lightning-d9d SUBCOMMAND --help lists its options; fit --config run.yaml trains from a file.",
        "",
    ])  # fmt: skip
