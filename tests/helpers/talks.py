"""Sessions over a tiny model, random changes to them, and their visible state."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import tiny
import torch
from transformers import LogitsProcessor
from workers import SETTINGS, TOKENIZER, WORDY, encode, small_model

from hf_parallel import HogwildSession

PROMPT = tiny.make_prompts([23], seed=3)[0][None]
SHORT = {name: value for name, value in SETTINGS.items() if name != "tokenizer"}
TALK: dict[str, Any] = {
    **SHORT,
    **WORDY,
    "do_sample": True,
    "temperature": 0.4,
    "seed": 0,
}
Said = tuple[int, str | int, str]
"""The pass after which a text was read, to whom, and the text."""


def said_in_session(session: HogwildSession, to: str | int, text: str) -> None:
    """Say a text in a session as `RequestHandle.inject` does."""
    if isinstance(to, int):
        session.inject(session.names[to], text)
    elif to != "all":
        session.inject(to, text)
    elif session.config.layout != "contiguous":
        session.inject("common", text)
    else:
        for name in session.names:
            if not session._run.workers[session.names.index(name)].stopped:
                session.inject(name, text)


def in_session(model: Any, tokenizer: Any, prompt: Any, settings: dict[str, Any], texts: list[Said]) -> Any:
    """Return the output of a session that gets the texts after the same passes."""
    with HogwildSession(model, tokenizer, prompt, **settings) as session:
        for passes, to, text in texts:
            session.run(passes - session.passes)
            said_in_session(session, to, text)
        session.run()
        return session.finish()


def begin(model: Any = None, **settings: Any) -> HogwildSession:
    return HogwildSession(model or small_model(), TOKENIZER, PROMPT, **{**TALK, "max_new_tokens": 40, **settings})


def scripted(*scripts: str, **settings: Any) -> HogwildSession:
    """Return a session over the prompt `P` whose workers write scripts."""
    model = settings.pop("model", None) or small_model()
    given = {"num_workers": len(scripts), "max_new_tokens": 99, "do_sample": False, **SHORT, **settings}
    ids = torch.tensor([encode("P")])
    return HogwildSession(model, TOKENIZER, ids, logits_processor=[Scripts(*scripts)], **given)


class Scripts(LogitsProcessor):
    """Forces row k of the batch to write script k, one letter per pass, and then `x`."""

    def __init__(self, *scripts: str) -> None:
        self.scripts, self.calls = scripts, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        letters = [script[self.calls : self.calls + 1] or "x" for script in self.scripts[: len(scores)]]
        letters += "x" * (len(scores) - len(letters))
        self.calls += 1
        return torch.nn.functional.one_hot(torch.tensor(list(map(ord, letters))), scores.shape[1]).to(scores) * 100


def tokens_held(session: HogwildSession) -> int:
    """Number of tokens whose keys and values the cache holds."""
    return sum(block.length for block in session.output().past_key_values.pool.blocks)


def state(session: HogwildSession) -> Any:
    """Everything that can be seen of a session."""
    out = session.output()
    cost = {name: value for name, value in asdict(session.stats).items() if "seconds" not in name}
    cost.pop("kv_bytes"), cost.pop("reserved_bytes")
    seen = (session.names, session.writing, session.passes, session.texts, session.history, session.answer)
    return seen, out.sequences.tolist(), out.history, out.record.events[:], tokens_held(session), cost


def change_at_random(session: HogwildSession, rng: random.Random, changes: int) -> Counter[str]:
    """Run passes with random changes in between. Returns how often each kind of change was made."""
    done: Counter[str] = Counter()
    for _ in range(changes):
        session.run(rng.choice([1, 1, 2, 5]))
        kinds = ["inject"] * (len(session.writing) > 0) + ["inject common"] * (session.config.layout != "contiguous")
        rng.shuffle(kinds)
        kind = min(kinds, key=lambda one: done[one])
        done[kind] += 1
        if kind == "inject":
            session.inject(rng.choice(session.writing), rng.choice(["Hm?", "Look here: ", "!"]))
        else:
            session.inject("common", rng.choice(["It rains.", "Now."]))
    session.run(3)
    return done


def logits_during(model: Any, action: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the logits of the forward passes that an action runs."""
    found: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: found.append(output.logits.clone()))
    action()
    hook.remove()
    return found
