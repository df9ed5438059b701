"""Small chat templates with the structure of known families, and a tokenizer that has their special tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """\
{{- bos_token }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- (first if loop.first else '') + (message.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

QWEN = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last_query %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}
{%- endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

INSTRUCT = """\
{{- bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "marked": MARKED, "llama": LLAMA, "gemma": GEMMA, "qwen": QWEN, "instruct": INSTRUCT}

_SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
_TEXT = ["How are you today? I am well, thank you.", "What is the sum of two and three? It is five.", "[INST] [/INST]"]


@cache
def _trained() -> Any:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_TEXT * 4, vocab_size=300, special_tokens=list(_SPECIAL))
    return bpe._tokenizer


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with the template of a family, and about 300 tokens."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_trained(), bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL[2:])})
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """The turns of the user and the assistant, one after the other."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(turns)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages]}


def write_chats(path: Path, number: int = 120) -> Path:
    """Chats of one or two turns of random lengths, as JSON lines."""
    numbers = torch.randint(1, 12, (number, 5), generator=torch.Generator().manual_seed(0)).tolist()
    lines = []
    for index, (*words, turns) in enumerate(numbers):
        texts = [f"{index} " + "well " * count for count in words]
        lines.append(json.dumps(chat(*texts[: 2 if turns % 2 else 4])))
    path.write_text("\n".join(lines) + "\n\n")
    return path
