"""Lets MkDocs read its pages from the folder of its own configuration, which its check of `docs_dir` refuses."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """MkDocs calls this once the configuration is read."""
    config.docs_dir = str(Path(config.config_file_path).parent)
    return config
