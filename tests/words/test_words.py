"""The lint of words: what each rule refuses and passes, and what is drawn for a reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.words.__main__ import COINED, ROOT, find, find_coined, main
from tests.words.draw import MIN_WORDS, draw
from tests.words.rules import MAX_WORDS, OPENERS
from tests.words.texts import texts_of

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
LONG = " ".join(["word"] * MAX_WORDS)


def problems(folder: Path, source: str, name: str = "a.py") -> list[str]:
    """Return the rules that the text breaks, each as often as it does."""
    (folder / name).write_text(source)
    return [rule for (_, rule), lines in find([folder / name], folder).items() for _ in lines]


def function(docstring: str) -> str:
    indented = docstring.replace("\n", "\n    ")
    return f'def f():\n    """{indented}"""\n'


@pytest.mark.parametrize("opener", OPENERS)
def test_a_first_line_that_makes_no_sense_alone(tmp_path: Path, opener: str) -> None:
    assert problems(tmp_path, function(f"{opener} the ranks that hold it.")) == ["first-line"]
    assert problems(tmp_path, f'"""{opener} the ranks that hold it."""\n') == ["first-line"]
    assert problems(tmp_path, f'class A:\n    b: int\n    """{opener} the ranks."""\n') == ["first-line"]
    assert problems(tmp_path, f'def f():\n    """Do it."""\n    b = 1\n    """{opener} the ranks."""\n') == [
        "first-line"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "return the sum.",
        "Return the sum",
        "The sum of all gradients over ranks.",
        "All ranks.",
        "Return the sum\n\nMore.",
    ],
)
def test_a_first_line_that_is_not_a_sentence(tmp_path: Path, line: str) -> None:
    assert problems(tmp_path, function(line)) == ["first-line"]


@pytest.mark.parametrize(
    "line",
    [
        "Return the sum.",
        "In-place sum over ranks.",
        "The sum is that of all ranks.",
        "`a` and `b` are summed, e.g. over ranks\nof a line.",
        "Ask: which rank?",
        'Refuse "auto".',
    ],
)
def test_a_first_line_that_is_a_sentence(tmp_path: Path, line: str) -> None:
    assert problems(tmp_path, function(line)) == []


def test_noun_phrases_name_classes_properties_and_fields(tmp_path: Path) -> None:
    assert (
        problems(tmp_path, 'class A:\n    """A rank of a mesh."""\n\n    b: int\n    """The dim of tokens."""\n') == []
    )
    assert problems(tmp_path, "class A:\n    @property\n    def b(self):\n" + '        """The ranks."""\n') == []


@pytest.mark.parametrize(
    "source",
    [
        function(f"Sum it.\n\n{LONG} more."),
        function(f"Sum it.\n\nArgs:\n    a: {LONG} more.\n    b: Short."),
        f'raise ValueError(f"{LONG} {{value}}")\n',
        f'raise ValueError("{LONG} " + "more")\n',
    ],
)
def test_a_long_sentence_of_python(tmp_path: Path, source: str) -> None:
    assert problems(tmp_path, source) == ["sentence-length"]


def test_sentences_that_are_not_long(tmp_path: Path) -> None:
    half = " ".join(["word"] * 15)
    assert problems(tmp_path, function(f"Sum it.\n\nWord {half}, i.e. so. `b` {half}.\n\n- a {half}\n- b {half}")) == []
    assert problems(tmp_path, function(f"Sum it.\n\nArgs:\n    a: {half}\n    b: {half}\n")) == []
    assert problems(tmp_path, function(f"Sum it.\n\n| {half} | {half} |")) == []
    assert problems(tmp_path, f'raise ValueError("{half}. {half.title()}")\n') == []


def test_a_long_sentence_of_a_page(tmp_path: Path) -> None:
    half = " ".join(["word"] * 15)
    page = (
        f"# {LONG} more\n\n```\n{LONG} more\n```\n\n| {LONG} more |\n\nA [{half}](x.md), in float\n16. Then {half}.\n"
    )
    assert problems(tmp_path, page, "a.md") == []
    assert problems(tmp_path, f"- {half}\n- {half}\n\n1. {half}\n2. {half}\n", "a.md") == []
    assert problems(tmp_path, f"Words {half}\n{half}.\n", "a.md") == ["sentence-length"]


@pytest.mark.parametrize(
    ("entries", "number"),
    [
        ("ValueError: The mesh has another size.", 0),
        ("ValueError, OSError: A file is missing or\n        damaged.\n    KeyError: `x` is not there.", 0),
        ("ValueError", 1),
        ("ValueError: Always.", 1),
        ("ValueError: the mesh has another size.", 1),
        ("ValueError: If the mesh has another size.\n    KeyError: It is damaged.", 2),
        ("ValueError: As in `f`.\n    OSError: A file is missing.", 1),
    ],
)
def test_raises_names_the_state(tmp_path: Path, entries: str, number: int) -> None:
    assert problems(tmp_path, function(f"Sum it.\n\nRaises:\n    {entries}\n")) == ["raises"] * number


def test_avoided_words(tmp_path: Path) -> None:
    assert problems(tmp_path, function("It is no mesh; `is no` code.")) == ["avoided-words"]
    assert problems(tmp_path, "Weights\nare let\ngo.\n", "a.md") == ["avoided-words"]
    assert problems(tmp_path, "It is no longer there.\n", "a.md") == []


def test_codespell_refuses_coined_words_everywhere(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def put_off():\n    filling = 1  # anew\n\n\ndef defer():\n    pass\n")
    (found,) = find_coined(["a.py"], tmp_path).items()
    assert found[0] == ("a.py", "coined-words")
    assert [line.split(": ")[0] for line in found[1]] == ["a.py:1", "a.py:2", "a.py:2"]


def test_the_glossary_has_every_coined_word() -> None:
    rows = [
        line.split("|")[1].strip()
        for line in GLOSSARY.read_text().split("## Words to avoid")[1].splitlines()
        if "|" in line
    ]
    listed = {word.strip("` ") for row in rows[2:] for word in row.split(",")}
    assert {line.split("->")[0] for line in COINED.read_text().splitlines()} <= listed


def test_any_problem_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.md").write_text("It is a mesh.\n")
    assert main([str(tmp_path / "a.md")]) == 0
    (tmp_path / "a.md").write_text("It is no mesh.\n")
    assert main([str(tmp_path / "a.md")]) == 1
    assert "avoided-words" in capsys.readouterr().out


def test_a_draw_follows_from_its_seed_and_has_no_fragments() -> None:
    files = [ROOT / "README.md", ROOT / "lightning_d9d" / "errors.py"]
    drawn = draw(1, 20, files)
    assert drawn == draw(1, 20, files) != draw(2, 20, files)
    assert len(set(drawn)) == 20
    assert all(len(line.split(": ", 2)[2].split()) >= MIN_WORDS for line in drawn)


def test_a_page_without_options_of_docstrings_and_markers_of_lists() -> None:
    page = "::: a.b\n    options:\n      members: false\n\n1. Read.\n2. Write in\n   16. Then go.\n"
    assert [text.content for text in texts_of("a.md", page)] == ["Read.", "Write in 16. Then go."]
