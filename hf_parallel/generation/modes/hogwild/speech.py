"""Texts for workers that run: who reads them, and as which tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.decoding.words import NotRunningError, Words
from hf_parallel.generation.modes.hogwild.group import WorkerGroup
from hf_parallel.generation.modes.hogwild.output import COMMON
from hf_parallel.generation.modes.hogwild.settings import HogwildSettings
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.generation.validation import check_text, is_int

ALL = "all"
"""Name of all workers, besides that of their common history."""


def address(config: HogwildSettings, to: object) -> int | None:
    """Return the number of the worker that `to` names, or None for all; else raise `ValueError`."""
    names = config.names
    if to in (ALL, COMMON):
        return None
    if is_int(to) and 0 <= to < len(names):
        return to
    if isinstance(to, str) and to in names:
        return names.index(to)
    shown = names if len(names) <= 8 else [*names[:8], "..."]
    raise ValueError(f"to must be {ALL!r}, one of {shown} or a number from 0 to {len(names) - 1}, got {to!r}")


def check_not_empty(text: object) -> None:
    """Raise `ValueError` unless `text` is a text."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"text must be a non-empty string, got {text!r}")


def encode_given(call: GenerationCall, text: str) -> list[int]:
    """Return the tokens of a text of a caller; raise `ValueError` for what is no text of the vocabulary."""
    check_text("text", text)
    tokens = encode(call.tokenizer, text)
    if not tokens or max(tokens) >= vocabulary_size(call.model):
        raise ValueError(f"text must be text in the model's vocabulary, got {text!r} (tokens {tokens})")
    return tokens


def ended(config: HogwildSettings, text: str) -> str:
    """Return a text that ends with the separator of steps."""
    return text if text.endswith(config.separator) else text + config.separator


def max_tokens(config: HogwildSettings, call: GenerationCall, text: str, to: int | None) -> int:
    """Return how many tokens a text may add to what a call holds. A step is held twice while it moves."""
    num_tokens = call.count_tokens(ended(config, text)) + 1
    copies = config.num_workers if to is None and config.layout == "contiguous" else 2
    return call.num_rows * copies * num_tokens


def hear(words: Words, workers: Sequence[Worker], passes: int) -> None:
    """Let workers read a text in the next forward pass, and answer it."""
    if not words.heard.set_running_or_notify_cancel():
        return
    try:
        _tell(words, workers, passes)
    except (ValueError, NotRunningError) as error:
        words.heard.set_exception(error)
    else:
        words.heard.set_result(passes)


def show_result(worker: Worker, passes: int) -> None:
    """Let all workers read the result of a worker's call, which goes on with its next step."""
    call = worker.call
    assert call is not None
    group = worker.group
    config = group.config
    worker.call = None
    result = call.result.result()
    for text in (result, f"error: the result has {len(result)} characters, which do not fit"):
        shown = ended(config, config.tool_result.format(name=call.name, worker=worker.name, result=text))
        in_history = config.layout != "contiguous"
        try:
            tokens = encode_given(group.call, shown if in_history else worker.on_new_line(shown))
            group.check_room(len(tokens))
        except ValueError:
            continue  # too long, or no text
        if in_history:
            group.inject_step(shown, tokens, passes)
        else:
            worker.insert(tokens)
        return


def _tell(words: Words, workers: Sequence[Worker], passes: int) -> None:
    """Give a text to the workers to whom it is said, or to none if it does not fit everywhere."""
    readers: dict[WorkerGroup, list[Worker]] = {}
    for worker in workers:
        if not worker.stopped and words.to in (None, worker.number):
            readers.setdefault(worker.group, []).append(worker)
    if not readers:
        raise NotRunningError("the workers to whom the text is said have stopped")
    in_history = words.to is None and workers[0].group.config.layout != "contiguous"
    written: list[tuple[WorkerGroup, Worker | None, str, list[int]]] = []
    for group, members in readers.items():
        texts: list[tuple[Worker | None, str]] = [(worker, worker.on_new_line(words.text)) for worker in members]
        if in_history:
            texts = [(None, ended(group.config, words.text))]
        tokens_of = [encode_given(group.call, text) for _, text in texts]
        group.check_room(sum(map(len, tokens_of)))
        for (listener, text), tokens in zip(texts, tokens_of, strict=True):
            written.append((group, listener, text, tokens))
    for group, listener, text, tokens in written:
        if listener is None:
            group.inject_step(text, tokens, passes)
        else:
            listener.insert(tokens)
