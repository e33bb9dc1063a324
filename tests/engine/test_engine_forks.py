"""Forks of requests have the bits of the same tokens alone, compute their suffix only, and leave nothing behind."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from engine_requests import TOKENIZER, WAIT, assert_nothing_is_held, wait_until_idle
from small_tokenizers import make, small_llama
from transformers import LogitsProcessor

import hf_parallel
from hf_parallel.engine import Engine, KVBudgetError, QueueFullError, RequestCancelledError, RequestHandle

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

PROMPT = list(range(40, 60))
HYBRIDS = ("lfm2", "qwen3_5_text")


def model_of(name: str) -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name)), batch_invariant=name != "qwen3_5_text")


def assert_equals_cold(model: Any, handle: RequestHandle, **settings: Any) -> None:
    """Check an answer of one row against the same prompt alone: its tokens, and the bits of their log-probabilities."""
    output = handle.result(WAIT)
    new = len(handle.row_tokens(0))
    prompt = output.sequences[:, : output.sequences.shape[1] - new]
    alone = model.generate(
        prompt, generation_mode="shared_prefix", max_new_tokens=new, return_dict_in_generate=True, **settings
    )
    assert torch.equal(alone.sequences, output.sequences)
    if model.config.model_type not in HYBRIDS[1:]:
        np.testing.assert_array_equal(alone.record.sampled_log_probs()[1], output.record.sampled_log_probs()[1])


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "lfm2",
        *[pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3_text", "deepseek_v3", "qwen3_5_text")],
    ],
)
def test_forks_of_running_and_finished_requests_equal_the_same_tokens_alone(name: str) -> None:
    model = model_of(name)
    sampling = {"do_sample": True, "temperature": 0.9}
    with Engine(model, TOKENIZER) as engine:
        parent = engine.submit(PROMPT, max_new_tokens=90, seed=3, **sampling)
        list(islice(parent, 30))
        forks = parent.fork(4, suffix=[70, 71, 72], max_new_tokens=8)
        forks += parent.fork(2, at=20, suffix="More.", max_new_tokens=8)
        forks += parent.fork(children=[{"suffix": [70]}, {"seed": 9}], at=10, max_new_tokens=8)
        assert not parent.done
        output = parent.result(WAIT)
        forks += parent.fork(2, suffix="More.", max_new_tokens=8)
        forks += forks[0].fork(at=3, suffix=[80], max_new_tokens=8)
        for fork in forks:
            fork.result(WAIT)
        if name not in HYBRIDS:  # which continue from the last kept state
            assert forks[0].stats.prefilled_tokens <= 4
        assert_nothing_is_held(engine)
    assert forks[4].result().sequences[0, : len(PROMPT) + 20].tolist() == PROMPT + parent.row_tokens(0)[:20]
    for fork, seed in zip(forks, [3, 4, 5, 6, 3, 4, 3, 9, 3, 4, 3], strict=True):
        assert_equals_cold(model, fork, seed=seed, **sampling)
    assert parent.row_tokens(0) == output.sequences[0, len(PROMPT) :].tolist()
    assert_equals_cold(model, parent, seed=3, **sampling)


def test_children_of_one_running_stream_compute_their_suffixes_only() -> None:
    model = model_of("llama")
    with Engine(model, TOKENIZER) as engine:
        parent = engine.submit(PROMPT, max_new_tokens=240)
        list(islice(parent, 120))
        before = engine.stats.prefilled_tokens
        suffixes = [[70 + index, 30, 31] for index in range(8)]
        forks = parent.fork(children=[{"suffix": suffix} for suffix in suffixes], max_new_tokens=4)
        counts = [(fork.result(WAIT) and fork.stats.cached_tokens, fork.stats.prefilled_tokens) for fork in forks]
        assert engine.stats.prefilled_tokens - before == sum(count for _, count in counts)
        parent.result(WAIT)
    # The keys of the last token of a stream that goes on may not be computed yet.
    assert all(cached >= len(PROMPT) + 119 and computed <= 4 for cached, computed in counts)
    assert sum(computed for _, computed in counts) <= 8 * 3 + 1


class SameScores(LogitsProcessor):
    """A processor of the caller's, with which each pass is taken by the run itself."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize("cause", ["processor", "replay", "preemption"])
def test_forks_do_not_wait_for_the_end_of_a_parent(cause: str) -> None:
    settings: dict[str, Any] = {}
    if cause == "processor":
        settings["logits_processor"] = [SameScores()]
    elif cause == "replay":
        settings = {"logits_cache": hf_parallel.LogitsCache(), "replay": "stepwise"}
    with Engine(model_of("llama"), TOKENIZER) as engine:
        parent = engine.submit(PROMPT, max_new_tokens=400, **settings)
        list(islice(parent, 30))
        with engine._changed:  # both happen between the same two steps
            if cause == "preemption":
                (request,) = engine._scheduler.running
                engine._post(partial(engine._scheduler.preempt, request))
            (fork,) = parent.fork(suffix=[70], max_new_tokens=4)
        fork.result(WAIT)
        assert not parent.done
        assert fork.stats.cached_tokens >= len(PROMPT) + 29
        parent.result(WAIT)
        assert_nothing_is_held(engine)


