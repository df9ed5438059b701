"""The tests that a change can break: those of the packages that it touches, and those above them.

A test file is above a module if it imports it, or imports something that does. A module's name in a string counts like
an import: commands and scripts of tests have it there.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = "lightning_d9d", "tests"
FOR_ALL = ("pyproject.toml", "tests/conftest.py", "tests/constraints.txt", "tests/harness/")
"""Files whose change concerns every test."""
_DOTTED = re.compile(rf"\b(?:{PACKAGE}|{TESTS})(?:\.\w+)*")


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from where this branch left `base`; those not committed yet, too."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout

    committed = git("diff", "--name-only", git("merge-base", base, "HEAD").strip())
    return sorted({*committed.splitlines(), *git("ls-files", "--others", "--exclude-standard").splitlines()})


def files_above(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files to run after these files have changed; all paths are relative to `root`."""
    changed = list(changed)
    tests = sorted(path.relative_to(root).as_posix() for path in (root / TESTS).rglob("test_*.py"))
    if any(name.startswith(FOR_ALL) for name in changed):
        return tests
    modules = Modules(root)
    touched = {_module_of(name) for name in changed if name.endswith(".py")}
    chosen = {name for name in tests if name in changed or touched & modules.below(_module_of(name))}
    for parts in (Path(name).parts for name in changed):
        if parts[0] == PACKAGE:
            chosen |= {name for name in tests if name.startswith(f"{TESTS}/{parts[1]}/")}
        elif parts[0] in ("docs", "examples") or parts[-1].endswith(".md"):
            chosen.add(f"{TESTS}/test_docs.py")
    return sorted(chosen)


class Modules:
    """The modules of the package and of its tests, and what each imports."""

    def __init__(self, root: Path) -> None:
        paths = [path for part in (PACKAGE, TESTS) for path in (root / part).rglob("*.py")]
        self._nodes = {_module_of(path.relative_to(root).as_posix()): _nodes_of(path.read_text()) for path in paths}
        self._imports: dict[str, set[str]] = {}
        self._passed_on: dict[str, dict[str, str]] = {}
        """Names that a module imports, and from where."""

    def below(self, module: str) -> set[str]:
        """Return the module and all that it imports, directly or not.

        A package's `__init__.py` does not count where only one of its modules is imported.
        """
        found: set[str] = set()
        left = [module]
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += self._imports_of(name)
        return found

    def _imports_of(self, module: str) -> set[str]:
        if module not in self._imports:
            self._imports[module] = set(self._read(module)) if module in self._nodes else set()
        return self._imports[module]

    def _read(self, importer: str) -> Iterator[str]:
        for node in self._nodes[importer]:
            match node:
                case ast.Import(names=names):
                    yield from (each.name for each in names)
                case ast.ImportFrom(module=str(module), names=names):
                    yield from (self._home(module, each.name) for each in names)
                case ast.Constant(value=str(text)):
                    yield from (name for name in _DOTTED.findall(text) if "." in name)

    def _home(self, module: str, name: str) -> str:
        """Return the module that a name comes from, which a package may only pass on."""
        if f"{module}.{name}" in self._nodes:
            return f"{module}.{name}"
        if module not in self._passed_on:
            nodes = self._nodes.get(module, []) if module.count(".") < 2 else []
            imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
            self._passed_on[module] = {each.name: str(node.module) for node in imports for each in node.names}
        passed_on = self._passed_on[module]
        source = passed_on.get(name, passed_on.get("*"))
        return module if source is None else self._home(source, name)


def _nodes_of(text: str) -> list[ast.AST]:
    """Return the imports and strings of a file. All nodes of all files would keep the garbage collector busy."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant)]


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
