"""A mode that streams no text and returns fewer rows than it draws: rows keep their prompts, names and marks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer

import hf_parallel
from hf_parallel.generation import MODES
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModeRows, ModeTraits, ParallelConfig
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import insert_prompts, prefill_leaves, prefix_cache_of
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.sampling.token_table import TokenTable

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWN = 4
DROPPED = 1  # of each prompt, the second row that is returned
PROMPTS = ("Is it?", "What?")


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    """Define a mode that returns the last rows of each prompt, in another order."""

    class Rows(ModeRows[Any]):
        @property
        def drawn_per_prompt(self) -> int:
            return DRAWN

        def name(self, index: int) -> str:
            return f"Draw {index}"

    @dataclass
    class Quiet(ParallelConfig):
        """Draws several rows per prompt and returns few of them."""

        mode: ClassVar[str] = "quiet"
        traits = ModeTraits(rows=Rows, streams_tokens="at_end")
        num_returned: int = 1

        def make_run(self, call: GenerationCall) -> Run:
            return Run(self, call)

        @property
        def rows_per_prompt(self) -> int:
            return self.num_returned

        @property
        def max_rows_per_prompt(self) -> int:
            return DRAWN

    yield
    del MODES["quiet"]


class Run:
    def __init__(self, config: Any, call: GenerationCall) -> None:
        self.call = call
        self.num_returned = config.num_returned
        self.cache = prefix_cache_of(call)
        ids = call.input_ids.repeat_interleave(DRAWN, dim=0)
        table = TokenTable(ids, call.pad_token_id, call.max_new_tokens)
        self.loop = DecodeLoop(call, self.cache, table, seed=config.seed, stream=False)

    def generate(self) -> Steps[Any]:
        loop = self.loop
        with loop.running():
            prompts = yield from insert_prompts(self.call, self.cache)
            leaves = [leaf for leaf in prompts for _ in range(DRAWN)]
            logits = yield from prefill_leaves(loop, self.cache, leaves)
            rows = [Row(index, (), leaf=leaf) for index, leaf in enumerate(leaves)]
            loop.start(rows, leaves, self.call.max_new_tokens)
            active = yield from loop.sample(rows, logits)
            for row in rows[DROPPED::DRAWN]:
                loop.drop(row, "dull")
            yield from loop.decode([row for row in active if not row.dropped], None)
            loop.keep(rows)
        loop.record_truncated(rows)
        returned = []
        for first in range(0, len(rows), DRAWN):
            returned += [rows[first + 2], rows[first + DROPPED]][: self.num_returned]
        return loop.output(ParallelOutput, returned)


def generate(**settings: Any) -> Any:
    ids, mask = tiny.left_pad([torch.tensor(AsciiTokenizer()(prompt)["input_ids"]) for prompt in PROMPTS])
    call = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": True, "seed": 1, "eos_token_id": None}
    return hf_parallel.enable(tiny.build("llama")).generate(ids, generation_mode="quiet", **call, **settings)


@pytest.mark.parametrize("names", [["Draw 2"], ["Draw 2", "Draw 1"]])
def test_a_transcript_shows_each_prompt_with_the_names_of_its_returned_rows(names: list[str]) -> None:
    out = generate(num_returned=len(names), return_dict_in_generate=True)
    sections = out.to_dict(AsciiTokenizer())["sections"]
    assert [section["prompt"] for section in sections] == [f"<bos>{prompt}" for prompt in PROMPTS]
    for section in sections:
        assert section["columns"] == names
        marks = [(len(card["pieces"]), card["truncated"], card["end_reason"]) for card in section["cards"]]
        assert marks == [(5, True, ""), (1, False, "dull")][: len(names)]


def test_the_console_shows_each_returned_row_below_its_prompt() -> None:
    printed = io.StringIO()
    streamer = hf_parallel.ConsoleStreamer(AsciiTokenizer(), printed, headings=PROMPTS)
    sequences = generate(num_returned=2, streamer=streamer)
    begin = sequences.shape[1] - 5
    expected = ""
    for prompt, (whole, dropped) in zip(PROMPTS, sequences[:, begin:].view(2, 2, 5), strict=True):
        texts = [AsciiTokenizer().decode(tokens) for tokens in (whole, dropped[:1])]
        rows = zip(("Draw 2", "Draw 1"), texts, ("truncated", "dull"), strict=True)
        shown = [f"[{name}]\n" + f"{text.rstrip()} [{reason}]".lstrip() for name, text, reason in rows]
        expected += f"{prompt}\n" + "\n\n".join(shown) + "\n\n"
    assert printed.getvalue() == expected.rstrip("\n") + "\n"
