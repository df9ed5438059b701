"""A model of transformers in a LightningModule, with sharded blocks. `python examples/transformers_model.py`."""

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.state import save_tensors


class CausalLM(L.LightningModule):
    def __init__(self, directory: str):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.train()  # from_pretrained returns a model in eval mode

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_end(self):
        config = self.model.config.to_json_string().encode()
        save_tensors(self.model, "trained", files={"config.json": config}, overwrite=True)  # all ranks call it

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


if __name__ == "__main__":
    L.seed_everything(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=256, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained("base")  # stands for a download

    rows: Any = [{"input_ids": row, "labels": row} for row in torch.randint(256, (64, 32))]
    data = DataLoader(rows, batch_size=8)
    strategy = D9DStrategy(
        mesh=MeshConfig(data_parallel_shard=-1),
        parallel=ParallelConfig(shard_blocks=("LlamaDecoderLayer",), recompute="full"),
    )
    trainer = L.Trainer(strategy=strategy, max_epochs=2, gradient_clip_val=1.0, logger=False)
    trainer.fit(CausalLM("base"), data)
    print(AutoModelForCausalLM.from_pretrained("trained").num_parameters())
