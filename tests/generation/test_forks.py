"""Rows that fork: a mode of one's own copies rows while they generate, and each copy has all that the row has.

The mode of these tests forks and drops rows at random. The oracle is a forward pass over each returned row.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
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
from hf_parallel.generation.sampling.log_probs import TopLogProbs
from hf_parallel.generation.sampling.token_table import TokenTable

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

ROWS = 3  # of a prompt at the same time, and in the output
PROMPTS = tiny.make_prompts([6, 3], seed=3)
IDS, MASK = tiny.left_pad(PROMPTS)
NEW_TOKENS = 12
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.7, "top_k": 0, "max_new_tokens": NEW_TOKENS}


@pytest.fixture(scope="module", autouse=True)
def _mode() -> Iterator[None]:
    """Define a mode that forks and drops rows at random."""

    class Rows(ModeRows[Any]):
        @property
        def drawn_per_prompt(self) -> int:
            return ROWS

    @dataclass
    class Forking(ParallelConfig):
        """Random forks."""

        mode: ClassVar[str] = "forking"
        traits = ModeTraits(rows=Rows, streams_text=True, streams_tokens="at_end", keeps_states=True)
        forks: int = 0  # seed

        def make_run(self, call: GenerationCall) -> Run:
            return Run(self, call)

        @property
        def rows_per_prompt(self) -> int:
            return ROWS

        def max_states(self, call: GenerationCall) -> int:
            return super().max_states(call) + call.num_rows * ROWS * NEW_TOKENS

    yield
    del MODES["forking"]


class Run:
    def __init__(self, config: Any, call: GenerationCall) -> None:
        self.call = call
        self.cache = prefix_cache_of(call)
        self.random = random.Random(config.forks)
        ids = call.input_ids.repeat_interleave(ROWS, dim=0)
        table = TokenTable(ids, call.pad_token_id, call.max_new_tokens)
        self.loop = DecodeLoop(call, self.cache, table, seed=config.seed, stream=False)
        self.groups: list[list[Row]] = []  # rows of each prompt that are returned

    def generate(self) -> Steps[Any]:
        loop = self.loop
        with loop.running():
            prompts = yield from insert_prompts(self.call, self.cache)
            leaves = [leaf for leaf in prompts for _ in range(ROWS)]
            logits = yield from prefill_leaves(loop, self.cache, leaves)
            rows = [Row(index, (), leaf=leaf) for index, leaf in enumerate(leaves)]
            self.groups = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
            loop.start(rows, leaves, self.call.max_new_tokens)
            yield from loop.decode(rows, logits, self._on_token, schedule=self._schedule)
            returned = [row for group in self.groups for row in group]
            loop.keep(returned)
        loop.record_truncated(returned)
        return loop.output(ParallelOutput, returned)

    def _on_token(self, row: Row, token: int, ended: bool) -> bool:
        row.pending = [token]
        self.loop.show(row, token, ended)
        return not ended

    def _schedule(self, active: Sequence[Row]) -> list[Row]:
        rows = []
        for group in self.groups:
            writing = [row for row in group if row in active]
            if len(writing) > 1 and self.random.random() < 0.5:
                best, worst = self.random.sample(writing, 2)
                (fork,) = self.loop.fork(best)
                self.loop.drop(worst, "worst")
                group[group.index(worst)] = fork
                writing[writing.index(worst)] = fork
            rows += writing
        return sorted(rows, key=lambda row: row.index)


class Texts:
    """A streamer that collects the text of each row."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.texts: dict[int, str] = {}

    def put(self, value: torch.Tensor) -> None:
        """Ignore tokens."""

    def write_row(self, row: int, text: str, event: str) -> None:
        self.texts[row] = self.texts.get(row, "") + text

    def end(self) -> None:
        """Ignore the end."""


def generate(model: Any, **settings: Any) -> Any:
    call = {**SAMPLED, "attention_mask": MASK, "tokenizer": AsciiTokenizer(), "return_dict_in_generate": True}
    return model.generate(IDS, generation_mode="forking", **call | settings)


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def model(request: pytest.FixtureRequest) -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build(request.param)))


