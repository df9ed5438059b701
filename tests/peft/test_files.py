"""Adapters in files: Hugging Face's `peft` computes the same with ours, and we with those that it made."""

import dataclasses
import json
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, load_huggingface, save_huggingface
from lightning_d9d.peft import (
    FullTune,
    LoRA,
    PeftMethod,
    Stack,
    inject,
    is_adapted,
    load_adapter,
    merge,
    save_adapter,
    trainable_parameters,
)
from lightning_d9d.state.format import MANIFEST_FILE
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance
from tests.meshes.cases import LAYERS
from tests.meshes.equality import CONFIG as SMALL
from tests.meshes.equality import on_mesh
from tests.peft.test_inject import IDS
from tests.peft.test_methods import CONFIG
from tests.test_convert import convert, refused

SPARSE = dataclasses.replace(CONFIG, mlp_only_layers=(), initializer_range=0.3)
LOGITS = Tolerance(relative=1e-5)
METHODS = {
    "default": LoRA(rank=4, alpha=6),
    "all": LoRA(rank=3, alpha=5, rank_of_experts=2, targets=["self_attn", "experts", "embed_tokens", "lm_head"]),
    "rslora": LoRA(rank=4, alpha=6, rslora=True),
    "down": LoRA(rank=4, targets=["experts.down_proj", r"layers\.1\.self_attn\.q_proj"]),
    "attention": LoRA(rank=2, alpha=7, targets=["self_attn"]),
    "by layer": Stack(
        [LoRA(rank=2 + i, alpha=3 + i, rank_of_experts=2 + i, targets=[rf"layers\.{i}"]) for i in (0, 1)]
    ),
}


@pytest.fixture
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    torch.manual_seed(0)
    initializer_range = getattr(request, "param", SPARSE.initializer_range)
    config = dataclasses.replace(SPARSE, initializer_range=initializer_range)
    save_huggingface(Qwen3MoeForCausalLM(config), tmp_path / "base")
    return tmp_path / "base"


def loaded(base: Path) -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM(SPARSE)
    load_huggingface(model, base)
    return model


def with_values(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.b") or "lora_B" in name or "lora_embedding_B" in name:
                parameter.normal_(std=0.3)
    return model


def adapted(base: Path, method: PeftMethod) -> Qwen3MoeForCausalLM:
    model = loaded(base)
    inject(model, method)
    return with_values(model)


def of_transformers(base: Path, **options):
    from transformers import Qwen3MoeForCausalLM as Reference

    return Reference.from_pretrained(base, **options)


@pytest.mark.parametrize("layout", ["experts", "fused"])
@pytest.mark.parametrize("name", METHODS)
def test_peft_computes_with_our_files(base, tmp_path, name, layout):
    from peft import PeftModel

    model = adapted(base, METHODS[name])
    expected = model(IDS).logits
    save_adapter(model, tmp_path / "adapter", layout=layout, base_model="somebody/base")
    theirs = PeftModel.from_pretrained(of_transformers(base), tmp_path / "adapter")
    assert theirs.peft_config["default"].base_model_name_or_path == "somebody/base"
    assert_close_named("peft", theirs(IDS).logits, expected, tolerance=LOGITS)
    assert_close_named("merged by peft", theirs.merge_and_unload()(IDS).logits, expected, tolerance=LOGITS)
    save_huggingface(model, tmp_path / "merged")
    assert_close_named("merged", of_transformers(tmp_path / "merged")(IDS).logits, expected, tolerance=LOGITS)

    again = loaded(base)
    load_adapter(again, tmp_path / "adapter")
    assert trainable_parameters(again).keys() == trainable_parameters(model).keys()
    assert_close_named("read again", again(IDS).logits, expected, tolerance=LOGITS)
    other = loaded(base)
    inject(other, METHODS[name])
    load_adapter(other, tmp_path / "adapter")
    for each, value in trainable_parameters(model).items():
        assert_close_named(each, other.get_parameter(each), value, tolerance=Tolerance(relative=1e-6))


OF_PEFT = {
    "attention": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj"]},
    "experts": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"layers.0.mlp.experts.gate_up_proj": 2, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 7},
    },
    "rslora": {
        "r": 4,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "embed_tokens"],
        "target_parameters": ["experts.down_proj"],
    },
}


