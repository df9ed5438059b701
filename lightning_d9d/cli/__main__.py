"""`python -m lightning_d9d.cli`, also under torchrun."""

from lightning_d9d.cli import main

if __name__ == "__main__":
    main()
