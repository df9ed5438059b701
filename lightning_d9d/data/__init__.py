"""What batches are read from.

`token_files.py` reads and writes files of tokens, `token_rows.py` makes rows and mixtures of them, and
`permutation.py` shuffles them without memory. `documents.py` reads texts, and `shards.py` has datasets around others.
`resume.py`: going on in the middle of an epoch; `workers.py`: random numbers.
"""

from lightning_d9d.data.permutation import PermutedOrder, PermutedSampler
from lightning_d9d.data.resume import (
    DataRank,
    can_replay,
    can_resume_by_sampler,
    is_place_of_sampler,
    is_replayed,
    make_replayed,
    make_resumable,
    resumes_at,
    without_resuming,
)
from lightning_d9d.data.shards import BufferSortedDataset, ShardedDataset, pad_stack_1d
from lightning_d9d.data.token_files import BorderToken, TokenFile, TokenFileWriter
from lightning_d9d.data.token_rows import Mixture, Span, TokenRows
from lightning_d9d.data.workers import seed_order, seed_workers

__all__ = [
    "BorderToken",
    "BufferSortedDataset",
    "DataRank",
    "Mixture",
    "PermutedOrder",
    "PermutedSampler",
    "ShardedDataset",
    "Span",
    "TokenFile",
    "TokenFileWriter",
    "TokenRows",
    "can_replay",
    "can_resume_by_sampler",
    "is_place_of_sampler",
    "is_replayed",
    "make_replayed",
    "make_resumable",
    "pad_stack_1d",
    "resumes_at",
    "seed_order",
    "seed_workers",
    "without_resuming",
]
