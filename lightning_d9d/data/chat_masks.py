"""Chats as tokens by a tokenizer's chat template, with marks for the assistant's tokens.

A template may mark what the assistant says (`{% generation %}`). Where it does not, each turn is found in the rendered
text: it begins where the prompt for it ends, and ends where the chat up to it does. Only turns that close with a token
of the tokenizer's own, such as `<|im_end|>`, count.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple

from lightning_d9d.errors import ConfigError, did_you_mean

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ASSISTANT = "assistant"
_PROBE = "probeofthisrole"
"""A word that every template renders unchanged."""


class ChatTokens(NamedTuple):
    """A chat, or its beginning, which ends with the last token that counts."""

    input_ids: list[int]
    is_counted: list[bool]
    """True for each of `input_ids` that belongs to the assistant."""


@dataclass
class ChatReport:
    """How many chats and turns became samples, and why others did not."""

    chats: int = 0
    samples: int = 0
    split: int = 0
    """Chats that became several samples, because the template renders a turn differently once others follow."""
    shortened: int = 0
    """Samples without their last turns, which do not fit."""
    too_long: int = 0
    """Samples left out because not even their first turn that counts fits."""
    uncounted: int = 0
    """Samples left out because none of their tokens counts."""
    refused: int = 0
    """Chats left out because the template raises an error for them."""
    broken_turns: int = 0
    """Turns that do not count because they do not follow their prompt in the text."""
    endless_turns: int = 0
    """Turns that do not count because no end-of-turn token closes them."""
    rendered_roles: set[str] = field(default_factory=set)
    """Roles of chats that the template accepted."""
    refusals: dict[str, str] = field(default_factory=dict)
    """The first refusal of each role, with its place."""

    def __add__(self, later: ChatReport) -> ChatReport:
        counts = [each.name for each in fields(self) if each.type == "int"]
        return ChatReport(
            **{name: getattr(self, name) + getattr(later, name) for name in counts},
            rendered_roles=self.rendered_roles | later.rendered_roles,
            refusals=later.refusals | self.refusals,
        )

    def check(self) -> None:
        """Check that some chats were usable, once all are rendered.

        Raises:
            ConfigError: The template refused every chat with some role, or no chat gave a sample.
        """
        if unknown := {role: said for role, said in self.refusals.items() if role not in self.rendered_roles}:
            role, said = next(iter(unknown.items()))
            raise ConfigError(
                f"the chat template accepts none of the chats with the role {role!r} ({said}). {_OTHER_TEMPLATE}"
            )
        if self.samples == 0:
            raise ConfigError(
                f"no chat can be trained on: {self}. Turns of the assistant must close with a special token and fit "
                "into a row. If the template has {% generation %}, its marks must contain that token"
            )

    def __str__(self) -> str:
        """Return a line for the log, which names the numbers that are not 0."""
        rest = {
            "chats split at turns": self.split,
            "samples shortened to whole turns": self.shortened,
            "samples too long for their first turn": self.too_long,
            "samples without a token that counts": self.uncounted,
            "chats that the template refuses": self.refused,
            "turns not found behind their prompt": self.broken_turns,
            "turns without an end-of-turn token": self.endless_turns,
        }
        parts = [f"{self.chats} chats gave {self.samples} samples"]
        return "; ".join([*parts, *(f"{name}: {number}" for name, number in rest.items() if number)])


class _Draft(NamedTuple):
    """A rendered text with the character ranges of the assistant's turns."""

    text: str
    turns: list[tuple[int, int]]


