"""`lightning-d9d generate` and `evaluate`, in processes of their own and in this one."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_d9d import D9DStrategy, StateError
from lightning_d9d.cli import main
from lightning_d9d.cli.commands import parse
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.errors import ConfigError
from lightning_d9d.generation import ByteTokenizer, generate, load_model, load_tokenizer
from lightning_d9d.generation.commands import main_evaluate, main_generate
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining, save_huggingface
from tests.generation.test_cache import CONFIG
from tests.harness import warm
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged, staged_rows

TEXT = "def run(self):\n    return self.numbers\n" * 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder with a checkpoint directory, a `.ckpt` file and an export, and the perplexity of TEXT."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    torch.manual_seed(0)
    module = Qwen3MoePretraining(preset="tiny", learning_rate=3e-3, warmup_steps=2)
    data = ByteTextDataModule(str(folder), "*.txt", sequence_length=32, batch_size=2, validation_fraction=0.1)
    run = trainer(D9DStrategy(), 1, max_steps=6, limit_val_batches=0)
    run.fit(module, datamodule=data)
    run.save_checkpoint(folder / "directory.ckpt")
    torch.save(
        {**(saved := {"pytorch-lightning_version": "2.6.0"}), "state_dict": module.state_dict(), **_arguments(module)},
        folder / "file.ckpt",
    )
    assert saved
    save_huggingface(module.model, folder / "export")
    tokens = torch.tensor(list(TEXT.encode()))
    with torch.no_grad():
        losses = module.model(tokens[None, :-1], labels=tokens[None, 1:]).loss
    return folder, float(losses.mean().exp())


def run_command(command: str, *arguments: str | Path) -> None:
    main = {"evaluate": main_evaluate, "generate": main_generate}[command]
    main(parse(command, [*map(str, arguments), "--device", "cpu"]))


def _arguments(module: Qwen3MoePretraining) -> dict[str, object]:
    checkpoint: dict[str, object] = {}
    module.on_save_checkpoint(checkpoint)
    return checkpoint


@pytest.mark.parametrize("source", ["directory.ckpt", "file.ckpt", "export"])
def test_the_model_is_the_trained_one(trained: tuple[Path, float], source: str, capsys: pytest.CaptureFixture) -> None:
    folder, perplexity = trained
    run_command("evaluate", folder / source, folder / "text.txt", "--context-length", "512")
    shown = capsys.readouterr().out
    found = re.fullmatch(r"perplexity ([\d.]+)  loss ([\d.]+)  bits per byte ([\d.]+)  tokens (\d+)\n", shown)
    assert found is not None
    assert float(found[1]) == pytest.approx(perplexity, rel=1e-4)
    assert int(found[4]) == len(TEXT) - 1
    model = load_model(folder / source)
    run_command("generate", folder / source, "--prompt", "def ", "--max-new-tokens", "12")
    expected = ByteTokenizer().decode(list(generate(model, torch.tensor(list(b"def ")), 12)))
    assert capsys.readouterr().out == f"def {expected}\n"


@pytest.mark.jobs
def test_the_shell_command(
    trained: tuple[Path, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A prompt from standard input; equal seeds draw equal text, in another process as in this one."""
    folder, _ = trained
    generate = ["generate", str(folder / "export"), "--prompt", "-"]
    generate += ["--temperature", "0.8", "--top-k", "20", "--max-new-tokens", "10", "--device", "cpu"]
    one = warm.run_command(*generate, folder=tmp_path, variables={}, text="def run")
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("def run")
    monkeypatch.setattr(sys, "stdin", io.StringIO("def run"))
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", *generate])
    main()
    assert capsys.readouterr().out == one.stdout
    (tmp_path / "binary.txt").write_bytes(b"\xff")
    binary = ["evaluate", str(folder / "export"), str(tmp_path / "binary.txt"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", *binary])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "binary.txt cannot be read as UTF-8 text" in capsys.readouterr().err


def test_a_tokenizer_beside_the_model_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = {"[UNK]": 0, "the": 1, "model": 2, "writes": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    save_huggingface(Qwen3MoeForCausalLM(CONFIG), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"has no tokenizer .* beside it. Give one with --tokenizer"):
        load_tokenizer(None, tmp_path / "model", 64)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    assert load_tokenizer(None, tmp_path / "model", 64).encode("the model") == [1, 2]
    run_command("generate", tmp_path / "model", "--prompt", "the model", "--max-new-tokens", "3")
    assert capsys.readouterr().out.startswith("the model")
    with pytest.raises(ConfigError, match="ids up to 3, but the model has vocab_size=2"):
        load_tokenizer(str(tmp_path / "model"), tmp_path, 2)
    with pytest.raises(ConfigError, match="vocab_size=64 has no token for each byte"):
        load_tokenizer("bytes", tmp_path, 64)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(str(tmp_path / "empty"), tmp_path, 64)


@pytest.mark.parametrize("name", ["tokens/qwen", "./qwen", "a/b/c", "/none/qwen", "~/none"])
def test_a_directory_that_is_missing_is_not_sought_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "tokens").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"tokenizer='{name}' does not exist"):
        load_tokenizer(name, tmp_path, 64)


def test_characters_of_several_bytes_come_whole() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("größer")) == "größer"
    assert tokenizer.decode([104, 300, 0xC3]) == "h\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, StateError), match="nothing"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"device='abacus' cannot be used here \(.*choose 'cpu'"):
        load_model(tmp_path / "nothing", device="abacus")


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    run = trainer(D9DStrategy(), 1, max_epochs=1)
    run.fit(Staged(), torch.utils.data.DataLoader(staged_rows(4), 2))  # type: ignore[arg-type]
    run.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ConfigError, match=r"other\.ckpt is a checkpoint, but not of a Qwen3MoePretraining"):
        load_model(tmp_path / "other.ckpt")


