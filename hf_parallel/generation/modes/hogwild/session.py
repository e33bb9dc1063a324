"""HogwildSession: workers that think together, one forward pass at a time, with somebody who joins in.

The mode's own problem, workers and decode loop, stepped by hand; between passes texts are put in, steps are forgotten,
workers come and go, and the whole is saved and goes on later (Hogwild! Inference, section 3).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.files import warn_of_version
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.config import check_int, is_int
from hf_parallel.generation.mixin import ParallelGenerationMixin, enable
from hf_parallel.generation.modes.hogwild.config import COMMON, HogwildConfig, HogwildOutput, default_name
from hf_parallel.generation.modes.hogwild.journal import read_journal, write_journal
from hf_parallel.generation.modes.hogwild.stepping import open_run
from hf_parallel.generation.modes.hogwild.worker import Step, Worker
from hf_parallel.generation.stats import GenerationStats


class HogwildSession:
    """Workers over one shared memory, of whom each gets one token per `step`. A context manager.

    Settings, tokens and texts are those of `generate(..., generation_mode="hogwild")`. Whatever fails, a step or a
    change, leaves the session as it was before; only what a streamer has been told stays told. Other threads may talk
    to a session while one runs it: what they do happens between two passes.

    Parameters
    ----------
    model : PreTrainedModel
        Is enabled, if it is not. Between steps it is free for others; it must stay enabled, its weights as they are and
        where they are.
    tokenizer
    prompt : str, list of messages, mapping or int64 [1, length]
        A task, or messages of a chat, which `hogwild_prompt` wraps; or `input_ids` that are taken as they are, alone or
        with their `attention_mask`.
    **settings
        Those of `HogwildConfig` and of `generate`. `seed` is an int or a list of them; default: drawn from PyTorch's
        global generator, if tokens are sampled. Without `max_new_tokens` or `max_length` workers write until the
        positions of the model are used up.

    Raises
    ------
    ValueError
        As `generate`; for several prompts or `num_return_sequences`; and for `logits_cache` and `max_time`, which
        have no sense where steps are taken by hand.
    TypeError
        For `input_ids` that are no tensor.
    UnsupportedModelError
        As `generate`.

    Attributes
    ----------
    config : HogwildConfig

    Examples
    --------
    >>> with HogwildSession(model, tokenizer, "Plan a picnic.", num_workers=2, do_sample=True, seed=0) as session:
    ...     session.run(50)
    ...     session.inject("common", "It is going to rain.")
    ...     session.run(50)
    ...     session.save("picnic.json")
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, prompt: Any, **settings: Any) -> None:
        self._model: Any = enable(model)
        self._place = model.device, model.dtype
        self._run = open_run(model, tokenizer, prompt, settings)
        self._call, self.config = self._run.loop.call, self._run.run.config
        self._over = ""
        self._turn, self._lock, self._busy = threading.Lock(), threading.RLock(), False

    def __enter__(self) -> HogwildSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # What there is

    @property
    def names(self) -> list[str]:
        """The workers that are there, in the order in which they came."""
        return [worker.name for worker in self._run.present]

    @property
    def writing(self) -> list[str]:
        """Those of them that still write."""
        return [worker.name for worker in self._run.writing]

    @property
    def passes(self) -> int:
        """Forward passes that have given tokens."""
        return self._run.passes

    @property
    def history(self) -> list[Step]:
        """Finished steps that have not been forgotten, in the order in which they ended; and what was told to all."""
        return self._run.problem.finished

    @property
    def transcript(self) -> str:
        """The history, then what is unfinished, as text."""
        return self._told["transcripts"][0]

    @property
    def texts(self) -> dict[str, str]:
        """All that each worker wrote itself or was told, by name."""
        return {worker.name: worker.text for worker in self._run.present}

    @property
    def answer(self) -> str | None:
        """The final answer, if one has been found."""
        return self._run.problem.answer

    @property
    def stats(self) -> GenerationStats:
        """What the session has cost; of one that was loaded, since then, but for the tokens."""
        return self._run.loop.stats

    def output(self) -> HogwildOutput:
        """What `generate` would return with `return_dict_in_generate`, as things stand.

        Rows are workers in the order in which they came, those that have been removed included.
        """
        with self._alone():
            return self._run.loop.result(HogwildOutput, **self._told)

    @property
    def _told(self) -> dict[str, Any]:
        return self._run.run.told()

    # Steps

    def step(self) -> dict[str, str]:
        """One forward pass, in which every worker that still writes gets a token.

        Returns
        -------
        dict of str to str
            What each worker's text grew by, by its name: where a step has ended, the next one's prefix too. Empty when
            nobody writes any more.
        """
        return self.run(1)

    def run(self, passes: int | None = None) -> dict[str, str]:
        """So many steps, or until nobody writes any more.

        Parameters
        ----------
        passes : int, optional
            At most so many. Default: as many as it takes.

        Returns
        -------
        dict of str to str
            As `step`, of all of them.

        Raises
        ------
        RuntimeError
            If the model has been disabled: enable it, and go on.
        ValueError
            If its weights have changed, or been moved to another device or dtype.
        """
        if passes is not None:
            check_int("passes", passes, at_least=0)
        written: dict[str, str] = {}
        done = 0
        with self._at_work():
            while passes is None or done < passes:
                with self._alone():
                    self._check_open()
                    if not self._run.writing:
                        break
                    added = self._run.step()
                for name, text in added.items():
                    written[name] = written.get(name, "") + text
                done += 1
        return written

    def finish(self) -> HogwildOutput:
        """End the session as the mode ends a call: workers leave, and the early finisher answers if nobody has.

        Nothing but `output` can be asked for afterwards, also where this fails.
        """
        with self._at_work(), self._alone():
            self._check_open()
            self._over = "finished"
            self._run.problem.settle()
            self._run.writing = []
            self._run.run.finish()
        return self._run.loop.output(HogwildOutput, **self._told)

    def close(self) -> None:
        """Give the memory back. Nothing can be computed afterwards; what was written can still be read."""
        with self._alone():
            if not self._over and self._call.streamer is not None:
                self._call.streamer.end()
            self._over, self._run.writing = "closed", []
            self._run.loop.graphs = None
            self._run.run.cache.reset()

    # Changes between steps

    def inject(self, to: str, text: str) -> None:
        """Tell a worker, or all of them, something; they read it in the next forward pass.

        Parameters
        ----------
        to : str
            Name of a worker: the text goes behind what it has written so far of its step. Or `common`: the text becomes
            a step of the history, behind those that have ended; the separator follows if it does not end in one.
        text : str
            Stands in the memory as it is: no name and no template goes around it.

        Raises
        ------
        ValueError
            If there is no such worker or it writes no more, for a text that is empty or that the model cannot read,
            and for `common` in the layout `contiguous`, which has no history.
        """
        with self._alone(), self._changing():
            worker = None if to == COMMON else self._find(to)
            if worker is None and self.config.layout == "contiguous":
                raise ValueError(f"to must be one of {self.writing}: the layout 'contiguous' has no history")
            if worker is not None and worker.left:
                raise ValueError(f"to must be one of {[*self.writing, COMMON]}: {to} writes no more")
            if not isinstance(text, str) or not text:
                raise ValueError(f"text must be a non-empty string, got {text!r}")
            if worker is None and not text.endswith(self.config.separator):
                text += self.config.separator
            self._run.tell(worker, text, self._encode("text", text))

    def forget(self, step: Step | int) -> None:
        """Forget a finished step: it leaves the memory, and what came after it in the history moves up.

        Nothing is computed again: what workers have written while they saw the step stays as it is.

        Parameters
        ----------
        step : Step or int
            One of `history`, or its place in it.

        Raises
        ------
        ValueError
            If there is no such step, and in the layout `contiguous`, where steps stay in their workers' texts.
        """
        with self._alone(), self._changing():
            if self.config.layout == "contiguous":
                raise ValueError("the layout 'contiguous' has no history that a step could leave")
            places = [i for i, other in enumerate(self.history) if other == step or (is_int(step) and i == step)]
            if not places:
                raise ValueError(f"step must be one of the {len(self.history)} in history, or its place, got {step!r}")
            self._run.forget(places[0])

    def add_worker(self, name: str | None = None) -> str:
        """Let one worker more begin to write in the next forward pass.

        It reads the prompt as it is, so tell the others in a text of yours if they should know.

        Parameters
        ----------
        name : str, optional
            Default: the next of Alice, Bob, Carol, ... that nobody has had.

        Returns
        -------
        str
            Its name.

        Raises
        ------
        ValueError
            If a worker has that name, or it is `common`, or the streamer takes one row only; and when `max_new_tokens`
            or the model's positions are spent, so that it could write nothing.
        """
        with self._alone(), self._changing():
            if self.passes >= self._call.max_new_tokens:
                raise ValueError(f"no pass is left for a worker: max_new_tokens={self._call.max_new_tokens} is spent")
            if self._run.problem.is_full():
                raise ValueError("no room is left for a worker: the model's positions are used up")
            if name is None:
                had = {worker.name for worker in self._run.run.workers}
                number = len(had)
                while (name := default_name(number)) in had:
                    number += 1
            if not isinstance(name, str) or not name or name in (*self.names, COMMON):
                raise ValueError(f"name must be none of {[*self.names, COMMON]} and not empty, got {name!r}")
            if isinstance(self._call.streamer, TextStreamer):
                kind = type(self._call.streamer).__name__
                raise ValueError(f"streamer must be a ParallelStreamer where several workers write, got a {kind}")
            self._encode("name", self.config.step_prefix.format(name=name, step=1234567890))
            self._run.add_worker(name)
        return name

    def remove_worker(self, name: str) -> None:
        """Let a worker go. What it is writing leaves the memory with it, its finished steps stay.

        Raises
        ------
        ValueError
            If there is no such worker.
        """
        with self._alone(), self._changing():
            self._run.remove_worker(self._find(name))

    def _find(self, name: Any) -> Worker:
        for worker in self._run.present:
            if worker.name == name:
                return worker
        raise ValueError(f"there is no worker {name!r}, only {self.names}")

    def _encode(self, name: str, text: str) -> list[int]:
        tokens, vocabulary = encode(self._call.tokenizer, text), vocabulary_size(self._model)
        if not tokens or max(tokens) >= vocabulary:
            raise ValueError(f"{name} must be text that the model can read, got {text!r} (tokens {tokens})")
        return tokens

    # What is kept

    def save(self, path: str | Path) -> None:
        """Write the session to a JSON file, which appears whole or not at all.

        It holds tokens, texts and settings, no keys and values: `load` computes these again. Objects (streamer,
        processors, criteria) are given to `load` anew; what they remember themselves is not saved.

        Raises
        ------
        ValueError
            For settings that are no plain data, with `output_scores` or `output_logits`, and if weights are offloaded.
        """
        with self._alone():
            self._check_open()
            write_journal(path, self._run.kept())

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        tokenizer: Any,
        streamer: Any = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Any = None,
    ) -> HogwildSession:
        """Go on with a session that was saved, as if it had never been interrupted.

        Keys and values are computed from the tokens, many passes at a time, each token seeing what it saw then; so the
        logits are those of before, up to rounding, and the same seed draws the same tokens. A file of another
        version of transformers, which may round in another way, gives a warning.

        Parameters
        ----------
        path : str or Path
        model : PreTrainedModel
            The one that it was saved with.
        tokenizer
        streamer, logits_processor, stopping_criteria, prefix_allowed_tokens_fn : optional
            As they were given to the session. The streamer is told what was written before.

        Raises
        ------
        OSError
            If there is no such file.
        ValueError
            If the file is no saved session or is damaged; if it was saved with another model or tokenizer, or with
            processors or criteria that are not given.
        """
        told = read_journal(path)
        warn_of_version(path, told["transformers"])
        if told["model"] != fingerprint(enable(model), "HogwildSession.load"):
            raise ValueError(f"{path} was saved with another model, or with other weights, adapters or dtype of it")
        session = cls(
            model,
            tokenizer,
            torch.tensor([told["prompt"]]),
            parallel_config=HogwildConfig(**told["settings"]),
            streamer=streamer,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            **told["generation"],
        )
        with session._at_work():
            try:
                session._run.restore(told)
            except ValueError as error:
                raise ValueError(f"{path} was saved with another tokenizer, or with other helpers: {error}") from error
        return session

    # Around it

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Hold the model, and compute with it."""
        self._check_model()
        with torch.no_grad(), self._model.claimed(self.config), self._run.loop.running():
            try:
                self._run.run.cache.claim(self._model)
            except ValueError as error:
                raise ValueError("the weights of the model have changed since this session began") from error
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out, who take turns."""
        with self._turn:
            self._lock.acquire()
        try:
            if self._busy:
                raise RuntimeError("this session is in a step: it was called again from a processor or a streamer")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
        finally:
            self._lock.release()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Take everything back if what happens inside fails."""
        self._check_open()
        with self._run.changing():
            yield

    def _check_model(self) -> None:
        now = self._model.device, self._model.dtype
        if not isinstance(self._model, ParallelGenerationMixin):
            raise RuntimeError("the model is not enabled any more: hf_parallel.enable(model) lets this session go on")
        if now != self._place:
            began, came = ("{} in {}".format(*place) for place in (self._place, now))
            raise ValueError(f"the model was on {began} when this session began, now it is on {came}: move it back")

    def _check_open(self) -> None:
        if self._over:
            raise RuntimeError(f"this session has been {self._over}")
