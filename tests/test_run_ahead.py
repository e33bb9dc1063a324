"""Where a device computes while the host goes on, a step begins before its tokens are known: same results."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from malformed_cases import TOKENIZER
from test_shared_prefix import TokenCount
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_parallel
from hf_parallel.cache import BlockCache
from hf_parallel.cache.layout import ForwardPass
from hf_parallel.cli.measure import StepClock
from hf_parallel.generation import decode
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.sampling import Sampler, TokenTable
from hf_parallel.kernels import AttentionPlan, ToHost
from hf_parallel.models.cuda_graph import DecodeGraphs

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 12
INPUT_IDS, ATTENTION_MASK = tiny.left_pad(
    [torch.cat((tiny.make_prompts([20], seed=8)[0], tail)) for tail in tiny.make_prompts([4, 4, 9, 7], seed=9)]
)
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 1.5}


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    yield hf_parallel.enable(tiny.build("llama"))
    hf_parallel.disable(tiny.build("llama"))


@pytest.fixture
def generate(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def generate(ahead: bool, **settings: Any) -> Any:
        monkeypatch.setattr(decode, "RUNNING_AHEAD", ("cpu",) if ahead else ())
        defaults: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
        settings = defaults | {"generation_mode": "shared_prefix", "attention_mask": ATTENTION_MASK} | settings
        return model.generate(INPUT_IDS, **settings)  # type: ignore[operator]

    return generate


def endings(generate: Callable[..., Any], **settings: Any) -> list[int]:
    """Tokens that end rows at different steps."""
    rows = generate(False, **settings).sequences[:, INPUT_IDS.shape[1] :]
    return [int(rows[0, 2]), int(rows[1, 5]), int(rows[2, 5]), int(rows[3, 8])]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ends", [False, True], ids=["to the end", "rows end"])
def test_results_are_the_same(generate: Callable[..., Any], sampled: bool, ends: bool) -> None:
    settings: dict[str, Any] = SAMPLED if sampled else {}
    settings = settings | {"output_scores": True, "output_logits": True, "num_return_sequences": 3 if sampled else 1}
    if ends:
        settings["eos_token_id"] = endings(generate, **(settings | {"num_return_sequences": 1}))
        settings["pad_token_id"] = 0
    expected, actual = generate(False, **settings), generate(True, **settings)
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(actual, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert actual.stats.kv_bytes == expected.stats.kv_bytes
    assert actual.stats.decoded_tokens == expected.stats.decoded_tokens
    assert actual.stats.forward_passes - expected.stats.forward_passes in ((0, 1) if ends else (0,))
    for ours, theirs in zip(actual.past_key_values.nodes(), expected.past_key_values.nodes(), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.block.length == theirs.block.length


def test_an_ended_row_is_in_one_more_pass_and_no_later(model: PreTrainedModel, generate: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"eos_token_id": endings(generate), "pad_token_id": 0}
    with TokenCount(model) as waiting:
        generate(False, **settings)
    with TokenCount(model) as ahead:
        generate(True, **settings)
    prompts, *steps = waiting.passes
    assert len(set(steps)) > 2, "the rows end together"
    assert len(steps) < NEW - 1, "a row does not end"
    assert ahead.passes == [prompts, len(INPUT_IDS), *steps]


def test_a_kept_cache_goes_on_from_the_right_tokens(generate: Callable[..., Any]) -> None:
    eos = endings(generate)
    cache = hf_parallel.SharedPrefixCache()
    for _ in range(2):
        settings: dict[str, Any] = {"eos_token_id": eos, "pad_token_id": 0}
        expected = generate(False, **settings)
        assert torch.equal(generate(True, past_key_values=cache, **settings).sequences, expected.sequences)


class Counting(LogitsProcessor):
    """A caller's own: it may read what it is given, so nothing may be ahead of it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_a_processor_of_the_callers_own_is_waited_for(
    generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    ahead = DecodeLoop._step_ahead
    monkeypatch.setattr(DecodeLoop, "_step_ahead", lambda *given: calls.append(1) or ahead(*given))
    generate(True)
    assert len(calls) == NEW - 1
    calls.clear()
    generate(True, logits_processor=LogitsProcessorList([Counting()]))
    generate(True, stop_strings=["zzz"], tokenizer=TOKENIZER, max_new_tokens=2)
    assert len(calls) == 1  # the criterion for stop_strings comes with Transformers


def test_tokens_are_on_their_way_before_the_next_step_is_begun(
    generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device does what it is given in order: a copy behind the next step would arrive when that is done."""
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (events.append(name), function(*given))[1]

    monkeypatch.setattr(ToHost, "__init__", noted("copies", ToHost.__init__))
    monkeypatch.setattr(ToHost, "tolist", noted("reads", ToHost.tolist))
    monkeypatch.setattr(DecodeLoop, "_step_ahead", noted("steps", DecodeLoop._step_ahead))
    generate(True)
    assert events == [*["copies", "steps", "reads"] * (NEW - 1), "copies", "reads"]


# What would make the host wait for the device

WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "synchronize")
PATH = [
    *(getattr(DecodeLoop, name) for name in ("_step_ahead", "run", "_logits", "_take_back")),
    *(getattr(DecodeGraphs, name) for name in ("logits", "_goes_on", "_storage")),
    *(getattr(Sampler, name) for name in ("draw", "_process", "_processed", "_draw", "_ended", "_judged", "_record")),
    *(getattr(TokenTable, name) for name in ("append", "left_padded", "index")),
    *(BlockCache.prepare, BlockCache.commit, BlockCache.update, ForwardPass.leads_to, ForwardPass.next_step),
    AttentionPlan.next_step,
]


@pytest.mark.parametrize("function", PATH, ids=lambda function: function.__qualname__)
def test_the_decode_path_fetches_nothing(function: Any) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    assert not called & set(WAITS)


class Waits(TorchDispatchMode):
    """Counts operations whose result the host must have before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_steps_ahead_ask_the_device_for_nothing(
    generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    found: list[str] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*given: Any) -> Any:
            with Waits() as waits:
                result = function(*given)
            found.extend(waits.seen)
            return result

        return inside

    monkeypatch.setattr(Sampler, "draw", watched(Sampler.draw))
    for name in ("_step_ahead", "stream"):  # the streamer is told while the next step is under way
        monkeypatch.setattr(DecodeLoop, name, watched(getattr(DecodeLoop, name)))
    generate(True, streamer=StepClock(), **({"do_sample": True, "top_p": 0.9} if sampled else {}))
    assert found == []
