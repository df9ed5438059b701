"""The example of a transformers model: sharded over ranks, it trains and is exported as replicas are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_model.py"
FAMILIES = {
    "llama": ("LlamaDecoderLayer", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeDecoderLayer",
        {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("transformers_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.meshes)])
def test_sharded_blocks_train_and_export_as_replicas(rank: RankContext, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    block, options = FAMILIES[family]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if rank.rank == 0:
        config = AutoConfig.for_model(family, vocab_size=64, **sizes, **options)
        AutoModelForCausalLM.from_config(config).save_pretrained("base")
    rank.barrier()
    tokens = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(0))
    data: Any = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4)

    def exported(mesh: MeshConfig, parallel: ParallelConfig) -> tuple[Any, dict[str, torch.Tensor]]:
        module = example().CausalLM("base")
        strategy = D9DStrategy(mesh=mesh, parallel=parallel)
        run = trainer(strategy, 2, rank.device.type, max_epochs=1, gradient_clip_val=0.1)
        run.fit(module, data)
        weights = AutoModelForCausalLM.from_pretrained("trained").state_dict()
        rank.barrier()  # before the next export replaces the files
        return module, weights

    sharded = ParallelConfig(shard_blocks=(block,), recompute="full")
    module, actual = exported(MeshConfig(data_parallel_shard=2), sharded)
    assert isinstance(module.model.model.layers[0], FSDPModule)
    _, expected = exported(MeshConfig(data_parallel_replicate=2), ParallelConfig())
    started = AutoModelForCausalLM.from_pretrained("base").state_dict()
    assert any(not torch.equal(expected[name], started[name]) for name in expected)
    assert_tensors_close(actual, expected)
