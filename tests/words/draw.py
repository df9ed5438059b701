"""Draws sentences to be read by a person: `python -m tests.words.draw --seed 1`.

The sentences of all pages, docstrings and error messages are one list. Each is drawn with equal chance, so a reader's
count of stumbles estimates that of the whole. Sentences of fewer than `MIN_WORDS` words are left out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

from tests.words.__main__ import ROOT, files_read
from tests.words.rules import sentences_of
from tests.words.texts import texts_of

SEED = 20261126
"""The seed of the draw whose count a report names."""
NUMBER = 60
MIN_WORDS = 4


def draw(seed: int = SEED, number: int = NUMBER, files: Iterable[Path] = ()) -> list[str]:
    """Return sentences as lines `path:line: kind: sentence`; the same seed and files give the same ones."""
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{text.line}: {text.kind}: {sentence}"
        for path in files or files_read()
        for text in texts_of(path.name, path.read_text(encoding="utf-8"))
        for sentence in sentences_of(text)
        if len(sentence.split()) >= MIN_WORDS
    ]
    return random.Random(seed).sample(found, number)


def main() -> None:
    """Print the sentences that a seed draws."""
    parser = argparse.ArgumentParser(prog="python -m tests.words.draw", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--number", type=int, default=NUMBER)
    options = parser.parse_args()
    print("\n".join(draw(options.seed, options.number)))


if __name__ == "__main__":
    main()
