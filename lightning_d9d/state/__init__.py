"""Model weights in safetensors files: sharded parameters and pipeline stages stream from and to one directory.

`layout` says which part of a parameter is which part of a file's tensor; `reader` and `writer` follow it and know no
model; `agreement` makes a failure on one rank a failure on all.
"""

from lightning_d9d.state.agreement import agreed, from_all_ranks, is_first_rank
from lightning_d9d.state.format import DTYPE_NAMES, write_json
from lightning_d9d.state.layout import Box, Index, LocalShard, Piece, tensor_shapes, whole_box
from lightning_d9d.state.reader import SafetensorsReader
from lightning_d9d.state.writer import complete_directory, write_tensors

__all__ = [
    "DTYPE_NAMES",
    "Box",
    "Index",
    "LocalShard",
    "Piece",
    "SafetensorsReader",
    "agreed",
    "complete_directory",
    "from_all_ranks",
    "is_first_rank",
    "tensor_shapes",
    "whole_box",
    "write_json",
    "write_tensors",
]
