"""The arguments of subcommands that are not Lightning's, which are read before torch is imported."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_d9d.cli.wording import MistakeError, either, must_be
from lightning_d9d.errors import did_you_mean, nearest_choice
from lightning_d9d.paths import missing

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Names of torch's dtypes that weights may have in files."""

_VALUE = re.compile(r"argument (\S+): invalid (?:choice|\w+ value): (['\"])(.*?)\2(?: \(choose .*)?", re.S)
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_TOO_MANY = re.compile(r"unrecognized arguments: (.*)")
_NO_VALUE = re.compile(r"argument (\S+): expected .* argument")
_NEEDLESS = re.compile(r"argument (\S+): ignored explicit argument (.*)")
_NUMBER = re.compile(r"-\.?\d")


class _Parser(argparse.ArgumentParser):
    """Reads arguments; a mistake is an error of one to three lines instead of usage."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"lightning-d9d {name}", description=description, allow_abbrev=False)

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Reads them. Unknown options are reported first: argparse would call a misspelt required option missing.

        Raises:
            MistakeError: An argument is unknown, missing or illegal.
        """
        known = [name for action in self._actions for name in action.option_strings]
        for argument in arguments[: arguments.index("--") if "--" in arguments else None]:
            name = argument.partition("=")[0]
            if name.startswith("-") and name not in ("-", *known) and " " not in name and not _NUMBER.match(name):
                raise self.unknown(name)
        return super().parse_args(arguments)

    def options(self) -> list[str]:
        """Return the long names of all options."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def unknown(self, name: str, others: str = "") -> MistakeError:
        """Return the error of an unknown option, with the legal ones.

        Args:
            name: The unknown option.
            others: The end of the list of legal options.
        """
        options = self.options()
        nearest = did_you_mean(name, options)
        return MistakeError(f"{self.prog} has no option {name!r}{nearest}\nit takes {', '.join(options)}{others}")

    def error(self, message: str) -> NoReturn:
        """Translate argparse's error into the user's words."""
        if found := _VALUE.match(message):
            action = self._find(found[1])
            choices = list(action.choices or ())
            kinds = [] if choices else [getattr(action.type, "__name__", "str")]
            raise MistakeError(must_be(found[1], found[3], choices, kinds))
        if found := _REQUIRED.match(message):
            names = found[1].split(", ")
            lines = [f"{name}: {self._find(name).help}" for name in names]
            raise MistakeError("\n".join([f"{self.prog} needs {' and '.join(names)}", *lines]))
        if found := _TOO_MANY.match(message):
            takes = [action.dest for action in self._actions if not action.option_strings]
            legal = f"it takes {' and '.join(takes)}, and options" if takes else "it takes no arguments"
            raise MistakeError(f"{self.prog} does not take {found[1]!r}\n{legal}")
        if found := _NO_VALUE.match(message):
            choices = self._find(found[1]).choices
            legal = f": {either([*map(repr, choices)])}" if choices else f"; one that begins with - is {found[1]}=VALUE"
            raise MistakeError(f"{found[1]} needs a value{legal}")
        if found := _NEEDLESS.match(message):
            raise MistakeError(f"{found[1]} takes no value, but got {found[2]}")
        raise MistakeError(message)

    def _find(self, name: str) -> argparse.Action:
        return next(each for each in self._actions if name in (each.dest, *each.option_strings))


def convert_parser() -> argparse.ArgumentParser:
    """Make the parser of `convert`."""
    parser = _Parser("convert", "Turns weights and checkpoints into other forms, without a GPU.")
    parser.add_argument("source", help="Hugging Face directory (or URL), checkpoint directory or .ckpt file")
    parser.add_argument("target", help="directory (or URL) for Hugging Face's form, or a name that ends with .ckpt")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; by default as they are")
    parser.add_argument("--max-shard-size", help="at which a new file begins, e.g. 500MB or 2GiB (5GB)")
    parser.add_argument("--fused-experts", action="store_true", help="all experts of a layer in one tensor")
    parser.add_argument("--adapter", help="directory of peft's form, with adapters that are merged into the weights")
    _add_base(parser)
    parser.add_argument("--tokenizer", help="directory whose tokenizer and generation config are copied")
    parser.add_argument("--weights-only", action="store_true", help="into a .ckpt file, no optimizers and schedulers")
    parser.add_argument("--overwrite", action="store_true", help="replace the target, with everything in it")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums first")
    return parser


def prepare_parser() -> argparse.ArgumentParser:
    """Make the parser of `prepare-data`."""
    parser = _Parser("prepare-data", "Turns texts into a .bin and an .idx of tokens, for TokenDataModule and others.")
    parser.add_argument("output", help="path of the files to make, without .bin and .idx")
    parser.add_argument(
        "sources",
        nargs="+",
        help="UTF-8 texts, .jsonl, .parquet or .arrow files, directories of `datasets`, or patterns ('a/**/*.txt')",
    )
    parser.add_argument("--tokenizer", required=True, help="directory or name of one on Hugging Face's hub, or 'bytes'")
    parser.add_argument("--column", help="field or column that has the text (text)")
    parser.add_argument("--lines", action="store_true", help="each line of a text file is a document, not the file")
    parser.add_argument("--processes", type=int, help="that tokenize at the same time; by default one for each CPU")
    parser.add_argument("--begin", action="store_true", help="put the begin-of-text token before each document")
    parser.add_argument("--no-end", action="store_true", help="put no end-of-text token behind each document")
    parser.add_argument("--skip-invalid", action="store_true", help="leave out, and count, lines that cannot be read")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    return parser


def doctor_parser() -> argparse.ArgumentParser:
    """Make the parser of `doctor`."""
    parser = _Parser("doctor", "Checks this machine, or the ranks of a job, and says what to mend.")
    parser.add_argument(
        "--measure", help="in place of checks write the rates of this GPU, for plan --gpu, to a .json file"
    )
    return parser


def report_parser() -> argparse.ArgumentParser:
    """Make the parser of `report`."""
    parser = _Parser("report", "Draws what a run has logged to CSV or TensorBoard files, as one page of HTML.")
    parser.add_argument("directory", help="where the run wrote: lightning_logs/version_0, or a folder above it")
    parser.add_argument("--output", help="the page, which ends in .html (report.html in the directory)")
    parser.add_argument("--pictures", help="folder for a PNG file of each chart, beside those in the page")
    return parser


def plan_parser() -> _Parser:
    """Make the parser of `plan`'s own options; all others are those of `fit`."""
    parser = _Parser("plan", "Tells what the run of a configuration holds, sends and takes; options of fit follow.")
    parser.add_argument(
        "--world_size", type=int, help="ranks of the run; by default devices x num_nodes of the Trainer"
    )
    parser.add_argument("--gpu", default="h100", help="h100, h200, a100, b200, or a .json file with rates (h100)")
    parser.add_argument(
        "--gpus_per_node",
        type=int,
        help="by default devices of a Trainer with several num_nodes, else those of usual nodes",
    )
    parser.add_argument("--rows", type=int, help="of a batch of one data rank; by default as the data say")
    parser.add_argument("--tokens", type=int, help="of a row; by default as the data say")
    parser.add_argument(
        "--expert_load",
        type=float,
        default=1.0,
        help="tokens that the experts of a rank get, as a multiple of an even share (1)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="list the ten fastest meshes, schedules and kinds of recomputation; the mesh of the file is not used",
    )
    parser.add_argument("--json", help="a file for the plan, with all numbers")
    parser.add_argument("--page", help="a file for a page of HTML")
    parser.add_argument("--yaml", help="a file for the settings of the best plan, which a later --config reads")
    return parser


