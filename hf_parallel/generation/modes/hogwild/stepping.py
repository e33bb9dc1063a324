"""SteppedRun: a Hogwild! run that is advanced pass by pass, and changed in between."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers import MaxTimeCriteria, PreTrainedTokenizerBase

from hf_parallel.generation.arguments import check_inputs
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.enabled import Claim, enabled
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes.hogwild.config import HogwildConfig, hogwild_prompt
from hf_parallel.generation.modes.hogwild.edits import Editor, Feed, locate
from hf_parallel.generation.modes.hogwild.output import COMMON, Step
from hf_parallel.generation.modes.hogwild.run import HogwildRun
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.generation.prompts import NOT_RENDERED, check_unused_template_kwargs
from hf_parallel.generation.settings import Arguments
from hf_parallel.models.probing.rotary import max_positions

R = TypeVar("R")


def open_run(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Any, settings: Arguments) -> SteppedRun:
    """Return the run of a session of an enabled model; arguments and errors as of `HogwildSession`."""
    parallel_config = settings.get("parallel_config")
    mode = parallel_config.mode if isinstance(parallel_config, HogwildConfig) else HogwildConfig.mode
    settings = {"generation_mode": mode, **settings}
    template = settings.pop("chat_template_kwargs", None)
    mode = settings["generation_mode"]
    config = take_parallel_config(model.generation_config, settings)
    if not isinstance(config, HogwildConfig):
        raise ValueError(f"a HogwildSession has the generation_mode 'hogwild' or 'async_reasoning', got {mode!r}")
    if COMMON in config.names:
        raise ValueError(f"worker_names must not contain {COMMON!r}, the name of the history, got {config.names!r}")
    if config.logits_cache is not None:
        reason = "in a session, whose steps are taken by the caller"
        raise ValueError(f"logits_cache must be None {reason}, got {config.logits_cache!r}")
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
    return SteppedRun(config, call)


class SteppedRun(HogwildRun):
    """Run of one prompt, advanced by the caller. `active` are the workers that have not stopped."""

    config: HogwildConfig
    outlives_call = True

    def __init__(self, config: HogwildConfig, call: GenerationCall) -> None:
        super().__init__(config, call)
        call.drive(self.begin())
        (self.group,) = self.groups
        self.feeds: list[Feed] = []  # of the workers' blocks, in the order of the passes
        self._num_feeds = 0
        self.active = call.drive(self.schedule(self.workers))

    @property
    def passes(self) -> int:
        """Decode passes so far."""
        return self.loop.call.record.passes

    def step(self) -> dict[str, str]:
        """Run one forward pass. Return the text added by each active worker, by name."""
        stats = self.loop.stats
        began = time.perf_counter()
        prefilling = stats.prefill_seconds
        self.group.move_ended_steps()  # before the transaction, which cannot undo it; affects no output
        with self.transaction():
            lengths = [(worker, len(worker.text)) for worker in self.active]
            self.active = self.loop.call.drive(self._next())
            stats.decode_seconds += time.perf_counter() - began - (stats.prefill_seconds - prefilling)
        return {worker.name: worker.text[length:] for worker, length in lengths}

    def _next(self) -> Steps[list[Worker]]:
        logits = yield from self._fed(self.loop.step(self.active))
        active = yield from self.loop.sample(self.active, logits, Worker.advance)
        return (yield from self.schedule(active))

    def inject(self, worker: int | None, text: str, tokens: list[int]) -> None:
        """Append a text to the step of a worker, given by its number, or to the history (None)."""
        if worker is None:
            self.group.inject_step(text, tokens, self.passes)
        else:
            self.workers[worker].insert(tokens)

    def _fed(self, steps: Steps[R]) -> Steps[R]:
        """Run steps that compute one pass, and record what it appends to the blocks of workers."""
        blocks = self.group.space.workers
        lengths = [block.length for block in blocks]
        result = yield from steps
        for number, (block, length) in enumerate(zip(blocks, lengths, strict=True)):
            if block.length > length:
                self.feeds.append(Feed(self._num_feeds, number, block, block.length - length))
        self._num_feeds += 1
        return result

    def edit(self, step: Step, text: str, tokens: list[int], keys: str, is_new: bool = False) -> None:
        """Replace a finished step by a text, or insert the text before it. An empty text removes the step.

        `keys`: one of `KEYS`. In a layout without a history, a new text becomes part of the step.
        """
        group = self.group
        with self.transaction():
            self.loop.call.drive(self._compute_pending())
        group.move_ended_steps()
        with self.transaction():
            splice = locate(group, step)
            splice = replace(splice, tokens=tokens, stop=splice.start if is_new else splice.stop)
            editor = Editor(group, self.workers, self.feeds)
            unused = self.loop.call.drive(editor.apply(splice, keys))
            self.feeds = editor.feeds
            self._edit_record(step, text, tokens, is_new)
        for block in unused:
            self.cache.pool.free(block)

    def _edit_record(self, step: Step, text: str, tokens: list[int], is_new: bool) -> None:
        """Edit the lists of steps, of which those in the history block come with their tokens."""
        group = self.group
        places = [place for place, other in enumerate(group.in_history) if other is step]
        place = next(index for index, other in enumerate(group.history) if other is step)
        if is_new and places:
            added = [group.common_step(text, tokens, self.passes)]
        elif is_new:
            added = [replace(step, text=text + step.text, tokens=[*tokens, *step.tokens])]
        else:
            added = [replace(step, text=text, tokens=tokens)] if text else []
        removes = 0 if is_new and places else 1
        group.history[place : place + removes] = added
        for index in places:
            group.step_tokens[index : index + removes] = [tokens] if tokens else []

    def _compute_pending(self) -> Steps[None]:
        """Compute all that is pending besides the tokens of workers that write."""
        unfilled = self.group.unfilled_prompt()
        if unfilled:
            yield from self.loop.runner.prefill(unfilled)
        inputs = self.group.writes.take()
        if inputs:
            yield from self._fed(self.loop.runner.forward(inputs, ends=[len(inputs) - 1]))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Restore the state of the run if the body raises.

        Lists, dicts and sets get their items back; the items themselves are not copied. The body must not free or
        move blocks.
        """
        loop = self.loop
        group = self.group
        cache = self.cache
        objects: list[object] = [self, group, group.space, group.writes, loop.table, loop.sampler, loop.stats]
        objects += [loop.call.record, *(loop.sampler.rngs or ())]
        for worker in self.workers:
            objects += [worker, worker.current]
        saved = [(vars(item), dict(vars(item))) for item in objects]
        containers: list[Any] = []
        for _, attributes in saved:
            containers += [value for value in attributes.values() if type(value) in (list, dict, set)]
        items = list(map(copy.copy, containers))
        log_state = None if cache.log is None else cache.log.state
        lengths = {block: block.length for block in cache.pool.blocks}
        try:
            yield
        except BaseException:
            for current, attributes in saved:
                current.clear()
                current.update(attributes)
            for container, saved_items in zip(containers, items, strict=True):
                container.clear()
                if isinstance(container, list):
                    container.extend(saved_items)
                else:
                    container.update(saved_items)
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


