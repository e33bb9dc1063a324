"""Beam search in `shared_prefix`: `generate` without a mode is the oracle, of sequences, scores and beams.

Models without states compute in float64, so that rounding decides between no two beams.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from engine_requests import assert_nothing_is_held
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, TextStreamer

import hf_parallel
from hf_parallel.engine import Engine, RequestCancelledError
from hf_parallel.generation.sampling.log_probs import TopLogProbs

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

MODELS = ("llama", "gemma3_text", "deepseek_v2")
PROMPTS = tiny.make_prompts([9, 3, 6, 40], seed=1)
RETURNED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@cache
def model_of(name: str) -> Any:
    has_states = name not in MODELS
    model = copy.deepcopy(tiny.build(name, dtype=torch.float32 if has_states else torch.float64))
    if name == "deepseek_v2":
        model.set_experts_implementation("eager")  # the others know no float64
    model.generation_config.eos_token_id = None
    return hf_parallel.enable(model)


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    yield
    model_of.cache_clear()


class Favors(LogitsProcessor):
    """A processor of a caller: favors a token that depends on the text and on the beam's place in the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favored = (input_ids[:, -1] * 7 + torch.arange(len(input_ids))) % scores.shape[1]
        return scores.scatter_add(1, favored[:, None], torch.full((len(scores), 1), 2.0))