def test_adapters_of_a_dense_model(tmp_path, monkeypatch):
    """Dense Qwen3, whose projections of MLPs have adapters, too."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = dataclasses.replace(CONFIG, num_experts=0, mlp_only_layers=(), initializer_range=0.3)
    torch.manual_seed(0)
    base = Qwen3MoeForCausalLM(config)
    save_huggingface(base, tmp_path / "base")
    model = Qwen3MoeForCausalLM(config)
    load_huggingface(model, tmp_path / "base")
    inject(model, LoRA(rank=3, alpha=5))
    expected = with_values(model)(IDS).logits
    save_adapter(model, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_close_named("peft", theirs(IDS).logits, expected, tolerance=LOGITS)
    load_adapter(base, tmp_path / "adapter")
    assert_close_named("read again", base(IDS).logits, expected, tolerance=LOGITS)
    convert(monkeypatch, tmp_path / "base", tmp_path / "merged", "--adapter", tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close_named("merged", merged(IDS).logits, expected, tolerance=LOGITS)


@pytest.mark.parametrize("name", OF_PEFT)
def test_we_compute_with_files_of_peft(base, tmp_path, name):
    from peft import LoraConfig, get_peft_model

    theirs = with_values(get_peft_model(of_transformers(base), LoraConfig(**OF_PEFT[name])))
    expected = theirs(IDS).logits
    theirs.save_pretrained(tmp_path / "adapter")
    model = loaded(base)
    load_adapter(model, tmp_path / "adapter")
    assert_close_named("ours", model(IDS).logits, expected, tolerance=LOGITS)
    merge(model.eval())
    assert_close_named("merged", model(IDS).logits, expected, tolerance=LOGITS)


BFLOAT16 = pytest.mark.parametrize("base", [0.1], indirect=True)
"""Weights so small that adapters change which experts a token visits, and rounding alone seldom does."""


def divergence(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the mean divergence of distributions over tokens, of all positions."""
    assert actual.dtype == expected.dtype == torch.bfloat16
    ours, theirs = (logits.float().log_softmax(-1) for logits in (actual, expected))
    return F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1).mean().item()


