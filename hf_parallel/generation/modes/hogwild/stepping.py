"""SteppedRun: a Hogwild! run that is advanced pass by pass, changed in between, saved and restored.

Its journal lists the tokens of every pass and every injected text, in order; `restore` repeats them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedTokenizerBase

from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.files import JSONObject, read_json, write_atomically
from hf_parallel.generation.arguments import check_inputs
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.enabled import Claim, enabled
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes.hogwild.config import HogwildConfig, hogwild_prompt
from hf_parallel.generation.modes.hogwild.output import COMMON
from hf_parallel.generation.modes.hogwild.run import HogwildRun
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.generation.prompts import NOT_RENDERED, check_unused_template_kwargs
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import is_int, json_error
from hf_parallel.models.rotary import max_positions

RESTORED_TOGETHER = 256
"""Passes of a journal that are computed in one forward pass, unless their tokens exceed a prefill chunk."""

HEAD = {"format": "hf_parallel.HogwildSession", "version": 1}
"""Beginning of the file of a saved session."""
_UNSAVED = ("max_length", "max_new_tokens", "num_return_sequences", "transformers_version")
"""Fields of a prepared GenerationConfig that follow from others or are saved separately."""


def open_run(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Any, settings: Arguments) -> SteppedRun:
    """Return the run of a session of an enabled model; arguments and errors as of `HogwildSession`."""
    given = settings.get("parallel_config")
    settings = {"generation_mode": given.mode if isinstance(given, HogwildConfig) else HogwildConfig.mode, **settings}
    template = settings.pop("chat_template_kwargs", None)
    mode = settings["generation_mode"]
    config = take_parallel_config(model.generation_config, settings)
    if not isinstance(config, HogwildConfig):
        raise ValueError(f"a HogwildSession has the generation_mode 'hogwild' or 'async_reasoning', got {mode!r}")
    seeds = config.seed if isinstance(config.seed, list | tuple) else [config.seed]
    if config.seed is not None and not all(map(is_int, seeds)):
        raise ValueError(f"seed must be an int or a list of ints in a session, which may be saved, got {config.seed!r}")
    if COMMON in config.names:
        raise ValueError(f"worker_names must not contain {COMMON!r}, the name of the history, got {config.names!r}")
    for name, value in {"logits_cache": config.logits_cache, "progress": settings.get("progress")}.items():
        if value is not None:
            raise ValueError(f"{name} must be None in a session, whose steps are taken by the caller, got {value!r}")
    settings |= _prompt_arguments(prompt, tokenizer, config, template)
    _set_default_length(model, settings)
    claim = Claim()
    try:
        with model.prepared_call(config, {**settings, "tokenizer": tokenizer}, claim) as call:
            pass
    finally:
        claim.active = False
    if call.num_rows != 1:
        raise ValueError(f"a session has one prompt and num_return_sequences=1, got {call.num_rows} rows")
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in call.stopping_criteria):
        raise ValueError("max_time must be None in a session, whose steps are taken by the caller")
    call.generation_config.return_dict_in_generate = True
    if config.seed is None and call.generation_config.do_sample:
        config.seed = int(torch.randint(2**62, ()))
    return SteppedRun(config, call)


class SteppedRun(HogwildRun):
    """Run of one prompt, advanced by the caller. `active` are the workers that have not stopped.

    `journal` holds the passes and injected texts as plain data.
    """

    config: HogwildConfig
    outlives_call = True

    def __init__(self, config: HogwildConfig, call: GenerationCall) -> None:
        super().__init__(config, call)
        (self.group,) = self.groups
        self.journal: list[JSONObject] = []
        self.active = self.schedule(self.workers)

    @property
    def passes(self) -> int:
        """Decode passes so far."""
        return self.loop.call.record.passes

    def step(self) -> dict[str, str]:
        """Run one forward pass. Return the text added by each active worker, by name."""
        stats = self.loop.stats
        began, prefilling = time.perf_counter(), stats.prefill_seconds
        self.group.move_ended_steps()  # before the transaction, which cannot undo it; affects no output
        with self.transaction():
            before = [(worker, len(worker.text)) for worker in self.active]
            sampled: list[list[int]] = []

            def advance(worker: Worker, token: int, ended: bool) -> bool:
                sampled.append([worker.index, token, int(ended)])
                return worker.advance(token, ended)

            logits = self.loop.step(self.active)
            self.active = self.loop.sample(self.active, logits, advance)
            self.journal.append({"pass": sampled})
            self.active = self.schedule(self.active)
            stats.decode_seconds += time.perf_counter() - began - (stats.prefill_seconds - prefilling)
        return {worker.name: worker.text[length:] for worker, length in before}

    def ask(self, thinkers: Sequence[Worker]) -> list[bool]:
        answers = super().ask(thinkers)
        self.journal[-1] = {**self.journal[-1], "answers": answers}
        return answers

    def inject(self, worker: int | None, text: str, tokens: list[int]) -> None:
        """Append a text to the step of a worker, given by its number, or to the history (None), and to the journal."""
        self.journal.append({"tell": worker, "text": text, "tokens": tokens})
        if worker is None:
            self.group.inject_step(text, tokens, self.passes)
        else:
            self.workers[worker].insert(tokens)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Restore the state of the run if the body raises.

        Lists, dicts and sets get their items back; the items themselves are not copied. The body must not free or
        move blocks.
        """
        loop, group, cache = self.loop, self.group, self.cache
        objects: list[object] = [self, group, group.space, group.writes, loop.table, loop.sampler, loop.stats]
        objects += [loop.call.record, *(loop.sampler.rngs or ())]
        objects += [item for worker in self.workers for item in (worker, worker.current)]
        before = [(vars(item), dict(vars(item))) for item in objects]
        containers = [value for _, held in before for value in held.values() if type(value) in (list, dict, set)]
        items = list(map(copy.copy, containers))
        log_state = None if cache.log is None else cache.log.state
        lengths = {block: block.length for block in cache.pool.blocks}
        try:
            yield
        except BaseException:
            for now, held in before:
                now.clear()
                now.update(held)
            for container, held_items in zip(containers, items, strict=True):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(held_items)
            for row, length in enumerate(loop.table.lengths):
                loop.table.truncate(row, length)
            cache.pool.touch()
            if cache.log is not None and log_state is not None:
                cache.log.restore(log_state)
            for block in cache.pool.blocks - lengths.keys():
                cache.pool.free(block)
            for block, length in lengths.items():
                block.length = length
            raise

    def state(self) -> JSONObject:
        """Return all that `restore` needs, as plain data; errors as of `HogwildSession.save`."""
        call, config = self.loop.call, self.config
        names = [name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in _UNSAVED]
        values = call.generation_config.to_dict()
        generation = {name: _plain(values.get(name)) for name in names}
        generation["max_new_tokens"] = call.max_new_tokens
        if generation["min_new_tokens"] is not None:
            del generation["min_length"]
        settings = {name: _plain(getattr(config, name)) for name in config.fields() if name not in config.not_stored()}
        for name, value in {**generation, **settings}.items():
            if json_error(value):
                raise ValueError(f"{name} cannot be saved: it must be plain data, got {value!r}")
            if name in ("output_scores", "output_logits") and value:
                raise ValueError(f"a session with {name} cannot be saved: scores and logits are not stored")
        if call.images:
            raise ValueError("a session whose prompt has images cannot be saved: images are not stored")
        return {
            "model": fingerprint(call.model, "HogwildSession.save"),
            "transformers": transformers.__version__,
            "prompt": call.prompts[0].tolist(),
            "mode": config.mode,
            "settings": settings,
            "given": list(call.record.settings),
            "generation": generation,
            "helpers": self._helpers,
            "journal": self.journal,
            "tokens": self._tokens,
        }

    def restore(self, state: JSONObject) -> None:
        """Repeat the journal of another run with the same model, prompt and settings.

        Nothing is sampled; keys and values are computed in as few forward passes as possible. Raises `ValueError` if
        the processors, the criteria or the tokenizer differ, and `LookupError` if an event does not fit those before.
        """
        if self._helpers != state["helpers"]:
            raise ValueError(f"it had the processors and criteria {state['helpers']}, this session has {self._helpers}")
        record = self.loop.call.record
        record.settings = {name: value for name, value in record.settings.items() if name in state["given"]}
        for event in state["journal"]:
            if "pass" in event:
                self._repeat_pass(event)
            else:
                self.inject(event["tell"], event["text"], event["tokens"])
        self._compute_backlog()
        if self._tokens != state["tokens"]:
            raise ValueError("its texts have other tokens")

    @property
    def _helpers(self) -> list[str]:
        call = self.loop.call
        return [type(helper).__name__ for helper in (*call.logits_processor, *call.stopping_criteria)]

    @property
    def _tokens(self) -> list[list[int]]:
        """Tokens of all texts, which identify the tokenizer."""
        table = self.loop.table
        texts = [*self.group.headers, self.group.encode(self.config.separator)]
        return texts + [table.ids[row, :length].tolist() for row, length in enumerate(table.lengths)]

    def _repeat_pass(self, event: JSONObject) -> None:
        rows, tokens, ended = ([entry[i] for entry in event["pass"]] for i in range(3))
        if rows != [worker.index for worker in self.active]:
            raise ValueError(f"rows {rows} were active, now rows {[worker.index for worker in self.active]} are")
        self.loop.runner.skip(self.group, self.active)
        self.loop.sampler.append(rows, tokens)
        active = self.loop.append(self.active, tokens, [end != 0 for end in ended], Worker.advance)
        self.active = self.schedule(active, event.get("answers", []))
        self.journal.append(event)
        if len(self.group.backlog) >= RESTORED_TOGETHER:
            self._compute_backlog()

    def _compute_backlog(self) -> None:
        self.loop.runner.compute(self.groups)
        self.group.move_ended_steps()


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if is_int(value) else value


