"""All tests that need no GPU: `python -m tests`. Those of ranks and jobs go on beside those of one process.

Ranks wait for each other often, and tests of faults for their time limits: side by side they fill the cores. What goes
on beside prints when all is over.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

WITHOUT_GPU = "not gpu and not meshes"
WAITING = "(ranks or jobs)"


def main() -> int:
    """The exit status of what failed, or 0."""
    command = [sys.executable, "-m", "pytest", *sys.argv[1:], "-m"]
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen([*command, f"{WAITING} and {WITHOUT_GPU}"], stdout=output, stderr=output) as ranks:
            other = subprocess.run([*command, f"not {WAITING} and {WITHOUT_GPU}"], check=False)
        output.seek(0)
        print(output.read())
    ended = {ranks.returncode, other.returncode}
    return max(
        ended - {pytest.ExitCode.NO_TESTS_COLLECTED} if len(ended) > 1 else ended
    )  # what was asked for may be of one


if __name__ == "__main__":
    sys.exit(main())
