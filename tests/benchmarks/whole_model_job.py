"""The processes of `whole_model`: one writes made-up weights, and a callback measures those that train."""

from __future__ import annotations

import json
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist

from lightning_d9d.data.token_files import TokenFileWriter, smallest_dtype
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, save_huggingface
from lightning_d9d.pipeline.initial_weights import materialize
from lightning_d9d.startup import seconds_of_parts

ROWS = "rows.jsonl"
_POLL_SECONDS = 0.05
_SKEW = 3
"""The exponent of made-up tokens, which are a uniform number to this power. So some are frequent, and there is
something to learn."""


def report(folder: Path, part: str, what: str, seconds: float | None = None, **values: Any) -> None:
    """Print a row and append it to the rows of the run. With `bytes` it has bytes a second, too."""
    row: dict[str, Any] = {"part": part, "what": what}
    if seconds is not None:
        row["seconds"] = seconds
    row |= values
    if seconds and values.get("bytes"):
        row["bytes_per_s"] = values["bytes"] / seconds
    with (folder / ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")
    print("  " + ", ".join(f"{name} {_shown(name, value)}" for name, value in row.items()), flush=True)


def _shown(name: str, value: Any) -> str:
    if name.endswith("bytes"):
        return f"{value / 2**30:.3g} GiB"
    if name == "bytes_per_s":
        return f"{value / 1e9:.3g} GB/s"
    return f"{value:.4g}" if isinstance(value, float) and name != "loss" else str(value)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows so far."""
    path = folder / ROWS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def size_of(path: Path, pattern: str = "**/*") -> int:
    """Return the bytes of all files below a folder."""
    return sum(each.stat().st_size for each in path.glob(pattern) if each.is_file())


def write_config(folder: Path, config: Qwen3MoeConfig) -> None:
    """Write what the example's YAML needs of `base` where weights are drawn."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


def write_weights(folder: Path, config: Qwen3MoeConfig, device_type: str) -> None:
    """Write made-up weights as a Hugging Face directory `base`, and say how long it took."""
    device = torch.device(device_type)
    begin = time.perf_counter()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    materialize(model, device, seed=0)
    if device_type == "cuda":
        torch.cuda.synchronize()
    report(folder, "directory", "weights drawn", time.perf_counter() - begin, parameters=config.num_parameters)
    begin = time.perf_counter()
    save_huggingface(model, folder / "base")
    report(folder, "directory", "weights written", time.perf_counter() - begin, bytes=size_of(folder / "base"))


def write_tokens(path: Path, vocab_size: int, num_rows: int, length: int) -> None:
    """Write made-up tokens, one document a row, as `prepare-data` writes tokens of texts. Some rows are held out."""
    writer = TokenFileWriter(path, smallest_dtype(vocab_size))
    generator = np.random.default_rng(0)
    for _ in range(num_rows + max(2, num_rows // 64)):
        ids = (vocab_size * generator.random(length) ** _SKEW).astype(np.int64)
        writer.add_joined(ids, np.array([length]))
    writer.finish()


class Probe(L.Callback):
    """Measures a fit, and removes files when nobody needs them any more: disks are small.

    It has to stand before all other callbacks.

    Args:
        folder: Of the run. Weights are in `base`, checkpoints in `output/checkpoints`, an export in `output/export`.
        part: The name of the rows.
        keeps_checkpoints: False removes them behind the training, before an export.
    """

    def __init__(self, folder: str, part: str, keeps_checkpoints: bool = True) -> None:
        self._folder = Path(folder)
        self._part = part
        self._keeps_checkpoints = keeps_checkpoints
        self._base, self._output = self._folder / "base", self._folder / "output"
        self._begin = self._step_begin = self._end_begin = 0.0
        self._seconds: list[float] = []
        self._saves: list[threading.Thread] = []
        self._is_first = True
        self._steps, self._is_in_step = 0, False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The model is about to be built."""
        self._begin, self._is_first = time.perf_counter(), trainer.is_global_zero

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Weights are there, on all ranks."""
        trainer.strategy.barrier()
        parts, total = seconds_of_parts(), time.perf_counter() - self._begin
        read = parts.get("weights from files", 0.0)
        weights = size_of(self._base, "*.safetensors")
        drawn = parts.get("initial weights", 0.0)
        if self._is_first:
            self._report("initial weights", drawn)
            if trainer.ckpt_path is not None:
                saved = size_of(Path(trainer.ckpt_path))
                self._report("checkpoint read, and all else of a setup", total - drawn, bytes=saved)
            elif weights:
                self._report("weights read", read, bytes=weights)
                for each in self._base.glob("*.safetensors"):
                    each.unlink()
        trainer.strategy.barrier()
        self._steps, self._step_begin = trainer.global_step, time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is over. If a step is, too, a checkpoint may follow."""
        if trainer.global_step == self._steps:
            return
        self._steps, self._is_in_step = trainer.global_step, False
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        now, step = time.perf_counter(), trainer.global_step
        self._seconds.append(now - self._step_begin)
        self._step_begin = now
        every = getattr(trainer.checkpoint_callback, "_every_n_train_steps", 0)
        if not self._is_first:
            return
        is_saved = any(each.is_alive() for each in self._saves)
        loss = float(trainer.callback_metrics["train_loss"])
        kind = "while a checkpoint is written" if is_saved else "after a save" if self._was_saved(step, every) else ""
        self._report(f"step {step}", self._seconds[-1], loss=loss, **({"kind": kind} if kind else {}))
        if every and step % every == 0:
            self._saves.append(threading.Thread(target=self._wait_for_checkpoint, args=(now,), daemon=True))
            self._saves[-1].start()

    def _was_saved(self, step: int, every: int) -> bool:
        return bool(every) and step > 1 and (step - 1) % every == 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The first batch of a step begins when a checkpoint of the last step has been copied to the host."""
        if self._is_in_step:
            return
        self._is_in_step = True
        now, every = time.perf_counter(), getattr(trainer.checkpoint_callback, "_every_n_train_steps", 0)
        if self._is_first and self._seconds and every and trainer.global_step % every == 0:
            self._report("training stood still for a checkpoint", now - self._step_begin)
        self._step_begin = now

    def _wait_for_checkpoint(self, begin: float) -> None:
        path = self._output / "checkpoints" / "last.ckpt"
        while not (path / "values.pt").is_file():
            time.sleep(_POLL_SECONDS)
        self._report("checkpoint written", time.perf_counter() - begin, bytes=size_of(path))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All steps are taken; what is saved may still be written."""
        peaks = [float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)]
        if pl_module.device.type == "cuda":
            peaks += [float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())]
        every = all_gather_object(peaks) if dist.is_initialized() else [peaks]
        if self._is_first:
            host, *of_gpu = zip(*every, strict=True)
            names = ("allocated_bytes", "reserved_bytes")
            gpu = {name: max(each) for name, each in zip(names, of_gpu, strict=False)}
            self._report("most memory: of a GPU, and of all processes", **gpu, processes_bytes=sum(host))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All is saved; an export may follow."""
        for each in self._saves:
            each.join()
        if self._is_first and not self._keeps_checkpoints:
            shutil.rmtree(self._output / "checkpoints")
        if dist.is_initialized():
            dist.barrier()
        self._end_begin = time.perf_counter()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """An export is there."""
        seconds, export = time.perf_counter() - self._end_begin, self._output / "export"
        if self._is_first and self._end_begin and (export / "config.json").exists():
            self._report("weights exported", seconds, bytes=size_of(export))

    def _report(self, what: str, seconds: float | None = None, **values: Any) -> None:
        report(self._folder, self._part, what, seconds, **values)
