"""Operations below the modules: one op a file, each a public function with a plain torch reference.

`grouped_gemm` is the product of sorted tokens with their experts' matrices; `linear` and `split_linears` are products
with one. Both can defer their weight gradients, with `WeightGradients` and `defer`, for split backwards. `moe_route`
chooses the experts of tokens; `moe_permute` copies tokens to their experts' rows, and `moe_unpermute` sums the results.
`multihot_from_indices` and `indices_from_multihot` convert the choice from and to a map over all experts.
`adapted_gate_up`, `adapted_swiglu` and `adapted_down` are the products and the activation of experts with adapters;
`adapted_linears` are the products of frozen linear layers with theirs. `all_to_all_rows` sends rows to other ranks;
`gather_dim`, `scatter_sum` and `sum_over` are collectives for computations that ranks share. `linear_cross_entropy` is
the loss of a product with a vocabulary's matrix, without all logits in memory. `vocab_parallel_embedding` looks up rows
of a vocabulary that is sharded over ranks. `attention` attends causally, within documents and a window if given, and
chooses its kernel. `round_stochastic_` rounds float32 to bfloat16 without bias. `fill_normal_` makes normal values that
follow from a key and from places in a whole tensor. `rms_norm` scales rows to a unit root mean square. `swiglu` is the
gated activation of MLPs and experts. `rope` turns heads by their positions; `norm_rope` norms them before. `rope_qk`
and `norm_rope_qk` take queries and keys at once.
"""

from lightning_d9d.ops.adapted_experts import adapted_down, adapted_gate_up, adapted_swiglu
from lightning_d9d.ops.adapted_linears import adapted_linears
from lightning_d9d.ops.all_to_all import all_to_all_copies, all_to_all_rows
from lightning_d9d.ops.attention import AttentionKernel, attention
from lightning_d9d.ops.collectives import gather_dim, scatter_sum, sum_over
from lightning_d9d.ops.fill_normal import fill_normal_
from lightning_d9d.ops.grouped_gemm import grouped_gemm, using_grouped_gemm
from lightning_d9d.ops.linear import linear, split_linears
from lightning_d9d.ops.linear_cross_entropy import LossOptions, VocabShard, linear_cross_entropy
from lightning_d9d.ops.moe_permute import Permutation, moe_permute, moe_unpermute
from lightning_d9d.ops.moe_route import Routes, moe_route
from lightning_d9d.ops.multihot import indices_from_multihot, multihot_from_indices
from lightning_d9d.ops.norm_rope import norm_rope, norm_rope_qk
from lightning_d9d.ops.rms_norm import rms_norm
from lightning_d9d.ops.rope import rope, rope_qk
from lightning_d9d.ops.stochastic import round_stochastic_
from lightning_d9d.ops.swiglu import swiglu
from lightning_d9d.ops.vocab_parallel import vocab_parallel_embedding
from lightning_d9d.ops.weight_gradients import WeightGradients, defer

__all__ = [
    "AttentionKernel",
    "LossOptions",
    "Permutation",
    "Routes",
    "VocabShard",
    "WeightGradients",
    "adapted_down",
    "adapted_gate_up",
    "adapted_linears",
    "adapted_swiglu",
    "all_to_all_copies",
    "all_to_all_rows",
    "attention",
    "defer",
    "fill_normal_",
    "gather_dim",
    "grouped_gemm",
    "indices_from_multihot",
    "linear",
    "linear_cross_entropy",
    "moe_permute",
    "moe_route",
    "moe_unpermute",
    "multihot_from_indices",
    "norm_rope",
    "norm_rope_qk",
    "rms_norm",
    "rope",
    "rope_qk",
    "round_stochastic_",
    "scatter_sum",
    "split_linears",
    "sum_over",
    "swiglu",
    "using_grouped_gemm",
    "vocab_parallel_embedding",
]
