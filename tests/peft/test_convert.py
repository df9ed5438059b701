"""`lightning-d9d convert` merges adapters: of a directory into another, and those of a checkpoint."""

import json
import re
import resource
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy
from lightning_d9d.generation import load_model
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoePretraining, save_huggingface
from lightning_d9d.peft import LoRA, inject, load_adapter, merge, save_adapter
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.forked import killed_at
from tests.harness.tolerances import Tolerance
from tests.peft.test_files import METHODS, adapted, base, of_transformers, with_values
from tests.peft.test_inject import IDS
from tests.strategy.plain import trainer
from tests.test_convert import assert_loads, convert, data, make_model, refused

__all__ = ["base"]


@pytest.mark.parametrize("layout", ["experts", "fused"])
@pytest.mark.parametrize("name", ["default", "all"])
@pytest.mark.parametrize("fused", [(), ("--fused-experts",)])
def test_an_adapter_is_merged_into_a_directory(base, tmp_path, monkeypatch, capsys, name, layout, fused):
    model = adapted(base, METHODS[name])
    expected = model(IDS).logits
    save_adapter(model, tmp_path / "adapter", layout=layout)
    convert(monkeypatch, base, tmp_path / "merged", "--adapter", tmp_path / "adapter", *fused)
    assert "tensors in float32" in capsys.readouterr().out
    assert_close_named(
        "logits", of_transformers(tmp_path / "merged")(IDS).logits, expected, tolerance=Tolerance(relative=1e-5)
    )
    assert any(".experts.gate_up_proj" in n for n in load_file(tmp_path / "merged" / "model.safetensors")) == bool(
        fused
    )
    if name == "default":  # no scale is folded
        merge(model)
        save_huggingface(model, tmp_path / "ours", fused_experts=bool(fused))
        theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("merged", "ours"))
        assert theirs.keys() == ours.keys()
        for each, value in ours.items():
            assert_bitwise_equal(each, theirs[each], value)


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_adapters_of_a_checkpoint_are_merged(tmp_path, monkeypatch, mode):
    torch.manual_seed(0)
    model = make_model()
    module = Qwen3MoePretraining(model.config, learning_rate=0.1, warmup_steps=0, peft=LoRA(rank=4))
    run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode=mode)), max_epochs=1)
    run.fit(module, data())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    convert(monkeypatch, tmp_path / "saved.ckpt", tmp_path / "merged")
    assert module.model.model.layers["0"].self_attn.q_proj.lora.b.any()
    merge(module)
    assert_loads(tmp_path / "merged", module.model)


def test_foreign_adapters_leave_nothing(base, tmp_path, monkeypatch, capsys):
    other = Qwen3MoeForCausalLM(make_model().config)
    inject(other, LoRA(rank=4, targets=["q_proj"]))
    save_adapter(with_values(other), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 3}))
    message = refused(monkeypatch, capsys, base, tmp_path / "merged", "--adapter", tmp_path / "adapter")
    assert "q_proj.lora_A.weight" in message
    assert "give the adapter of this base model" in message
    message = refused(monkeypatch, capsys, base, tmp_path / "merged", "--adapter", tmp_path / "nothing")
    assert "nothing" in message
    message = refused(monkeypatch, capsys, base, tmp_path / "merged.ckpt", "--adapter", tmp_path / "adapter")
    assert "--adapter has no effect" in message
    assert not (tmp_path / "merged").exists()


def test_what_is_no_base_and_what_is_no_adapter(base, tmp_path, monkeypatch, capsys):
    save_adapter(adapted(base, METHODS["default"]), tmp_path / "adapter")
    remedy = f"`lightning-d9d convert BASE DIRECTORY --adapter {tmp_path / 'adapter'}`"
    assert remedy in refused(monkeypatch, capsys, tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        load_model(tmp_path / "adapter")
    message = refused(monkeypatch, capsys, base, tmp_path / "merged", "--adapter", base)
    assert "has whole weights (config.json), no adapters; give the directory of an adapter_config.json" in message


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_a_checkpoint_without_frozen_weights_is_merged_with_its_base(tmp_path, monkeypatch, capsys, mode):
    base = tmp_path / "base"
    save_huggingface(make_model(5), base)
    module = Qwen3MoePretraining(
        make_model().config, learning_rate=0.1, warmup_steps=0, peft=LoRA(rank=4), pretrained=str(base)
    )
    run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode=mode, trainable_only=True)), max_epochs=1)
    run.fit(module, data())
    saved = tmp_path / "saved.ckpt"
    run.save_checkpoint(saved)
    remedy = f"on the base {str(base)!r}; give --base {base}"
    assert remedy in refused(monkeypatch, capsys, saved, tmp_path / "merged")
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        load_model(saved)
    convert(monkeypatch, saved, tmp_path / "merged", "--base", base)
    assert module.model.model.layers["0"].self_attn.q_proj.lora.b.any()
    ids = torch.arange(8)[None]
    logits = load_model(saved, base=base)(ids).logits
    assert_bitwise_equal("logits", logits, module.model.eval()(ids).logits)
    merge(module)
    assert_loads(tmp_path / "merged", module.model)
    message = refused(monkeypatch, capsys, tmp_path / "merged", tmp_path / "new", "--base", base)
    assert f"base={str(base)!r} has no effect: {tmp_path / 'merged'} has all weights; leave it out" in message
    with pytest.raises(ConfigError, match=r"has no effect: .* has all weights"):
        load_model(base, base=base)
    for name, values in {"wide": {"moe_intermediate_size": 16}, "tied": {"tie_word_embeddings": True}}.items():
        save_huggingface(Qwen3MoeForCausalLM(replace(module.config, **values)), tmp_path / name)
        with pytest.warns(UserWarning, match=rf"beside '{base}': '{tmp_path / name}' must have the same weights"):
            message = refused(monkeypatch, capsys, saved, tmp_path / "new", "--base", tmp_path / name)
        assert f"{tmp_path / name} has other weights than those that {saved} adapts; give another base" in message


