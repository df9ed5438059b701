"""What holds for every file: its place, its length, docstrings, and no path of somebody's machine."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_d9d
from lightning_d9d.mesh import Axis
from tests.harness.quick import SPINE
from tests.stress import TESTS

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    *("pyproject.toml", "noxfile.py", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore"),
    *("lightning_d9d", "tests", "examples", "docs", ".ci"),
}
MAX_LINES, MAX_LINES_OF_FUNCTION = 600, 80
MACHINE_PATH = re.compile(r"/(work|root|home|Users|mnt)/\w|[A-Z]:\\Users\\")
AXES = ROOT / "lightning_d9d/mesh/axes.py"
"""The one file in which names of axes are literals."""
MODULES = ["lightning_d9d", *(m.name for m in pkgutil.walk_packages(lightning_d9d.__path__, "lightning_d9d."))]


@cache
def tracked_files() -> list[Path]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"not a git checkout: {result.stderr}")
    return [Path(name) for name in result.stdout.split("\0") if name and (ROOT / name).exists()]


def test_top_level_is_fixed() -> None:
    assert {path.parts[0] for path in tracked_files()} <= TOP_LEVEL


def test_packages_are_two_levels_deep() -> None:
    deeper = {Path("lightning_d9d/models"), Path("lightning_d9d/ops/kernels")}
    for path in tracked_files():
        if path.parts[0] == "lightning_d9d":
            depth = len(path.parts) - 2
            assert depth <= (2 if deeper & {*path.parents} else 1), f"{path} lies too deep"


@pytest.mark.parametrize("folder", ["lightning_d9d", "tests", "examples"])
def test_no_file_is_too_long(folder: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


@pytest.mark.parametrize("folder", ["lightning_d9d", "tests", "examples"])
def test_no_function_is_too_long(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > MAX_LINES_OF_FUNCTION
    ]
    assert not found


def test_no_path_of_a_machine() -> None:
    found = []
    for path in tracked_files():
        if path.suffix in (".png", ".jpg"):
            continue
        match = MACHINE_PATH.search((ROOT / path).read_text(encoding="utf-8"))
        if match is not None:
            found.append(f"{path}: {match[0]}")
    assert not found


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        assert module.__doc__, f"{name}/__init__.py: no map of the package"
    defined_here = [
        (key, value)
        for key, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name
    ]
    exported = [(key, getattr(module, key)) for key in getattr(module, "__all__", ())]
    for key, value in (*defined_here, *exported):
        if key.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        documented = value.__doc__ and not value.__doc__.startswith(f"{key}(")  # what a dataclass says of itself
        assert documented, f"{name}.{key} has no docstring"


def test_axis_names_are_literals_in_one_file_only() -> None:
    found = []
    for path in (ROOT / "lightning_d9d").rglob("*.py"):
        if path != AXES:
            found += [f"{path.relative_to(ROOT)}:{line}: {name!r}" for line, name in axes_in(path)]
    assert {name for _, name in axes_in(AXES)} == {*Axis}
    assert not found, "write Axis.TP and the like, from lightning_d9d.mesh"


def axes_in(path: Path) -> Iterator[tuple[int, str]]:
    """Literals that name an axis, with their lines. Docstrings are sentences, so none of them is one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and node.value in {*Axis}:
            yield node.lineno, node.value


def test_tests_that_are_named_elsewhere_are_there() -> None:
    """The stress loop and the quick tests name tests that exist."""
    missing = []
    for node in (*TESTS, *SPINE):
        path, _, name = node.partition("::")
        functions = {each.name for each in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(each, "name")}
        if name and name.split("[")[0].split("::")[-1] not in functions:
            missing.append(node)
    assert not missing


def test_protocols_that_are_asked_for_have_no_modules() -> None:
    """From Python 3.12 on `isinstance` looks up attributes of such protocols without `__getattr__`, where modules have
    some."""
    found = []
    for path in sorted(Path("lightning_d9d").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and "runtime_checkable" in map(ast.unparse, node.decorator_list):
                kinds = [ast.unparse(part.annotation) for part in node.body if isinstance(part, ast.AnnAssign)]
                found += [f"{path}: {node.name} has {kind}" for kind in kinds if "Module" in kind or "Tensor" in kind]
    assert not found


def test_kernels_that_the_host_launches_can_be_compiled_ahead() -> None:
    launched_otherwise = []
    for path in sorted(Path("lightning_d9d/ops/kernels").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        launched = {ast.unparse(each.value) for each in called if isinstance(each, ast.Subscript)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in launched:
                decorators = [ast.unparse(each).partition("(")[0] for each in node.decorator_list]
                launched_otherwise += [] if decorators == ["jit"] else [f"{path}: {node.name}"]
    assert not launched_otherwise
