"""The long imports of the process that others are forked from.

The garbage collector looks at none of it, there and in forks. A look would change every page, and make a fork copy it.
"""

import gc
import os
from importlib import import_module

from tests.harness.interpreter import quicken_interpreter
from tests.harness.repeated import work_out_once

gc.disable()
for name in ("lightning_d9d.cli.training", "tests.harness.worker"):
    import_module(name)
work_out_once()
if os.environ.get("TRITON_INTERPRET") == "1":
    quicken_interpreter()
gc.freeze()
gc.enable()
