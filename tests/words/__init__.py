"""The lint of words: `python -m tests.words`, also in `nox -s lint`.

`texts.py` reads docstrings, error messages and paragraphs out of files, `rules.py` says what is wrong with one.
`coined.txt` is the dictionary of words that codespell refuses, in every file. `baseline.txt` counts what older files
still have of each, by file and rule: a count only shrinks.
"""
