"""A run that one mesh begins and another one ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, D9DStrategy
from lightning_d9d.peft import LoRA
from tests.meshes.cases import Case
from tests.meshes.equality import CLIP, CONFIG, ROWS, Data, Watched, batch_of
from tests.strategy.plain import trainer

SAVED_AFTER, STEPS = 2, 5
TOKENS = Data(8)
MODEL = replace(
    CONFIG,
    num_attention_heads=4,
    num_key_value_heads=2,
    mlp_only_layers=(1,),
    intermediate_size=24,
    shared_expert_intermediate_size=8,
)
WITHOUT_EXPERTS: dict[str, Any] = {"num_experts": 0, "mlp_only_layers": (), "shared_expert_intermediate_size": 0}


@dataclass(frozen=True)
class RoundTrip:
    """A trip from a mesh to another, such as "pp2 shard2" to "tp2"; "" is one rank."""

    saved: str
    loaded: str
    schedules: tuple[str, str] = ("1f1b", "1f1b")
    tied: bool = False
    frozen: bool = False
    """Whether the first layer's attention is not trained."""
    asynchronous: bool = False
    dense: bool = False
    """Whether no layer is a mixture of experts."""
    adapted: bool = False
    """Whether adapters are trained, and nothing else."""
    fast: bool = False
    """Whether it is one of those that always run."""

    @property
    def cases(self) -> tuple[Case, Case]:
        saved, loaded = zip((self.saved, self.loaded), self.schedules, strict=True)
        return Case(saved[0], saved[1], tied=self.tied), Case(loaded[0], loaded[1], tied=self.tied)

    def __str__(self) -> str:
        names = [mesh.replace(" ", "-") or "one" for mesh in (self.saved, self.loaded)]
        flags = [each for each in ("tied", "frozen", "asynchronous", "dense", "adapted") if getattr(self, each)]
        return ",".join(["->".join(names), *(name for name in self.schedules if name != "1f1b"), *flags])


ROUND_TRIPS = [
    RoundTrip("rep2", "", fast=True),
    RoundTrip("", "shard2", frozen=True, asynchronous=True),
    RoundTrip("shard2 ep2", "pp2", schedules=("1f1b", "zero_bubble_v"), tied=True, asynchronous=True, fast=True),
    RoundTrip("pp2", "tp2", tied=True, frozen=True),
    RoundTrip("tp2", "cp2", frozen=True),
    RoundTrip("cp2", "rep2 shard2 ep4", tied=True, asynchronous=True),
    RoundTrip("pp2 shard2 ep2", "rep2", schedules=("dual_pipe_v", "1f1b"), frozen=True),
    RoundTrip("shard4 ep2", "pp2 tp2", schedules=("1f1b", "zero_bubble_v"), tied=True),
    RoundTrip("pp2 rep2 ep2", "shard2 cp2", schedules=("interleaved_1f1b", "1f1b"), asynchronous=True),
    RoundTrip("rep2 cp2 ep4", "tp4", frozen=True, asynchronous=True),
    RoundTrip("tp4", "pp4", tied=True, frozen=True),
    RoundTrip("rep2 tp2 ep4", "cp4", asynchronous=True),
    RoundTrip("pp2 rep2 tp2 ep4", "shard4 ep4", asynchronous=True),
    RoundTrip("shard8 ep8", "pp2 cp2 tp2", frozen=True),
    RoundTrip("pp2 cp2 ep2", "rep4 shard2 ep4", schedules=("dual_pipe_v", "1f1b"), tied=True),
    RoundTrip("shard2 cp2 tp2 ep2", "", tied=True, frozen=True, asynchronous=True),
    RoundTrip("pp2 shard2", "tp2", tied=True, dense=True),
    RoundTrip("shard2 ep2", "pp2", schedules=("1f1b", "zero_bubble_v"), adapted=True, fast=True),
    RoundTrip("tp2", "shard2", adapted=True, asynchronous=True),
]


@dataclass
class Travelling(Watched):
    """Reads the same rows in the same order on any mesh, as Lightning deals them out."""

    frozen: bool = False
    batches: list[list[Any]] = field(default_factory=list)
    """The rows of all data ranks, for each step."""

    __hash__ = Watched.__hash__
    __eq__ = Watched.__eq__

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            if self.frozen and "layers.0.self_attn" in name:
                parameter.requires_grad_(False)

    def train_dataloader(self) -> DataLoader:
        data = [
            {name: value[row] for name, value in batch_of(index, data=self.data).items()}
            for index in range(self.num_batches)
            for row in range(ROWS)
        ]
        size = self.trainer.strategy.mesh.dp_size if self.trainer.world_size > 1 else 1  # type: ignore[attr-defined]
        return DataLoader(data, ROWS // size, shuffle=True)  # type: ignore[arg-type]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        own: list[Any] = batch["input_ids"].tolist()
        gathered = [own] * self.trainer.world_size
        if self.trainer.world_size > 1:
            dist.all_gather_object(gathered, own)
        unique = {tuple(row) for rows in gathered for row in rows}
        self.batches.append(sorted(unique))


class SavingAgain(Callback):
    """What was loaded, before it is trained on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def train(trip: RoundTrip, loads: bool, folder: Path) -> None:
    """One rank's part of the run that saves, or of the one that loads; results go to FOLDER/saved-0.pt and so on."""
    torch.set_num_threads(1)
    L.seed_everything(1 if not loads else 2, verbose=False)
    case = trip.cases[loads]
    strategy = D9DStrategy(**case.strategy_options, checkpoint=CheckpointConfig(asynchronous=trip.asynchronous))
    model = replace(MODEL, **WITHOUT_EXPERTS) if trip.dense else MODEL
    module = Travelling(
        replace(model, tie_word_embeddings=trip.tied),
        STEPS,
        data=TOKENS,
        frozen=trip.frozen,
        peft=LoRA(rank=4) if trip.adapted else None,
    )
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1)
    run = trainer(
        strategy,
        case.num_ranks,
        callbacks=[SavingAgain(folder / "again.ckpt")] if loads else [saving],
        enable_checkpointing=not loads,
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=CLIP,
    )
    run.fit(module, ckpt_path=folder / f"step={SAVED_AFTER}.ckpt" if loads else None)
    skipped = 0 if loads else SAVED_AFTER
    result = {
        "losses": module.seen.losses[skipped:],
        "batches": module.batches[skipped:],
        "weights": {} if loads else module.seen.weights[SAVED_AFTER - 1],
    }
    torch.save(result, folder / f"{'loaded' if loads else 'saved'}-{run.global_rank}.pt")
