"""Files and datasets from which batches are read.

`token_files.py` reads and writes token files, `token_rows.py` makes rows and mixtures of them, and `permutation.py`
shuffles without memory. `records.py` reads JSON lines, tables and saved datasets. `documents.py` finds texts in them,
and `chat_files.py` chats. `shards.py` has datasets that wrap others. `chat_masks.py` makes tokens of chats,
`samples.py` stores them, and `chat_cache.py` keeps them in files of `cache.py`. `packing.py` assigns samples to rows,
and `epoch_sampler.py` distributes rows over data ranks. `resume.py`: resuming in the middle of an epoch; `workers.py`:
random numbers.
"""

from lightning_d9d.data.chat_cache import TokenizedChats, tokenized_chats
from lightning_d9d.data.chat_files import read_chats
from lightning_d9d.data.chat_masks import ChatReport, ChatTokenizer, ChatTokens
from lightning_d9d.data.epoch_sampler import EpochOrder, EpochSampler
from lightning_d9d.data.packing import GroupedOrder, PackedOrder, packed_row, padded_rows
from lightning_d9d.data.permutation import PermutedOrder
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
from lightning_d9d.data.shards import BufferSortedDataset, ShardedDataset, pad_stack_1d
from lightning_d9d.data.token_files import BorderToken, TokenFile, TokenFileWriter
from lightning_d9d.data.token_rows import Mixture, Span, TokenRows
from lightning_d9d.data.workers import seed_order, seed_workers

__all__ = [
    "BorderToken",
    "BufferSortedDataset",
    "ChatReport",
    "ChatTokenizer",
    "ChatTokens",
    "DataRank",
    "EpochOrder",
    "EpochSampler",
    "GroupedOrder",
    "Mixture",
    "PackedOrder",
    "PackedRows",
    "PaddedRows",
    "PermutedOrder",
    "Samples",
    "ShardedDataset",
    "Span",
    "TokenFile",
    "TokenFileWriter",
    "TokenRows",
    "TokenizedChats",
    "can_replay",
    "can_resume_by_sampler",
    "end_resuming",
    "is_place_of_sampler",
    "is_replayed",
    "make_replayed",
    "make_resumable",
    "packed_row",
    "pad_stack_1d",
    "padded_rows",
    "read_chats",
    "resumes_at",
    "seed_order",
    "seed_workers",
    "tokenized_chats",
    "without_resuming",
]
