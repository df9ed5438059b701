"""What the ranks of `test_launchers.py` and `test_two_nodes.py` run: small fits that tell of themselves.

The ranks start as `python launcher_job.py DIRECTORY CASE...` or, where `forked_rank` is used, from a process that has
imported all this. Each writes DIRECTORY/RANK.json, one entry a case.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import D9DStrategy, TimeoutConfig, doctor
from lightning_d9d.cli import D9DCLI

LAUNCHER_VARIABLES = (
    *("SLURM_", "LSB_", "JSM_", "PMI_", "OMPI_", "TORCHELASTIC_"),
    *("MASTER_", "LOCAL_", "NODE_", "GROUP_", "RANK", "WORLD_"),
)
NUM_STEPS = 4
STEP_SECONDS = 4.0
SHUTDOWN_SECONDS = 2.0
CUT_AT = 3  # the step of the case "cut" at which it says that it is ready


class Model(L.LightningModule):
    """Least squares in float64; each rank has its own rows."""

    def __init__(self, num_steps: int = NUM_STEPS) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)
        self.losses: list[float] = []

    def train_dataloader(self) -> DataLoader:
        rows = torch.arange(3.0 * 2 * self.num_steps, dtype=torch.float64).sin().reshape(-1, 3)
        return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = (self.layer(inputs) - targets).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaysWhenReady(L.Callback):
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == CUT_AT and trainer.global_rank == 0:
            print("ready", flush=True)


def fit(model: Model | None = None, **options: Any) -> tuple[L.Trainer, Model]:
    options = {"max_epochs": 1, "strategy": "d9d", "num_nodes": 1, "devices": 1, **options}
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = model or Model()
    trainer.fit(model)
    return trainer, model


def fit_by_cli(**options: Any) -> tuple[L.Trainer, Model]:
    arguments = ["fit", "--trainer.accelerator", "cpu", "--trainer.strategy", "d9d", "--trainer.max_epochs", "1"]
    for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        arguments += [f"--trainer.{name}", "false"]
    for name, value in options.items():
        arguments += [f"--trainer.{name}", type(value[0]).__name__ if isinstance(value, list) else str(value)]
    cli = D9DCLI(Model, args=arguments, save_config_callback=None)
    return cli.trainer, cli.model


_folder: list[str] = []
"""The folder in which `main` writes, and which has reports of ranks that wait in vain."""


def fit_until_cut() -> tuple[L.Trainer, Model]:
    timeouts = TimeoutConfig(step_seconds=STEP_SECONDS, shutdown_seconds=SHUTDOWN_SECONDS)
    options: dict[str, Any] = {"strategy": D9DStrategy(timeouts=timeouts), "default_root_dir": _folder[0]}
    return fit(Model(num_steps=10**5), num_nodes=2, callbacks=[SaysWhenReady()], **options)


class Signalled(L.Callback):
    """SLURM's warning, as rank 1 alone gets it in each batch of its third step."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def fit_until_requeued(*callbacks: L.Callback) -> tuple[L.Trainer, Model]:
    root = os.environ["SLURM_TEST_ROOT"]
    options: dict[str, Any] = {"default_root_dir": root, "callbacks": list(callbacks), "accumulate_grad_batches": 4}
    return fit(Model(num_steps=2000), devices=2, **options)


CASES = {
    "requeued": lambda: fit_until_requeued(Signalled()),
    "resumes": lambda: fit_until_requeued(),
    "two_nodes": lambda: fit(num_nodes=2),
    "two_nodes_cli": lambda: fit_by_cli(num_nodes=2),
    "two_devices": lambda: fit(devices=2),
    "two_devices_cli": lambda: fit_by_cli(devices=2),
    "kubeflow": lambda: fit(num_nodes=2, plugins=[KubeflowEnvironment()]),
    "kubeflow_cli": lambda: fit_by_cli(num_nodes=2, plugins=[KubeflowEnvironment()]),
    "cut": fit_until_cut,
}


def answers(host: str, port: int) -> bool:
    """Whether someone listens there. 127.0.0.2 is this machine by another address."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def main(directory: str, *names: str) -> None:
    _folder[:] = [directory]
    said: dict[str, Any] = {}
    for name in names:
        trainer, model = CASES[name]()
        environment = trainer.strategy.cluster_environment
        said[name] = {
            "environment": type(environment).__name__,
            "address": environment.main_address,
            "port": environment.main_port,
            "answers": {host: answers(host, environment.main_port) for host in ("127.0.0.1", "127.0.0.2")},
            "place": [trainer.global_rank, trainer.node_rank, trainer.local_rank, trainer.world_size],
            "losses": model.losses,
            "weights": [*model.layer.weight[0].tolist(), model.layer.bias.item()],
        }
        (Path(directory) / f"{trainer.global_rank}.json").write_text(json.dumps(said))


def forked_rank(directory: str, number: int, environment: Mapping[str, str], hostname: str, names: list[str]) -> None:
    """`main` as if a launcher had started it on a machine called `hostname`. Output goes to DIRECTORY/NUMBER.txt.

    Without names of cases: `lightning-d9d doctor`.
    """
    with (Path(directory) / f"{number}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(directory)
    for name in list(os.environ):
        if name.startswith(LAUNCHER_VARIABLES):
            del os.environ[name]
    os.environ.update(environment)
    socket.gethostname = lambda: hostname
    sys.argv = ["lightning-d9d"]
    if not names:
        sys.exit(doctor.main())
    main(directory, *names)


if __name__ == "__main__":
    main(*sys.argv[1:])
