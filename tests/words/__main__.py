"""Checks the words of the package, the examples and the pages: `python -m tests.words`.

It prints what is wrong, and exits with 1 if there is something. The only exceptions are the files in `SAYS_WHY`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.words.rules import RULES
from tests.words.texts import texts_of

ROOT = Path(__file__).parents[2]
COINED = Path(__file__).with_name("coined.txt")
READ = ("lightning_d9d/**/*.py", "examples/**/*.py", "noxfile.py", "docs/**/*.md", "README.md", "tests/**/*.md")
SAYS_WHY = ("docs/reference/glossary.md", "tests/words/", "CHANGELOG.md")
"""Files that may have coined words: they list words to avoid, and former names."""
SPELLED = ("lightning_d9d", "tests", "examples", "docs", "README.md", "CHANGELOG.md", "noxfile.py")

Key = tuple[str, str]
"""A file and a rule."""
Found = dict[Key, list[str]]
"""Each problem as a line `path:line: rule: what`."""


def files_read() -> list[Path]:
    """Return the files whose texts are checked, in order."""
    return sorted(path for each in READ for path in ROOT.glob(each))


def find(paths: Iterable[Path], root: Path = ROOT) -> Found:
    """Return what is wrong with the texts of files, by file and rule."""
    found: Found = {}
    for path in paths:
        name = path.relative_to(root).as_posix()
        for text in texts_of(name, path.read_text(encoding="utf-8")):
            for rule, check in RULES.items():
                for problem in check(text):
                    found.setdefault((name, rule), []).append(f"{name}:{text.line}: {rule}: {problem}")
    return found


def find_coined(paths: Iterable[str], root: Path = ROOT) -> Found:
    """Return the coined words in files and folders, which codespell finds."""
    command = [sys.executable, "-m", "codespell_lib", "--dictionary", str(COINED), *paths]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ended.stderr:
        raise RuntimeError(f"codespell failed: {ended.stderr}")
    found: Found = {}
    for line in ended.stdout.splitlines():
        place, problem = line.removeprefix("./").split(": ", 1)
        name = place.rpartition(":")[0]
        if name.startswith(SAYS_WHY):
            continue
        found.setdefault((name, "coined-words"), []).append(f"{place}: coined-words: {problem}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.words", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files to check; by default all")
    options = parser.parse_args(arguments)
    files = [Path(path).resolve() for path in options.paths] or files_read()
    texts = [path for path in files if path.suffix in (".py", ".md")]
    root = ROOT if all(path.is_relative_to(ROOT) for path in texts) else Path("/")
    found = find(sorted(texts), root) | find_coined(options.paths or SPELLED)
    print("\n".join(line for lines in found.values() for line in lines))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
