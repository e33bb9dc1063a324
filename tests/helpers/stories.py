"""Scripted calls of the pdos mode: each trunk and each branch writes given text.

The tiny model has one token per ASCII character, so that a script reads like the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tiny
import torch
from transformers import LogitsProcessor
from workers import TOKENIZER, Script, encode, small_model

from hf_parallel import PDOSOutput
from hf_parallel.models.probing.signature import CACHE

FILLER = "x"
"""Text that a row repeats after the end of its script."""


@contextmanager
def before_passes(call: Callable[[torch.Tensor, Any], Any]) -> Iterator[None]:
    """Call a function with `input_ids` and cache before each forward pass of the tiny model."""
    hook = small_model().register_forward_pre_hook(
        lambda model, args, kwargs: call(kwargs["input_ids"], kwargs.get(CACHE)) and None, with_kwargs=True
    )
    with hook:
        yield


@contextmanager
def pass_sizes() -> Iterator[list[int]]:
    """Record the number of tokens of each forward pass of the tiny model."""
    sizes: list[int] = []
    with before_passes(lambda ids, cache: sizes.append(ids.shape[1])):
        yield sizes


class ActiveRows:
    """A `ParallelStreamer` that tracks which rows of the batch are active, and forwards events to another streamer."""

    def __init__(self, num_rows: int, streamer: Any = None) -> None:
        self.num_rows, self.streamer = num_rows, streamer
        self.batch_rows = dict(enumerate(range(num_rows)))  # by output row; branches follow in the order of opening
        self.active = set(range(num_rows))
        self._next = num_rows

    def put(self, value: torch.Tensor) -> None:
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def write_row(self, row: int, text: str, event: str) -> None:
        if event == "begin":
            self.batch_rows[row] = self._next
            self.active = (self.active | {self._next}) - {row % self.num_rows}
            self._next += 1
        elif event == "end":
            self.active.discard(self.batch_rows[row])
        elif event == "join":
            self.active.add(row)
        if hasattr(self.streamer, "write_row"):
            self.streamer.write_row(row, text, event)


class Scripted(LogitsProcessor):
    """Forces trunks and branches to write their scripts.

    Rows of the batch are the trunks, followed by the branches in the order in which they open. A row without a script,
    or whose script is None, decodes greedily. `drawn` holds the tokens of each row before the format is forced.
    """

    def __init__(self, trunks: Sequence[Script | None], branches: Sequence[Script | None] = ()) -> None:
        self.scripts = [None if script is None else encode(script) for script in (*trunks, *branches)]
        self.drawn: dict[int, list[int]] = defaultdict(list)
        self.rows: ActiveRows

    def follow(self, num_rows: int, streamer: Any = None) -> ActiveRows:
        """Return the streamer of the call, from which the script learns which rows are active."""
        self.rows = ActiveRows(num_rows, streamer)
        return self.rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced, rows = scores.clone(), sorted(self.rows.active)
        lines = (
            forced if len(forced) == len(rows) else [forced[row] for row in rows]
        )  # another processor needs all rows
        for row, line in zip(rows, lines, strict=True):
            script = self.scripts[row] if row < len(self.scripts) else None
            if script is not None:
                at = len(self.drawn[row])
                line.fill_(-100.0)[script[at] if at < len(script) else ord(FILLER)] = 100.0
            self.drawn[row].append(int(line.argmax()))
        return forced


def tell(
    *trunks: Script | None,
    branches: Sequence[Script | None] = (),
    prompts: Sequence[str] = ("Tell: ",),
    model: Any = None,
    mode: str = "pdos",
    **settings: Any,
) -> Any:
    """Generate answers by their scripts, or by a `script` given as such; 200 tokens unless given otherwise."""
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in prompts])
    given = {
        "tokenizer": TOKENIZER,
        "max_new_tokens": 200,
        "return_dict_in_generate": True,
        "do_sample": False,
        **({"parallel_hint": False} if mode == "pdos" else {}),
        **settings,
    }
    script = given.pop("script", None) or Scripted(trunks, branches)
    processors = [script, *given.pop("logits_processor", [])]
    streamer = given.pop("streamer", None)
    if streamer is None or hasattr(streamer, "put"):
        streamer = script.follow(len(prompts) * given.get("num_return_sequences", 1), streamer)
    return (model or small_model()).generate(
        ids, attention_mask=mask, generation_mode=mode, logits_processor=processors, streamer=streamer, **given
    )


def answer(out: PDOSOutput, row: int = 0, prompts: Sequence[str] = ("Tell: ",)) -> list[int]:
    """Return the tokens of an answer."""
    tokens = out.sequences[row, max(map(len, prompts)) :].tolist()
    while tokens[-1] == tiny.PAD:
        tokens.pop()
    return tokens


def after_blocks(out: PDOSOutput, row: int = 0) -> list[range]:
    """Return the spans of an answer's sequential text after each block."""
    assert out.blocks is not None
    starts = [block.start for block in out.blocks[row]]
    ends = [block.end for block in out.blocks[row]]
    return [range(end, start) for end, start in zip(ends, [*starts[1:], len(answer(out, row))], strict=True)]
