"""A tokenizer with a chat template for tools, of characters and a few marks, and models that write what is prescribed.

An answer is text and calls of tools, such as `so <call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from small_tokenizers import small_llama
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

MARKS = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>", "<system>", "<call>", "</call>"]
TEMPLATE = """\
{%- if tools %}<system>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<end>
{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<end>
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<end>\\s*", "content": "text"},
    },
}


def make_tool_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate([*MARKS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    wrapped.chat_template = TEMPLATE
    wrapped.response_template = RESPONSE
    return wrapped


def make_tool_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **settings: object) -> LlamaForCausalLM:
    """Return a random model for the tokenizer, whose logits differ clearly between contexts."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return small_llama(tokenizer, initializer_range=0.3, **settings)


class Written(LogitsProcessor):
    """Makes rows write only tokens that `following` returns, given the tokens of a row; None: any."""

    def __init__(self, following: Callable[[list[int]], Sequence[int] | None]) -> None:
        self.following = following

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, float("-inf"))
        for row, ids in enumerate(input_ids.tolist()):
            tokens = self.following([token for token in ids if token])  # 0: padding
            allowed[row, slice(None) if tokens is None else list(tokens)] = 0.0
        return scores + allowed


def script_of(tokenizer: PreTrainedTokenizerFast, turns: Callable[[str], Sequence[str]]) -> Written:
    """Return a processor by which an answer is the next of the `turns` for a conversation, given its first part."""
    start = tokenizer.convert_tokens_to_ids("<assistant>")

    def following(ids: list[int]) -> list[int]:
        begin = len(ids) - ids[::-1].index(start)
        number = ids[:begin].count(start) - 1
        text = tokenizer.decode(ids[: ids.index(start)])
        turn = tokenizer(turns(text)[number], add_special_tokens=False).input_ids
        position = len(ids) - begin
        return [turn[position] if position < len(turn) else 0]  # TRL computes rows that have ended, too

    return Written(following)
