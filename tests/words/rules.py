"""The rules for a text. Each returns what is wrong, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.words.texts import Kind, Text, paragraphs

MAX_WORDS = 25
OPENERS = (
    "Of",
    "As",
    "That",
    "Those",
    "In",
    "From",
    "What",
    "Whether",
    "By",
    "Also",
    "Are",
    "Is",
    "Has",
    "Have",
    "Was",
)
"""First words of lines that make no sense alone."""
AVOIDED = re.compile(r"\b(is no|are no|was no|were no|let go|lets go|put off|puts off)\b(?! longer)", re.I)

_DOCSTRINGS = (Kind.FUNCTION, Kind.NAMED)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[\"'(\[*]*[A-Z`{])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|et al|vs|etc)\.", re.I)
_CODE = re.compile(r"``?[^`]+``?")
_ENTRY = re.compile(r"\*{0,2}\w+(?: \([^)]*\))?: ")
"""The name in front of an entry of `Args:` or `Raises:`."""
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_WORD = re.compile(r"[\w{][\w'’.,/{}%+-]*")
_RAISED = re.compile(r"(?m)^(?:(?P<name>[A-Z][\w.]*(?:, [A-Z][\w.]*)*): ?)")
_DETERMINER = re.compile(r"(The|A|An|All|Every|Each|Both|Its|Their|How|Where|Which|Who|Why|For|With|No) ")
_FINITE = re.compile(
    r"\b(is|are|was|were|be|been|has|have|had|can|could|may|might|must|will|would|does|do|did|gets?|gives?|takes?|"
    r"holds?|makes?|runs?|needs?|raises?|returns?|keeps?|comes?|goes|lies?|stands?|says?|shows?|counts?|becomes?|"
    r"belongs?|begins?|ends?|stays?|fits?|uses?|reads?|writes?|names?|differs?|trains?|sends?|receives?|waits?)\b"
)


def first_line(text: Text) -> Iterator[str]:
    """Refuse a first line that is not a sentence of its own.

    A noun phrase is refused of a function only, and only where it is plain. It begins with an article or the like, and
    has no common verb.
    """
    if text.kind not in _DOCSTRINGS:
        return
    first = " ".join(text.content.split("\n\n")[0].split()) if text.content else ""
    line = _SENTENCE_END.split(_ABBREVIATION.sub(r"\1", first))[0]
    word = re.match(r"[A-Za-z]+(?:-place)?", line)
    if word and word[0] in OPENERS:
        yield f"the first line begins with {word[0]!r}: {line}"
    elif not re.match(r"[\"'(]?[A-Z`0-9\[]", line):
        yield f"the first line begins without a capital letter: {line}"
    elif not line.rstrip("\"')*").endswith((".", "!", "?", ":")):
        yield f"the first line has no period: {line}"
    elif text.kind is Kind.FUNCTION and _DETERMINER.match(line) and not _FINITE.search(line):
        yield f"the first line of a function has no verb: {line}"


def sentence_length(text: Text) -> Iterator[str]:
    """Refuse a sentence of more than 25 words; code in backquotes and a value in a message are one word each."""
    for sentence in sentences_of(text):
        plain = _LINK.sub(r"\1", _CODE.sub("`code`", sentence))
        if (number := len(_WORD.findall(plain))) > MAX_WORDS:
            yield f"{number} words in a sentence, {MAX_WORDS} at most: {plain}"


def sentences_of(text: Text) -> Iterator[str]:
    """Yield the sentences of a text, each on one line, without the names in front of entries."""
    for paragraph in paragraphs(text):
        words = " ".join(paragraph.split())
        if text.kind in _DOCSTRINGS and (entry := _ENTRY.match(words)):
            words = words[entry.end() :]
        yield from _SENTENCE_END.split(_ABBREVIATION.sub(r"\1", words))


def raises_section(text: Text) -> Iterator[str]:
    """Refuse an entry of `Raises:` that does not name the state in which it is raised."""
    match = re.search(r"(?m)^Raises:\n((?:[ \t]+.*\n?|\n)+)", text.content) if text.kind in _DOCSTRINGS else None
    if match is None:
        return
    for entry in re.split(r"\n(?=    \S)", "\n" + match[1].rstrip())[1:]:
        plain = " ".join(entry.split())
        named = _RAISED.match(plain)
        state = plain[named.end() :] if named else ""
        opener = re.match(r"\w*", state)
        if not state or not re.match(r"[A-Z`]", state) or not state.endswith(".") or " " not in state:
            yield f"`Raises:` has `Error: The state, as a sentence.`, not {plain!r}"
        elif opener and opener[0] in (*OPENERS, "If", "When", "It", "They"):
            yield f"`Raises:` names the state, subject first, not {plain!r}"


def avoided_words(text: Text) -> Iterator[str]:
    """Refuse turns of phrase that a reader stumbles over; single words are in `coined.txt`, for codespell."""
    for match in AVOIDED.finditer(_CODE.sub("code", " ".join(text.content.split()))):
        yield f"say it without {match[0]!r}"


RULES: dict[str, Callable[[Text], Iterator[str]]] = {
    "first-line": first_line,
    "sentence-length": sentence_length,
    "raises": raises_section,
    "avoided-words": avoided_words,
}
