"""All Triton code: the kernels of an op and their launchers are in a file with the op's name.

An op imports its kernels when the first of them runs, so the package works without Triton. One process of a machine
compiles each kernel: [Note: compiling].
"""

from lightning_d9d.ops.kernels import compiling

compiling.install()
