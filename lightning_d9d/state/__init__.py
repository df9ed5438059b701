"""Model weights in safetensors files: sharded parameters and pipeline stages stream from and to one directory.

`layout` says which part of a parameter is which part of a file's tensor; `reader` and `writer` follow it and know no
model; `directory` lets a directory appear when it is complete.
"""

from lightning_d9d.state.directory import complete_directory
from lightning_d9d.state.format import DTYPE_NAMES, write_json
from lightning_d9d.state.layout import Box, Index, LocalShard, Piece, tensor_shapes, whole_box
from lightning_d9d.state.reader import SafetensorsReader
from lightning_d9d.state.writer import write_tensors

__all__ = [
    "DTYPE_NAMES",
    "Box",
    "Index",
    "LocalShard",
    "Piece",
    "SafetensorsReader",
    "complete_directory",
    "tensor_shapes",
    "whole_box",
    "write_json",
    "write_tensors",
]
