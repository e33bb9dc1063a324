"""On asynchronous devices a pass is queued before the tokens of the previous one reach the host: same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tiny_tokenizer import TOKENIZER
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_parallel.generation.decoding import host
from hf_parallel.generation.sampling import sampler as sampling
from hf_parallel.kernels import HostCopy

NEW = 12
INPUT_IDS, ATTENTION_MASK = tiny.left_pad(
    [torch.cat((tiny.make_prompts([20], seed=8)[0], tail)) for tail in tiny.make_prompts([4, 4, 9, 7], seed=9)]
)
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 1.5}


@pytest.fixture
def generate(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def generate(ahead: bool, **settings: Any) -> Any:
        monkeypatch.setattr(host, "ASYNC_DEVICES", ("cpu",) if ahead else ())
        defaults: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
        settings = defaults | {"generation_mode": "shared_prefix", "attention_mask": ATTENTION_MASK} | settings
        return model.generate(INPUT_IDS, **settings)  # type: ignore[operator]

    return generate


def endings(generate: Callable[..., Any], **settings: Any) -> list[int]:
    """Return tokens that end rows at different steps."""
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
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert actual.stats.kv_bytes == expected.stats.kv_bytes
    assert actual.stats.decoded_tokens == expected.stats.decoded_tokens
    assert actual.stats.forward_passes - expected.stats.forward_passes in ((0, 1) if ends else (0,))
    for ours, theirs in zip(actual.past_key_values.tree.nodes(), expected.past_key_values.tree.nodes(), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.block.length == theirs.block.length


class Identity(LogitsProcessor):
    """A custom processor, which might read its arguments on the host."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


FIRST = ("copy", "tokens", "pass")
SYNCHRONIZING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")


class Events(TorchDispatchMode, BaseStreamer):
    """Records forward passes, copies of sampled tokens, tokens that reach the host, and operations that synchronize."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.events = model, list[str]()

    def __enter__(self) -> Events:
        self._hook = self.model.register_forward_pre_hook(lambda *_: self.events.append("pass"))
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(sampling, "HostCopy", lambda tensor: self.events.append("copy") or HostCopy(tensor))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        self._patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNCHRONIZING:
            self.events.append("wait")
        return func(*args, **(kwargs or {}))

    def put(self, value: torch.Tensor) -> None:
        if value.shape == INPUT_IDS.shape[:1]:
            self.events.append("tokens")

    def end(self) -> None:
        """Do nothing."""

    @property
    def decoding(self) -> list[str]:
        """Events from the first copy of sampled tokens on."""
        return self.events[self.events.index("copy") :]


def decode_events(model: PreTrainedModel, generate: Callable[..., Any], **settings: Any) -> list[str]:
    with Events(model) as events:
        generate(True, streamer=events, **settings)
    return events.decoding


def overlapped(events: list[str]) -> int:
    return sum(events[i : i + 3] == ["copy", "pass", "tokens"] for i in range(len(events)))


def test_a_custom_processor_prevents_overlap(model: PreTrainedModel, generate: Callable[..., Any]) -> None:
    assert overlapped(decode_events(model, generate)) == NEW - 2
    assert overlapped(decode_events(model, generate, logits_processor=LogitsProcessorList([Identity()]))) == 0
    stop = {"stop_strings": ["zzz"], "tokenizer": TOKENIZER, "max_new_tokens": 3}  # a criterion of Transformers
    events = decode_events(model, generate, **stop)
    assert [event for event in events if event != "wait"] == [*FIRST, "copy", "pass", "tokens", "copy", "tokens"]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_tokens_are_copied_before_the_next_pass_and_nothing_waits_for_the_device(
    model: PreTrainedModel, generate: Callable[..., Any], sampled: bool
) -> None:
    """A device runs operations in order, so a copy queued after the pass would arrive when that is done.

    The first token is streamed before the first decode pass, which may compile layers.
    """
    events = decode_events(model, generate, **({"do_sample": True, "top_p": 0.9} if sampled else {}))
    assert events == [*FIRST, *["copy", "pass", "tokens"] * (NEW - 2), "copy", "tokens"]
