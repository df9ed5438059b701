"""Trains a small Qwen3-MoE on the sources of Python's standard library: a minute on two CPU cores, no download.

    python examples/qwen3_moe/quickstart.py

First the sources become a file of tokens, one for each byte. The training is interrupted, and resumed from its
checkpoint. At the end the model generates some Python. The output folder then has the tokens, the checkpoint, a picture
of the losses and the model in Hugging Face's layout.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import sysconfig
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import HuggingFaceExport, LossCurve, TextSample
from lightning_d9d.datamodules import TokenDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining

FULL_LENGTH = 240  # optimizer steps of 8 x 256 bytes
EXPECTED_GAIN = 0.9  # nats per byte by which a full-length run gets below the unigram entropy, at least


class Interruption(L.Callback):
    """Ends the training early, as the loss of a machine would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints whether the run is a new one."""
        trainer.print(f"training starts at step {trainer.global_step} of {trainer.max_steps}")

    def on_train_batch_end(self, trainer: L.Trainer, *args: object, **kwargs: object) -> None:
        """Stops after the step."""
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.step


def train(options: argparse.Namespace, callbacks: list[L.Callback], resume_from: Path | None = None) -> L.Trainer:
    """One run: until `--max_steps`, or until a callback stops it."""
    trainer = L.Trainer(
        strategy=D9DStrategy(),
        accelerator=options.accelerator,
        devices=options.devices,
        precision="32-true" if options.accelerator == "cpu" else "bf16-mixed",
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        val_check_interval=options.validate_every,
        limit_val_batches=min(20, options.validate_every),
        num_sanity_val_steps=0,
        log_every_n_steps=min(5, options.validate_every),
        logger=False,
        enable_model_summary=False,
        callbacks=[
            TQDMProgressBar(refresh_rate=5),
            ModelCheckpoint(
                options.output / "checkpoints",
                save_last=True,
                save_on_train_epoch_end=False,  # but after each validation
                enable_version_counter=False,  # the last.ckpt of an earlier run is replaced
            ),
            LossCurve(options.output / "loss_curve.png"),
            *callbacks,
        ],
    )
    L.seed_everything(0, verbose=False)
    module = Qwen3MoePretraining(preset="tiny", learning_rate=3e-3, warmup_steps=30)
    data = TokenDataModule(
        f"{sysconfig.get_path('stdlib')}/*.py",
        tokenizer="bytes",
        cache_folder=str(options.output / "tokens"),
        sequence_length=256,
        batch_size=8,
        borders=False,  # as in the text: sources see those before them
        validation_fraction=0.05,
    )
    trainer.fit(module, data, ckpt_path=resume_from, weights_only=True)
    return trainer


def say_what_next(options: argparse.Namespace) -> None:
    """Prints commands for the next steps."""
    here, config, export = Path.cwd(), Path(__file__).with_name("tiny.yaml"), options.output / "huggingface"
    last = options.output / "checkpoints" / "last.ckpt"
    print("\nWhat next:")
    for what, *arguments in (
        ("write text", "generate", export, "--prompt", "def ", "--temperature", "0.7"),
        ("score a text", "evaluate", export, Path(__file__)),
        ("train on", "fit", "--config", config, "--ckpt_path", last, "--trainer.max_steps", 2 * options.max_steps),
    ):
        paths = [Path(sys.executable), "-m", "lightning_d9d.cli", *arguments]
        short = [p.relative_to(here) if isinstance(p, Path) and p.is_relative_to(here) else p for p in paths]
        print(f"  {what}:  {shlex.join(map(str, short))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_steps", type=int, default=FULL_LENGTH)
    parser.add_argument("--num_tokens", type=int, default=200, help="length of the text that is generated at the end")
    parser.add_argument("--output", type=Path, default=Path("quickstart_output"))
    parser.add_argument("--accelerator", default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    options.validate_every = max(1, options.max_steps // 6)
    started = time.perf_counter()

    first = train(options, [Interruption(step=4 * options.validate_every)])
    first.print(f"interrupted at step {first.global_step}; a new Trainer goes on from last.ckpt")
    second = train(
        options,
        [
            Interruption(step=options.max_steps),
            TextSample(num_tokens=options.num_tokens),
            HuggingFaceExport(options.output / "huggingface", overwrite=True),
        ],
        resume_from=options.output / "checkpoints" / "last.ckpt",
    )

    val_loss = second.callback_metrics["val_loss"].item()
    entropy = second.datamodule.unigram_entropy  # type: ignore[attr-defined]
    second.print(f"steps {second.global_step}, {time.perf_counter() - started:.0f} seconds, files in {options.output}/")
    second.print(f"unigram entropy {entropy:.3f} nats per byte, final validation loss {val_loss:.3f}")
    if options.max_steps >= FULL_LENGTH and val_loss > entropy - EXPECTED_GAIN:
        sys.exit(f"The loss should have come down to {entropy - EXPECTED_GAIN:.3f}.")
    if second.is_global_zero:
        say_what_next(options)


if __name__ == "__main__":
    main()
