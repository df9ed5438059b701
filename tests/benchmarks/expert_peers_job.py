"""A process of `expert_peers`: one contender trains for some steps on several ranks, with its time, memory and loss."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import re
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

from lightning_d9d import D9DStrategy, GradSyncConfig, MeshConfig, ParallelConfig
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW
from tests.benchmarks.pipeline import fill, fill_by_name, values_by_name
from tests.benchmarks.plan_runs_job import Rows
from tests.benchmarks.train_step import config_of_transformers

FIRST_STEPS = 3
"""The first steps, which are not timed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a contender trains. The learning rate is 0, so weights, the choice of experts and losses stay equal."""

    package: str
    num_ranks: int = 2
    spreads: bool = True
    """Whether experts are spread over the ranks."""
    compiles: bool = False
    device_type: str
    preset: str
    layers: int
    rows: int
    tokens: int
    steps: int
    recompute: str = "full"

    @property
    def config(self) -> Qwen3MoeConfig:
        """The geometry."""
        config = Qwen3MoeConfig.preset(self.preset)  # type: ignore[arg-type]
        return replace(config, num_hidden_layers=self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, gradients, their sums and optimizer states."""
        return torch.bfloat16 if self.device_type == "cuda" else torch.float32

    @property
    def name_of_dtype(self) -> str:
        """The dtype's name."""
        return str(self.dtype).removeprefix("torch.")


def loader(job: Job) -> DataLoader[dict[str, Tensor]]:
    """Return the batches of this rank, the same for every contender."""
    data = Rows(job.steps * job.num_ranks * job.rows, job.tokens, job.config.vocab_size)
    sampler = DistributedSampler(data, num_replicas=job.num_ranks, rank=int(os.environ["RANK"]), shuffle=False)
    return DataLoader(data, batch_size=job.rows, sampler=sampler, pin_memory=job.device_type == "cuda")


class Meter:
    """Notes when steps are done, by the device's clock, and the most memory from here on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []
        self.loss = 0.0
        """The mean over all ranks in the last step."""
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def step_done(self) -> None:
        """Note the end of a step."""
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def measured(self) -> dict[str, Any]:
        """Return the seconds of each step but the first ones, the loss of the last one and the memory, of a rank."""
        found: dict[str, Any] = {"loss": self.loss}
        pairs = list(zip(self.marks[FIRST_STEPS - 1 : -1], self.marks[FIRST_STEPS:], strict=True))
        if self.device.type == "cuda":
            found["step_seconds"] = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
            found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
            found["device"] = torch.cuda.get_device_name()
        else:
            found["step_seconds"] = [end - begin for begin, end in pairs]
        return found


class Measure(L.Callback):
    """Gives the stages the weights that all contenders have, and measures the fit."""

    meter: Meter
    dispatch: str
    """How tokens reach the experts, and why."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put in the weights."""
        for stage in pl_module.stages:  # type: ignore[union-attr]
            fill_by_name(stage, pl_module.device)
        strategy: Any = trainer.strategy
        self.dispatch = str(strategy.staging.dispatch)
        self.meter = Meter(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the end of a step."""
        self.meter.step_done()
        if trainer.global_step == trainer.max_steps:
            self.meter.loss = float(trainer.callback_metrics["train_loss"])


def train_ours(job: Job) -> dict[str, Any]:
    """Fit by `Trainer`, with the settings of `examples/qwen3_moe/30b_a3b_two_gpus.yaml`, but no norm and no log."""
    optimizer = functools.partial(StochasticAdamW, lr=0.0, state_dtype=job.dtype)
    module = Qwen3MoePretraining(job.config, optimizer=optimizer)
    strategy = D9DStrategy(
        mesh=MeshConfig(data_parallel_replicate=job.num_ranks, expert_parallel=job.num_ranks if job.spreads else 1),
        parallel=ParallelConfig(recompute=job.recompute, compile=job.compiles),
        grad_sync=GradSyncConfig(dtype=job.name_of_dtype),  # type: ignore[arg-type]
    )
    measure = Measure()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="gpu" if job.device_type == "cuda" else "cpu",
            devices=job.num_ranks,
            precision="bf16-true" if job.dtype == torch.bfloat16 else "32-true",
            max_steps=job.steps,
            callbacks=[measure],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader(job))
    return measure.meter.measured() | {"dispatch": measure.dispatch}


def train_transformers(job: Job) -> dict[str, Any]:
    """Train transformers' model, sharded and spread by its own `DistributedConfig`."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(fsdp_size=job.num_ranks, ep_size=job.num_ranks if job.spreads else 1)
    _, _, meshes = Qwen3MoeForCausalLM.prepare_distribute_model(distributed)
    device = _device(job)
    config = config_of_transformers(job.config, "grouped_mm")
    with torch.device("meta"):
        network: Any = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=job.dtype)
    network.train()
    if job.recompute != "none":
        network.gradient_checkpointing_enable({"use_reentrant": False})
    if job.compiles:
        for layer in network.model.layers:
            layer.compile()
    network = Qwen3MoeForCausalLM.maybe_distribute_model(network, distributed, meshes)
    network.to_empty(device=device)
    network.model.rotary_emb = type(network.model.rotary_emb)(config).to(device)  # its tables are in no state dict
    fill_by_name(network, device)

    def mean_loss(ids: Tensor, labels: Tensor) -> Tensor:
        return network(ids, labels=labels, shift_labels=labels, use_cache=False).loss

    return train_peer(job, network, mean_loss, device)


