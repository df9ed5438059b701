"""How a module is spread over the ranks of a mesh: each piece can be used alone, on any module."""

from lightning_d9d.parallel.config import ParallelConfig

__all__ = ["ParallelConfig"]
