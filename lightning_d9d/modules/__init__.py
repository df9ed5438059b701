"""Building blocks of decoder models for one device, on `lightning_d9d.ops`.

Every module that directly owns parameters has its own `reset_parameters()`, and no block computes a buffer when it is
built. So a model can be built under `torch.device("meta")`, then allocated with `to_empty(device=...)` and reset part
by part. Modules with matrices also define their `initial_values()`, of which a rank of a sharded stage computes only
its own part. Softmax, norms, rotary tables and losses are computed in float32, or in float64 for float64 models.
"""

from lightning_d9d.modules.attention import GroupedQueryAttention
from lightning_d9d.modules.balance import BalanceConfig, ExpertBalance, expert_load, update_expert_bias
from lightning_d9d.modules.dispatch import AllToAllDispatch, Dispatch, LocalDispatch
from lightning_d9d.modules.embedding import SplitTokenEmbedding, TokenEmbedding
from lightning_d9d.modules.experts import GroupedExperts
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.modules.linear import Linear
from lightning_d9d.modules.lm_head import LMHead, SplitLMHead
from lightning_d9d.modules.mlp import SwiGLU
from lightning_d9d.modules.moe import SparseMoE, TopKRouter
from lightning_d9d.modules.norm import RMSNorm
from lightning_d9d.modules.rope import document_positions, rope_tables

__all__ = [
    "AllToAllDispatch",
    "BalanceConfig",
    "Constant",
    "Dispatch",
    "DrawnByRows",
    "ExpertBalance",
    "GroupedExperts",
    "GroupedQueryAttention",
    "LMHead",
    "Linear",
    "LocalDispatch",
    "Normal",
    "RMSNorm",
    "SparseMoE",
    "SplitLMHead",
    "SplitTokenEmbedding",
    "SwiGLU",
    "TokenEmbedding",
    "TopKRouter",
    "document_positions",
    "expert_load",
    "rope_tables",
    "update_expert_bias",
]
