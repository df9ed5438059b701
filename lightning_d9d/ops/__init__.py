"""Operations below the modules: one op a file, each a public function with a plain torch reference.

Today: `grouped_gemm`, the product of sorted tokens with their experts' matrices.
"""

from lightning_d9d.ops.grouped_gemm import grouped_gemm

__all__ = ["grouped_gemm"]
