"""What batches are read from.

`resume.py`: going on in the middle of an epoch; `workers.py`: random numbers. `chat_files.py` reads chats,
`chat_masks.py` makes tokens of them, and `samples.py` keeps these. `packing.py` says which samples are in a row, and
`epoch_sampler.py` deals rows out to data ranks.
"""

from lightning_d9d.data.chat_files import read_chats
from lightning_d9d.data.chat_masks import ChatReport, ChatTokenizer, ChatTokens
from lightning_d9d.data.epoch_sampler import EpochSampler
from lightning_d9d.data.packing import EpochOrder, GroupedOrder, PackedOrder, packed_row, padded_rows
from lightning_d9d.data.resume import (
    DataRank,
    can_replay,
    can_resume_by_sampler,
    end_resuming,
    is_place_of_sampler,
    is_replayed,
    make_replayed,
    make_resumable,
    resumes_at,
    without_resuming,
)
from lightning_d9d.data.samples import PackedRows, PaddedRows, Samples
from lightning_d9d.data.workers import seed_order, seed_workers

__all__ = [
    "ChatReport",
    "ChatTokenizer",
    "ChatTokens",
    "DataRank",
    "EpochOrder",
    "EpochSampler",
    "GroupedOrder",
    "PackedOrder",
    "PackedRows",
    "PaddedRows",
    "Samples",
    "can_replay",
    "can_resume_by_sampler",
    "end_resuming",
    "is_place_of_sampler",
    "is_replayed",
    "make_replayed",
    "make_resumable",
    "packed_row",
    "padded_rows",
    "read_chats",
    "resumes_at",
    "seed_order",
    "seed_workers",
    "without_resuming",
]