@contextmanager
def files_of_at_most(num_bytes):
    """A write beyond fails, as one on a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_merge_that_fails_half_way_leaves_nothing(base, tmp_path, monkeypatch, capsys):
    save_adapter(adapted(base, METHODS["default"]), tmp_path / "adapter")
    convert(monkeypatch, base, tmp_path / "split", "--max-shard-size", "20KB")
    (tmp_path / "work").mkdir()
    largest = max(path.stat().st_size for folder in ("split", "adapter") for path in (tmp_path / folder).iterdir())
    with files_of_at_most(largest + 1000):
        message = refused(
            monkeypatch, capsys, tmp_path / "split", tmp_path / "work" / "merged", "--adapter", tmp_path / "adapter"
        )
    assert "File too large" in message
    assert "free space, raise the limit" in message
    assert not any((tmp_path / "work").iterdir())


def test_a_killed_merge_leaves_all_or_nothing(base, tmp_path, monkeypatch):
    model = adapted(base, METHODS["default"])
    save_adapter(model, tmp_path / "adapter")
    merge(model)
    for call in range(0, 100, 3):
        target = tmp_path / str(call) / "merged"
        target.parent.mkdir()
        arguments = (base, target, "--adapter", tmp_path / "adapter", "--max-shard-size", "4KB")
        killed = killed_at(call, target.parent, lambda arguments=arguments: convert(monkeypatch, *arguments))
        assert killed
        if target.exists():
            break
    assert_loads(target, model)
    assert call > 20


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_adapters_that_were_injected_later_are_merged(tmp_path, monkeypatch, mode):
    """A checkpoint has the method, also where the module was not made with it."""
    torch.manual_seed(0)
    module = Qwen3MoePretraining(make_model().config, learning_rate=0.1, warmup_steps=0)
    inject(module, LoRA(rank=4))
    run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode=mode)), max_epochs=1)
    run.fit(module, data())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    convert(monkeypatch, tmp_path / "saved.ckpt", tmp_path / "merged")
    assert module.model.model.layers["0"].self_attn.q_proj.lora.b.any()
    merge(module)
    assert_loads(tmp_path / "merged", module.model)
    assert Qwen3MoePretraining.load_from_checkpoint(tmp_path / "saved.ckpt").peft == LoRA(rank=4)


@pytest.mark.parametrize("name", ["default", "all", "rslora", "by layer"])
def test_adapters_of_a_file_stay_those_of_the_module(base, tmp_path, monkeypatch, name):
    """A module that got its adapters from a file has them in its checkpoint, too."""
    save_adapter(adapted(base, METHODS[name]), tmp_path / "adapter", layout="fused")
    module = Qwen3MoePretraining(preset=str(base), pretrained=str(base), learning_rate=0.1, warmup_steps=0)
    with pytest.raises(ConfigError, match=r"stages of Qwen3MoePretraining are not built yet; call configure_model\(\)"):
        load_adapter(module, tmp_path / "adapter")
    module.configure_model()
    load_adapter(module, tmp_path / "adapter")
    run = trainer(D9DStrategy(checkpoint=CheckpointConfig(trainable_only=True)), max_epochs=1)
    run.fit(module, data())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    again = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "saved.ckpt", pretrained=str(base))
    for each, value in module.state_dict().items():
        assert_bitwise_equal(each, again.state_dict()[each], value)
    convert(monkeypatch, tmp_path / "saved.ckpt", tmp_path / "merged", "--base", base)
    merge(module)
    assert_loads(tmp_path / "merged", module.model)


def test_adapters_that_a_checkpoint_does_not_describe_are_not_dropped(tmp_path, monkeypatch, capsys):
    module = Qwen3MoePretraining(make_model().config)
    module.configure_model()
    inject(module.model, LoRA(rank=4))
    run = trainer(D9DStrategy(), max_epochs=1)
    run.fit(module, data())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    message = refused(monkeypatch, capsys, tmp_path / "saved.ckpt", tmp_path / "merged")
    assert "has the adapter model." in message
    assert "which its own peft setting does not have; write the weights from the run" in message
    assert not (tmp_path / "merged").exists()


def test_a_wider_dtype_keeps_the_bits_of_a_sum(base, tmp_path, monkeypatch):
    model = adapted(base, METHODS["default"]).bfloat16()
    save_adapter(model, tmp_path / "adapter")
    weights = Qwen3MoeForCausalLM(model.config).bfloat16()
    weights.load_state_dict({name: model.state_dict()[name] for name in weights.state_dict()})
    save_huggingface(weights, tmp_path / "base16")
    options = "--adapter", tmp_path / "adapter", "--dtype", "float32"
    convert(monkeypatch, tmp_path / "base16", tmp_path / "converted", *options)
    save_huggingface(model, tmp_path / "saved", dtype=torch.float32)
    model.float()
    merge(model)
    save_huggingface(model, tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    for folder in ("converted", "saved"):
        actual = load_file(tmp_path / folder / "model.safetensors")
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_bitwise_equal(name, actual[name], value)