def ends_by_sum(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    """A criterion of a caller."""
    return input_ids[:, -2:].sum(1) % 5 == 0


def allowed(batch: int, sequence: torch.Tensor) -> list[int]:
    """Tokens that may follow, which differ by prompt and by token."""
    first = (int(sequence[-1]) + 11 * batch) % 40
    return list(range(first, first + 12))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Random arguments of `generate` for a beam search."""
    prompts = draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3))
    ids, mask = tiny.left_pad(prompts)
    num_beams = draw(st.integers(2, 6))
    call: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "num_beams": num_beams,
        "num_return_sequences": draw(st.integers(1, num_beams)),
        "max_new_tokens": draw(st.integers(1, 14)),
        "early_stopping": draw(st.sampled_from([False, True, "never"])),
        "length_penalty": draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.5])),
        "eos_token_id": draw(st.none() | st.lists(st.integers(3, 60), min_size=1, max_size=12, unique=True)),
        "pad_token_id": tiny.PAD,
        "do_sample": draw(st.booleans()),
        **RETURNED,
    }
    further: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 3},
        {"bad_words_ids": [[20], [30, 31]]},
        {"logits_processor": [Favors()]},
        {"stopping_criteria": [ends_by_sum]},
        {"prefix_allowed_tokens_fn": allowed},
        {"renormalize_logits": True},
    ]
    if call["do_sample"]:
        further += [{"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}]
    for changes in draw(st.lists(st.sampled_from(further), max_size=3)):
        call |= changes
    return call


def assert_same(model: Any, call: dict[str, Any]) -> None:
    """Assert that a call with the mode returns what it does without a mode, or raises the same error."""
    torch.manual_seed(3)
    try:
        expected = model.generate(**call)
    except RuntimeError as error:  # fewer continuations have a probability than are to be drawn
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            model.generate(**call, generation_mode="shared_prefix")
        return
    torch.manual_seed(3)
    output = model.generate(**call, generation_mode="shared_prefix")
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.beam_indices, expected.beam_indices)
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)
    for name in ("scores", "logits"):
        for step, of_generate in zip(getattr(output, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(step, of_generate, atol=1e-4, rtol=1e-5)


@given(calls())
@settings(max_examples=20)
def test_a_call_returns_what_generate_does(call: dict[str, Any]) -> None:
    assert_same(model_of("llama"), call)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_calls_return_what_generate_does(name: str) -> None:
    @given(calls())
    @settings(max_examples=40)
    def check(call: dict[str, Any]) -> None:
        assert_same(model_of(name), call)

    check()


@pytest.mark.parametrize("name", ["lfm2", "granitemoehybrid"])
def test_states_follow_their_beams(name: str) -> None:
    """Layers with states: the oracle computes each token from the whole text."""
    model = model_of(name)
    ids, mask = tiny.left_pad(PROMPTS[:3])
    call = {"input_ids": ids, "attention_mask": mask, "num_beams": 4, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**call, use_cache=False)
    assert torch.equal(model.generate(**call, generation_mode="shared_prefix"), expected)


def wide_call(prompt: torch.Tensor, **changes: Any) -> dict[str, Any]:
    return {
        "inputs": prompt[None],
        "attention_mask": torch.ones_like(prompt[None]),
        "num_beams": 24,
        "max_new_tokens": 40,
        "do_sample": True,
        "temperature": 1.5,
        "seed": 0,
        "generation_mode": "shared_prefix",
        "return_dict_in_generate": True,
        **changes,
    }


def test_the_cache_holds_each_token_of_live_beams_once_in_few_blocks() -> None:
    model = model_of("llama")
    kept = hf_parallel.SharedPrefixCache()
    num_beams = 24
    lengths = []

    def check(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = input_ids.tolist()
        unique = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
        assert kept.kv_bytes == len(unique) * kept.pool.arena.bytes_per_token
        assert len(kept.pool.blocks) <= 1 + 2 * num_beams
        lengths.append(max(block.length for block in kept.pool.blocks - {node.block for node in kept.tree.nodes()}))
        return scores

    prompt = PROMPTS[3]
    output = model.generate(**wide_call(prompt, past_key_values=kept, logits_processor=[check_later(check)]))
    assert max(lengths) > 5  # the trunk of all beams is one block
    assert output.stats.prefilled_tokens == len(prompt)
    assert kept.kv_bytes == len(prompt) * kept.pool.arena.bytes_per_token  # only the prompt is kept
    again = model.generate(**wide_call(prompt, past_key_values=kept))
    assert again.stats.prefilled_tokens == 1
    assert torch.equal(again.sequences, output.sequences)


def check_later(check: Any) -> Any:
    """Return a processor that calls `check` from its second call on: the first sees the prompt alone."""
    seen = []

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.shape[1])
        return check(input_ids, scores) if len(seen) > 1 else scores

    return process


def test_log_probs_and_transition_scores_are_those_of_the_model() -> None:
    model = model_of("llama")
    ids, mask = tiny.left_pad(PROMPTS[:2])
    call = {"input_ids": ids, "attention_mask": mask, "num_beams": 5, "num_return_sequences": 3, "do_sample": False}
    output = model.generate(
        **call, **RETURNED, max_new_tokens=9, eos_token_id=[*range(20, 28)], generation_mode="shared_prefix"
    )
    scores = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    log_probs = output.log_probs
    torch.testing.assert_close(log_probs.nan_to_num(), scores, atol=1e-5, rtol=1e-5)  # there are no processors
    begin = ids.shape[1]
    for row, sequence in enumerate(output.sequences):
        end = output.record.lengths[row]
        text = sequence[:end][None]
        seen = torch.cat((mask[row // 3], torch.ones(end - begin, dtype=torch.int64)))[None]
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        logits = model(text, attention_mask=seen, position_ids=positions).logits[0].float().log_softmax(-1)
        expected = logits[begin - 1 : end - 1].gather(1, text[0, begin:end, None])[:, 0]
        torch.testing.assert_close(log_probs[row, : end - begin], expected, atol=1e-5, rtol=1e-5)
        assert log_probs[row, end - begin :].isnan().all()
    rows, values = output.record.sampled_log_probs()
    for row in range(6):
        torch.testing.assert_close(torch.tensor(values[rows == row]), log_probs[row][~log_probs[row].isnan()])
    assert "completion 3" in output.to_html(AsciiTokenizer())
    assert len(output.to_records()) == 6


def test_a_seed_repeats_draws_whatever_the_batch() -> None:
    model = model_of("llama")
    ids, mask = tiny.left_pad(PROMPTS[:2])
    shared = {"num_beams": 4, "max_new_tokens": 8, "do_sample": True, "generation_mode": "shared_prefix"}
    together = model.generate(input_ids=ids, attention_mask=mask, seed=[5, 6], **shared)
    for row, prompt in enumerate(PROMPTS[:2]):
        alone = model.generate(prompt[None], seed=[5 + row], **shared)
        assert torch.equal(together[row, -8:], alone[0, -8:])
    with pytest.raises(ValueError, match="seed must have one entry per row"):
        model.generate(input_ids=ids, attention_mask=mask, seed=[1, 2, 3], **shared)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"generation_mode": "best_of", "tokenizer": AsciiTokenizer()}, "modes, 'shared_prefix'.* search(es)? beams"),
        ({"generation_mode": "resample", "logits_cache": hf_parallel.LogitsCache()}, "num_beams"),
        ({"generation_mode": "hogwild", "tokenizer": AsciiTokenizer()}, "num_beams"),
        ({"num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beam_groups"),
        ({"diversity_penalty": 0.5}, "diversity_penalty=0.5 is not supported with num_beams"),
        ({"constraints": [object()]}, "constraints"),
        ({"force_words_ids": [[5]]}, "force_words_ids"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_return_sequences": 5}, "num_return_sequences"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"low_memory": True}, "low_memory"),
        ({"logits_cache": hf_parallel.LogitsCache()}, "logits_cache"),
        ({"streamer": TextStreamer(AsciiTokenizer())}, "streamer"),
        ({"logits_processor": [TopLogProbs(3)]}, "TopLogProbs"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_what_a_beam_search_does_not_support_raises(changes: dict[str, Any], says: str) -> None:
    call = {"num_beams": 4, "generation_mode": "shared_prefix", "max_new_tokens": 3, "return_dict_in_generate": True}
    with pytest.raises(ValueError, match=says):
        model_of("llama").generate(PROMPTS[0][None], **call | changes)


def engine_call(number: int) -> dict[str, Any]:
    """Return one of several different calls."""
    call = {"num_beams": 3 + number % 4, "max_new_tokens": 10 + 3 * number, "do_sample": False, "pad_token_id": 0}
    if number % 2:
        call |= {"eos_token_id": [20, 21, 22, 23], "early_stopping": True, "num_return_sequences": 2}
    if number % 3:
        call |= {"do_sample": True, "seed": number, "temperature": 4.0}  # beams that share little
    return call


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_requests_of_an_engine_that_preempts_return_what_each_does_alone(name: str) -> None:
    model = model_of(name)
    prompts = [prompt[None] for prompt in PROMPTS] * 2
    cases = list(zip(prompts, map(engine_call, range(len(prompts))), strict=True))
    expected = []
    for prompt, call in cases:
        mode = None if name == "llama" and not call["do_sample"] else "shared_prefix"
        mask = torch.ones_like(prompt)
        expected.append(model.generate(prompt, attention_mask=mask, generation_mode=mode, **call))
    with Engine(model) as engine:
        token_bytes = engine._storage.arena.bytes_per_token
        state_bytes = engine._storage.pool.states.bytes_per_slot
    needed = []
    for prompt, call in cases:
        tokens = prompt.shape[1] + call["num_beams"] * call["max_new_tokens"]
        needed.append(tokens * token_bytes + (3 * call["num_beams"] // 2 + 3) * state_bytes)
    with Engine(model, max_kv_bytes=max(needed)) as engine:
        handles = [engine.submit(prompt, **call) for prompt, call in cases]
        cancelled = engine.submit(prompts[0], num_beams=6, max_new_tokens=30)
        cancelled.cancel()
        plain = [engine.submit(prompts[1], max_new_tokens=60, num_return_sequences=3, do_sample=True) for _ in range(4)]
        for handle, sequences in zip(handles, expected, strict=True):
            output = handle.result()
            assert torch.equal(output.sequences, sequences)
            assert len(list(handle)) == sum(length - output.record.begin for length in output.record.lengths)
        with pytest.raises(RequestCancelledError):
            cancelled.result()
        for handle in plain:
            handle.result()
        assert engine.stats.preemptions > 0
        with pytest.raises(ValueError, match="num_beams=2 is not supported"):
            engine.submit(prompts[0], "best_of", tokenizer=AsciiTokenizer(), num_beams=2)
        assert_nothing_is_held(engine)
