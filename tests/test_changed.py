"""`python -m tests changed` chooses the tests of changed packages and of those above, and no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.changed import ROOT, changed_files, files_above

FILES = {
    "lightning_d9d/__init__.py": "from lightning_d9d.high.top import Top\n",
    "lightning_d9d/low/__init__.py": "from lightning_d9d.low.base import base\n"
    "from lightning_d9d.low.other import other\n",
    "lightning_d9d/low/base.py": "def base(): ...\n",
    "lightning_d9d/low/other.py": "def other(): ...\n",
    "lightning_d9d/high/__init__.py": "",
    "lightning_d9d/high/top.py": "from lightning_d9d.low import base\nclass Top: ...\n",
    "lightning_d9d/side.py": "",
    "tests/low/test_base.py": "from lightning_d9d.low.base import base\n",
    "tests/low/test_other.py": "from lightning_d9d.low import other\n",
    "tests/high/helper.py": "import lightning_d9d.high.top\n",
    "tests/high/test_top.py": "from tests.high import helper\n",
    "tests/test_public.py": "from lightning_d9d import Top\n",
    "tests/test_command.py": "COMMAND = 'python -m lightning_d9d.side --help'\n",
    "tests/test_docs.py": "",
}
LOW, HIGH = {"tests/low/test_base.py", "tests/low/test_other.py"}, {"tests/high/test_top.py", "tests/test_public.py"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ("lightning_d9d/low/base.py", LOW | HIGH),
        ("lightning_d9d/low/other.py", LOW),  # the package passes it on, and nobody above takes it
        ("lightning_d9d/high/top.py", HIGH),
        ("lightning_d9d/side.py", {"tests/test_command.py"}),
        ("tests/high/helper.py", {"tests/high/test_top.py"}),
        ("tests/low/test_base.py", {"tests/low/test_base.py"}),
        ("docs/index.md", {"tests/test_docs.py"}),
        ("README.md", {"tests/test_docs.py"}),
        (".gitignore", set()),
        ("tests/conftest.py", {name for name in FILES if "test_" in name}),
    ],
)
def test_tests_above_a_change(tree: Path, changed: str, chosen: set[str]) -> None:
    assert set(files_above([changed], tree)) == chosen


def test_layers_of_this_package() -> None:
    """A schedule is above no op, and the strategy above both."""
    files = files_above(["lightning_d9d/ops/rope.py"])
    assert {"tests/ops/test_rope.py", "tests/models/test_qwen3_moe_model.py", "tests/test_docs.py"} <= set(files)
    assert not {name for name in files if name.startswith(("tests/schedule/", "tests/sync/", "tests/state/"))}


def test_changes_of_a_branch(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("kept.py", "edited.py", "committed.py"):
        (tmp_path / name).write_text("")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "branch")
    (tmp_path / "committed.py").write_text("1")
    git("commit", "-am", "second")
    (tmp_path / "edited.py").write_text("1")
    (tmp_path / "new.py").write_text("")
    git("checkout", "main", "-q", "--merge")
    git("commit", "--allow-empty", "-m", "not of the branch")
    git("checkout", "branch", "-q", "--merge")
    assert changed_files("main", tmp_path) == ["committed.py", "edited.py", "new.py"]


def test_every_folder_of_tests_has_its_package() -> None:
    """A folder with the name of a package holds its tests; that is how they are found."""
    packages = {path.name for path in (ROOT / "lightning_d9d").iterdir() if (path / "__init__.py").exists()}
    assert packages <= {path.name for path in (ROOT / "tests").iterdir()}
