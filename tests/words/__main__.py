"""Checks the words of the package, the examples and the pages: `python -m tests.words`.

What older files have wrong is counted in `baseline.txt`. Exits with 1 where a file has more than that, or less.
`--record` writes lower counts, and never higher ones. `--all` prints everything that is wrong, also what is counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.words.rules import RULES
from tests.words.texts import texts_of

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).with_name("baseline.txt")
COINED = Path(__file__).with_name("coined.txt")
READ = ("lightning_d9d/**/*.py", "examples/**/*.py", "noxfile.py", "docs/**/*.md", "README.md", "tests/**/*.md")
SAYS_WHY = ("docs/reference/glossary.md", "tests/words/", "CHANGELOG.md")
"""Where coined words are named as such, and names that are gone."""
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


def read_baseline(content: str) -> Counter[Key]:
    """Return the counts that are written down, one `path rule count` a line."""
    rows = [line.split() for line in content.splitlines() if line]
    return Counter({(path, rule): int(count) for path, rule, count in rows})


def written(counts: Mapping[Key, int]) -> str:
    """Return the counts as `read_baseline` reads them."""
    return "".join(f"{path} {rule} {count}\n" for (path, rule), count in sorted(counts.items()) if count)


def differences(found: Found, baseline: Counter[Key]) -> tuple[list[str], list[str]]:
    """Return what there is more of than counted, with all places in the file, and what there is less of."""
    more, less = [], []
    for key in sorted({*found, *baseline}):
        number, counted = len(found.get(key, ())), baseline[key]
        if number > counted:
            more += [*found.get(key, ()), f"{key[0]}: {number} of {key[1]}, {counted} at most: mend what is new"]
        elif number < counted:
            less.append(f"{key[0]}: {number} of {key[1]}, {counted} in the baseline")
    return more, less


def shrunk(found: Found, baseline: Counter[Key]) -> Counter[Key]:
    """Return the baseline with what has become less; nothing grows."""
    return Counter({key: min(count, len(found.get(key, ()))) for key, count in baseline.items()})


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 where the counts are those of the baseline."""
    parser = argparse.ArgumentParser(prog="python -m tests.words", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write counts that have become lower")
    parser.add_argument("--all", action="store_true", help="print what is wrong, also what the baseline counts")
    parser.add_argument("paths", nargs="*", help="files, for --all")
    options = parser.parse_args(arguments)
    if options.paths and not options.all:
        parser.error("name files with --all only: the baseline is of all files")
    files = [Path(path).resolve() for path in options.paths] or files_read()
    texts = [path for path in files if path.suffix in (".py", ".md")]
    found = find(sorted(texts)) | find_coined(options.paths or SPELLED)
    if options.all:
        print("\n".join(line for lines in found.values() for line in lines))
        return 0
    baseline = read_baseline(BASELINE.read_text())
    if options.record:
        baseline = shrunk(found, baseline)
        BASELINE.write_text(written(baseline))
    more, less = differences(found, baseline)
    for line in [*more, *less]:
        print(line)
    if less:
        print("There is less than before: write it down with `python -m tests.words --record`.")
    return 1 if more or less else 0


if __name__ == "__main__":
    sys.exit(main())
