"""Qwen3-MoE as LightningModules."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import reprlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchmetrics import Metric

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.loop.progress import is_watched
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe.batch import BatchCheck, check_form, place_in_data, prepared
from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig, refuse_checkpoint
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.models.qwen3_moe.huggingface import load_huggingface
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM, layers_of_stages
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.models.qwen3_moe.presets import PRESETS
from lightning_d9d.modules import (
    BalanceConfig,
    ExpertBalance,
    expert_load,
    update_expert_bias,
)
from lightning_d9d.ops.linear_cross_entropy import IGNORED
from lightning_d9d.optim import OptimizerSettings, ParameterGroup
from lightning_d9d.optim.settings import LRSchedulerFactory, OptimizerFactory
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.paths import check_directory, is_path
from lightning_d9d.peft import PeftMethod, inject
from lightning_d9d.peft.methods import as_table, from_table
from lightning_d9d.pipeline.partition import split_by_sizes
from lightning_d9d.pipeline.types import StageInfo, StageInputs, WeightedLoss
from lightning_d9d.schedule import ModelCosts
from lightning_d9d.state import SafetensorsReader
from lightning_d9d.strategy.checkpoint_files import read_value
from lightning_d9d.strategy.module import D9DModule

_NAMES_OF_STAGES: dict[str | None, str] = {
    "train": "training",
    "validate": "validation",
    "sanity_check": "validation",
    "test": "test",
    "predict": "prediction",
}

_OF_ADAMW = ("learning_rate", "weight_decay", "betas", "warmup_steps", "final_learning_rate_fraction")
"""Arguments of `Qwen3MoePretraining` that only its own optimizer and schedule use."""

ARGUMENTS_KEY = "qwen3_moe_arguments"
"""Name under which a checkpoint stores the arguments of the module."""


def saved_arguments(saved: Any, source: object) -> dict[str, Any]:
    """Return the arguments of `Qwen3MoePretraining` from a checkpoint, with objects built from its tables.

    Args:
        saved: The checkpoint's value under `ARGUMENTS_KEY`.
        source: Name of the checkpoint, for error messages.

    Raises:
        StateError: The arguments are damaged, or belong to another version.
        ConfigError: No model can be built from their `config`.
    """
    if not isinstance(saved, Mapping):
        raise StateError(f"{source}: {ARGUMENTS_KEY}={reprlib.repr(saved)} must be a table; give another checkpoint")
    arguments = dict(saved)
    if "config" in arguments:
        arguments["config"] = Qwen3MoeConfig.from_dict(arguments["config"], source=str(source))
    makers = {
        "balance": ("BalanceConfig", lambda table: BalanceConfig(**table)),
        "peft": ("PeftMethod", from_table),
    }
    for name, (kind, make) in makers.items():
        if arguments.get(name) is None:
            continue
        try:
            arguments[name] = make(arguments[name])
        except (TypeError, ConfigError) as error:
            raise StateError(
                f"{source}: {ARGUMENTS_KEY} has {name}={reprlib.repr(arguments[name])}, which is not a {kind} "
                f"({error}); give another checkpoint"
            ) from error
    return arguments


class Perplexity(Metric):
    """The exponential of the mean loss of all tokens seen.

    It keeps its own sum: torchmetrics' MeanMetric ignores weights unless it looks for NaN, which needs a host sync.
    """

    loss_sum: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, num_tokens: Tensor) -> None:
        """Add `num_tokens` tokens whose mean loss is `loss`."""
        # Not in place: what `validate` made in inference mode must not be changed by a fit.
        self.loss_sum = self.loss_sum + loss * num_tokens
        self.num_tokens = self.num_tokens + num_tokens

    def compute(self) -> Tensor:
        """Return the perplexity of all tokens since the last reset."""
        return (self.loss_sum / self.num_tokens).exp()


class Qwen3MoePretraining(D9DModule):
    """Next-token training of Qwen3-MoE, or of dense Qwen3 if the config has no experts.

    Batches are mappings with `input_ids` and `labels`, integers `[batch, seq]`. Labels are already shifted, unless
    `shift_labels` is True. A label of -100 does not count. `document_ids` `[batch, seq]` are optional: tokens attend
    only to tokens of their row that have the same id. Rows may be packed with documents or padded on either side, with
    a separate id and labels of -100 for padding. `attention_mask` `[batch, seq]` marks padding with 0, as tokenizers
    do. The data decide labels at borders, too. The label of a document's last token should be -100; otherwise the next
    document's first token is predicted from it. `position_ids` `[batch, seq]` are optional, and by default begin at 0
    with each document. Every label that counts has the same weight over all microbatches, ranks and accumulated
    batches. With a `pooling_mask` `[batch, seq]`, `microbatch_loss` and `predict_output` find `pooled_states` in the
    output: see `CausalLMOutput`.

    The module logs `train_loss`, `grad_norm`, `tokens_per_s` (of all ranks), `val_loss`, `val_perplexity` and the same
    for test. With `balance` it also logs `expert_load/layer_0` and `expert_entropy/layer_0` for each mixture layer.
    These are results of `expert_load` for the tokens of a step on all ranks. It logs `train_router_loss` if there is
    one; `train_loss` and `val_loss` are the cross-entropy alone.

    On a pipeline the layers are distributed so that all stages compute equally much. The first stage also has the
    embedding, which is cheap. The last stage also has the head, which counts as some virtual layers.

    Args:
        config: The model's size. Set this or `preset`.
        preset: A size by name: a mixture "tiny", "30b-a3b" or "235b-a22b", or a dense model "tiny-dense", "0.6b",
            "1.7b", "4b", "8b", "14b" or "32b". Or the path of a Hugging Face `config.json`, or of its directory.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of matrices other than embeddings; embeddings and vectors (norms, biases) have none.
        betas: Decay rates of AdamW.
        warmup_steps: Steps of linear warm-up; then cosine decay over the Trainer's steps.
        final_learning_rate_fraction: End of the cosine, as a fraction of the peak.
        pretrained: Directory with Hugging Face weights to start from. It is not read in a run that resumes from a
            checkpoint.
        layers_per_stage: Number of layers of each pipeline stage, in place of the virtual layers.
        virtual_layers_before: Number of layers that the embedding counts as on the first stage.
        virtual_layers_after: Number of layers that the head counts as on the last stage. By default this follows from
            the sizes, as in `layers_of_stages`. So 48 layers of "30b-a3b" on 4 stages become 13, 13, 12 and 10.
        balance: How tokens are kept evenly distributed over the experts. None does not balance, and counts nothing.
        shift_labels: Whether labels are at their own tokens, as in batches of Hugging Face's collators, and must be
            moved to the token before. No label is moved over the border of a document.
        optimizer: Optimizer to use instead of this module's AdamW, as for `D9DModule`; the arguments of that AdamW
            (`learning_rate`, ...) are refused beside it.
        lr_scheduler: Learning-rate schedule of `optimizer`.
        parameter_groups: Parameters with a separate learning rate or weight decay.
        peft: Selection of trained parameters, such as `lightning_d9d.peft.LoRA()`; all others are frozen. None trains
            all parameters.
    """

    sequence_dims: ClassVar = dict.fromkeys(("input_ids", "labels", "position_ids", "document_ids", "pooling_mask"), 1)
    sequence_padding: ClassVar = {"labels": IGNORED, "document_ids": -1}
    prediction_dim = 1

    def __init__(
        self,
        config: Qwen3MoeConfig | None = None,
        preset: str | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 100,
        final_learning_rate_fraction: float = 0.1,
        pretrained: str | None = None,
        layers_per_stage: list[int] | None = None,
        virtual_layers_before: int = 0,
        virtual_layers_after: int | None = None,
        balance: BalanceConfig | None = None,
        shift_labels: bool = False,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
        parameter_groups: list[ParameterGroup] | None = None,
        peft: PeftMethod | None = None,
    ) -> None:
        super().__init__()
        if warmup_steps < 0:
            raise ConfigError(f"Qwen3MoePretraining got warmup_steps={warmup_steps}; it must be at least 0")
        self.config = _resolve_config(config, preset)
        if balance is not None:
            self.config.refuse_without_experts(f"balance={balance}")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.warmup_steps = warmup_steps
        self.final_learning_rate_fraction = final_learning_rate_fraction
        self.pretrained = pretrained
        self.layers_per_stage = layers_per_stage
        self.virtual_layers_before = virtual_layers_before
        self.virtual_layers_after = virtual_layers_after
        self.balance = balance
        self.shift_labels = shift_labels
        if peft is not None:
            inject(self, peft)
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()
        self._clock: tuple[float, int] | None = None  # when, and how many tokens, since the last log
        self._checks: dict[str | None, BatchCheck] = {}  # by kind of batches
        self._counted: dict[str, Tensor] | None = None  # after an optimizer step, the tokens of each expert
        self.use_optimizer(optimizer, lr_scheduler, parameter_groups)

    @property
    def model(self) -> Qwen3MoeForCausalLM:
        """The whole network."""
        if len(self.stages) == 0:
            raise ConfigError("the network is built when a Trainer starts; call configure_model() to build it earlier")
        stage = self.stages[0]
        assert isinstance(stage, Qwen3MoeForCausalLM)
        if stage.stage.num_stages > 1:
            raise ConfigError(
                f"this rank has {len(self.stages)} of the network's {stage.stage.num_stages} stages, in `stages`. For "
                "the whole network call save_huggingface(list(module.stages), directory) on every rank. Then "
                "load_huggingface into Qwen3MoeForCausalLM(module.config)"
            )
        return stage

    def model_costs(self, sequence_length: int, bytes_per_element: int) -> ModelCosts:
        """Return the costs of embedding, decoder layers and head."""
        return model_costs(self.config, sequence_length, bytes_per_element)

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        """Build the stage's part of the network, split by the strategy, `layers_per_stage` or virtual layers."""
        if stage.layers is None:
            stage = dataclasses.replace(stage, layers=self.layers_of_stages(stage.num_stages)[stage.index])
        return Qwen3MoeForCausalLM(self.config, stage, self.balance)

    def parallelize_stage(self, stage: nn.Module, mesh: MeshDomains | None, parallel: ParallelConfig) -> None:
        """Spread a stage over the ranks with `lightning_d9d.models.qwen3_moe.parallelize_qwen3_moe`."""
        assert isinstance(stage, Qwen3MoeForCausalLM)
        parallelize_qwen3_moe(stage, mesh, parallel)

    def layers_of_stages(self, num_stages: int) -> list[range]:
        """Return the layers of each stage, for a number of stages."""
        if self.layers_per_stage is not None and num_stages > 1:
            num_layers = self.config.num_hidden_layers
            return split_by_sizes(self.layers_per_stage, num_layers, num_stages, "layers_per_stage")
        return layers_of_stages(self.config, num_stages, self.virtual_layers_before, self.virtual_layers_after)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the arguments, so that `load_from_checkpoint` needs none."""
        checkpoint[ARGUMENTS_KEY] = {
            "config": self.config.to_dict(),
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "betas": tuple(self.betas),
            "warmup_steps": self.warmup_steps,
            "final_learning_rate_fraction": self.final_learning_rate_fraction,
            "layers_per_stage": self.layers_per_stage,
            "virtual_layers_before": self.virtual_layers_before,
            "virtual_layers_after": self.virtual_layers_after,
            "balance": None if self.balance is None else dataclasses.asdict(self.balance),
            "shift_labels": self.shift_labels,
            "peft": None if self.peft is None else as_table(self.peft),
        }

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load like `D9DModule.load_from_checkpoint`; arguments that are not given are taken from the checkpoint."""
        found = read_value(checkpoint_path, ARGUMENTS_KEY)
        saved = {} if found is None else saved_arguments(found, checkpoint_path)
        if "preset" in kwargs:
            saved.pop("config", None)  # not every file has one
        known = inspect.signature(cls.__init__).parameters
        saved = {name: value for name, value in saved.items() if name in known}
        return super().load_from_checkpoint(checkpoint_path, *args, **{**saved, **kwargs})

    def check_paths(self, *, resumes: bool) -> None:
        """Refuse a `pretrained` that does not exist, is a checkpoint, or has no weights or no index of them. Local.

        It is not read in a run that resumes. Weights of a URL are not looked for.

        Raises:
            ConfigError: The directory does not exist, or has no weights in Hugging Face's form.
        """
        if self.pretrained is None or resumes:
            return
        remedy = "give the directory of a model saved as safetensors"
        if not is_path(self.pretrained):
            remedy = f"fetch a model of Hugging Face's hub by `hf download {self.pretrained} --local-dir DIRECTORY`"
        check_directory("pretrained", self.pretrained, remedy)
        refuse_checkpoint(self.pretrained)
        if "://" not in self.pretrained:
            try:
                SafetensorsReader(self.pretrained)
            except StateError as error:
                raise ConfigError(f"pretrained={self.pretrained!r} cannot be read: {error}") from error

    def load_pretrained(self) -> None:
        """Read the directory `pretrained`."""
        if self.pretrained is not None:
            shown = is_watched(self._trainer)
            load_huggingface(list(self.stages), self.pretrained, check_first=False, progress=shown)

    def configure_model(self) -> None:
        """Build the model like `D9DModule.configure_model`, and begin to check batches, starting with the first."""
        super().configure_model()
        self._checks.clear()

    def teardown(self, stage: str) -> None:
        """Finish the checks of the last batches.

        Raises:
            ConfigError: One of these batches is refused, as in `prepare_batch`.
        """
        for check in self._checks.values():
            check.finish()
        self._checks.clear()

    def prepare_batch(self, batch: Any) -> Any:
        """Check a batch and return it with shifted labels, and with `document_ids` in place of `attention_mask`.

        Raises:
            ConfigError: The batch is not a mapping of tensors `[batch, seq]` with `input_ids`, and with `labels` if
                there is a loss. Or an id or a label is outside of the vocabulary, or a document is too long. Or the
                first batch's labels contradict `shift_labels`. On an accelerator ids are refused some batches late.
        """
        has_own_form = type(self).microbatch_inputs is not Qwen3MoePretraining.microbatch_inputs
        if has_own_form and not (isinstance(batch, Mapping) and "input_ids" in batch):
            return batch
        kind = None if self._trainer is None else self.trainer.state.stage
        index, name = self._batch_index(), _NAMES_OF_STAGES.get(kind, "the data")
        check_form(batch, place_in_data(index, name), ("input_ids", "labels") if self._needs_labels else ("input_ids",))
        if kind not in self._checks:
            self._checks[kind] = BatchCheck(
                name, self.config.vocab_size, self.config.max_position_embeddings, self.shift_labels
            )
        return prepared(self._checks[kind](batch, index), self.shift_labels)

    @property
    def _needs_labels(self) -> bool:
        """Return whether the loss of this class needs the batch."""
        return self.makes_loss and type(self).microbatch_loss is Qwen3MoePretraining.microbatch_loss

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        """Return token ids and labels; the last stage computes the loss, and predict has no labels."""
        optional = ("position_ids", "document_ids", "pooling_mask")
        shared = {name: microbatch[name] for name in optional if name in microbatch}
        predicts = self._trainer is not None and self.trainer.predicting
        labels = None if predicts else microbatch.get("labels")
        return StageInputs(
            first={"input_ids": microbatch["input_ids"]}, shared={"labels": labels, "reduction": "sum", **shared}
        )

    def microbatch_loss(self, output: Any, microbatch: Any) -> WeightedLoss:
        """Return the summed cross-entropy, weighted by the labels that count, with the routers' gradient."""
        loss, weight = output.loss, self.microbatch_weight(microbatch)
        if output.router_loss is not None:
            router_loss = output.router_loss * weight
            loss = loss + (router_loss - router_loss.detach())  # adds 0, so that train_loss is the cross-entropy
        return WeightedLoss(loss, weight)

    def microbatch_metrics(self, output: Any, microbatch: Any) -> dict[str, WeightedLoss]:
        """Return the routers' loss, if there is one."""
        if output.router_loss is None:
            return {}
        weight = self.microbatch_weight(microbatch)
        return {"router_loss": WeightedLoss(output.router_loss * weight, weight)}

    def microbatch_weight(self, microbatch: Any) -> Tensor:
        """Return the number of labels that count."""
        return (microbatch["labels"] != IGNORED).sum()

    def predict_output(self, output: Any) -> Tensor:
        """Return logits `[batch, seq, vocab]`."""
        return output.logits

    def on_train_start(self) -> None:
        """Forget the clock and the counts of an earlier fit."""
        self._clock = None
        for balance in self._balances():
            balance.tokens_per_expert.zero_()
            if self.trainer.world_size > 1:
                balance.group = getattr(self.trainer.strategy, "stage_group", None) or dist.group.WORLD

    def on_after_optimizer_step(self, skipped: Tensor | None) -> None:
        """Balance the experts; after a skipped step only restart the counts. Collective over all ranks."""
        if self.balance is not None:
            group = getattr(self.trainer.strategy, "stage_group", None)
            self._counted = update_expert_bias(self, self.balance.bias_rate, group, skipped)

    def on_train_end(self) -> None:
        """Forget the process group of a global batch, because a module with one cannot be copied."""
        for balance in self._balances():
            balance.group = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock again after an interruption, such as a validation."""
        if self._clock is None:
            self._clock = (time.perf_counter(), 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count tokens; every `log_every_n_steps` batches log the rate."""
        if batch is None:  # Lightning warns, and leaves the step out
            return
        assert self._clock is not None
        start, tokens = self._clock
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1}  # of a pipeline all read the same
        tokens += batch["input_ids"].numel() * ranks["num_replicas"]
        self._clock = (start, tokens)
        if (batch_idx + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            now = time.perf_counter()
            rate = torch.tensor(tokens / (now - start))  # on the CPU: the progress bar reads it without a host sync
            self.log("tokens_per_s", rate, prog_bar=True, batch_size=1)
            self._clock = (now, 0)
        counted, self._counted = self._counted, None
        if counted is not None and self.trainer.global_step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log_load(counted)

    def on_validation_start(self) -> None:
        """Stop the clock."""
        self._clock = None

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the batch to the perplexity."""
        self._log_perplexity("val_perplexity", outputs)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the batch to the perplexity."""
        self._log_perplexity("test_perplexity", outputs)

    def arguments_of_default_optimizer(self) -> dict[str, object]:
        """Return the arguments of the AdamW that differ from their defaults."""
        defaults = inspect.signature(Qwen3MoePretraining).parameters
        return {name: value for name in _OF_ADAMW if (value := getattr(self, name)) != defaults[name].default}

    def default_optimizer(self) -> Optimizer:
        """Return AdamW, fused if torch supports that on the device, with the groups of an optimizer in settings."""
        adamw = functools.partial(
            AdamW,
            lr=self.learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,
            fused=self.device.type == "cuda",
        )
        return OptimizerSettings(adamw).make_optimizer(self.named_for_optimizer())

    def default_lr_scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        """Return a schedule of warm-up and cosine decay.

        Raises:
            ConfigError: The Trainer does not know how many steps it will take.
        """
        if total_steps is None:
            raise ConfigError(
                f"the cosine decay of {type(self).__name__} needs the number of steps, which is unknown: max_steps=-1, "
                f"max_epochs={self.trainer.max_epochs}, and the data may not have a length. Set the Trainer's max_steps"
            )
        return LambdaLR(optimizer, lambda step: self._learning_rate_factor(step, total_steps))

    def _balances(self) -> list[ExpertBalance]:
        return [part for part in self.modules() if isinstance(part, ExpertBalance)]

    def _log_load(self, counted: Mapping[str, Tensor]) -> None:
        """Log the load of all layers, which is equal on every rank. Collective over the pipeline."""
        of_layers = torch.zeros(self.config.num_hidden_layers, 2, device=self.device)
        for name, counts in counted.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            assert layer is not None
            of_layers[int(layer[1])] = expert_load(counts)
        self.pipeline.sum(of_layers)
        for layer in filter(self.config.is_sparse, range(self.config.num_hidden_layers)):
            for kind, value in zip(("load", "entropy"), of_layers[layer], strict=True):
                self.log(f"expert_{kind}/layer_{layer}", value, batch_size=1)

    def _batch_index(self) -> int:
        """Return the index of the batch in its epoch; 0 without a Trainer."""
        loop: Any = None if self._trainer is None else self.trainer._active_loop
        loop = loop.epoch_loop if loop is not None and self.trainer.training else loop
        return 0 if loop is None else loop.batch_progress.current.ready - 1

    def _learning_rate_factor(self, step: int, total_steps: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        floor = self.final_learning_rate_fraction
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def _log_perplexity(self, name: str, outputs: dict[str, Tensor]) -> None:
        metric = getattr(self, name)
        with torch.no_grad():
            metric.update(outputs["loss"], outputs["weight"])
        self.log(name, metric, on_step=False, on_epoch=True, prog_bar=True)


def _resolve_config(config: Qwen3MoeConfig | None, preset: str | None) -> Qwen3MoeConfig:
    if config is not None and preset is not None:
        raise ConfigError(
            f"Qwen3MoePretraining got both config and preset={preset!r}; give one. To change a preset's fields in "
            "Python: dataclasses.replace(Qwen3MoeConfig.preset(...), ...); in YAML list the fields under config"
        )
    if config is not None:
        return config
    if preset is None:
        raise ConfigError(f"Qwen3MoePretraining needs config, or preset: {', '.join(map(repr, PRESETS))} or a path")
    if "/" in preset or Path(preset).exists():
        return Qwen3MoeConfig.from_json(preset)
    return Qwen3MoeConfig.preset(preset)  # type: ignore[arg-type]
