"""Summing gradients over data-parallel ranks. `buckets.py`: flat buffers whose views are the gradients."""
