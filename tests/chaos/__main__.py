"""Kill jobs at random moments: `python -m tests.chaos --kills 200`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.chaos.kill import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run(Path(folder) / "chaos", arguments.kills, arguments.seed, show=True))


if __name__ == "__main__":
    main()
