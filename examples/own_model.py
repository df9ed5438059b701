"""Your own model as a D9DModule: how it is built, its inputs and its loss. `python examples/own_model.py`."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import D9DModule, D9DStrategy, StageInfo, StageInputs, WeightedLoss


class Classifier(D9DModule):
    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def microbatch_inputs(self, microbatch):
        x, _ = microbatch
        return StageInputs(first={"input": x})

    def microbatch_loss(self, output, microbatch):
        _, y = microbatch  # rows labelled -100 do not count, and all others weigh the same
        loss_sum = nn.functional.cross_entropy(output, y, ignore_index=-100, reduction="sum")
        return WeightedLoss(loss_sum, weight=(y != -100).sum())

    def microbatch_metrics(self, output, microbatch):
        return {"accuracy": (output.argmax(-1) == microbatch[1]).float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    x = torch.randn(1024, 16)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(-1)), batch_size=64)
    strategy = D9DStrategy(microbatch_size=16)
    trainer = L.Trainer(strategy=strategy, max_epochs=5, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), data, data)
    print({name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()})
