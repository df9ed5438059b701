"""All Triton code: the kernels of an op, and what launches them, in a file with the name of the op's own.

An op imports its kernels when the first of them runs, so the package works where Triton is not installed. Of the
processes of a machine one compiles each: [Note: compiling].
"""

from lightning_d9d.ops.kernels import compiling

compiling.install()
