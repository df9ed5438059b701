"""The model against transformers' with the same weights: Qwen3MoeForCausalLM, without experts Qwen3ForCausalLM."""

import dataclasses

import pytest
import torch

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from tests.harness.compare import assert_close_named, assert_gradients_equal, assert_tensors_close
from tests.harness.tolerances import TOLERANCES, Kind

BASE = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    moe_intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=3,
    norm_topk_prob=True,
    rms_norm_eps=1e-5,
    initializer_range=0.1,  # wide enough that routing and attention differ from token to token
)
VARIANTS = {
    "base": {},
    "router not normalized": {"norm_topk_prob": False},
    "tied": {"tie_word_embeddings": True},
    "dense layers by list": {"mlp_only_layers": (0, 2)},
    "dense layers by step": {"decoder_sparse_step": 2},
    "all dense by list": {"mlp_only_layers": (0, 1, 2)},
    "dense": {"num_experts": 0},
    "dense, tied": {"num_experts": 0, "tie_word_embeddings": True},
    "dense, attention bias": {"num_experts": 0, "attention_bias": True},
    "dense, other head_dim and rope base": {"num_experts": 0, "head_dim": 24, "rope_theta": 1e6},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "attention bias": {"attention_bias": True},
    "7 of 8 experts": {"num_experts_per_tok": 7},
    "widths that grouped_mm refuses": {"moe_intermediate_size": 45},
    "other rope base": {"rope_theta": 100.0},
}
OF_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
)
"""Fields that transformers' Qwen3Config does not have."""


def make_reference(config):
    """Return the model of transformers, with random weights."""
    import transformers

    values = dataclasses.asdict(dataclasses.replace(config, vocab_splits=None))
    del values["vocab_splits"]
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    if config.num_experts == 0:
        for name in OF_EXPERTS:
            del values[name]
        described = transformers.Qwen3Config(**values, rope_parameters=rope)
        return transformers.Qwen3ForCausalLM._from_config(described, attn_implementation="sdpa")
    values["mlp_only_layers"] = list(values["mlp_only_layers"])
    described = transformers.Qwen3MoeConfig(**values, rope_parameters=rope, experts_implementation="eager")
    return transformers.Qwen3MoeForCausalLM._from_config(described, attn_implementation="sdpa")


def make_pair(config, dtype=torch.float32):
    """Our model and transformers' with equal random weights; norms and biases are not at their start values."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    reference = make_reference(config)
    missing, unexpected = reference.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model.to(dtype), reference.to(dtype)


def make_batch(vocab_size=BASE.vocab_size):
    """Ids, the mask of those that are no padding, and labels not yet shifted; the first row is ignored as a whole."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (4, 33), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -1:] = 0
    mask[2, -5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0] = -100
    return ids, mask, labels


def shift(labels):
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_loss_and_gradients_equal_transformers(changes):
    model, reference = make_pair(dataclasses.replace(BASE, **changes))
    ids, mask, labels = make_batch()
    shifted = shift(labels)
    expected = reference(ids, attention_mask=mask, labels=labels)
    expected.loss.backward()

    assert_close_named("logits", model(ids).logits[mask == 1], expected.logits[mask == 1], kind=Kind.OUTPUT)
    losses = model(ids, shifted).loss
    total = model(ids, shifted, reduction="sum").loss
    num_tokens = (shifted != -100).sum()
    assert not losses[shifted == -100].any()
    assert_close_named("loss", losses.sum() / num_tokens, expected.loss, kind=Kind.LOSS)
    assert_close_named("sum", total / num_tokens, expected.loss, kind=Kind.LOSS)
    (total / num_tokens).backward()
    assert_gradients_equal(model, reference)


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": False}, {"num_experts": 0}], ids=str)
def test_bfloat16_equals_transformers(changes):
    model, reference = make_pair(dataclasses.replace(BASE, **changes), torch.bfloat16)
    ids, mask, labels = make_batch()
    shifted = shift(labels)
    expected = reference(ids, attention_mask=mask, labels=labels).loss
    expected.backward()
    loss = model(ids, shifted, reduction="sum").loss / (shifted != -100).sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert_close_named("loss", loss, expected, tolerance=TOLERANCES[torch.bfloat16][Kind.LOSS])
    assert_gradients_equal(model, reference)


def test_positions_equal_transformers():
    model, reference = make_pair(BASE)
    ids, _, _ = make_batch()
    positions = torch.randint(3000, ids.shape, generator=torch.Generator().manual_seed(2))
    expected = reference(ids, attention_mask=torch.ones(4, 1, 33, 33, dtype=torch.bool).tril(), position_ids=positions)
    logits = model(ids, position_ids=positions).logits
    assert_close_named("logits", logits, expected.logits, kind=Kind.OUTPUT)
    assert_close_named("shared", model(ids, position_ids=positions[:1]).logits[0], logits[0], kind=Kind.OUTPUT)


def loss_and_gradients(model, batch, **options):
    ids, _, labels = batch
    loss = model(ids, shift(labels), reduction="sum", **options).loss
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_float64_equals_float32():
    model, _ = make_pair(BASE)
    loss, gradients = loss_and_gradients(model, make_batch())
    model.zero_grad(set_to_none=True)
    loss_64, gradients_64 = loss_and_gradients(model.double(), make_batch())
    assert loss_64.dtype == torch.float64
    assert_close_named("loss", loss, loss_64, kind=Kind.OUTPUT)
    assert_tensors_close(gradients, gradients_64)


