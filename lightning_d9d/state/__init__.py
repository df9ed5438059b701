"""Model weights in safetensors files: sharded parameters and pipeline stages stream from and to one directory.

`mappers` say which tensors become which others; `stream` reads, loads and saves through them. Below them, `views` are
tensors assembled from parts of others, and `boxes` maps a box of a tensor to a box of another. `reader`, `shards` and
`writer` process views and know nothing about models. `format`, `manifest` and `places` are the files; `threads`
processes several at a time. `directory` publishes a directory when it is complete.
"""

from lightning_d9d.state.boxes import Box, Index, LocalShard, MappedBox, whole_box
from lightning_d9d.state.directory import complete_directory
from lightning_d9d.state.format import DTYPE_NAMES, write_json
from lightning_d9d.state.mappers import (
    Cast,
    Concatenate,
    Distribute,
    Gather,
    Group,
    Identity,
    Inverse,
    Mapper,
    Parallel,
    Prefix,
    Rename,
    Select,
    Sequential,
    Share,
    Split,
    Stack,
    Transpose,
)
from lightning_d9d.state.reader import SafetensorsReader
from lightning_d9d.state.shards import Checks, check_names, fill_shards
from lightning_d9d.state.stream import MAX_SHARD_BYTES, load_tensors, read_tensors, save_tensors
from lightning_d9d.state.views import Spec, View, inverted
from lightning_d9d.state.writer import write_tensors

__all__ = [
    "DTYPE_NAMES",
    "MAX_SHARD_BYTES",
    "Box",
    "Cast",
    "Checks",
    "Concatenate",
    "Distribute",
    "Gather",
    "Group",
    "Identity",
    "Index",
    "Inverse",
    "LocalShard",
    "MappedBox",
    "Mapper",
    "Parallel",
    "Prefix",
    "Rename",
    "SafetensorsReader",
    "Select",
    "Sequential",
    "Share",
    "Spec",
    "Split",
    "Stack",
    "Transpose",
    "View",
    "check_names",
    "complete_directory",
    "fill_shards",
    "inverted",
    "load_tensors",
    "read_tensors",
    "save_tensors",
    "whole_box",
    "write_json",
    "write_tensors",
]
