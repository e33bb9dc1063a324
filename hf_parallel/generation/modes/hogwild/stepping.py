"""SteppedRun: a Hogwild! run that goes on pass by pass, is changed in between, and keeps a journal of all that happens.

The journal is what is needed to bring the run about again: the tokens that workers took and the changes, in order.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, MaxTimeCriteria

from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.generation.arguments import check_inputs
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import is_int
from hf_parallel.generation.modes.hogwild.checkpoint import Checkpoint
from hf_parallel.generation.modes.hogwild.config import COMMON, HogwildConfig, HogwildRun
from hf_parallel.generation.modes.hogwild.journal import check_plain
from hf_parallel.generation.modes.hogwild.prompt import hogwild_prompt
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.generation.rows import Part

RETOLD_TOGETHER = 256
"""Passes of a journal that are computed in one go, unless their tokens are more than a prefill takes."""

_LENGTHS = ("max_new_tokens", "max_length")
_UNSAVED = ("max_length", "max_new_tokens", "transformers_version")
"""What a prepared GenerationConfig holds that follows from the rest, or from what is kept elsewhere."""


def open_run(model: Any, tokenizer: Any, prompt: Any, settings: dict[str, Any]) -> SteppedRun:
    """Make a run as `HogwildSession` describes it; nothing is computed yet.

    Parameters
    ----------
    model : PreTrainedModel
        Enabled.
    """
    settings = {"generation_mode": HogwildConfig.mode, **settings}
    config = model._take_parallel_config(settings)
    _check_config(config)
    settings |= _read(prompt, tokenizer, config)
    _set_length(model, settings)
    with model.prepared_call(config, {**settings, "tokenizer": tokenizer}) as call:
        pass
    _check_call(call)
    call.generation_config.return_dict_in_generate = True
    if config.seed is None and call.generation_config.do_sample:
        config.seed = int(torch.randint(2**62, ()))
    return SteppedRun(config.open(call))


class SteppedRun:
    """One problem, its workers, and whatever happens to them.

    Parameters
    ----------
    run : HogwildRun
        Of one problem; nothing has been computed yet.

    Attributes
    ----------
    writing : list of Worker
        Those that go on.
    journal : list of dict
        Plain data.
    """

    def __init__(self, run: HogwildRun) -> None:
        self.run, self.loop = run, run.loop
        (self.problem,) = run.problems
        self.writing: list[Worker] = list(run.workers)
        self.journal: list[dict[str, Any]] = []

    @property
    def passes(self) -> int:
        """Forward passes that have given tokens."""
        return self.loop.call.record.passes

    @property
    def present(self) -> list[Worker]:
        """The workers that are there."""
        return [worker for worker in self.run.workers if worker.number not in self.problem.space.removed]

    def step(self) -> dict[str, str]:
        """One forward pass; returns what the text of each worker that wrote grew by, by its name."""
        stats = self.loop.stats
        began, prefilling = time.perf_counter(), stats.prefill_seconds
        self.problem.settle()  # changes nothing that anybody sees, and could not be taken back
        with self.changing():
            before = [(worker, len(worker.text)) for worker in self.writing]
            taken: list[list[int]] = []

            def advance(worker: Worker, token: int, ended: bool) -> bool:
                taken.append([worker.index, token, int(ended)])
                return worker.advance(token, ended)

            logits = self.loop.step(self.writing)
            self.writing = self.loop.take(self.writing, logits, advance)
            self.journal.append({"pass": taken})
            stats.decode_seconds += time.perf_counter() - began - (stats.prefill_seconds - prefilling)
        return {worker.name: worker.text[length:] for worker, length in before}

    def tell(self, worker: Worker | None, text: str, tokens: list[int]) -> None:
        """Put a text into a worker's step, or (None) into the history."""
        self.journal.append({"tell": None if worker is None else worker.number, "text": text, "tokens": tokens})
        if worker is None:
            self.problem.tell_all(text, tokens, self.passes)
        else:
            worker.append_given(tokens, "inject")

    def forget(self, place: int) -> None:
        """Forget a finished step, counted from the first that is left."""
        self.journal.append({"forget": place})
        *before, step = self.problem.finished[: place + 1]
        own = sum(other.worker == step.worker for other in before)
        self.loop.call.record.write(step.worker, str(own), "forget")
        self.problem.forget(place)

    def add_worker(self, name: str) -> None:
        """Let one worker more begin."""
        self.journal.append({"add": name})
        row = self.loop.sampler.begin_row(self.loop.call.record.begin, self.passes)
        worker = self.problem.add_worker(name, row, self.passes)
        self.run.workers.append(worker)
        self.writing.append(worker)

    def remove_worker(self, worker: Worker) -> None:
        """Let a worker go, and what it is writing with it."""
        self.journal.append({"remove": worker.number})
        self.loop.call.record.write(worker.index, "", "leave")
        self.writing = [other for other in self.writing if other is not worker]
        self.problem.remove_worker(worker)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Take everything back if what happens inside fails; forgetting and removing must come last in it."""
        loop, problem = self.loop, self.problem
        things = [self, self.run, problem, problem.space, loop.sampler, loop.stats, loop.call.record]
        things += [thing for worker in self.run.workers for thing in (worker, worker.current)]
        checkpoint = Checkpoint(self.run.cache, loop.table, [*things, *(loop.sampler.noise or ())])
        try:
            yield
        except BaseException:
            checkpoint.restore()
            raise

    def kept(self) -> dict[str, Any]:
        """All that it takes to bring the run about again, as plain data.

        Raises
        ------
        ValueError
            For settings that are no plain data, with `output_scores` or `output_logits`, and if weights are offloaded.
        """
        call, config = self.loop.call, self.run.config
        known = [name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in _UNSAVED]
        held = call.generation_config.to_dict()
        generation = {name: _plain(held.get(name)) for name in known}
        generation["max_new_tokens"] = call.max_new_tokens
        if generation["min_new_tokens"] is not None:
            del generation["min_length"]
        settings = {name: _plain(getattr(config, name)) for name in config.fields() if name not in config.not_stored}
        for name, value in {**generation, **settings}.items():
            check_plain(name, value)
            if name in ("output_scores", "output_logits") and value:
                raise ValueError(f"a session with {name} cannot be saved: they are not kept")
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

    @property
    def _helpers(self) -> list[str]:
        """What decides on tokens besides the model."""
        call = self.loop.call
        return [type(helper).__name__ for helper in (*call.logits_processor, *call.stopping_criteria)]

    @property
    def _tokens(self) -> list[list[int]]:
        """Everything that another tokenizer would make differently."""
        table = self.loop.table
        texts = [*self.problem.headers, self.problem.encode(self.run.config.separator)]
        return texts + [table.ids[row, :length].tolist() for row, length in enumerate(table.lengths)]

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Let everything happen that another run has `kept`, of the same model, prompt and settings.

        Nothing is drawn again, and what the model computed is caught up with in as few forward passes as can be, each
        token seeing what it saw then.

        Raises
        ------
        ValueError
            If processors, criteria or the tokenizer are others.
        """
        if self._helpers != kept["helpers"]:
            raise ValueError(f"{kept['helpers']} decided on tokens, now {self._helpers}")
        record, given = self.loop.call.record, kept.get("given", kept["settings"])  # an older file does not tell them
        record.settings = {name: value for name, value in record.settings.items() if name in given}
        for event in kept["journal"]:
            if "pass" in event:
                self._retake(event["pass"])
            elif "tell" in event:
                number = event["tell"]
                self.tell(None if number is None else self.run.workers[number], event["text"], event["tokens"])
            elif "add" in event:
                self.add_worker(event["add"])
            else:  # blocks that passes have seen go
                self._catch_up()
                if "forget" in event:
                    self.forget(event["forget"])
                else:
                    self.remove_worker(self.run.workers[event["remove"]])
        self._catch_up()
        if self._tokens != kept["tokens"]:
            raise ValueError("texts have other tokens")

    def _retake(self, taken: Sequence[Sequence[int]]) -> None:
        rows, tokens, ended = ([one[i] for one in taken] for i in range(3))
        if rows != [worker.index for worker in self.writing]:
            raise ValueError(f"workers {rows} wrote, now {[worker.index for worker in self.writing]} do")
        self.problem.backlog.append(Part.of(self.problem, list(self.writing)).brought)
        self.loop.sampler.append(rows, tokens)
        self.writing = self.loop.give(self.writing, tokens, [end != 0 for end in ended], Worker.advance)
        self.journal.append({"pass": taken})
        if len(self.problem.backlog) >= RETOLD_TOGETHER:
            self._catch_up()

    def _catch_up(self) -> None:
        self.loop.catch_up([self.problem])
        self.problem.settle()