class ChatTokenizer:
    """Renders chats and converts them to tokens; the tokens of the assistant's turns count. Local.

    Args:
        tokenizer: A fast tokenizer of Hugging Face with a chat template.
        max_length: Maximum number of tokens of a sample; longer ones are shortened to the turns that fit. None sets no
            limit.

    Raises:
        ConfigError: The tokenizer is slow, has no chat template, or has no special tokens to close a turn.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(tokenizer).__name__} does not give the positions of its tokens in the text; use a fast "
                "tokenizer (a directory with tokenizer.json)"
            )
        self.report = ChatReport()
        """The report on the chats so far."""
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._closing = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        if not self._closing:
            raise ConfigError("the tokenizer has no special tokens, so none can close the assistant's turns")
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; put a chat_template.jinja into its directory, such as that of "
                "the instruction-tuned model of the same family"
            )

    def __call__(self, chat: Mapping[str, Any], place: object) -> list[ChatTokens]:
        """Return the samples of a chat: one, none, or several if the template renders earlier turns differently.

        Args:
            chat: Mapping with `messages`, a list of mappings with `role` and `content`. All other fields of a message
                are passed on to the template, and so are the chat's `tools`, a list or the JSON of one.
            place: The place of the chat, for messages to the user.

        Raises:
            ConfigError: The chat has another form, or the template leaves out the content of a role.
        """
        messages, tools = _messages_of(chat, place), _tools_of(chat, place)
        self.report.chats += 1
        try:
            self._check_roles(messages, tools, place)
            samples = self._marked(messages, tools) if self._has_marks(tools) else self._found(messages, tools)
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            self.report.refused += 1
            for role in _roles(messages):
                if role not in self.report.refusals:
                    self.report.refusals[role] = f"{place}: {error}"
            return []
        self.report.rendered_roles |= _roles(messages)
        kept = [sample for sample in samples if sample is not None]
        self.report.samples += len(kept)
        self.report.split += len(samples) > 1
        return kept

    def finish(self) -> ChatReport:
        """Return the report on the chats, once all are rendered.

        Raises:
            ConfigError: The chats were not usable, see `ChatReport.check`.
        """
        self.report.check()
        return self.report

    # Rendering

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    def _has_marks(self, tools: Any) -> bool:
        return _MARK.search(self._tokenizer.get_chat_template(None, tools)) is not None

    def _check_roles(self, messages: Sequence[Mapping[str, Any]], tools: Any, place: object) -> None:
        """Check, at the first chat of each role, that the template renders its content."""
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role in self.report.rendered_roles or not isinstance(content, str) or not content.strip():
                continue
            probed = [*messages[:index], {**message, "content": _PROBE}, *messages[index + 1 :]]
            if _PROBE not in self._render(probed, tools):
                raise ConfigError(
                    f"{place} has a message of the role {role!r}, whose content the chat template leaves out. "
                    f"{_OTHER_TEMPLATE}"
                )

    def _marked(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[ChatTokens | None]:
        """Return samples by the marks of the template."""
        text = self._render(messages, tools)
        encoded = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        runs, start = [], 0
        for is_marked, run in groupby(encoded["assistant_masks"]):
            length = len(list(run))
            if is_marked:
                runs.append((start, start + length))
            start += length
        return [self._sample(text, encoded, runs)]

    def _found(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[ChatTokens | None]:
        """Return samples by turns found in the text.

        Turns share a sample as long as the text of a turn begins with that of the turns before it.
        """
        drafts: list[_Draft] = []
        for index, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            prompt = self._render(messages[:index], tools, prompt=True) if index else ""
            text = self._render(messages[: index + 1], tools)
            if not prompt or not text.startswith(prompt):
                self.report.broken_turns += 1
                continue
            if drafts and text.startswith(drafts[-1].text):
                drafts[-1] = _Draft(text, drafts[-1].turns)
            else:
                drafts.append(_Draft(text, []))
            drafts[-1].turns.append((len(prompt), len(text)))
        if not drafts:
            self.report.uncounted += 1
        return [self._tokenized(draft) for draft in drafts]

    def _tokenized(self, draft: _Draft) -> ChatTokens | None:
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        encoded = self._tokenizer(draft.text, **options)
        starts = [start for start, _ in encoded["offset_mapping"]]
        runs = [(bisect_left(starts, start), bisect_left(starts, end)) for start, end in draft.turns]
        return self._sample(draft.text, encoded, runs)

    # Tokens

    def _sample(self, text: str, encoded: Mapping[str, Any], runs: Iterable[tuple[int, int]]) -> ChatTokens | None:
        """Return the tokens up to the last run that closes and fits; None if there is none."""
        input_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        closed = []
        for first, last in runs:
            end = last
            while end > first and text[slice(*offsets[end - 1])].isspace():  # a template's newline behind the turn
                end -= 1
            if end > max(first, 1) and input_ids[end - 1] in self._closing:
                closed.append((first, end))
            else:
                self.report.endless_turns += 1
        fitting = [run for run in closed if self._max_length is None or run[1] <= self._max_length]
        if not fitting:
            self.report.too_long += bool(closed)
            self.report.uncounted += not closed
            return None
        self.report.shortened += len(fitting) < len(closed)
        num_tokens = fitting[-1][1]
        is_counted = [False] * num_tokens
        for first, end in fitting:
            is_counted[first:end] = [True] * (end - first)
        return ChatTokens(list(input_ids[:num_tokens]), is_counted)


def _roles(messages: Iterable[Mapping[str, Any]]) -> set[str]:
    return {message["role"] for message in messages}


def _messages_of(chat: Any, place: object) -> list[dict[str, Any]]:
    """Return the messages without entries that are None, which tables have in columns that other rows use.

    Raises:
        ConfigError: The chat has another form, or a message says nothing.
    """
    if not isinstance(chat, Mapping) or "messages" not in chat:
        found = sorted(chat) if isinstance(chat, Mapping) else type(chat).__name__
        raise ConfigError(f"{place} has no 'messages', but {found}; a chat is {_FORM}")
    messages = chat["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f"{place} has messages={messages!r:.80}, but a chat is {_FORM}")
    cleaned = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{place} has message {number}, {message!r:.80}, without a role; a chat is {_FORM}")
        kept = {name: value for name, value in message.items() if value is not None}
        says_more = len(kept) > 1 if "content" in message else bool(kept.get("tool_calls"))
        if "content" not in kept and not says_more:
            nearest = did_you_mean("content", message.keys() - {"content"})
            raise ConfigError(
                f"{place} has message {number}, {message!r:.80}, without content{nearest}; a chat is {_FORM}. Content "
                "may be null beside tool_calls, say"
            )
        cleaned.append({"content": "", **kept})
    return cleaned


def _tools_of(chat: Mapping[str, Any], place: object) -> Any:
    tools = chat.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ConfigError(f"{place} has tools that are not JSON: {error}") from error
    return tools or None


_OTHER_TEMPLATE = (
    "Give the data the roles of the template, or put one that has this role into the tokenizer's directory "
    "(chat_template.jinja)"
)
_FORM = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