def test_rows_of_a_request_are_forked_by_their_number_and_messages_follow_an_answer() -> None:
    tokenizer = copy.deepcopy(make("byte_level"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
    )
    torch.manual_seed(0)
    model = small_llama(tokenizer)
    chat = [{"role": "user", "content": "Hello"}]
    with Engine(model, tokenizer) as engine:
        parent = engine.submit(chat, max_new_tokens=12, num_return_sequences=3, do_sample=True, seed=1)
        parent.result(WAIT)
        repair = [{"role": "user", "content": "Again"}]
        (fork,) = parent.fork(row=2, at=6, suffix=repair, num_return_sequences=2, do_sample=True)
        sequences = fork.result(WAIT).sequences
    assert len(sequences) == 2
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(rendered, add_special_tokens=False)["input_ids"] + parent.row_tokens(2)[:6]
    prompt += tokenizer("</s>\n<s>user\nAgain</s>\n<s>assistant\n", add_special_tokens=False)["input_ids"]
    assert sequences[0, : len(prompt)].tolist() == prompt


def test_invalid_forks_raise_and_none_is_submitted() -> None:
    model = model_of("llama")
    with Engine(model, TOKENIZER, max_waiting=2, max_kv_bytes=10**6) as engine:
        parent = engine.submit(PROMPT, max_new_tokens=8)
        parent.result(WAIT)
        wait_until_idle(engine)
        submitted = engine.stats.finished
        for arguments, named in [
            ({"at": 9}, "at must be at most the 8 tokens"),
            ({"at": -1}, "at must be"),
            ({"at": True}, "at must be"),
            ({"row": 1}, "row must be below"),
            ({"n": 0}, "n must be"),
            ({"n": 3, "children": [{}]}, "n=3 differs"),
            ({"children": []}, "children must be"),
            ({"suffix": 1.5}, "suffix must be"),
            ({"suffix": [[1]]}, "suffix must be"),
            ({"temperture": 1}, "temperture"),
            ({"adapter": "none"}, "adapter"),
            ({"children": [{}, {"max_new_tokens": "x"}]}, "max_new_tokens"),
        ]:
            with pytest.raises(ValueError, match=named):
                parent.fork(**arguments)
        with pytest.raises(KVBudgetError):
            parent.fork(max_new_tokens=10**6)
        workers = engine.submit(PROMPT, "hogwild", max_new_tokens=4, redundancy_prompt="")
        with pytest.raises(ValueError, match="hogwild"):
            workers.fork()
        workers.cancel()
        with pytest.raises(QueueFullError):
            parent.fork(80)
        wait_until_idle(engine)
        assert engine.stats.finished - submitted <= 1
    with pytest.raises(RuntimeError, match="not open"):
        parent.fork()


@pytest.mark.parametrize(
    ("name", "seeds", "count"),
    [
        ("llama", [0, 1], 40),
        ("lfm2", [0], 20),
        *[pytest.param(name, range(10, 12), 60, marks=pytest.mark.slow) for name in ("llama", "gemma3_text", "lfm2")],
    ],
)
def test_random_trees_of_forks_in_small_budgets_equal_the_same_tokens_alone(
    name: str, seeds: list[int], count: int
) -> None:
    model = model_of(name)
    preemptions = 0
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        with Engine(model, TOKENIZER) as engine:
            token = engine._storage.arena.bytes_per_token
            state = engine._storage.pool.states.bytes_per_slot
        settings: dict[str, Any] = {"max_kv_bytes": rng.choice([150, 400]) * token + 12 * state}
        settings |= {"state_interval": rng.choice([8, 2048]), "max_batch_tokens": rng.choice([8, 64])}
        handles: list[tuple[RequestHandle, int]] = []
        with Engine(model, TOKENIZER, **settings) as engine:
            while len(handles) < count:
                kind = rng.random()
                drawn = rng.randrange(1000)
                if not handles or kind < 0.2:
                    prompt = [40 + rng.randrange(3) for _ in range(rng.randint(1, 12))]
                    sampling = {"do_sample": True, "seed": drawn, "max_new_tokens": rng.randint(1, 40)}
                    handles.append((engine.submit(prompt, cache_salt=rng.choice(["a", "b"]), **sampling), drawn))
                elif kind < 0.3:
                    rng.choice(handles)[0].cancel()
                elif kind < 0.4:
                    with suppress(RequestCancelledError):
                        list(islice(handles[-1][0], 3))
                else:
                    parent = rng.choice(handles)[0]
                    tokens = len(parent.row_tokens(0))
                    suffix = [40 + rng.randrange(3) for _ in range(rng.randint(0, 3))]
                    at = rng.choice([None, rng.randint(0, tokens)])
                    try:
                        forks = parent.fork(rng.randint(1, 3), at=at, suffix=suffix, seed=drawn)
                    except KVBudgetError:
                        continue
                    handles += [(fork, drawn + index) for index, fork in enumerate(forks)]
            for handle, _ in handles:
                try:
                    handle.result(WAIT)
                except RequestCancelledError:
                    continue
            preemptions += engine.stats.preemptions
            assert_nothing_is_held(engine)
        for handle, drawn in handles:
            if handle.error is None:
                assert_equals_cold(model, handle, do_sample=True, seed=drawn)
    assert preemptions or name in HYBRIDS
