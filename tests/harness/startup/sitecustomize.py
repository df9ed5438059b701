"""Python imports this at its start where the folder is in PYTHONPATH: in the processes of `python -m tests`.

The garbage collector looks seldom. What tests and imports leave behind is small, and to look takes a tenth of the time.
"""

import gc

gc.set_threshold(20_000)
