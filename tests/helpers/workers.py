"""Hogwild! runs with scripted tokens, and recordings of their forward passes.

A tiny model writes the text of a script, one token per ASCII character.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from dense import DenseOracle
from transformers import LogitsProcessor, PreTrainedModel

import hf_parallel
from hf_parallel.models.probing.signature import CACHE

TOKENIZER = AsciiTokenizer()
SETTINGS: dict[str, Any] = {
    "tokenizer": TOKENIZER,
    "history_header": "[DONE]",
    "others_header": "[OTHERS]",
    "own_header": "[ME]",
    "step_gap": "|",
    "step_prefix": "{name} {step}: ",
    "finisher_prompt": "So \\boxed{",
}
"""Short texts, so that tests can spell out everything that a worker sees."""
WORDY: dict[str, Any] = {
    "separator": "a",
    "sentence_ends": [chr(c) for c in range(33, 127)],
    "sequence_bias": [[[ord("a")], 6.0]],
    "redundancy_interval": 15,
    "redundancy_prompt": "Again? ",
}
"""Settings under which the tiny model, which writes random letters, ends a step now and then."""
FILLER = "x"
"""Written after the end of a script."""

Script = str | Sequence[str | int]
"""Text, and ids of special tokens."""


def encode(script: Script) -> list[int]:
    parts = [script] if isinstance(script, str) else script
    return [t for part in parts for t in ([part] if isinstance(part, int) else map(ord, part))]


class Scripted(LogitsProcessor):
    """Forces each row of the batch to write its script; rows of early finishers, a batch of their own, `finisher`."""

    def __init__(self, scripts: Sequence[Script], finisher: Script = "") -> None:
        self.scripts, self.finisher = [encode(script) for script in scripts], encode(finisher)
        self.calls = {True: 0, False: 0}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        workers = len(scores) == len(self.scripts)
        call = self.calls[workers]
        self.calls[workers] += 1
        scripts = self.scripts if workers else [self.finisher] * len(scores)
        tokens = [script[call] if call < len(script) else ord(FILLER) for script in scripts]
        return torch.full_like(scores, -100.0).index_put_(
            (torch.arange(len(scores)), torch.tensor(tokens)), scores.new_tensor(100.0)
        )


@cache
def small_model() -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def write(*scripts: Script, prompts: Sequence[str] = ("P",), finisher: Script = "", **settings: Any) -> Any:
    """Generate by scripts, by default as many tokens as the longest one has."""
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in prompts])
    given = {
        "num_workers": len(scripts) // len(prompts),
        "max_new_tokens": max(len(encode(script)) for script in scripts),
        "finisher_tokens": len(encode(finisher)),
        "return_dict_in_generate": True,
        "do_sample": False,
        **SETTINGS,
        **settings,
    }
    processor = [Scripted(scripts, finisher)]
    return small_model().generate(
        ids, attention_mask=mask, generation_mode="hogwild", logits_processor=processor, **given
    )


@dataclass
class Pass:
    """One forward pass: its segments, and the logits at the packed tokens `kept`, `[len(kept), vocabulary]`."""

    segments: list[Segment]
    kept: list[int]
    logits: torch.Tensor

    @property
    def seen(self) -> list[str]:
        """For each segment the text that its last token attends to, itself included."""
        return [segment.seen for segment in self.segments]

    @property
    def appended(self) -> list[str]:
        """Text of each segment's tokens."""
        return [TOKENIZER.decode(segment.tokens) for segment in self.segments]

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment.tokens) for segment in self.segments)


@dataclass
class Segment:
    """Consecutive new tokens of a row. `places` number the tokens that the last one attends to, in reading order.

    Tokens are numbered in the order in which forward passes computed them.
    """

    tokens: list[int]
    places: list[int]
    seen: str