def _prompt_arguments(
    prompt: Any, tokenizer: PreTrainedTokenizerBase, config: HogwildConfig, template: Any
) -> Arguments:
    """Return the arguments of `generate` for a prompt as `HogwildSession` accepts it."""
    if not isinstance(prompt, torch.Tensor | Mapping):
        return hogwild_prompt(prompt, tokenizer, config, chat_template_kwargs=template)
    check_unused_template_kwargs(template, NOT_RENDERED)
    given: Arguments = {"input_ids": prompt} if isinstance(prompt, torch.Tensor) else dict(prompt)
    if given.get("input_ids") is None:
        raise ValueError(f"prompt must contain input_ids, got {sorted(given)}")
    check_inputs(given)
    mask = given.pop("attention_mask", None)
    if mask is not None and mask[0].any():  # a single row needs no padding
        seen = mask[0].nonzero().flatten().tolist()
        if len(seen) <= seen[-1] - seen[0]:
            masked = sorted({*range(seen[0], seen[-1])} - {*seen})
            raise ValueError(
                f"attention_mask masks {masked} inside the prompt, which is not saved: remove these tokens"
            )
        given = {name: value[:, seen[0] : seen[-1] + 1] for name, value in given.items()}
    return given


def _set_default_length(model: Any, settings: Arguments) -> None:
    """Set `max_new_tokens` to the positions that the prompt leaves, unless a length is given."""
    configs = [settings.get("generation_config"), model.generation_config]
    sources = [settings, *(vars(config) for config in configs if config is not None)]
    if all(source.get(name) is None for source in sources for name in ("max_new_tokens", "max_length")):
        positions = max_positions(model.config) or 2**20
        longest = min(positions, enabled(model).capabilities.max_length or positions)
        settings["max_new_tokens"] = max(longest - settings["input_ids"].shape[1], 1)


def write_journal(path: str | Path, state: JSONObject) -> None:
    """Write the state of a session, plain data, to a JSON file, atomically."""
    write_atomically(path, json.dumps({**HEAD, "digest": _digest(state), **state}))


def read_journal(path: str | Path) -> JSONObject:
    """Read a file of `write_journal`. Raise `OSError` if it is missing, `ValueError` if it is damaged or outdated."""
    state = read_json(path)
    if not isinstance(state, dict) or {name: state.pop(name, None) for name in HEAD} != HEAD:
        raise ValueError(f"{path} is not a saved session: it must be a JSON object with {HEAD}")
    if state.pop("digest", None) != _digest(state):
        raise ValueError(f"{path} is damaged: its content does not match its digest")
    return state


def _digest(state: JSONObject) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
