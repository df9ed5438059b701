"""Lets MkDocs read its pages from the folder of its own configuration, and ranks pages for its search."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

BOOSTS = {"faq.md": 8, "how-to/troubleshooting.md": 6, "how-to": 3, "tutorials": 3, "explanation": 1, "benchmarks": 0.5}
"""How much more a page, or one of a folder, counts in the search than a page of the reference."""

NOTE = re.compile(r"(?P<before>(?:[^\s\[]\s*)?)\[Note:(?P<name>[^\]]+)\](?P<after>\.| in |\s+[A-Z]|)")
"""A reference to a note in a docstring of some module, or such a note."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """MkDocs calls this once the configuration is read. It refuses such a `docs_dir` in the configuration itself."""
    config.docs_dir = str(Path(config.config_file_path).parent)
    return config


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """MkDocs calls this for each page. The search of its theme reads the boost of a page from the page's settings."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTS.get(uri, BOOSTS.get(uri.partition("/")[0], 1))}
    return markdown


def on_page_content(html: str, **_: object) -> str:
    """MkDocs calls this for each page. Readers of docstrings learn that a note is in the source, not on the page."""
    return NOTE.sub(_name_note, html)


def _name_note(found: re.Match[str]) -> str:
    before, name, after = found["before"], " ".join(found["name"].split()), found["after"]
    if after.strip()[:1].isupper():  # the note itself
        return f"{before}<em>{name}</em>: {after.strip()}"
    place = "" if after.startswith(" in ") else " in the source"
    begins = before.rstrip()[-1:] in (".", ">", "")
    the = ("See the" if after == "." else "The") if begins else "the"
    return f"{before}{the} note <em>{name}</em>{place}{after}"
