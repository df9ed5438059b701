"""`python -m lightning_d9d.cli`, also under torchrun."""

import sys

from lightning_d9d.cli import program

if __name__ == "__main__":
    sys.argv[0] = "lightning-d9d"  # the name in usage
    program()