def test_float64_is_float64_throughout():
    """A directional derivative by finite differences: a step to float32 anywhere would spoil it."""
    model, _ = make_pair(BASE, torch.float64)
    batch = make_batch()
    _, gradients = loss_and_gradients(model, batch)
    direction = {name: torch.randn_like(gradient) for name, gradient in gradients.items()}
    slope = sum((gradients[name] * direction[name]).sum() for name in gradients)
    step, losses = 1e-6, []
    for sign in (1, -2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(direction[name], alpha=sign * step)
            ids, _, labels = batch
            losses.append(model(ids, shift(labels), reduction="sum").loss)
    measured = (losses[0] - losses[1]) / (2 * step)
    assert_close_named("slope", measured, slope, tolerance=TOLERANCES[torch.float32][Kind.GRADIENT])


def test_autocast_equals_bfloat16_of_transformers():
    model, reference = make_pair(BASE)
    ids, mask, labels = make_batch()
    reference(ids, attention_mask=mask, labels=labels).loss.backward()
    shifted = shift(labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, shifted, reduction="sum").loss / (shifted != -100).sum()
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert_gradients_equal(model, reference, tolerance=TOLERANCES[torch.bfloat16][Kind.GRADIENT])


@pytest.mark.parametrize("tied", [True, False])
def test_split_vocabulary_equals_one(tied):
    config = dataclasses.replace(BASE, tie_word_embeddings=tied)
    splits = {"text": 60, "image": 30, "special": 6}
    one, _ = make_pair(config)
    split = Qwen3MoeForCausalLM(dataclasses.replace(config, vocab_splits=splits))
    vocabulary = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]

    def cut(tensors):
        tensors = dict(tensors)
        for owner in vocabulary:
            rows = tensors.pop(f"{owner}.weight").split(list(splits.values()))
            tensors |= {f"{owner}.{name}.weight": part for name, part in zip(splits, rows, strict=True)}
        return tensors

    split.load_state_dict(cut(one.state_dict()))
    loss, gradients = loss_and_gradients(one, make_batch())
    split_loss, split_gradients = loss_and_gradients(split, make_batch())
    assert_close_named("loss", split_loss, loss, kind=Kind.OUTPUT)
    assert_tensors_close(split_gradients, cut(gradients))
    ids, _, _ = make_batch()
    assert_close_named("logits", split(ids).logits, one(ids).logits, kind=Kind.OUTPUT)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"vocab_splits": {"a": 90, "b": 6}}, {"attention_bias": True}],
    ids=str,
)
def test_meta_model_is_materialized_part_by_part(changes):
    config = dataclasses.replace(BASE, **changes)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) == (changes in ({}, {"attention_bias": True}))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert abs(parameter.std().item() / config.initializer_range - 1) < 0.15, name
    assert model(make_batch()[0]).logits.isfinite().all()


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_tokens(shape, has_documents):
    model = Qwen3MoeForCausalLM(BASE)
    ids = torch.zeros(shape, dtype=torch.long)
    documents = {"document_ids": ids} if has_documents else {}
    assert model(ids, **documents).logits.shape == (*shape, BASE.vocab_size)
    assert model(ids, ids, **documents).loss.shape == shape
    model(ids, ids, reduction="sum", **documents).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("has_documents", [False, True])
def test_forward_and_backward_never_wait_for_the_host(has_documents):
    with torch.device("meta"):  # without values, whatever would read one on the host raises
        model = Qwen3MoeForCausalLM(BASE).to(torch.bfloat16)
        ids = torch.zeros(2, 7, dtype=torch.long)
        documents = {"document_ids": ids} if has_documents else {}
        model(ids, ids, reduction="sum", **documents).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_position_sees_no_later_token():
    model, _ = make_pair(BASE)
    ids, _, _ = make_batch()
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % BASE.vocab_size
    logits, others = model(ids).logits, model(changed).logits
    assert_close_named("before", others[:, :20], logits[:, :20], kind=Kind.OUTPUT)
    assert not torch.allclose(others[:, 20:], logits[:, 20:])


@pytest.mark.gpu
@pytest.mark.parametrize("has_documents", [False, True])
def test_cuda_equals_cpu(has_documents):
    model, _ = make_pair(BASE)
    ids, is_token, labels = make_batch()
    documents = {"document_ids": is_token} if has_documents else {}
    loss, gradients = loss_and_gradients(model, (ids, is_token, labels), **documents)
    model.zero_grad(set_to_none=True)
    batch = tuple(tensor.cuda() for tensor in (ids, is_token, labels))
    documents = {name: tensor.cuda() for name, tensor in documents.items()}
    cuda_loss, cuda_gradients = loss_and_gradients(model.cuda(), batch, **documents)
    assert_close_named("loss", cuda_loss.cpu(), loss, kind=Kind.OUTPUT)
    assert_tensors_close({name: gradient.cpu() for name, gradient in cuda_gradients.items()}, gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("has_documents", [False, True])
def test_cuda_never_waits_for_the_host(has_documents):
    model = Qwen3MoeForCausalLM(BASE).to("cuda", torch.bfloat16)
    ids = make_batch()[0].cuda()
    documents = {"document_ids": ids} if has_documents else {}
    model(ids, ids, reduction="sum", **documents).loss.backward()  # libraries may wait when they start
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(ids, ids, reduction="sum", **documents).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
