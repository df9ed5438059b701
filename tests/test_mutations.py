"""The lines that `tests.mutations` breaks are there, and the page that lists them lists all."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation

PAGE = ROOT / "docs" / "explanation" / "mutations.md"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_is_there_once(mutation: Mutation) -> None:
    source = (ROOT / mutation.path).read_text()
    assert mutation.applied_to(source) != source


def test_the_page_lists_every_mutation() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == [mutation.name for mutation in MUTATIONS]