def train_torchtitan(job: Job) -> dict[str, Any]:
    """Train torchtitan's model, sharded and spread by its own function for Qwen3."""
    for name, content in STAND_INS.items():
        _stand_in(name, content)
    parts = {
        name: importlib.import_module(f"torchtitan.{name}")
        for name in ("config", "components.loss", "distributed.parallel_dims", "models.qwen3.infra.parallelize")
    }
    device = _device(job)
    parallel_dims: Any = parts["distributed.parallel_dims"]
    parallel_dims.device_type = device.type  # it knows GPUs only
    dims = parallel_dims.ParallelDims(
        dp_replicate=1,
        dp_shard=job.num_ranks,
        cp=1,
        tp=1,
        pp=1,
        ep=job.num_ranks if job.spreads else 1,
        etp=1,
        world_size=job.num_ranks,
    )
    settings = parts["config"].JobConfig()
    settings.training.seq_len = job.tokens
    settings.training.mixed_precision_param = settings.training.mixed_precision_reduce = job.name_of_dtype
    settings.compile.enable = job.compiles
    settings.activation_checkpoint.mode = job.recompute
    settings.activation_checkpoint.selective_ac_option = "op"
    network = _torchtitan_network(job)
    network = parts["models.qwen3.infra.parallelize"].parallelize_qwen3(network, dims, settings)
    for module in network.modules():
        if isinstance(module, FSDPModule):  # its factor of 1 would be nccl's PREMUL_SUM, which bfloat16 and gloo lack
            module.set_force_sum_reduction_for_comms(True)
    network.to_empty(device=device)
    with torch.no_grad():
        network.init_weights(buffer_device=None)
        _fill_torchtitan(network, device)
    network.train()
    summed_loss = parts["components.loss"].build_cross_entropy_loss(settings)
    num_tokens = job.num_ranks * job.rows * job.tokens

    def mean_loss(ids: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(network(ids), labels) / num_tokens  # its shards add gradients up

    return train_peer(job, network, mean_loss, device, of_all_ranks=True)


STAND_INS = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}
"""Modules that torchtitan imports for texts and logs, with what it takes from them. Neither is needed here."""


def _stand_in(name: str, content: Sequence[str]) -> None:
    """Put an empty module in the place of one that may not be installed."""
    module = types.ModuleType(name)
    for each in content:
        setattr(module, each, object)
    sys.modules[name] = module


