"""The texts that people read: docstrings and error messages of a Python file, paragraphs of a page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from inspect import cleandoc


class Kind(StrEnum):
    """The kinds of texts, which rules tell apart."""

    FUNCTION = "docstring of a function"
    NAMED = "docstring of a module, a class or a field"
    MESSAGE = "error message"
    PROSE = "paragraph"


@dataclass(frozen=True)
class Text:
    """A text, and the line of the file where it begins."""

    kind: Kind
    line: int
    content: str


def texts_of(path: str, source: str) -> list[Text]:
    """Return the texts of a Python file or a Markdown page, in order."""
    found = _of_python(ast.parse(source)) if path.endswith(".py") else _of_page(source)
    return sorted(found, key=lambda text: text.line)


def paragraphs(text: Text) -> Iterator[str]:
    """Yield the paragraphs of a docstring, and of its sections the entries; another text is one paragraph."""
    if text.kind is Kind.PROSE or text.kind is Kind.MESSAGE:
        yield text.content
        return
    entry = re.compile(r"(?m)^(?=[ \t]*(?:[-*] |\d+\. |\*{0,2}\w+(?: \([^)]*\))?: ))")
    for block in re.split(r"\n[ \t]*\n", text.content):
        if not _is_drawn(block):
            yield from (part for part in entry.split(block) if part.strip())


def _is_drawn(block: str) -> bool:
    """Return True for a table, a diagram or code, which have no sentences."""
    lines = block.splitlines()
    return any("|" in line or "->" in line[:3] for line in lines) or all(line.startswith("    ") for line in lines)


def _of_python(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield Text(Kind.MESSAGE, node.lineno, " ".join(_literal(argument) for argument in node.exc.args))
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_property = is_function and any("property" in ast.unparse(each) for each in node.decorator_list)
        kind = Kind.FUNCTION if is_function and not is_property else Kind.NAMED
        for number, statement in enumerate(node.body):  # behind the first one those of fields and variables
            match statement:
                case ast.Expr(value=ast.Constant(value=str(docstring))):
                    yield Text(Kind.NAMED if number else kind, statement.lineno, cleandoc(docstring))


def _literal(node: ast.expr) -> str:
    """Return what is written of a string; each value in it counts as a word."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_literal(value) for value in values)
        case ast.FormattedValue():
            return "{}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _literal(left) + _literal(right)
    return ""


_FENCE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$", re.M | re.S)
_NOT_PROSE = re.compile(r"[ \t]*(#|\||<|:::|!\[|---|===)")
_ITEM = re.compile(r"[ \t]*(?:[-*+]|(\d+)\.)[ \t]+")
_DIRECTIVE = re.compile(r"(?m)^:::.*\n((?:[ \t]+.*\n)*)")
"""A page's request for docstrings, with its options."""


def _of_page(source: str) -> Iterator[Text]:
    for pattern in (_FENCE, _DIRECTIVE):
        source = pattern.sub(lambda match: "\n" * match[0].count("\n"), source)
    gathered: list[str] = []
    start = item = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        marker = _ITEM.match(line)
        if marker and gathered and marker[1] not in (None, "1", str(item + 1)):
            marker = None  # a line may begin with the number that ends a sentence
        if (marker or not line.strip() or _NOT_PROSE.match(line)) and gathered:
            yield Text(Kind.PROSE, start, " ".join(gathered))
            gathered = []
        if line.strip() and not _NOT_PROSE.match(line):
            start = start if gathered else number
            item = int(marker[1]) if marker and marker[1] else item
            gathered.append(line[marker.end() if marker else 0 :].strip())
