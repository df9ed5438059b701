"""The long imports of the process that others are forked from.

The garbage collector looks at none of it, there and in the forks: a look changes every page, which each fork copies then.
"""

import gc

gc.disable()

import lightning_d9d.cli.training
import tests.harness.worker  # noqa: F401

gc.freeze()
gc.enable()
