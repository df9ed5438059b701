"""LightningDataModules, the data side of a Trainer.

`tokens.py` reads token files of any size, alone or as mixtures. `chat.py` makes rows of chats, in which only the
assistant's tokens count. `text.py` reads plain text files as bytes: windows of fixed length with labels shifted by one.
Without arguments it reads the sources of Python's standard library, real text that every machine has. `rows.py` has
their shared settings, and `batch_size.py` computes the rows of a rank's batch from those of a step on all ranks.
"""

from lightning_d9d.datamodules.chat import ChatDataModule
from lightning_d9d.datamodules.text import ByteTextDataModule, ByteWindows, unigram_entropy
from lightning_d9d.datamodules.tokens import TokenDataModule

__all__ = ["ByteTextDataModule", "ByteWindows", "ChatDataModule", "TokenDataModule", "unigram_entropy"]
