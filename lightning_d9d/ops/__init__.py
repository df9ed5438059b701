"""Operations below the modules: one op a file, each a public function with a plain torch reference.

`grouped_gemm` is the product of sorted tokens with their experts' matrices; `linear` and `split_linears` are products
with one. Both can put their weight gradients off, with `WeightGradients` and `put_off`, for split backwards.
`all_to_all_rows` brings rows to other ranks.
"""

from lightning_d9d.ops.all_to_all import all_to_all_rows
from lightning_d9d.ops.grouped_gemm import grouped_gemm
from lightning_d9d.ops.linear import linear, split_linears
from lightning_d9d.ops.weight_gradients import WeightGradients, put_off

__all__ = ["WeightGradients", "all_to_all_rows", "grouped_gemm", "linear", "put_off", "split_linears"]
