"""What the tests share.

`plugin.py` gives pytest the `ranks(n)` and `gpu` markers and the `rank` fixture. `ranks.py` is what a test body sees of
its rank, `pool.py` the living rank processes, `worker.py` one of them, `messages.py` what the two say to each other,
`failures.py` the wording of what went wrong, `state.py` what is put back after a test. `recorder.py` records the
collectives of a rank, `records.py` compares those of all ranks. `tolerances.py` is the one table of tolerances,
`compare.py` the comparisons that read it.
"""
