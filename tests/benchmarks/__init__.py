"""Benchmarks, each against a peer in the same run: `nox -s bench`, or `python -m tests.benchmarks [names]`.

`frame.py` builds contenders, warms them up, times them in turn and says what the ratio to the peer is and how sure;
`__main__.py` is the command line. Every other file is one benchmark: its `cases(device_type, quick)` lists what is run.
"""

import os

import torch

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, which must be on before anybody imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
