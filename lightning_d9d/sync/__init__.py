"""Gradients over ranks: their sums and their norm.

`buckets.py`: flat buffers whose views are the gradients, summed over data-parallel ranks. `norm.py`: the norm of the
whole model's gradients, and clipping.
"""
