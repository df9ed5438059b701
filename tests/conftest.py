"""Without a GPU, kernels run in Triton's interpreter, which must be on before anybody imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.harness.plugin"]
