"""All hangs of `tests/strategy/hangs.py`, one after the other: `python -m tests.chaos.hangs [WORD...]`.

With `--device cuda` ranks have a GPU each and NCCL, and no table is written.

Prints each with the seconds from the fault to the end of the job, or what went wrong. Writes the table of the page if
all went well.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import traceback
from pathlib import Path

from tests.strategy.fault_table import PAGE
from tests.strategy.hangs import HANGS, page_rows

HEAD = "| Fault | What the report says | Seconds | Limit |"


def main() -> int:
    """Run those whose names have one of the words, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    words, seconds = options.words, dict[str, float]()
    chosen = [name for name in HANGS if not words or any(word in name for word in words)]
    for name in chosen:
        said = io.StringIO()
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
                seconds[name] = HANGS[name].run(Path(folder), options.device).seconds
            print(f"{name}: {seconds[name]:.1f} s", flush=True)
        except AssertionError:
            print(f"{name} failed\n{said.getvalue()}\n{traceback.format_exc()}", flush=True)
    if len(seconds) == len(HANGS) and options.device == "cpu":
        lines = PAGE.read_text().splitlines()
        begin = lines.index(HEAD) + 2
        end = next(number for number in range(begin, len(lines)) if not lines[number].startswith("|"))
        lines[begin:end] = page_rows(lambda name: f"{seconds[name]:.1f}")
        PAGE.write_text("\n".join(lines) + "\n")
    return int(len(seconds) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
