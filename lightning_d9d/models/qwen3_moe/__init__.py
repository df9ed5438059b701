"""Qwen3-MoE: `Qwen3MoeConfig` has the size, and `Qwen3MoeForCausalLM` is the network, with the names of Hugging Face.

A config without experts (`num_experts=0`) is dense Qwen3.
`load_huggingface` and `save_huggingface` stream its weights from and to a directory of safetensors files.
"""

from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.huggingface import huggingface_mapper, load_huggingface, save_huggingface
from lightning_d9d.models.qwen3_moe.model import CausalLMOutput, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.module import Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe

__all__ = [
    "CausalLMOutput",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    "Qwen3MoePretraining",
    "huggingface_mapper",
    "load_huggingface",
    "parallelize_qwen3_moe",
    "save_huggingface",
]
