"""The files of a directory of weights (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], values: Iterable[Tensor]
) -> None:
    """Writes one file, with the tensors in the order of `shapes`. Local.

    Args:
        path: of the file.
        shapes: of its tensors, by name.
        dtypes: of these and perhaps others.
        values: contiguous tensors on the CPU, in the same order; each is asked for when those before it are written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + num_bytes(shape, dtypes[name])
        header[name] = {"dtype": DTYPE_NAMES[dtypes[name]], "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in values:
            file.write(tensor.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a file for people too. Local."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """The size of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
