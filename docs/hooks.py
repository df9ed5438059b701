"""Lets MkDocs read its pages from the folder of its own configuration, and ranks pages for its search."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

BOOSTS = {"faq.md": 8, "how-to/troubleshooting.md": 6, "how-to": 3, "tutorials": 3, "explanation": 1, "benchmarks": 0.5}
"""How much more a page, or one of a folder, counts in the search than a page of the reference."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """MkDocs calls this once the configuration is read. It refuses such a `docs_dir` in the configuration itself."""
    config.docs_dir = str(Path(config.config_file_path).parent)
    return config


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """MkDocs calls this for each page. The search of its theme reads the boost of a page from the page's settings."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTS.get(uri, BOOSTS.get(uri.partition("/")[0], 1))}
    return markdown


def on_page_content(html: str, page: Page, **_: object) -> str:
    """MkDocs calls this for each page. A docstring on it must name the file that describes more, not a note there."""
    if "[Note:" in html:
        raise PluginError(f"{page.file.src_uri} has [Note: ...] of the source, which readers of the page cannot find")
    return html