def _torchtitan_network(job: Job) -> nn.Module:
    """Return torchtitan's model of the geometry, on the meta device."""
    moe = importlib.import_module("torchtitan.models.moe")
    arguments = importlib.import_module("torchtitan.models.qwen3.model.args")
    model = importlib.import_module("torchtitan.models.qwen3.model.model")
    config = job.config
    experts = moe.MoEArgs(
        num_experts=config.num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=config.norm_topk_prob,
        score_before_experts=False,
        top_k=config.num_experts_per_tok,
    )
    sizes = arguments.Qwen3ModelArgs(
        vocab_size=config.vocab_size,
        max_seq_len=job.tokens,
        head_dim=config.head_dim,
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        hidden_dim=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        moe_enabled=True,
        moe_inter_dim=config.moe_intermediate_size,
        moe_args=experts,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(job.dtype)
    try:
        with torch.device("meta"):
            return model.Qwen3Model(sizes)
    finally:
        torch.set_default_dtype(before)


OF_TORCHTITAN = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "moe.router.gate": "mlp.gate",
}
"""Its modules, and what they are called here."""
OF_ITS_EXPERTS = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None)}
"""Its weights of experts, what they are called here, and which half of dim 1 they are."""


def _fill_torchtitan(network: nn.Module, device: torch.device) -> None:
    """Give its parameters the values that `fill_by_name` gives ours."""
    for name, parameter in network.named_parameters():
        name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        layer, rest = re.match(r"(layers\.\d+\.)?(.*)", name).groups()  # type: ignore[union-attr]
        module, _, last = rest.rpartition(".")
        layer = f"model.{layer}" if layer else ""
        if module != "moe.experts":
            whole = values_by_name(f"{layer}{OF_TORCHTITAN[module]}.{last}", parameter.shape, parameter.dtype, device)
        else:
            other, half = OF_ITS_EXPERTS[last]
            num_experts, middle, end = parameter.shape
            shape = (num_experts, middle if half is None else 2 * middle, end)
            whole = values_by_name(f"{layer}mlp.experts.{other}", shape, parameter.dtype, device)
            whole = whole if half is None else whole.chunk(2, dim=1)[half]
        fill(parameter, whole)


def train_peer(
    job: Job,
    network: nn.Module,
    mean_loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    of_all_ranks: bool = False,
) -> dict[str, Any]:
    """Train a peer in the loop that one would write for it: forward, backward, torch's fused AdamW.

    Args:
        job: What is trained.
        network: The model, spread and filled.
        mean_loss: Gives the loss of ids and labels.
        device: Where it is.
        of_all_ranks: Whether the loss is this rank's part of the mean over the tokens of all ranks.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in network.parameters():
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
    groups = [{"params": parameters} for parameters in by_mesh.values()]
    optimizer = AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    meter, loss = Meter(device), torch.zeros(())
    for ids, labels in _batches(job, device):
        loss = mean_loss(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_done()
    loss = loss.detach() * (job.num_ranks if of_all_ranks else 1)
    dist.all_reduce(loss)
    meter.loss = loss.item() / job.num_ranks
    return meter.measured()


def _batches(job: Job, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of this rank."""
    for batch in loader(job):
        yield batch["input_ids"].to(device, non_blocking=True), batch["labels"].to(device, non_blocking=True)


def _device(job: Job) -> torch.device:
    """Return this rank's device, with a default process group for it."""
    if job.device_type != "cuda":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=device)
    return device


TRAIN: dict[str, Callable[[Job], dict[str, Any]]] = {
    "lightning_d9d": train_ours,
    "transformers": train_transformers,
    "torchtitan": train_torchtitan,
}
"""What trains, by package."""


def main() -> None:
    """Train, and write what was measured on all ranks: of memory the most, of the rest rank 0's."""
    job, output = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    if find_spec(job.package) is None:
        raise ModuleNotFoundError(f"{job.package} is not installed")
    if job.package != "lightning_d9d":
        gc.disable()  # ranks of a plain loop would wait for each other's collections
    measured = TRAIN[job.package](job)
    every = all_gather_object(measured)
    if dist.get_rank() == 0:
        most = {name: max(each[name] for each in every) for name in measured if name.endswith("_bytes")}
        versions = {name: version(name) for name in ("torch", job.package) if name != "lightning_d9d"}
        output.write_text(json.dumps(measured | most | {"versions": versions}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
