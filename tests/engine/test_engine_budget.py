"""A budget of an engine: a request that may not fit raises at submission, and one that is accepted ends."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tiny
import torch
from engine_requests import STATE_MODES, TOKENIZER, Case, assert_nothing_is_held, needed_bytes
from mode_cases import BUILT_IN, small_call

import hf_parallel
from hf_parallel.cache.tree import PrefixTree
from hf_parallel.engine import Engine, KVBudgetError
from hf_parallel.engine.storage import KVStorage

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SENTENCE_END = 4  # a token of `AsciiTokenizer` that ends a step of a worker


class Writer:
    """Forces all rows to write one text, then letters."""

    def __init__(self, text: list[int]) -> None:
        self.text = iter(text)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, next(self.text, ord("x"))] = 0
        return forced


def random_settings(mode: str, rng: random.Random) -> tuple[dict[str, Any], list[int]]:
    """Return random settings of a mode, and text with which its rows become as long as they can."""
    settings = small_call(mode) | {"max_new_tokens": rng.randint(3, 40)}
    text: list[int] = []
    if mode == "shared_prefix":
        settings |= {"num_return_sequences": rng.randint(1, 4), "do_sample": True}
    elif mode == "self_consistency":
        vote, texts = rng.choice(["majority", "final"]), {"answer_header": "({number}) ", "conclusion_prompt": "So "}
        settings |= {"vote": vote, "num_answers": rng.randint(1, 5), "conclusion_tokens": rng.randint(1, 9), **texts}
    elif mode == "skeleton_of_thought":
        outline = "".join(f" {'t' * rng.randint(1, 4)}{i}\n{i + 1}." for i in range(1, 9))
        text = list(map(ord, outline))
        settings |= {"outline_tokens": len(text), "point_tokens": rng.randint(1, 20), "max_points": rng.randint(2, 6)}
        settings |= {"conclusion_tokens": rng.choice([None, 0, 5]), "point_end": ""}
        settings["point_prompt"] = rng.choice(["Q:", "Do {number}/{skeleton}:", "{skeleton}\nNow: "])
        settings["point_heading"] = rng.choice(["", "{number}. {point}: {point}"])
    elif mode == "pdos":
        settings |= {"max_new_tokens": rng.randint(40, 120), "join": rng.choice(["reencode", "rotate"])}
        settings |= {"titles": ["A", "B"], "opening": "", "max_blocks": 1, "parallel_hint": False}
    elif mode == "hogwild":
        layout = rng.choice(["combined", "interleaved", "contiguous"])
        settings |= {"num_workers": rng.randint(1, 4), "layout": layout, "stop_on_answer": "never"}
        text = ([ord("x")] * rng.choice([15, 20, 40]) + [SENTENCE_END]) * 3
    return settings, text


def estimate(model: Any, least_bytes: int, ids: torch.Tensor, settings: dict[str, Any]) -> int:
    """Return the number of bytes that a request may need. `least_bytes` is the smallest budget."""
    with Engine(model, TOKENIZER, max_kv_bytes=least_bytes) as engine, pytest.raises(KVBudgetError) as raised:
        engine.submit(ids, **settings)
    found = re.search(r"this request may need (\d+) bytes", str(raised.value))
    assert found
    return int(found[1])


@pytest.mark.parametrize("mode", BUILT_IN)
@pytest.mark.parametrize("seed", range(4))
def test_a_request_ends_within_the_memory_that_it_may_need(model: Any, token_bytes: int, mode: str, seed: int) -> None:
    """It may not need much more than it does if all its texts are as long as allowed."""
    rng = random.Random(f"{mode} {seed}")
    settings, text = random_settings(mode, rng)
    prompts = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, 126, (rng.choice([1, 1, 2]), rng.randint(2, 40)), generator=prompts)
    tokens = estimate(model, token_bytes, ids, settings) // token_bytes
    with Engine(model, TOKENIZER, max_kv_bytes=token_bytes * (tokens - 1)) as engine, pytest.raises(KVBudgetError):
        engine.submit(ids, **settings)
    peak = 0
    with Engine(model, TOKENIZER, max_kv_bytes=token_bytes * tokens) as engine:

        def note(module: Any, args: Any) -> None:
            nonlocal peak
            peak = max(peak, engine.stats.kv_bytes // token_bytes)

        hook = model.register_forward_pre_hook(note)
        output = engine.submit(ids, logits_processor=[Writer(text)], **settings).result(600)
        hook.remove()
        assert_nothing_is_held(engine)
        assert engine.stats.preemptions == 0
    unused = len(output.record.end_reasons) * settings["max_new_tokens"]  # at most, of rows that the mode has dropped
    assert tokens - unused <= 3 * peak


@pytest.mark.parametrize("mode", [mode for mode in STATE_MODES if mode])
@pytest.mark.parametrize("seed", range(2))
def test_a_request_on_layers_with_states_ends_within_the_memory_that_it_may_need(mode: str, seed: int) -> None:
    model, rng, peak = hf_parallel.enable(copy.deepcopy(tiny.build("lfm2"))), random.Random(f"{mode} {seed}"), 0
    settings, text = random_settings(mode, rng)
    settings |= {"join": "reencode"} if mode == "pdos" else {}
    settings |= {"draft_tokens": 0} if mode == "resample" else {}
    ids = torch.randint(32, 126, (1, rng.randint(2, 40)), generator=torch.Generator().manual_seed(seed))
    needed = estimate(model, 4096, ids, settings)
    with Engine(model, TOKENIZER, max_kv_bytes=needed) as engine:
        stored = engine._storage

        def note(module: Any, args: Any) -> None:
            nonlocal peak
            peak = max(peak, stored.pool.budget.held(stored.pool.blocks))  # type: ignore[union-attr]

        hook = model.register_forward_pre_hook(note)
        engine.submit(ids, logits_processor=[Writer(text)], **settings).result(600)
        hook.remove()
        assert_nothing_is_held(engine)
        assert engine.stats.preemptions == 0
        assert engine.stats.reserved_bytes <= needed <= 5 * peak


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("lfm2", [2]), *[pytest.param(name, range(6), marks=pytest.mark.slow) for name in ("qwen3_5_text", "mamba2")]],
)
def test_states_where_other_prompts_leave_a_running_one_do_not_end_it(
    name: str, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are dropped, and computed again; the budget holds the largest request alone, and no such state."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    drop_states, dropped = PrefixTree.drop_states, list[None]()

    def note(tree: PrefixTree, kept: Any) -> Iterator[None]:
        for _ in drop_states(tree, kept):
            dropped.append(None)
            yield

    monkeypatch.setattr(PrefixTree, "drop_states", note)
    for seed in seeds:
        rng = random.Random(seed)
        prefix = [rng.randrange(32, 126) for _ in range(12)]
        cases = []
        for _ in range(7):
            prompt = prefix[: rng.randint(0, 12)] + [rng.randrange(32, 126) for _ in range(rng.randint(1, 10))]
            settings = {"max_new_tokens": rng.randint(8, 16), "do_sample": True, "seed": rng.randrange(99)}
            settings["num_return_sequences"] = rng.choice([1, 3])
            cases.append(Case(torch.tensor([prompt]), None, settings))
        with Engine(model, max_kv_bytes=needed_bytes(model, cases), max_rows=8) as engine:
            handles = [engine.submit(case.prompt, **case.settings) for case in cases]
            outputs = [handle.result(600).sequences.tolist() for handle in handles]
            assert_nothing_is_held(engine)
        assert outputs == [case.alone(model) for case in cases]
    assert dropped


def test_answers_of_a_vote_count_as_rows(model: Any) -> None:
    """Though a prompt has a single output."""
    settings = small_call("self_consistency") | {"num_answers": 3, "max_new_tokens": 12}
    running = []
    with Engine(model, TOKENIZER, max_rows=6) as engine:
        hook = model.register_forward_pre_hook(lambda module, args: running.append(engine.stats.running))
        handles = [engine.submit(torch.arange(40 + i, 50 + i), **settings) for i in range(6)]
        for handle in handles:
            handle.result(600)
        hook.remove()
    assert max(running) == 2


def test_a_storage_keeps_its_limit_where_everything_is_deleted() -> None:
    """Submitters read the limit while the engine's thread deletes what other weights have computed."""
    storage = KVStorage(None, torch.device("cpu"), max_bytes=1000)
    storage.set_token_size(10)
    storage.reset()
    assert storage.pool.budget is not None
    assert storage.pool.budget.max_tokens(states=0) == storage.arena.max_slots == 100