def check_plan(arguments: Sequence[str]) -> None:
    """Check `plan`'s own options.

    Args:
        arguments: The words after the subcommand.

    Raises:
        MistakeError: One is missing, illegal or misspelled.
    """
    parser = plan_parser()
    for argument in parser.parse_known_args(arguments)[1]:
        name = argument.partition("=")[0]
        if name.startswith("--") and "." not in name and nearest_choice(name, parser.options()):
            raise parser.unknown(name, ", and those of fit")


def generate_parser() -> argparse.ArgumentParser:
    """Make the parser of `generate`."""
    parser = _model_parser("generate", "Writes what a model makes of a prompt: greedily, or drawn with a temperature.")
    parser.add_argument("--prompt", required=True, help="what the text begins with; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="after how many tokens to end (200)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, help="draw from the likeliest tokens that have this probability together"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--no-stop", action="store_true", help="go on behind the token that ends a text")
    return parser


def evaluate_parser() -> argparse.ArgumentParser:
    """Make the parser of `evaluate`."""
    parser = _model_parser("evaluate", "Tells how well a model predicts text files: loss, perplexity, bits per byte.")
    parser.add_argument("text", nargs="+", help="UTF-8 files; each is a text of its own")
    parser.add_argument(
        "--context-length", type=int, help="tokens that a window has; by default 2048, or all positions"
    )
    parser.add_argument("--batch-size", type=int, default=1, help="windows that run at the same time (1)")
    return parser


def _model_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(name, description)
    parser.add_argument("source", help="Hugging Face directory, checkpoint directory or .ckpt file of a Qwen3")
    _add_base(parser)
    parser.add_argument(
        "--tokenizer", help="directory or name of one, or 'bytes'; by default what lies beside the model"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; by default as they are stored")
    parser.add_argument("--device", help="of the model; by default the first GPU, if there is one")
    return parser


def _add_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", help="Hugging Face directory with the weights that a trainable_only checkpoint lacks")


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "convert": convert_parser,
    "prepare-data": prepare_parser,
    "doctor": doctor_parser,
    "report": report_parser,
    "generate": generate_parser,
    "evaluate": evaluate_parser,
}
"""The function that makes the parser of each subcommand."""


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of a subcommand.

    Args:
        name: The subcommand, a key of `PARSERS`.
        arguments: The words after it.

    Raises:
        MistakeError: An argument is unknown, missing or illegal.
    """
    parsed = PARSERS[name]().parse_args(arguments)
    for option, value in (("--top-k", getattr(parsed, "top_k", None)), ("--top-p", getattr(parsed, "top_p", None))):
        if value is not None and parsed.temperature == 0:
            raise MistakeError(
                f"{option} needs a --temperature above 0, such as --temperature 1.0: at 0 nothing is drawn"
            )
    return parsed


def check_paths(name: str, parsed: argparse.Namespace) -> None:
    """Check that the model, the texts or the directory of a subcommand exist.

    Args:
        name: The subcommand.
        parsed: The arguments of the subcommand.

    Raises:
        MistakeError: One of them does not exist.
    """
    kinds = {action.dest: action.help for action in PARSERS[name]()._actions}
    kinds_read = ("source", "base", "text", "adapter", "directory")
    read = [(kind, path) for kind in kinds_read for path in _listed(getattr(parsed, kind, None) or [])]
    for kind, path in read:
        if "://" not in path and not Path(path).exists():
            raise MistakeError(f"{missing(path)}\n{kind}: {kinds[kind]}")


def check_picture(arguments: Sequence[str]) -> None:
    """Check that `learning-rate` got a picture to draw; the other arguments are those of `fit`.

    Args:
        arguments: The words after the subcommand.

    Raises:
        MistakeError: The picture is missing.
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise MistakeError(
            "lightning-d9d learning-rate needs a picture first, which ends in .png, .svg or .html\n"
            "such as lightning-d9d learning-rate rates.png --config run.yaml; options are those of fit"
        )


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
