"""Your own data for a configuration: a LightningDataModule. `own_model.yaml` uses it."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Rows(L.LightningDataModule):
    def __init__(self, batch_size: int = 64, num_rows: int = 1024) -> None:
        super().__init__()
        self.batch_size = batch_size
        x = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(0))
        self.rows = TensorDataset(x, x[:, :4].argmax(-1))  # the class of a row is its largest of four numbers

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=self.batch_size)
