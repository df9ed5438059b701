"""The settings that flash-attn 4 gets before it is imported."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from lightning_d9d.ops import flash_attention

NAME = "FLASH_ATTENTION_CUTE_DSL_CACHE"


@pytest.fixture(autouse=True)
def untold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (f"{NAME}_DIR", f"{NAME}_ENABLED"):
        monkeypatch.setenv(name, "")  # so that what the package sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(flash_attention, "_keep_compiled", flash_attention._keep_compiled.__wrapped__)


def test_what_is_compiled_is_kept_in_the_cache_of_the_user(tmp_path: Path) -> None:
    flash_attention.flash_attention_package()
    assert os.environ[f"{NAME}_ENABLED"] == "1"
    folder = Path(os.environ[f"{NAME}_DIR"])
    assert folder.is_dir()
    assert folder.parent == tmp_path


def test_the_word_of_the_user_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{NAME}_ENABLED", "0")
    monkeypatch.setenv(f"{NAME}_DIR", "/elsewhere")
    flash_attention.flash_attention_package()
    assert (os.environ[f"{NAME}_ENABLED"], os.environ[f"{NAME}_DIR"]) == ("0", "/elsewhere")


def test_a_cache_that_cannot_be_made_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    flash_attention.flash_attention_package()
    assert f"{NAME}_ENABLED" not in os.environ


def test_without_the_package_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: None)
    flash_attention.flash_attention_package()
    assert f"{NAME}_DIR" not in os.environ
    assert not list(tmp_path.iterdir())
