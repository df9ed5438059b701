"""Without a GPU, kernels run in Triton's interpreter, which must be on before anybody imports Triton.

Ctrl-C works in here and in the processes of tests, also where a shell started all of this in the background.
"""

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.harness.plugin"]