def _plain(value: Any) -> Any:
    """Tuples as lists, and NumPy's integers as Python's."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if is_int(value) else value


def _check_config(config: Any) -> None:
    if not isinstance(config, HogwildConfig):
        raise ValueError(f"a HogwildSession has the generation_mode 'hogwild', got {config.mode!r}")
    if config.logits_cache is not None:
        raise ValueError("logits_cache must be None in a session, which takes its steps by hand")
    seeds = config.seed if isinstance(config.seed, list | tuple) else [config.seed]
    if config.seed is not None and not all(map(is_int, seeds)):
        raise ValueError(f"seed must be an int or a list of ints in a session, which may be saved, got {config.seed!r}")
    if COMMON in config.names:
        raise ValueError(f"worker_names must not hold {COMMON!r}, which names the history, got {config.worker_names!r}")


def _check_call(call: GenerationCall) -> None:
    if call.num_rows != 1:
        raise ValueError(f"a session has one prompt and num_return_sequences=1, got {call.num_rows} rows")
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in call.stopping_criteria):
        raise ValueError("max_time must be None in a session: it ends when no step is taken any more")


def _read(prompt: Any, tokenizer: Any, config: HogwildConfig) -> dict[str, Any]:
    """Arguments of `generate` that hold the prompt."""
    if not isinstance(prompt, torch.Tensor | Mapping):
        return hogwild_prompt(prompt, tokenizer, config)
    given: dict[str, Any] = {"input_ids": prompt} if isinstance(prompt, torch.Tensor) else dict(prompt)
    if given.get("input_ids") is None:
        raise ValueError(f"prompt must hold input_ids, got {sorted(given)}")
    check_inputs(given)
    mask = given.get("attention_mask")
    if mask is not None and len(mask) == 1 and mask[0, -1]:  # padding says nothing to a row that is alone
        seen = mask[0].bool()
        held = [name for name in ("input_ids", "attention_mask", "position_ids") if given.get(name) is not None]
        given |= {name: given[name][:, seen] for name in held}
    return given


def _set_length(model: Any, settings: dict[str, Any]) -> None:
    """Let workers write as long as the model has positions, if nobody says how long."""
    given = settings.get("generation_config")
    sources = [settings, *(vars(config) for config in (given, model.generation_config) if config is not None)]
    if any(source.get(name) is not None for source in sources for name in _LENGTHS):
        return
    for name in _LENGTHS:
        settings.pop(name, None)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20
    furthest = min(positions, model._parallel_capabilities.max_length or positions)
    length = max(furthest - settings["input_ids"].shape[1], 1)
    if given is None:
        settings["max_new_tokens"] = length
    else:
        settings["generation_config"] = copy.deepcopy(given)
        settings["generation_config"].max_new_tokens = length
