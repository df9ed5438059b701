"""What is drawn, against the processors of logits of `transformers`; greedy text against its `generate`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightning_d9d import ConfigError
from lightning_d9d.generation import Sampling, generate
from lightning_d9d.models.qwen3_moe import save_huggingface
from tests.generation.test_cache import model_of

IDS: Any = torch.zeros(3, 1, dtype=torch.long)
LOGITS: Any = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.6), Sampling(1.0, top_k=8, top_p=0.5)],
)
def test_tokens_are_drawn_with_their_probability(sampling: Sampling) -> None:
    logits = TemperatureLogitsWarper(sampling.temperature)(IDS, LOGITS)
    if sampling.top_k is not None:
        logits = TopKLogitsWarper(sampling.top_k)(IDS, logits)
    if sampling.top_p is not None:
        logits = TopPLogitsWarper(sampling.top_p)(IDS, logits)
    num_drawn = 20_000
    generator = torch.Generator().manual_seed(1)
    drawn = sampling.choose(LOGITS.repeat_interleave(num_drawn, 0), generator).view(3, num_drawn)
    shares = torch.nn.functional.one_hot(drawn, 20).double().mean(1)
    expected = logits.double().softmax(-1)
    assert torch.equal(shares > 0, expected > 0) or (shares[expected == 0] == 0).all()
    deviation = (expected * (1 - expected) / num_drawn).sqrt()
    assert ((shares - expected).abs() <= 5 * deviation).all()


def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    model = model_of()
    save_huggingface(model, tmp_path / "model")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = torch.tensor([3, 1, 4, 1, 5])
    expected = theirs.generate(prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(generate(model, prompt, 20)) == expected[0, 5:].tolist()


def test_a_text_is_that_of_its_seed_and_ends_where_told() -> None:
    model, prompt = model_of().train(), torch.tensor([1, 2])
    first, again, other = (list(generate(model, prompt, 30, Sampling(1.0), seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert model.training
    stopped = list(generate(model, prompt, 30, Sampling(1.0), seed=1, stop=[first[10]]))
    assert stopped == list(itertools.takewhile(lambda token: token != first[10], first))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        generate(model_of(), torch.tensor([], dtype=torch.long), 1)
    with pytest.raises(ConfigError, match=r"max_position_embeddings=64 of the model; ask for at most 62"):
        generate(model_of(), torch.tensor([1, 2]), 63)
    with pytest.raises(ConfigError, match="max_new_tokens=0 must be at least 1"):
        generate(model_of(), torch.tensor([1, 2]), 0)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 3}, "have no effect at temperature=0"),
    )
    for options, text in wrong:
        with pytest.raises(ConfigError, match=text):
            Sampling(**options)