def _prompt_arguments(
    prompt: Any, tokenizer: PreTrainedTokenizerBase, config: HogwildConfig, template: Any
) -> Arguments:
    """Return the arguments of `generate` for a prompt as `HogwildSession` accepts it."""
    if not isinstance(prompt, torch.Tensor | Mapping):
        return hogwild_prompt(prompt, tokenizer, config, chat_template_kwargs=template)
    check_unused_template_kwargs(template, NOT_RENDERED)
    inputs: Arguments = {"input_ids": prompt} if isinstance(prompt, torch.Tensor) else dict(prompt)
    if inputs.get("input_ids") is None:
        raise ValueError(f"prompt must contain input_ids, got {sorted(inputs)}")
    check_inputs(inputs)
    return inputs


def _set_default_length(model: Any, settings: Arguments) -> None:
    """Set `max_new_tokens` to the positions that the prompt leaves, unless a length is given."""
    sources: list[Mapping[str, Any]] = [settings]
    for config in (settings.get("generation_config"), model.generation_config):
        if config is not None:
            sources.append(vars(config))
    for source in sources:
        if source.get("max_new_tokens") is not None or source.get("max_length") is not None:
            return
    positions = max_positions(model.config) or 2**20
    longest = min(positions, enabled(model).capabilities.max_length or positions)
    settings["max_new_tokens"] = max(longest - settings["input_ids"].shape[1], 1)
