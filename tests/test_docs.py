"""The code on README.md, tests/README.md and the pages of docs/ works: a page's blocks share a namespace and a folder.

`python` blocks run, one after the other. `yaml` blocks parse. A block with a title (```python title="train.py") is a
file of that name for the blocks behind it, which can import it; if the repository has a file of that name, the block
must equal it. Of commands everything is built that their options ask for, and nothing is run, but on the pages of
`RUN`. `examples/` lies in the folder.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
import torch.multiprocessing
import yaml

from lightning_d9d.cli import D9DCLI, main
from lightning_d9d.cli.commands import PARSERS, parse, plan_parser
from tests.harness import warm
from tests.harness.ranks import RankContext

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUN = {ROOT / "docs" / "tutorials" / name for name in ("fine-tune-qwen3-30b.md", "your-text.md")}
"""Pages whose commands run in their order, where they have a file for a tiny model or take what such a run has left."""
FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"\n]+)")?\n(?P<code>.*?)^```$', re.M | re.S)
ITEM_IN_LINE = re.compile(r"[.:;)?] [1-9][0-9]?\.(?= |$)", re.M)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    path: Path
    line: int
    """Line number of the fence."""
    language: str
    title: str | None
    code: str

    def execute(self, namespace: dict[str, Any]) -> None:
        """Runs Python code; a traceback shows the page and its line."""
        exec(compile("\n" * self.line + self.code, str(self.path), "exec"), namespace)

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, without variables set in front of it."""
        for line in self.code.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                words = shlex.split(command, comments=True)
                while words and re.match(r"\w+=", words[0]):
                    words.pop(0)
                if words:
                    yield words


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(path, text.count("\n", 0, match.start()) + 1, match["language"], match["title"], match["code"])
        for match in FENCE.finditer(text)
    ]


class Built(D9DCLI):
    """Builds Trainer, model and data, and runs nothing."""

    def _parse_ckpt_path(self) -> None:
        pass  # no command of a page has written it

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def check_command(words: list[str]) -> None:
    match words:
        case ["lightning-d9d" | "lightning_d9d.cli", *arguments] | ["python", "-m", "lightning_d9d.cli", *arguments]:
            if arguments[0] in PARSERS:
                parse(arguments[0], arguments[1:])
                return
            if arguments[0] == "learning-rate":
                arguments = ["fit", *arguments[2:]]
            if arguments[0] == "plan":
                arguments = ["fit", *plan_parser().parse_known_args(arguments[1:])[1]]
            asks_for_help = any(argument.endswith("help") for argument in words[:-1])
            try:
                Built(args=arguments if asks_for_help else [*arguments, "--trainer.accelerator", "cpu"])
            except SystemExit as end:  # after help or --print_config
                if end.code != 0:
                    pytest.fail(f"refused: {shlex.join(words)}")
        case ["torchrun", *arguments]:
            options = torch.distributed.run.get_args_parser().parse_args(arguments)
            launcher = [] if options.module else ["python"]
            check_command([*launcher, options.training_script, *options.training_script_args])
        case ["python", "-m", "nox", "-s", *sessions]:
            for session in sessions:
                assert f"\ndef {session}(" in (ROOT / "noxfile.py").read_text(), f"no nox session {session!r}"
        case ["python", script, *_] if script.endswith(".py"):
            assert Path(script).exists(), f"no file {script!r}"


def takes_no_gpu(words: list[str]) -> bool:
    return words[:2] != ["lightning-d9d", "fit"] or any(word.endswith("tiny.yaml") for word in words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-d9d"])
    warm.context()  # processes that a page starts begin with their imports made
    forks = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(torch.multiprocessing, "spawn", forks)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(path):
        if block.title and (ROOT / block.title).exists():
            assert block.code == (ROOT / block.title).read_text(), f"{path}:{block.line} is not {block.title} any more"
        elif block.title:
            (tmp_path / block.title).write_text(block.code)
        if block.language == "python":
            block.execute(namespace)
        elif block.language == "yaml":
            assert yaml.safe_load(block.code), f"{path}:{block.line} is empty"
        elif block.language in ("", "bash"):
            for words in block.commands():
                if path in RUN and words[0] == "lightning-d9d" and takes_no_gpu(words):
                    monkeypatch.setattr(sys, "argv", words)
                    main()
                else:
                    check_command(words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_list_items_begin_lines(path: Path) -> None:
    """A formatter that fills lines may move an item behind the one before it, of which it is then a part."""
    assert ITEM_IN_LINE.findall(FENCE.sub("", path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    for target in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        assert (path.parent / target).exists(), f"{path}: no file {target}"


@pytest.mark.ranks(2)
def test_the_page_about_ranks_on_ranks(rank: RankContext) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "how-to" / "test-with-ranks.md"):
        if block.language == "python":
            block.execute(namespace)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(rank)


NAMED_TEST = re.compile(r"`(?:tests/)?(?:(\w+)/)?(test_\w+\.py)(?:::(test_\w+))?`")


def test_named_tests_exist() -> None:
    """The tests that the page names exist. Names without a folder are in tests/strategy."""
    page = (ROOT / "docs" / "explanation" / "lightning-traps.md").read_text()
    named = {match.groups() for match in NAMED_TEST.finditer(page)}
    assert len(named) > 15
    for folder, file, name in named:
        path = ROOT / "tests" / (folder or "strategy") / file
        if not path.exists():
            path = ROOT / "tests" / file
        assert path.exists(), f"{folder or 'strategy'}/{file}"
        assert name is None or f"def {name}(" in path.read_text(), f"{file}::{name}"
