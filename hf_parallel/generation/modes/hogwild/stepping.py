"""SteppedRun: a Hogwild! run that is advanced pass by pass, changed in between, saved and restored.

Its journal lists the tokens of every pass and every change, in order; `restore` repeats them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedTokenizerBase

from hf_parallel.cache import BlockCache
from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.files import JSONObject
from hf_parallel.generation.arguments import check_inputs
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.claim import Claim
from hf_parallel.generation.enabled import enabled
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes.hogwild.config import HogwildConfig, hogwild_prompt
from hf_parallel.generation.modes.hogwild.output import COMMON
from hf_parallel.generation.modes.hogwild.run import HogwildRun
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.generation.prompts import NOT_RENDERED, check_unused_template_kwargs
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.token_table import TokenTable
from hf_parallel.generation.validation import is_int, json_error
from hf_parallel.models.capabilities import max_positions

RESTORED_TOGETHER = 256
"""Passes of a journal that are computed in one forward pass, unless their tokens exceed a prefill chunk."""

_LENGTHS = ("max_new_tokens", "max_length")
_UNSAVED = ("max_length", "max_new_tokens", "transformers_version")
"""Fields of a prepared GenerationConfig that follow from others or are saved separately."""


def open_run(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Any, settings: Arguments) -> SteppedRun:
    """Return the run of a session of an enabled model; arguments and errors as of `HogwildSession`."""
    settings = {"generation_mode": HogwildConfig.mode, **settings}
    if "progress" in settings:
        raise ValueError("a session has no progress: its steps are taken by the caller")
    template = settings.pop("chat_template_kwargs", None)
    config: Any = take_parallel_config(model.generation_config, settings)
    _check_config(config)
    settings |= _prompt_arguments(model, prompt, tokenizer, config, template)
    if (rows := settings.get("num_return_sequences")) not in (None, 1):  # before the prompt is repeated
        raise ValueError(f"a session has one prompt and num_return_sequences=1, got num_return_sequences={rows!r}")
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

    `journal` holds the passes and changes as plain data.
    """

    config: HogwildConfig
    outlives_call = True

    def __init__(self, config: HogwildConfig, call: GenerationCall) -> None:
        super().__init__(config, call)
        (self.group,) = self.groups
        self.active: list[Worker] = list(self.workers)
        self.journal: list[JSONObject] = []

    @property
    def passes(self) -> int:
        """Decode passes so far."""
        return self.loop.call.record.passes

    @property
    def present(self) -> list[Worker]:
        """Workers that have not been removed."""
        return [worker for worker in self.workers if worker.number not in self.group.space.removed]

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
            stats.decode_seconds += time.perf_counter() - began - (stats.prefill_seconds - prefilling)
        return {worker.name: worker.text[length:] for worker, length in before}

    def apply(self, change: JSONObject) -> None:
        """Apply a change between two passes, and append it to the journal.

        A change is `{"tell": number of a worker or None for the history, "text": ..., "tokens": ...}`, `{"add": name}`,
        `{"remove": number of a worker}` or `{"forget": index of a finished step}`.
        """
        self.journal.append(change)
        group, record = self.group, self.loop.call.record
        if "tell" in change:
            if change["tell"] is None:
                group.inject_step(change["text"], change["tokens"], self.passes)
            else:
                self.workers[change["tell"]].insert(change["tokens"])
        elif "add" in change:
            row = self.loop.sampler.add_row(record.begin, self.passes)
            self.cache.add_worker(group.space)
            group.append_headers()
            self.workers.append(Worker(group, row, len(self.workers), change["add"], self.passes))
            self.active.append(self.workers[-1])
        elif "remove" in change:
            worker = self.workers[change["remove"]]
            record.write(worker.index, "", "leave")
            self.active = [other for other in self.active if other is not worker]
            worker.remove()
        else:
            *before, step = group.finished[: change["forget"] + 1]
            own_index = sum(other.worker == step.worker for other in before)
            record.write(step.worker, str(own_index), "forget")
            group.remove_step(change["forget"])

    def transaction(self) -> AbstractContextManager[None]:
        """Restore the state of the run if the body raises."""
        loop, group = self.loop, self.group
        objects = [self, group, group.space, group.writes, loop.sampler, loop.stats, loop.call.record]
        objects += [item for worker in self.workers for item in (worker, worker.current)]
        return _restored_on_error(self.cache, loop.table, [*objects, *(loop.sampler.rngs or ())])

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
        return {
            "model": fingerprint(call.model, "HogwildSession.save"),
            "transformers": transformers.__version__,
            "prompt": call.prompts[0].tolist(),
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
        the processors, the criteria or the tokenizer differ.
        """
        if self._helpers != state["helpers"]:
            raise ValueError(f"it had the processors and criteria {state['helpers']}, this session has {self._helpers}")
        record, given = self.loop.call.record, state.get("given")
        given = state["settings"] if given is None else given  # older files lack it
        record.settings = {name: value for name, value in record.settings.items() if name in given}
        for number, event in enumerate(state["journal"]):
            if not self._fits(event):
                raise ValueError(
                    f"journal[{number}] does not fit the events before it, or the vocabulary: {event!r:.200}"
                )
            if "pass" in event:
                self._repeat_pass(event["pass"])
                continue
            if "remove" in event or "forget" in event:  # removes a block that earlier passes attend to
                self._compute_backlog()
            self.apply(event)
        self._compute_backlog()
        if self._tokens != state["tokens"]:
            raise ValueError("its texts have other tokens")

    def _fits(self, event: JSONObject) -> bool:
        """Return whether the numbers of an event stand for workers, steps and tokens that there are."""
        tokens = [entry[1] for entry in event.get("pass", ())] + event.get("tokens", [])
        if max(tokens, default=0) >= vocabulary_size(self.loop.call.model):
            return False
        has_history = self.config.layout != "contiguous"
        if "tell" in event:
            return has_history if event["tell"] is None else event["tell"] in [w.number for w in self.active]
        if "add" in event:
            names = [worker.name for worker in self.present]
            return event["add"] not in (*names, COMMON, "") and not self.group.is_full()
        if "remove" in event:
            return event["remove"] in [worker.number for worker in self.present]
        return "pass" in event or (has_history and event["forget"] < len(self.group.finished))

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

    def _repeat_pass(self, sampled: Sequence[Sequence[int]]) -> None:
        rows, tokens, ended = ([entry[i] for entry in sampled] for i in range(3))
        if rows != [worker.index for worker in self.active]:
            raise ValueError(f"rows {rows} were active, now rows {[worker.index for worker in self.active]} are")
        self.loop.runner.skip(self.group, self.active)
        self.loop.sampler.append(rows, tokens)
        self.active = self.loop.append(self.active, tokens, [end != 0 for end in ended], Worker.advance)
        self.journal.append({"pass": sampled})
        if len(self.group.backlog) >= RESTORED_TOGETHER:
            self._compute_backlog()

    def _compute_backlog(self) -> None:
        self.loop.runner.compute(self.groups)
        self.group.move_ended_steps()


@contextmanager
def _restored_on_error(cache: BlockCache, table: TokenTable, objects: Sequence[object]) -> Iterator[None]:
    """Restore the attributes of objects, the table and the blocks of the cache if the body raises.

    Lists, dicts and sets get their items back; the items themselves are not copied. Blocks that the body frees are kept
    until it has ended. It must not move blocks.
    """
    log_state = None if cache.log is None else cache.log.state
    cache.pool.defer_frees()
    lengths = {block: block.length for block in cache.blocks}
    attributes = [(item, dict(vars(item))) for item in (*objects, table)]
    containers = [
        (value, copy.copy(value))
        for _, held in attributes
        for value in held.values()
        if type(value) in (list, dict, set)
    ]
    try:
        yield
    except BaseException:
        for item, held in attributes:
            vars(item).clear()
            vars(item).update(held)
        for value, items in containers:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(items)
        for row, length in enumerate(table.lengths):
            table.truncate(row, length)
        cache.pool.free_deferred(keep=True)
        if cache.log is not None and log_state is not None:
            cache.log.restore(log_state)
        for block in cache.blocks - lengths.keys():
            cache.free(block)
        for block, length in lengths.items():
            block.length = length
        raise
    cache.pool.free_deferred()


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if is_int(value) else value


def _check_config(config: HogwildConfig) -> None:
    if not isinstance(config, HogwildConfig):
        raise ValueError(f"a HogwildSession has the generation_mode 'hogwild', got {config.mode!r}")
    if config.logits_cache is not None:
        raise ValueError("logits_cache must be None in a session, whose steps are taken by the caller")
    seeds = config.seed if isinstance(config.seed, list | tuple) else [config.seed]
    if config.seed is not None and not all(map(is_int, seeds)):
        raise ValueError(f"seed must be an int or a list of ints in a session, which may be saved, got {config.seed!r}")
    if COMMON in config.names:
        raise ValueError(f"worker_names must not contain {COMMON!r}, the name of the history, got {config.names!r}")


def _prompt_arguments(
    model: Any, prompt: Any, tokenizer: PreTrainedTokenizerBase, config: HogwildConfig, template: Any
) -> Arguments:
    """Return the arguments of `generate` for a prompt as `HogwildSession` accepts it."""
    if not isinstance(prompt, torch.Tensor | Mapping):
        return hogwild_prompt(prompt, tokenizer, config, chat_template_kwargs=template)
    check_unused_template_kwargs(template, NOT_RENDERED)
    given: Arguments = {"input_ids": prompt} if isinstance(prompt, torch.Tensor) else dict(prompt)
    if given.get("input_ids") is None:
        raise ValueError(f"prompt must contain input_ids, got {sorted(given)}")
    check_inputs(given)
    mask = given.get("attention_mask")
    if mask is not None and len(mask) == 1 and mask.any():  # a single row needs no padding
        seen = mask[0].bool()
        inside = (~seen & seen.cummax(0).values & seen.flip(0).cummax(0).values.flip(0)).nonzero().flatten().tolist()
        if inside and enabled(model).capabilities.has_window:
            raise ValueError(
                f"attention_mask masks {inside} inside the prompt, which a session with a sliding window "
                "does not save: remove these tokens"
            )
        names = [name for name in ("input_ids", "attention_mask", "position_ids") if given.get(name) is not None]
        given |= {name: given[name][:, seen] for name in names}
    return given


def _set_default_length(model: Any, settings: Arguments) -> None:
    """Set `max_new_tokens` to the positions that the prompt leaves, unless a length is given."""
    given = settings.get("generation_config")
    sources = [settings, *(vars(config) for config in (given, model.generation_config) if config is not None)]
    if any(source.get(name) is not None for source in sources for name in _LENGTHS):
        return
    for name in _LENGTHS:
        settings.pop(name, None)
    positions = max_positions(model.config) or 2**20
    longest = min(positions, enabled(model).capabilities.max_length or positions)
    length = max(longest - settings["input_ids"].shape[1], 1)
    if given is None:
        settings["max_new_tokens"] = length
    else:
        settings["generation_config"] = copy.deepcopy(given)
        settings["generation_config"].max_new_tokens = length
