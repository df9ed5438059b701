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
        ConfigError: A value is not one of those listed below, or two settings exclude each other.
    """

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Reshard fully sharded parameters after each forward and all-gather them again for its backward. False keeps them
    from a stage's first forward of a batch to its last backward: faster, but the rank's whole stages must fit into
    memory. Pipelines and several microbatches make "auto" False; otherwise it is True. Schedules with split backwards
    always keep them gathered."""

    recompute: str = "none"
    """Activations that are recomputed in the backward instead of kept. With "none" all are kept. With "full" each block
    is recomputed. With "offload" each block is recomputed, and its input waits in host memory, copied while other
    blocks compute. With "selective" all of a block is recomputed except matrix products, attention, routing and
    all-to-alls. With "attention" each attention module is recomputed. With "every_2", or another number, every second
    block is recomputed. With "3_of_4", or other numbers, the first three of every four blocks are recomputed."""

    compile: bool = False
    """Compile each block with `torch.compile`. Recomputation then covers whole blocks. In split backwards compiled
    blocks have no weight phase."""

    cuda_graphs: bool = False
    """Capture the forward and the backward of each block as CUDA graphs, for small models whose steps wait for the
    host. Each rank must hold the whole model. Neither `compile` nor `recompute` may be set. The schedule must run the
    backward of a microbatch before the next forward. Without CUDA it changes nothing."""

    expert_dispatch: ExpertDispatch = "auto"
    """How tokens are sent to experts on other ranks. With "peer" ranks of one host write into each other's memory while
    a D9DModule is trained. The host waits once for each forward of a stage and each batch, and in no layer. The default
    "auto" is "local" if a rank has all experts. Under `D9DStrategy` it is "peer" for GPUs of one host with peer access,
    if no other setting refuses that and memory suffices. Otherwise it is "all_to_all"."""

    expert_capacity: float = 1.5
    """Room for token copies for a rank's experts with peer dispatch, as a multiple of an even share, at least 1. A
    forward that needs more runs again by all-to-all, and after the batch the memory grows."""

    overlap_experts: bool = False
    """Send the tokens of a layer to experts on other ranks in two halves. On CUDA messages have a separate stream:
    messages of one half overlap the products of the other. Messages are half as long, and there are twice as many."""

    overlap_pairs: bool = False
    """Run the forward and the backward of an overlapped pair of the schedule in turns, which change where tokens go to
    experts on other ranks. On CUDA messages of one microbatch overlap the computation of the other. The schedule must
    have pairs, as "dual_pipe_v" has. Tokens travel by all-to-all, for which the host waits behind the other
    microbatch."""

    grouped_gemm: GroupedGemmBackend = "auto"
    """The backend of the experts' matrix products. By default, "auto" uses torch's `grouped_mm` if that supports the
    tensors, else "eager". On Hopper it uses "quack" for large products, if that is installed. With "torch" it is always
    `grouped_mm`. "quack" is the package quack-kernels (`pip install 'lightning-d9d[quack]'`). The package
    nv-grouped-gemm (`pip install 'lightning-d9d[grouped-gemm]'`) is "nv"; each of its products waits for the device.
    With "eager" each expert has a separate product, which waits, too. It applies to the whole process, from setup to
    teardown."""

    context: Literal["gather", "ring", "heads"] = "gather"
    """How attention sees sequences that are spread over ranks (context parallelism). With "gather" each rank
    all-gathers the keys and values. With "ring" keys and values are passed from rank to rank while those that have
    arrived are attended to; a rank never holds all. With "heads" an all-to-all gives each rank whole sequences, for
    some heads."""

    pad_sequences: bool = False
    """Pad sequences that the ranks of context and tensor parallelism cannot share evenly. The padding is at their end,
    and its labels do not count. False refuses such sequences."""

    kernels: Kernels = "auto"
    """The kernels of ops. By default, "auto" uses this package's kernels on CUDA, except where others were measured to
    be faster. With "torch" all ops use torch's, to find out whether a kernel is at fault. With "triton" all ops use the
    package's own. It applies to all ops of the process, from setup to teardown."""

    gather_dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype in which fully sharded parameters are gathered and computed. None means bfloat16 if the Trainer's
    precision is "bf16-mixed", whose autocast is then off inside stages, else the parameters' own."""

    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype in which gradients of fully sharded parameters are summed and kept. None means the dtype of
    `GradSyncConfig`, if that sets one, else float32, or the parameters' own if wider."""

    offload: bool = False
    """Keep fully sharded parameters, their gradients and the optimizer's state in host memory."""

    shard_blocks: tuple[str, ...] | None = None
    """Names of the classes whose modules are gathered one at a time when parameters are fully sharded. By default,
    these are the entries of the `ModuleList`s and `ModuleDict`s of a `D9DModule`'s stage. Plain LightningModules are
    sharded and recomputed only if it is given."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("reshard_after_forward", (True, False, "auto")),
            ("compile", (True, False)),
            ("cuda_graphs", (True, False)),
            ("expert_dispatch", get_args(ExpertDispatch)),
            ("overlap_experts", (True, False)),
            ("overlap_pairs", (True, False)),
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
                "memory only for experts with equal loads"
            )
        if self.recompute not in ("none", "full", "offload", "selective", "attention") and not self._recomputed_of:
            raise ConfigError(
                f"ParallelConfig.recompute={self.recompute!r} must be 'none', 'full', 'offload', 'selective', "
                "'attention' or a part of the blocks, such as 'every_2' or '3_of_4'"
            )
        if self.compile and self.recompute in ("selective", "attention"):
            raise ConfigError(
                f"ParallelConfig.compile=True with recompute={self.recompute!r}, which recomputes parts of blocks, but "
                "blocks are compiled whole. Choose recompute='none', 'full', 'offload', 'every_2' or '3_of_4'"
            )
        if self.compile and self.overlap_experts:
            raise ConfigError(
                "ParallelConfig.compile=True with overlap_experts=True: the compiler does not support streams; leave "
                "out one of them"
            )
        if self.overlap_pairs:
            self._check_pairs()
        if self.cuda_graphs and (self.compile or self.recompute != "none"):
            other = "compile=True" if self.compile else f"recompute={self.recompute!r}"
            raise ConfigError(f"ParallelConfig.cuda_graphs=True cannot be combined with {other}; leave out one of them")
        if isinstance(self.shard_blocks, str) or self.shard_blocks == ():
            raise ConfigError(
                f"ParallelConfig.shard_blocks={self.shard_blocks!r} must be a list of names of classes, such as "
                '["Block"], or None'
            )
        if self.shard_blocks is not None:
            object.__setattr__(self, "shard_blocks", tuple(self.shard_blocks))  # YAML has lists

    def _check_pairs(self) -> None:
        reasons = {
            "overlap_experts=True": (self.overlap_experts, "both move messages to a separate stream"),
            "expert_dispatch='peer'": (self.expert_dispatch == "peer", "both microbatches would write to one memory"),
            "compile=True": (self.compile, "a compiled block does not give way to the other microbatch"),
            "cuda_graphs=True": (self.cuda_graphs, "a graph holds the state of one microbatch"),
            "recompute='offload'": (self.recompute == "offload", "inputs on the host have one order of copies"),
        }
        for other, (is_set, reason) in reasons.items():
            if is_set:
                raise ConfigError(f"ParallelConfig.overlap_pairs=True with {other}: {reason}; leave out one of them")

    @property
    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtypes to gather and to reduce in; None if they are not set."""
        gathered, reduced = (name and getattr(torch, name) for name in (self.gather_dtype, self.reduce_dtype))
        return gathered, reduced

    def keeps_gathered(self, *, num_stages: int, is_one_microbatch: bool) -> bool:
        """Return whether fully sharded stages stay gathered over a batch, unless a schedule that splits asks for it.

        Args:
            num_stages: Pipeline ranks.
            is_one_microbatch: Whether a batch is never more.
        """
        if self.reshard_after_forward == "auto":
            return num_stages > 1 or not is_one_microbatch
        return not self.reshard_after_forward

    def recomputes_block(self, place: int) -> bool:
        """Return whether all of the block at this place in its stage is recomputed."""
        if (part := self._recomputed_of) is not None:
            return place % part[1] < part[0]
        return self.recompute in ("full", "offload")

    @property
    def _recomputed_of(self) -> tuple[int, int] | None:
        """Return how many of how many blocks: (1, 2) for "every_2", (3, 4) for "3_of_4", None for the other kinds."""
        if match := re.fullmatch(r"every_([1-9]\d*)", self.recompute):
            return 1, int(match[1])
        if (match := re.fullmatch(r"([1-9]\d*)_of_([1-9]\d*)", self.recompute)) and int(match[1]) <= int(match[2]):
            return int(match[1]), int(match[2])
        return None