@BFLOAT16
@pytest.mark.parametrize("name", METHODS)
def test_in_bfloat16_our_files_have_the_same_distributions(base, tmp_path, name):
    from peft import PeftModel

    model = adapted(base, METHODS[name]).bfloat16()
    expected = model(IDS).logits
    assert divergence(loaded(base).bfloat16()(IDS).logits, expected) > 0.01
    save_adapter(model, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(of_transformers(base, dtype=torch.bfloat16), tmp_path / "adapter")
    assert divergence(theirs.bfloat16()(IDS).logits, expected) <= 1e-3
    save_huggingface(model, tmp_path / "merged")
    assert divergence(of_transformers(tmp_path / "merged", dtype=torch.bfloat16)(IDS).logits, expected) <= 1e-3
    again = loaded(base).bfloat16()
    load_adapter(again, tmp_path / "adapter")
    assert divergence(again(IDS).logits, expected) <= 1e-3


@BFLOAT16
@pytest.mark.parametrize("name", OF_PEFT)
def test_in_bfloat16_files_of_peft_have_the_same_distributions(base, tmp_path, name):
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(of_transformers(base, dtype=torch.bfloat16), LoraConfig(**OF_PEFT[name]))
    theirs = with_values(theirs).bfloat16()
    expected = theirs(IDS).logits
    theirs.save_pretrained(tmp_path / "adapter")
    model = loaded(base).bfloat16()
    assert divergence(model(IDS).logits, expected) > 0.01
    load_adapter(model, tmp_path / "adapter")
    assert divergence(model(IDS).logits, expected) <= 1e-3
    merge(model.eval())
    assert divergence(model(IDS).logits, expected) <= 1e-3


def test_tensors_of_experts_have_the_names_that_engines_read(base, tmp_path):
    model = adapted(base, METHODS["default"])
    save_adapter(model, tmp_path / "adapter", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}
    prefix = "base_model.model.model.layers.1.mlp.experts.3"
    assert tensors[f"{prefix}.gate_proj.lora_A.weight"].shape == (2, 16)
    assert tensors[f"{prefix}.up_proj.lora_B.weight"].shape == (8, 2)
    assert tensors[f"{prefix}.down_proj.lora_B.weight"].shape == (16, 2)
    adapter = model.model.layers["1"].mlp.experts.gate_up_lora
    assert_bitwise_equal("up", tensors[f"{prefix}.up_proj.lora_A.weight"], adapter.a[3, 2:].bfloat16())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    # One scale for all, so that readers without patterns compute the same.
    scales = {config["alpha_pattern"][name] / rank for name, rank in config["rank_pattern"].items()}
    assert scales == {config["lora_alpha"] / config["r"]}


class SavingAdapters(L.Callback):
    """Saves at the end of a fit, and reads what was saved into adapters without values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer, pl_module):
        stages = list(pl_module.stages)
        save_adapter(pl_module, self.folder)
        trained = {name: p.detach().clone() for name, p in trainable_parameters(pl_module).items()}
        with torch.no_grad():
            for parameter in trainable_parameters(pl_module).values():
                parameter.zero_()
        load_adapter(stages, self.folder)
        for name, parameter in trainable_parameters(pl_module).items():
            assert_bitwise_equal(name, parameter, trained[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mesh",
    [{"data_parallel_shard": 2, "expert_parallel": 2}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}],
    ids=str,
)
def test_ranks_write_and_read_what_one_process_does(rank: RankContext, tmp_path: Path, mesh: dict[str, int]) -> None:
    folder = Path(rank.all_gather_object(str(tmp_path))[0])
    L.seed_everything(1, verbose=False)
    saving = SavingAdapters(folder / "ranks")
    seen = on_mesh(rank, D9DStrategy(mesh=MeshConfig(**mesh)), steps=2, peft=LAYERS, callbacks=[saving])
    weights = {name: value for each in rank.all_gather_object(seen.weights[-1]) for name, value in each.items()}
    whole = Qwen3MoeForCausalLM(SMALL).double()
    inject(whole, LAYERS)
    whole.load_state_dict(weights)
    save_adapter(whole, folder / "one")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / "ranks" / name).read_bytes() == (folder / "one" / name).read_bytes()


def edit(directory: Path, change) -> None:
    """Change a file as other programs do, which know no manifest."""
    (directory / MANIFEST_FILE).unlink()
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


def configure(directory: Path, **changes) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
GATE = "base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda d: edit(d, lambda t: t.update({Q_A: torch.zeros(4, 17)})),
            r"q_proj\.lora_A\.weight is .*\[4, 17\].*\[4, 16\]",
        ),
        (
            lambda d: edit(d, lambda t: t.update({Q_A: torch.zeros(5, 16)})),
            r"q_proj\.lora_A\.weight is .*\[5, 16\].*\[4, 16\]",
        ),
        (lambda d: edit(d, lambda t: t.pop(Q_A)), r"q_proj\.lora_B\.weight lacks its other matrix"),
        (
            lambda d: edit(d, lambda t: [t.pop(n) for n in [*t] if ".experts.7." in n]),
            r"has 8 experts, but the file has",
        ),
        (lambda d: edit(d, lambda t: t.pop(GATE)), "gate_proj.lora_A.weight lacks its other matrix"),
        (
            lambda d: edit(d, lambda t: t.update({"odd.weight": torch.zeros(1)})),
            "odd.weight is not a tensor of a low-rank",
        ),
        (
            lambda d: edit(
                d,
                lambda t: t.update(
                    {
                        Q_A.replace("q_proj", "z_proj"): torch.zeros(4, 16),
                        Q_A.replace("q_proj", "z_proj").replace("_A", "_B"): torch.zeros(16, 4),
                    }
                ),
            ),
            "adapter of .*z_proj, but the model has none",
        ),
        (lambda d: configure(d, use_dora=True), "use_dora=True is not supported"),
        (lambda d: configure(d, modules_to_save=["norm"]), r"modules_to_save=\['norm'\] is not supported"),
        (lambda d: configure(d, peft_type="LOHA"), "peft_type='LOHA' is not 'LORA'"),
        (lambda d: configure(d, alora_invocation_tokens=[1]), r"alora_invocation_tokens=\[1\] is not supported"),
        (
            lambda d: configure(d, init_lora_weights="loftq"),
            "init_lora_weights='loftq' changes the weights of the base",
        ),
        (lambda d: configure(d, r="4"), "must have numbers above 0"),
        (lambda d: configure(d, lora_alpha=float("inf")), "must have numbers above 0"),
        (lambda d: configure(d, rank_pattern={"(": 4}), r"rank_pattern has '\(', which is not a regular expression"),
        (
            lambda d: edit(d, lambda t: t[Q_A].fill_(float("nan"))),
            "q_proj.lora_A.weight has numbers that are not finite",
        ),
        (lambda d: (d / "adapter_config.json").write_text("{"), "cannot be read as a JSON configuration"),
        (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (lambda d: edit(d, lambda t: t.clear()), "it has no adapters"),
    ],
)
def test_damaged_and_foreign_files_are_refused(base, tmp_path, damage, expected):
    save_adapter(adapted(base, METHODS["default"]), tmp_path / "adapter")
    damage(tmp_path / "adapter")
    for makes in (lambda: loaded(base), lambda: adapted(base, METHODS["default"])):
        model = makes()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(StateError, match=f"(?s)adapters cannot be loaded from.*{expected}"):
            load_adapter(model, tmp_path / "adapter")
        assert model.state_dict().keys() == before.keys()
        for name, value in model.state_dict().items():
            assert_bitwise_equal(name, value, before[name])


def test_a_changed_byte_is_noticed(base, tmp_path):
    model = adapted(base, METHODS["attention"])
    save_adapter(model, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    again = loaded(base)
    with pytest.raises(StateError, match=r"lora_B\.weight is damaged or was replaced: its checksum differs"):
        load_adapter(again, tmp_path / "adapter")
    assert not is_adapted(again)
    load_adapter(again, tmp_path / "adapter", verify=False)
    assert trainable_parameters(again).keys() == trainable_parameters(model).keys()


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapters_whose_start_changed_the_base(base, tmp_path, start):
    """They are read if `peft` converted them to the original base, as the error says."""
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(of_transformers(base), LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=start))
    theirs.peft_config["default"].init_lora_weights = True  # as peft's own documentation does it
    theirs.save_pretrained(tmp_path / "start")
    theirs.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1.5)
    expected = theirs(IDS).logits
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(StateError, match=f"init_lora_weights='{start}' changes the weights of the base, too"):
        load_adapter(loaded(base), tmp_path / "adapter")
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    model = loaded(base)
    load_adapter(model, tmp_path / "converted")
    assert_close_named("ours", model(IDS).logits, expected, tolerance=LOGITS)


def test_an_adapter_of_a_tied_embedding_is_refused(tmp_path, monkeypatch, capsys):
    """Merged it would change the head, too."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = dataclasses.replace(CONFIG, num_experts=0, mlp_only_layers=(), tie_word_embeddings=True)
    base = Qwen3MoeForCausalLM(config)
    save_huggingface(base, tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = get_peft_model(theirs, LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"]))
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    expected = "has an adapter of model.embed_tokens, whose weight another layer shares in this model"
    with pytest.raises(StateError, match=expected):
        load_adapter(base, tmp_path / "adapter")
    assert not is_adapted(base)
    arguments = tmp_path / "base", tmp_path / "merged", "--adapter", tmp_path / "adapter"
    assert expected in refused(monkeypatch, capsys, *arguments)
    assert not (tmp_path / "merged").exists()


def test_other_adapters_are_refused(base, tmp_path):
    save_adapter(adapted(base, METHODS["attention"]), tmp_path / "adapter")
    for method, expected in (
        (LoRA(rank=3, targets=["self_attn"]), "has rank 2, but that of the model has rank 3"),
        (
            LoRA(rank=2, targets=["q_proj"]),
            r"has an adapter of model\.layers\.0\.self_attn\.k_proj.*but the model has none",
        ),
        (LoRA(rank=2), r"lacks an adapter of model\.layers\.0\.mlp\.experts\.down_proj"),
    ):
        with pytest.raises(StateError, match=f"(?s){expected}"):
            load_adapter(adapted(base, method), tmp_path / "adapter")


def test_what_files_cannot_have_is_refused(base, tmp_path):
    cases = (
        (Stack([LoRA(rank=2), FullTune("norm")]), {}, r"model\.norm\.weight is trained whole.*save_huggingface"),
        (LoRA(rank=2, targets=["experts.gate_up_proj"]), {}, "down_proj beside it has none.*layout='fused'"),
        (LoRA(rank=2), {"layout": "flat"}, "layout='flat' must be one of 'experts', 'fused'"),
    )
    for method, options, expected in cases:
        with pytest.raises(ConfigError, match=f"(?s){expected}"):
            save_adapter(adapted(base, method), tmp_path / "adapter", **options)
        assert not (tmp_path / "adapter").exists()
    with pytest.raises(ConfigError, match="has no adapters"):
        save_adapter(loaded(base), tmp_path / "adapter")
    merged = adapted(base, LoRA(rank=2))
    merge(merged)
    with pytest.raises(ConfigError, match="is merged into its weight; call unmerge"):
        save_adapter(merged, tmp_path / "adapter")
    save_adapter(adapted(base, LoRA(rank=2)), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="is merged into its weight; call unmerge"):
        load_adapter(merged, tmp_path / "adapter")
