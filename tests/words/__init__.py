"""The lint of words: `python -m tests.words`, also in `nox -s lint`.

`texts.py` reads docstrings, error messages and paragraphs from files, and `rules.py` checks them. `coined.txt` is the
dictionary of words that codespell refuses, in every file. `draw.py` draws sentences that a person reads.
"""