DAMAGED = {
    "no version": lambda saved: saved.pop("pytorch-lightning_version"),
    "arguments": lambda saved: saved.update(qwen3_moe_arguments={**saved["qwen3_moe_arguments"], "warmup_steps": "x"}),
    "a list of hyperparameters": lambda saved: saved.update(hyper_parameters=[1]),
    "a shape": lambda saved: saved["state_dict"].update({"model.norm.weight": torch.zeros(3)}),
    "no weights": lambda saved: saved.update(state_dict={}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_named(trained: tuple[Path, float], tmp_path: Path, name: str) -> None:
    saved = torch.load(trained[0] / "file.ckpt", weights_only=True)
    DAMAGED[name](saved)
    torch.save(saved, tmp_path / "damaged.ckpt")
    with pytest.raises((StateError, ConfigError), match=r"damaged\.ckpt"):
        load_model(tmp_path / "damaged.ckpt")


def test_a_refusal_writes_no_prompt(trained: tuple[Path, float], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError, match="ask for at most 2044"):
        run_command("generate", trained[0] / "export", "--prompt", "def ", "--max-new-tokens", "9999")
    assert capsys.readouterr().out == ""


def test_dtypes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_huggingface(Qwen3MoeForCausalLM(Qwen3MoeConfig.preset("tiny")), tmp_path / "half", dtype=torch.bfloat16)
    assert next(load_model(tmp_path / "half").parameters()).dtype == torch.bfloat16
    assert next(load_model(tmp_path / "half", torch.float32).parameters()).dtype == torch.float32


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_model_does_not_steer_a_terminal(
    trained: tuple[Path, float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    is_terminal: bool,
) -> None:
    """A file gets the text as it is."""
    monkeypatch.setattr("lightning_d9d.generation.commands.generate", lambda *_, **__: iter(b"\x1b[2J\n"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    run_command("generate", trained[0] / "export", "--prompt", "def ")
    assert capsys.readouterr().out == ("def \\x1b[2J\n\n" if is_terminal else "def \x1b[2J\n\n")
