"""Generates text with a trained model, and measures how well it predicts text.

This runs in one process, for inspection rather than serving.
"""

from lightning_d9d.generation.cache import CachedDecoder
from lightning_d9d.generation.perplexity import TextScore, score
from lightning_d9d.generation.sampling import Sampling, generate
from lightning_d9d.generation.sources import ByteTokenizer, Tokenizer, load_model, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "CachedDecoder",
    "Sampling",
    "TextScore",
    "Tokenizer",
    "generate",
    "load_model",
    "load_tokenizer",
    "score",
]
