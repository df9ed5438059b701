"""Messages about paths that do not exist name the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_d9d.errors import ConfigError
from lightning_d9d.paths import check_directory, missing


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("models/qwen", "models/qwen does not exist; did you mean 'qwen3'?"),
        ("model/qwen3", "model/qwen3 does not exist, nor does its folder; did you mean 'models'?"),
        ("modelz", "modelz does not exist; did you mean 'models'?"),
        ("a/b/c", "a/b/c does not exist, nor does its folder"),
        ("/qwen", "/qwen does not exist"),
    ],
)
def test_the_nearest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    assert missing(path) == message


def test_what_exists_or_is_a_url_is_not_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path), "s3://bucket/model", "file:///nowhere"):
        check_directory("pretrained", path, "give another")
    with pytest.raises(ConfigError, match=r"^pretrained='.*/none' does not exist; give another$"):
        check_directory("pretrained", str(tmp_path / "none"), "give another")
