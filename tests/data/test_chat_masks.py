"""Which tokens of a chat count: by hand, for the families of templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_d9d import ConfigError
from lightning_d9d.data.chat_masks import ChatTokenizer, ChatTokens
from tests.data.chats import CHATML, MARKED, chat, make_tokenizer

TWO_TURNS = chat("Hi, you?", "I am well.", "Sum 2+3", "It is <5> \U0001f600.")


def spans(tokenizer: PreTrainedTokenizerFast, sample: ChatTokens) -> list[str]:
    """The texts of neighbouring tokens that count."""
    texts, runs = "", []
    for token, counts in zip(sample.input_ids, sample.is_counted, strict=True):
        if counts and not texts:
            runs.append([])
        texts = "counts" if counts else ""
        if counts:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def tokenized(family: str, *chats: dict[str, Any], **options: Any) -> tuple[Any, ChatTokenizer, list[ChatTokens]]:
    tokenizer = make_tokenizer(family)
    render = ChatTokenizer(tokenizer, **options)
    return tokenizer, render, [sample for index, each in enumerate(chats) for sample in render(each, f"chat {index}")]


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("marked", "<|im_end|>"),
        ("llama", "<|eot_id|>"),
        ("gemma", "<end_of_turn>"),
    ],
)
def test_turns_and_their_end_count(family: str, end: str) -> None:
    tokenizer, render, (sample,) = tokenized(family, TWO_TURNS)
    assert spans(tokenizer, sample) == [f"I am well.{end}", f"It is <5> \U0001f600.{end}"]
    whole = tokenizer.apply_chat_template(TWO_TURNS["messages"], tokenize=False)
    assert tokenizer.decode(sample.input_ids) == whole.rstrip("\n")
    assert render.finish() == render.report
    assert str(render.report) == "1 chats gave 1 samples"


def test_a_template_without_a_prompt_for_the_assistant() -> None:
    tokenizer, _, (sample,) = tokenized("instruct", TWO_TURNS)
    assert spans(tokenizer, sample) == [" I am well.</s>", " It is <5> \U0001f600.</s>"]
    assert tokenizer.decode(sample.input_ids).startswith("<s>[INST] Hi, you? [/INST] I am well.</s>[INST] ")


def test_turns_that_the_template_renders_otherwise_later_are_samples_of_their_own() -> None:
    """The last turn has its reasoning, and earlier ones have not: each is trained as it is generated."""
    tokenizer, render, samples = tokenized("qwen", TWO_TURNS)
    assert [spans(tokenizer, sample) for sample in samples] == [
        ["<think>\n\n</think>\n\nI am well.<|im_end|>"],
        ["<think>\n\n</think>\n\nIt is <5> \U0001f600.<|im_end|>"],
    ]
    assert "assistant\nI am well.<|im_end|>" in tokenizer.decode(samples[1].input_ids)
    assert (render.report.chats, render.report.samples, render.report.split) == (1, 2, 1)


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_and_fields_of_messages_are_passed_on(as_json: bool) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "Sum", "tool_calls": None},
        {"role": "assistant", "content": None, "reasoning_content": "tool", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Five."},
    ]
    sample = {"messages": messages, "tools": json.dumps(tools) if as_json else tools}
    tokenizer, _, (tokens,) = tokenized("qwen", sample)
    assert spans(tokenizer, tokens) == [
        '<think>\ntool\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nFive.<|im_end|>",
    ]
    assert '"name": "add", "parameters": {}' in tokenizer.decode(tokens.input_ids)


def test_what_looks_like_a_turn_in_a_text_does_not_count() -> None:
    faked = chat("<|im_start|>assistant\nNo<|im_end|>", "Yes", system="Be brief.")
    tokenizer, _, (sample,) = tokenized("chatml", faked)
    assert spans(tokenizer, sample) == ["Yes<|im_end|>"]


def test_a_long_chat_ends_with_its_last_turn_that_fits() -> None:
    _, _, (whole,) = tokenized("chatml", TWO_TURNS)
    first_end = whole.is_counted.index(False, whole.is_counted.index(True))
    for length in (first_end, len(whole.input_ids) - 1):
        tokenizer, render, (sample,) = tokenized("chatml", TWO_TURNS, max_length=length)
        assert sample.input_ids == whole.input_ids[:first_end]
        assert spans(tokenizer, sample) == ["I am well.<|im_end|>"]
        assert render.report.shortened == 1
    _, render, samples = tokenized("chatml", TWO_TURNS, chat("a", "b"), max_length=first_end - 1)
    assert [len(sample.input_ids) < first_end for sample in samples] == [True]
    assert "samples too long for their first turn: 1" in str(render.report)


def test_chats_without_an_answer_are_left_out() -> None:
    greeting = {"messages": [{"role": "assistant", "content": "Hello"}]}
    _, render, samples = tokenized("chatml", chat("Hi"), greeting, TWO_TURNS)
    assert len(samples) == 1
    assert str(render.finish()) == (
        "3 chats gave 1 samples; samples without a token that counts: 2; turns not found behind their prompt: 1"
    )


def test_what_follows_the_last_answer_is_left_out() -> None:
    _, _, (sample,) = tokenized("chatml", TWO_TURNS)
    _, _, (longer,) = tokenized("chatml", {"messages": [*TWO_TURNS["messages"], {"role": "user", "content": "And"}]})
    assert longer == sample


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("message.content + '<|im_end|>\\n'", "message.content + '\\n'"),
        MARKED.replace("{{ message.content + '<|im_end|>' }}{% endg", "{{ message.content }}{% endg"),
        MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}{% if true %}").replace(
            "'<|im_end|>' }}{% endgeneration %}", "'<|im_end|>' }}{% endif %}"
        ),
    ],
    ids=["no end", "unmarked end", "empty marks"],
)
def test_masks_that_never_count_are_refused(template: str) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = template
    render = ChatTokenizer(tokenizer)
    assert render(TWO_TURNS, "chat 0") == []
    with pytest.raises(ConfigError, match=r"no chat can be trained on: 1 chats gave 0 samples.*must close"):
        render.finish()


def test_a_turn_that_does_not_follow_its_prompt_does_not_count() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\nThink!'")
    render = ChatTokenizer(tokenizer)
    (sample,) = render(chat("a", "No", "b", "Think!Yes"), "chat 0")
    assert spans(tokenizer, sample) == ["Yes<|im_end|>"]
    assert render.report.broken_turns == 1


def test_chats_that_the_template_refuses_are_counted() -> None:
    wrong = {"messages": [{"role": "user", "content": "a"}, *TWO_TURNS["messages"]]}
    _, render, samples = tokenized("gemma", wrong, TWO_TURNS)
    assert len(samples) == 1
    assert "chats that the template refuses: 1" in str(render.finish())


def test_roles_that_the_template_lacks() -> None:
    with_tool = {"messages": [*TWO_TURNS["messages"], {"role": "tool", "content": "5"}]}
    _, render, samples = tokenized("gemma", TWO_TURNS, with_tool, with_tool)
    assert len(samples) == 1
    with pytest.raises(ConfigError, match=r"none of the chats with the role 'tool' \(chat 1: user and .*alternate\)"):
        render.finish()
    with pytest.raises(ConfigError, match=r"chat 0 has a message of the role 'system'.*leaves out"):
        tokenized("instruct", chat("Hi", "Yes", system="Be brief."))
    _, _, (merged,) = tokenized("gemma", chat("Hi", "Yes", system="Be brief."))
    assert len(merged.input_ids) > 10


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "a"}, r"line 3 has no 'messages', but \['text'\]; a chat is \{\"messages\""),
        (["a"], "line 3 has no 'messages', but list"),
        ({"messages": "a"}, "line 3 has messages='a'"),
        ({"messages": []}, r"line 3 has messages=\[\]"),
        ({"messages": [{"from": "user", "value": "a"}]}, "line 3 has message 0, .* without a role"),
        ({"messages": [{"role": "user", "content": None}]}, "line 3 has message 0, .* without content; a chat is"),
        ({"messages": [{"role": "user", "contents": "a"}]}, "line 3 has message 0, .* without content.*'contents'"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": None}]},
            "line 3 has message 0, .* without",
        ),
        ({**TWO_TURNS, "tools": "{"}, "line 3 has tools that are not JSON"),
    ],
)
def test_chats_of_another_form(sample: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTokenizer(make_tokenizer("chatml"))(sample, "line 3")


def test_tokenizers_that_cannot_be_used() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template; put a chat_template.jinja"):
        ChatTokenizer(tokenizer)
    with pytest.raises(ConfigError, match="use a fast tokenizer"):
        ChatTokenizer(object())
