"""Sessions over a tiny model, lives that they may have, and what can be seen of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessor
from workers import SETTINGS, TOKENIZER, encode, small_model

from hf_parallel import HogwildSession
from hf_parallel.generation.decode import DecodeLoop

PROMPT = tiny.make_prompts([23], seed=3)[0][None]
SHORT = {name: value for name, value in SETTINGS.items() if name != "tokenizer"}
WORDY: dict[str, Any] = {
    **SHORT,
    "separator": "a",
    "sentence_ends": [chr(c) for c in range(33, 127)],
    "sequence_bias": [[[ord("a")], 6.0]],
    "redundancy_interval": 15,
    "redundancy_prompt": "Again? ",
    "do_sample": True,
    "temperature": 0.4,
    "seed": 0,
}
"""Settings under which the tiny model, which writes letters at random, ends steps now and then."""


def begin(model: Any = None, **settings: Any) -> HogwildSession:
    return HogwildSession(model or small_model(), TOKENIZER, PROMPT, **{**WORDY, "max_new_tokens": 40, **settings})


def scripted(*scripts: str, **settings: Any) -> HogwildSession:
    """A session over the prompt `P`, whose workers write what they are told; there may be scripts for later ones."""
    given = {"num_workers": len(scripts), "max_new_tokens": 99, "do_sample": False, **SHORT, **settings}
    ids = torch.tensor([encode("P")])
    return HogwildSession(small_model(), TOKENIZER, ids, logits_processor=[Scripts(*scripts)], **given)


class Scripts(LogitsProcessor):
    """Lets the k-th row of the batch write the k-th script, one letter a pass, and then `x`."""

    def __init__(self, *scripts: str) -> None:
        self.scripts, self.calls = scripts, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        letters = [script[self.calls : self.calls + 1] or "x" for script in self.scripts[: len(scores)]]
        letters += "x" * (len(scores) - len(letters))
        self.calls += 1
        return torch.nn.functional.one_hot(torch.tensor(list(map(ord, letters))), scores.shape[1]).to(scores) * 100


def state(session: HogwildSession) -> Any:
    """All that can be seen of a session, and what its cache holds."""
    out = session.output()
    blocks, space = session._run.run.cache.blocks, session._run.problem.space
    held = sum(block.length for block in blocks), len(blocks) - len(space.closing), session._run.problem.length
    cost = {name: value for name, value in asdict(session.stats).items() if "seconds" not in name}
    cost.pop("kv_bytes"), cost.pop("reserved_bytes")
    seen = (session.names, session.writing, session.passes, session.texts, session.history, session.answer)
    return seen, out.sequences.tolist(), out.history, out.record.events[:], held, cost


def some_life(session: HogwildSession, chance: random.Random, changes: int) -> None:
    """Passes, and between them whatever can be done to a session."""
    done: Counter[str] = Counter()
    for _ in range(changes):
        session.run(chance.choice([1, 1, 2, 5]))
        kinds = ["tell"] * (len(session.writing) > 0)
        kinds += ["add"] * (len(session.names) < 4) + ["remove"] * (len(session.writing) > 1)
        if session.config.layout != "contiguous":
            kinds += ["forget"] * (len(session.history) > 0) + ["tell all"]
        chance.shuffle(kinds)
        kind = min(kinds, key=lambda one: done[one])
        done[kind] += 1
        if kind == "tell":
            session.inject(chance.choice(session.writing), chance.choice(["Hm?", "Look here: ", "!"]))
        elif kind == "tell all":
            session.inject("common", chance.choice(["It rains.", "Now."]))
        elif kind == "add":
            session.add_worker()
        elif kind == "remove":
            session.remove_worker(chance.choice(session.writing))
        else:
            session.forget(chance.randrange(len(session.history)))
    session.run(3)


def logits_of(session: HogwildSession, what: Callable[[HogwildSession], Any]) -> list[torch.Tensor]:
    """The logits of the passes in which something is done."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        step = DecodeLoop.step

        def noted(loop: DecodeLoop, *given: Any) -> torch.Tensor:
            found.append(step(loop, *given))
            return found[-1]

        patch.setattr(DecodeLoop, "step", noted)
        what(session)
    return found