class Recording:
    """Records the forward passes of a model over a block cache, while the recording exists.

    It reads the attention plan and the storage of the cache. A stored token is recognized by its value vector in the
    last layer, which differs from that of any other token and does not change when the token is moved.
    """

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self.passes: list[Pass] = []
        self.moved: set[int] = set()
        """Tokens that were read from another place than the one they were written to."""
        self._tokens: list[int] = []
        self._places: dict[bytes, int] = {}
        self._rows: dict[int, int] = {}  # storage row that each token was written to
        this = weakref.ref(self)

        def record(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            recording = this()
            if recording is not None and isinstance(kwargs.get(CACHE), hf_parallel.BlockCache):
                recording._record(kwargs, output.logits[0])

        hook = (model or small_model()).register_forward_hook(record, with_kwargs=True)
        weakref.finalize(self, hook.remove)

    def _record(self, kwargs: dict[str, Any], logits: torch.Tensor) -> None:
        tokens, first, cache = kwargs["input_ids"][0].tolist(), len(self._tokens), kwargs[CACHE]
        plan = cache.plan_of(-1)  # of a layer in which image tokens see earlier tokens only
        storage = cache.pool.arena.layers[len(cache) - 1]
        self._tokens += tokens
        values = storage.values.numpy()

        def row(origin: int, index: int) -> int:
            return int(origin * storage.num_kv_heads + index)

        for query, origin, index in zip(plan.write_query, plan.write_origin, plan.write_index, strict=True):
            written = row(origin, index)
            self._places[values[written].tobytes()] = first + int(query)
            self._rows[first + int(query)] = written
        seen: list[list[tuple[int, list[int]]]] = [[] for _ in tokens]
        for block in range(plan.num_blocks):
            pairs = range(plan.block_pairs[block], plan.block_pairs[block + 1])
            places = []
            for j in range(max((int(plan.pair_hi[pair]) for pair in pairs), default=0)):
                at = row(plan.block_origin[block], plan.block_first[block] + j)
                places.append(self._places[values[at].tobytes()])
                if self._rows[places[-1]] != at:
                    self.moved.add(places[-1])
            for pair in pairs:
                part = places[plan.pair_lo[pair] : plan.pair_hi[pair]]
                seen[plan.pair_query[pair]].append((-int(plan.pair_position[pair]), part))
        visible = [[place for _, part in sorted(parts, key=lambda part: part[0]) for place in part] for parts in seen]
        extents, segments = dict(zip(plan.write_query.tolist(), plan.write_origin.tolist(), strict=True)), []
        for query, places in enumerate(visible):
            if query and extents[query] == extents[query - 1] and places[:-1] == visible[query - 1]:
                segments.pop()
            else:
                begin = query
            text = TOKENIZER.decode([self._tokens[place] for place in places])
            segments.append(Segment(tokens[begin : query + 1], places, text))
        keep = kwargs.get("logits_to_keep")
        kept = list(range(len(tokens))) if keep is None else keep.tolist()
        self.passes.append(Pass(segments, kept, logits.clone()))


def check_against(oracle: DenseOracle, passes: Sequence[Pass]) -> float:
    """Repeat recorded passes by the dense oracle and check that the best tokens agree.

    Returns the largest difference of a logit, in standard deviations of the oracle's logits.
    """
    largest = 0.0
    for one in passes:
        rows = [([segment.places[: -len(segment.tokens)], []], segment.tokens) for segment in one.segments]
        expected = oracle.forward(rows)[one.kept]
        largest = max(largest, ((one.logits - expected).abs().max() / expected.std()).item())
        assert one.logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
    return largest


class Listener:
    """A `ParallelStreamer` that keeps what it receives: everything in order, texts and events by row, and tokens."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.rows: dict[int, list[tuple[str, str]]] = {}
        self.tokens: list[Any] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.received.append(value.tolist())
        self.tokens.append(value.tolist())

    def write_row(self, row: int, text: str, event: str) -> None:
        self.received.append((row, text, event))
        self.rows.setdefault(row, []).append((text, event))

    @property
    def written(self) -> list[tuple[int, str, str]]:
        """Texts and events of all rows in order."""
        return [item for item in self.received if isinstance(item, tuple)]

    def end(self) -> None:
        self.ended += 1
        self.received.append("end")
