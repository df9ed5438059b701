from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import Kernels
from lightning_d9d.ops.grouped_gemm import GroupedGemmBackend

ExpertDispatch = Literal["auto", "local", "all_to_all", "peer"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a module is spread over the ranks of a mesh.

    Raises:
        ConfigError: A value that is none of those named below.
    """

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Reshard fully sharded parameters after each forward and all-gather them again for its backward. False keeps
    them from a stage's first forward of a batch to its last backward: faster, at the price of the memory of the
    rank's whole stages. "auto": False in pipelines and with several microbatches, else True. Schedules with split
    backwards always keep them."""

    recompute: str = "none"
    """Activations that are recomputed in the backward instead of kept. With "none" all are kept. With "full" each block
    is computed again. With "offload" it is, too, and its input waits in the host's memory, copied beside the
    computation. With "selective" all of a block is but for matrix products, attention, routing and all-to-alls. With
    "attention" each attention module is. With "every_2", or another number, every second block is. With "3_of_4", or
    other numbers, the first three of every four blocks are."""

    compile: bool = False
    """Compile each block with `torch.compile`. Recomputation is of whole blocks then. In split backwards compiled
    blocks have no weight phase."""

    cuda_graphs: bool = False
    """Capture the forward and the backward of each block as CUDA graphs, for small models, whose steps wait for the
    host. It takes ranks that hold the whole model, neither `compile` nor `recompute`, and schedules in
    which the backward of a microbatch comes before the next forward. Without CUDA it changes nothing."""

    expert_dispatch: ExpertDispatch = "auto"
    """How tokens come to experts on other ranks. "auto": "local" where a rank has all experts, else "all_to_all".
    With "peer" ranks of one host write into each other's memory while a D9DModule is trained, and the host does not
    wait for sizes. It takes windows of one batch, without `step_in_backward`."""

    expert_capacity: float = 1.5
    """With `expert_dispatch="peer"` the copies of tokens that a rank's experts have memory for, as a multiple of an
    even share: at least 1. A batch that needs more is computed again by all-to-all, and then there is more memory."""

    overlap_experts: bool = False
    """True sends the tokens of a layer to experts on other ranks in two halves. On CUDA messages have a stream of their
    own: those of one half run beside the products of the other. Messages are half as long, and twice as many."""

    grouped_gemm: GroupedGemmBackend = "auto"
    """The backend of the experts' matrix products. "auto": torch's `grouped_mm` where it takes their tensors, else
    "eager"; large ones on Hopper "quack", where that is installed. "torch". "quack": the package quack-kernels (`pip
    install 'lightning-d9d[quack]'`). "nv": the package nv-grouped-gemm (`pip install 'lightning-d9d[grouped-gemm]'`),
    whose every product waits for the device. "eager": a product for each expert; it waits, too. For all of the process,
    from setup to teardown."""

    context: Literal["gather", "ring", "heads"] = "gather"
    """How attention sees sequences that are spread over ranks (context parallelism). "gather": each rank gathers the
    keys and values of all. "ring": they travel from rank to rank while those that are there are attended to, and no
    rank holds all. "heads": an all-to-all gives each rank whole sequences, for some heads."""

    pad_sequences: bool = False
    """Pad sequences that the ranks of context and tensor parallelism cannot share evenly. The padding is at their end,
    with labels that do not count. False refuses such sequences."""

    kernels: Kernels = "auto"
    """The kernels of ops. "auto": on CUDA their own, or what was measured to be faster there. "torch":
    torch's everywhere, to find out whether a kernel is at fault. "triton": their own everywhere. For all ops of the
    process, from setup to teardown."""

    gather_dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype that fully sharded parameters are gathered and computed in. None: bfloat16 if the Trainer's precision
    is "bf16-mixed", whose autocast is then off inside of stages, else the parameters' own."""

    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype that gradients of fully sharded parameters are summed and kept in. None: that of `GradSyncConfig`, if
    it names one, else float32 or the parameters' own if wider."""

    offload: bool = False
    """Keep fully sharded parameters, their gradients and the optimizer's state in the host's memory."""

    shard_blocks: tuple[str, ...] | None = None
    """Names of the classes whose modules are gathered one at a time when parameters are fully sharded. By default, of a
    `D9DModule`'s stage, the entries of its `ModuleList`s and `ModuleDict`s. Plain LightningModules are sharded and
    recomputed only where it is given."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("reshard_after_forward", (True, False, "auto")),
            ("compile", (True, False)),
            ("cuda_graphs", (True, False)),
            ("expert_dispatch", get_args(ExpertDispatch)),
            ("overlap_experts", (True, False)),
            ("kernels", get_args(Kernels)),
            ("grouped_gemm", get_args(GroupedGemmBackend)),
            ("context", ("gather", "ring", "heads")),
            ("pad_sequences", (True, False)),
            ("gather_dtype", (None, "float32", "bfloat16")),
            ("reduce_dtype", (None, "float32", "bfloat16")),
            ("offload", (True, False)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"ParallelConfig.{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, allowed))}"
                )
        if not 1.0 <= self.expert_capacity < math.inf:
            raise ConfigError(
                f"ParallelConfig.expert_capacity={self.expert_capacity} must be a number of at least 1, which has "
                "memory for experts with equal loads alone"
            )
        if self.recompute not in ("none", "full", "offload", "selective", "attention") and not self._recomputed_of:
            raise ConfigError(
                f"ParallelConfig.recompute={self.recompute!r} must be 'none', 'full', 'offload', 'selective', "
                "'attention' or a part of the blocks, such as 'every_2' or '3_of_4'"
            )
        if self.compile and self.recompute in ("selective", "attention"):
            raise ConfigError(
                f"ParallelConfig.compile=True with recompute={self.recompute!r}, of something inside of blocks, which "
                "are compiled whole; choose recompute='none', 'full', 'offload' or 'every_2'"
            )
        if self.compile and self.overlap_experts:
            raise ConfigError(
                "ParallelConfig.compile=True with overlap_experts=True: the compiler does not see streams; leave out "
                "one of them"
            )
        if self.cuda_graphs and (self.compile or self.recompute != "none"):
            other = "compile=True" if self.compile else f"recompute={self.recompute!r}"
            raise ConfigError(f"ParallelConfig.cuda_graphs=True cannot be had with {other}; leave out one of them")
        if isinstance(self.shard_blocks, str) or self.shard_blocks == ():
            raise ConfigError(
                f"ParallelConfig.shard_blocks={self.shard_blocks!r} must be a list of names of classes, such as "
                '["Block"], or None'
            )
        if self.shard_blocks is not None:
            object.__setattr__(self, "shard_blocks", tuple(self.shard_blocks))  # YAML has lists

    @property
    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes of gathering and of reducing, None where they are not set."""
        gathered, reduced = (name and getattr(torch, name) for name in (self.gather_dtype, self.reduce_dtype))
        return gathered, reduced

    def recomputes_block(self, place: int) -> bool:
        """Return whether all of the block at this place in its stage is computed again."""
        if (part := self._recomputed_of) is not None:
            return place % part[1] < part[0]
        return self.recompute in ("full", "offload")

    @property
    def _recomputed_of(self) -> tuple[int, int] | None:
        """How many of how many blocks: (1, 2) of "every_2" and (3, 4) of "3_of_4"; None for the other kinds."""
        if match := re.fullmatch(r"every_([1-9]\d*)", self.recompute):
            return 1, int(match[1])
        if (match := re.fullmatch(r"([1-9]\d*)_of_([1-9]\d*)", self.recompute)) and int(match[1]) <= int(match[2]):
            return int(match[1]), int(match[2])
        return None
