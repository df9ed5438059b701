"""LightningDataModules, the data side of a Trainer.

`text.py` reads plain text files as bytes: windows of fixed length with labels shifted by one. Without arguments it
serves the sources of Python's standard library, real text that every machine has.
"""

from lightning_d9d.datamodules.text import ByteTextDataModule, ByteWindows, unigram_entropy

__all__ = ["ByteTextDataModule", "ByteWindows", "unigram_entropy"]
