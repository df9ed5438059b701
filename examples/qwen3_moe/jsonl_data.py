"""Windows of tokens from the texts of a JSON lines file."""

import json

import lightning as L
import torch
from torch.utils.data import DataLoader, StackDataset, random_split
from transformers import AutoTokenizer

from lightning_d9d import ConfigError


class JsonLines(L.LightningDataModule):
    def __init__(self, path: str, tokenizer: str, sequence_length: int = 1024, batch_size: int = 8) -> None:
        super().__init__()
        self.path = path
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        tokens = []
        with open(self.path, encoding="utf-8") as file:
            for line in file:
                tokens += [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_token_id]
        length = self.sequence_length
        if len(tokens) < (needed := 2 * self.batch_size * length):
            raise ConfigError(f"{self.path} has {len(tokens)} tokens; give at least {needed}, or fewer or shorter rows")
        rows = torch.tensor(tokens).unfold(0, length + 1, length)  # neighbours share a token
        windows = StackDataset(input_ids=rows[:, :-1], labels=rows[:, 1:])  # type: ignore[arg-type]
        shares = random_split(windows, [0.95, 0.05], torch.Generator().manual_seed(0))  # the same on all ranks
        self.training, self.validation = shares

    def train_dataloader(self):
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.validation, batch_size=self.batch_size)

    predict_dataloader = val_dataloader  # for `lightning-d9d predict`