@pytest.mark.parametrize("forks", range(6))
def test_inherited_tokens_keep_log_probs_logits_scores_and_text(model: Any, forks: int) -> None:
    streamer, top = Texts(), TopLogProbs(2)
    out = generate(
        model, forks=forks, output_logits=True, output_scores=True, streamer=streamer, logits_processor=[top]
    )
    begin, record = IDS.shape[1], out.record
    returned = record.returned or range(len(out.sequences))
    assert any(row >= len(PROMPTS) * ROWS for row in returned), "some rows are forks"
    sections = out.to_dict(AsciiTokenizer())["sections"]
    for index, (row, end) in enumerate(zip(returned, record.lengths, strict=True)):
        prompt, count = PROMPTS[index // ROWS], end - begin
        assert record.place(row)[0] == index // ROWS
        new = out.sequences[index, begin:end]
        logits = model(torch.cat((prompt, new))[None]).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, new[:, None])[:, 0]
        torch.testing.assert_close(out.log_probs[index, :count], log_probs, rtol=1e-4, atol=1e-4)
        assert out.log_probs[index, count:].isnan().all()
        for step in range(count):
            torch.testing.assert_close(out.logits[step][index], logits[step], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(out.scores[step][index], logits[step] / 0.7, rtol=1e-4, atol=1e-4)
            found = top.get(row, step)
            assert found.log_prob == pytest.approx(float(log_probs[step]), abs=1e-4)
            assert found.top[0][0] == int(logits[step].argmax())
        (column,) = (card for card in sections[index // ROWS]["cards"] if card["column"] == record.place(row)[1])
        assert column["given"] + "".join(text for _, text, _ in column["pieces"]) == streamer.texts[row]
        assert streamer.texts[row] == AsciiTokenizer().decode(new[new != tiny.EOS].tolist())
        assert (row in record.truncated) == (count == NEW_TOKENS and int(new[-1]) != tiny.EOS)
    drawn = sum(len(rows) for rows, _ in record.log_probs)
    assert out.stats.decoded_tokens == drawn < sum(record.lengths) + 6 * NEW_TOKENS


def test_forks_are_sampled_apart(model: Any) -> None:
    out = generate(model, forks=1, temperature=9.0)
    assert len({tuple(row) for row in out.sequences.tolist()}) == len(out.sequences)


@pytest.mark.parametrize("forks", [0, 3])
def test_a_request_forks_as_a_call(model: Any, forks: int) -> None:
    from hf_parallel.engine import Engine

    alone = generate(model, forks=forks)
    with Engine(model, AsciiTokenizer()) as engine:
        settings = {**SAMPLED, "forks": forks, "attention_mask": MASK}
        handles = [engine.submit(IDS, generation_mode="forking", **settings | {"seed": 5 + n}) for n in (0, 1)]
        output, tokens = handles[0].result(), list(handles[0])
    assert torch.equal(output.sequences, alone.sequences)
    begin = IDS.shape[1]
    for index, (row, end) in enumerate(zip(output.record.returned, output.record.lengths, strict=True)):
        assert [int(token) for token in tokens if token.row == row] == output.sequences[index, begin:end].tolist()


def test_a_server_streams_each_row_under_a_choice_of_the_response() -> None:
    serving = pytest.importorskip("serving")
    body = {"prompt": "Hello", "generation_mode": "forking", "forks": 1, "max_tokens": NEW_TOKENS, "seed": 5, "n": 2}
    with serving.Engine(*serving.small_model()) as engine, serving.served(engine) as server:
        lines = server.post("/v1/completions", stream=True, **body).text.splitlines()
        whole = server.post("/v1/completions", **body).json()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    texts = {part["index"]: part["text"] for part in parts if part["finish_reason"]}
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert {part["index"] for part in parts} == set(range(2 * ROWS))
    names = {part["row"] for part in parts if part.get("row")}
    assert names > {f"Answer {number + 1}" for number in range(ROWS)}, "rows beyond the choices are forks"
