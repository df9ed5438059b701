"""Running a program of forward and backward actions over microbatches.

`types.py`: what a module hands over. `microbatch.py`: cutting a batch. `executor.py`: the loop over actions.
"""
