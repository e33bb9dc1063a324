"""HogwildSession: workers advanced by the caller, one forward pass at a time (Hogwild! Inference, section 3).

Between passes the caller injects texts, and edits what the workers remember.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.cache.placement import cpu_as_default
from hf_parallel.generation.enabled import Claim
from hf_parallel.generation.mixin import ParallelGenerationMixin, enable, unwrap
from hf_parallel.generation.modes.hogwild.edits import KEYS
from hf_parallel.generation.modes.hogwild.output import COMMON, HogwildOutput, Step
from hf_parallel.generation.modes.hogwild.speech import ALL, check_not_empty, encode_given, ended
from hf_parallel.generation.modes.hogwild.stepping import open_run
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.generation.validation import check_choice, check_int
from hf_parallel.models.loading.adapters import check_no_virtual_tokens


class HogwildSession:
    """Workers over one shared KV cache. A `step` adds one token per worker. A context manager.

    Settings, tokens and texts are the same as with `generate(..., generation_mode="hogwild")`. A step or change that
    raises leaves the session unchanged; only a streamer may have received its text. Changes happen between two steps.

    Parameters
    ----------
    model : PreTrainedModel
        Enabled if it is not. Other calls may use it between steps. Its weights, device and dtype must not change.
    tokenizer
    prompt : str, list of messages, mapping or int64 [1, length]
        A task or a chat, for `hogwild_prompt`; or `input_ids`, used unchanged, optionally with an `attention_mask`.
    **settings
        Settings of `HogwildConfig` and of `generate`, and `chat_template_kwargs` of `hogwild_prompt`. Without
        `max_new_tokens` and `max_length`, workers may use all positions of the model.

    Raises
    ------
    ValueError, TypeError, UnsupportedModelError
        As `generate`; also for several prompts, `num_return_sequences`, `logits_cache` and `max_time`.

    Examples
    --------
    >>> with HogwildSession(model, tokenizer, "Plan a picnic.", num_workers=2, do_sample=True, seed=0) as session:
    ...     session.run(50)
    ...     session.inject("common", "It is going to rain.")
    ...     session.run(50)
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Any, **settings: object
    ) -> None:
        check_no_virtual_tokens(model)
        model = unwrap(enable(model))
        self._model: Any = model
        self._location = model.device, model.dtype
        with cpu_as_default():
            self._run = open_run(model, tokenizer, prompt, settings)
        self._call = self._run.loop.call
        self.config = self._run.config
        if self.config.draft_tokens:
            raise ValueError(f"draft_tokens must be 0 in a session, got {self.config.draft_tokens}")
        self._ended_by = ""
        self._is_running = False

    def __enter__(self) -> HogwildSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._ended_by or (f"{', '.join(self.writing)} writing" if self._run.active else "all stopped")
        return f"<{type(self).__name__} of {', '.join(self.names)}: {self.passes} passes, {state}>"

    @property
    def names(self) -> list[str]:
        """Names of the workers."""
        return [worker.name for worker in self._run.workers]

    @property
    def writing(self) -> list[str]:
        """Names of the workers that get a token in the next pass: all that have neither stopped nor paused."""
        return [worker.name for worker in self._run.active]

    @property
    def passes(self) -> int:
        """Decode passes so far."""
        return self._run.passes

    @property
    def history(self) -> list[Step]:
        """Finished and injected steps, in the order in which they ended."""
        return self._run.group.finished

    @property
    def transcript(self) -> str:
        """Text of the history and of the unfinished steps."""
        return self._run.fields()["transcripts"][0]

    @property
    def texts(self) -> dict[str, str]:
        """All text of each worker, by name, injected text included."""
        return {worker.name: worker.text for worker in self._run.workers}

    @property
    def answer(self) -> str | None:
        """The final answer, if one has been found."""
        return self._run.group.answer

    @property
    def stats(self) -> GenerationStats:
        """Costs of the session."""
        return self._run.loop.stats

    def output(self) -> HogwildOutput:
        """Return the current state as `generate` would with `return_dict_in_generate=True`; rows are workers."""
        self._check_idle()
        with cpu_as_default():
            return self._run.loop.result(HogwildOutput, **self._run.fields())

    def step(self) -> dict[str, str]:
        """Run one forward pass, in which every active worker gets one token. Return as `run`."""
        return self.run(1)

    def run(self, passes: int | None = None) -> dict[str, str]:
        """Run up to `passes` steps (default: until all workers have stopped).

        Returns the text added by each worker, by name, prefixes of new steps included; empty if no worker is active.
        Raises `RuntimeError` if the model has been disabled, and `ValueError` if its weights, device or dtype have
        changed.
        """
        if passes is not None:
            check_int("passes", passes, at_least=0)
        self._check_open()
        written: dict[str, str] = {}

        def run() -> None:
            for _ in itertools.count() if passes is None else range(passes):
                if not self._run.active:
                    break
                for name, text in self._run.step().items():
                    written[name] = written.get(name, "") + text

        self._with_model(run)
        return written

    def finish(self) -> HogwildOutput:
        """Stop all workers and, if none has answered, let the early finisher answer. Return the final output.

        Afterward only `output` and the properties can be used, even if `finish` raises.
        """
        self._check_open()

        def finish() -> None:
            self._ended_by = "finished"
            self._run.group.move_ended_steps()
            self._run.active = []
            self._call.drive(self._run.finish())

        self._with_model(finish)
        output = self._run.loop.output(HogwildOutput, **self._run.fields())
        self._run.warn_unanswered()
        return output

    def close(self) -> None:
        """Free the memory of the cache. Texts can still be read."""
        self._check_idle()
        if not self._ended_by and self._call.streamer is not None:
            self._call.streamer.end()
        self._ended_by = "closed"
        self._run.active = []
        self._call.host.release()
        self._run.cache.reset()

    def inject(self, to: str, text: str, at: Step | int | None = None, keys: str = "reencode") -> None:
        """Append a text, without a name or template, which the model reads in the next forward pass.

        `to` is the name of a worker, whose unfinished step the text continues on a new line, or begins if the step has
        no text yet; or `common` (or `all`), to append it to the history as a step of its own, followed by the separator
        unless it ends with it. Raises `ValueError` if the worker does not exist or has stopped, if the text is empty or
        cannot be encoded, and for `common` in the layout `contiguous`, which has no history.

        With `at`, a finished step or its index in `history`, the text is inserted before this step: in the history as
        a step of its own, for which `to` must be `common`; or, where the steps of a worker do not move, at the
        beginning of a step of the worker `to`. `keys`: see `forget`.
        """
        self._check_open()
        if to == ALL:
            to = COMMON
        if at is None and keys != "reencode":
            raise ValueError(f"keys={keys!r} needs at=, the step before which the text is inserted")
        if at is not None:
            self._insert(to, text, self._find_step("at", at), keys)
            return
        worker = next((worker for worker in self._run.workers if worker.name == to), None)
        if worker is None and to != COMMON:
            raise ValueError(f"to must be {COMMON!r} or one of {self.names}, got {to!r}")
        if worker is None and self.config.layout == "contiguous":
            raise ValueError("the layout 'contiguous' has no history")
        if worker is not None and worker.stopped:
            raise ValueError(f"to must be one of {[*self.writing, COMMON]}: {to} has stopped")
        check_not_empty(text)
        text = ended(self.config, text) if worker is None else worker.on_new_line(text)
        tokens = encode_given(self._call, text)
        with cpu_as_default(), self._run.transaction():
            self._run.inject(None if worker is None else worker.number, text, tokens)

    def forget(self, step: Step | int, keys: str = "reencode") -> None:
        """Remove a finished step from what the workers remember. `texts` and the output's tokens keep it.

        Parameters
        ----------
        step : Step or int
            An element of `history`, or its index.
        keys : str
            Keys and values of the text that follows: the later steps of the history, and the unfinished steps of all
            workers. `reencode`: they are recomputed, as if the step had never been written. A later step is then
            computed only after the history before it, as with `step_move="reencode"`; unfinished steps attend to the
            same tokens of each other as before. `keep`: they are only rotated to their new positions, so they may still
            reflect the step; this costs no forward pass. If steps do not move into a history, the text that follows is
            all text written since the forward pass of the step's first token.

        Raises
        ------
        ValueError
            If there is no such step.
        """
        self._check_open()
        self._edit(self._find_step("step", step), "", [], keys)

    def replace(self, step: Step | int, text: str, keys: str = "reencode") -> None:
        """Replace the text of a finished step. `step` and `keys`: see `forget`.

        A step of a worker keeps its prefix, which is written before the text unless the text begins with it; the step
        ends with the separator. Raises `ValueError` if there is no such step, and for a text as `inject`.
        """
        self._check_open()
        found = self._find_step("step", step)
        check_not_empty(text)
        if found.worker >= 0:
            prefix = self.config.step_prefix_of(found.name, found.step)
            if not text.startswith(prefix):
                space = "" if prefix[-1].isspace() or text[0].isspace() else " "
                text = f"{prefix}{space}{text}"
        text = ended(self.config, text)
        self._edit(found, text, encode_given(self._call, text), keys)

    def _insert(self, to: str, text: str, step: Step, keys: str) -> None:
        """Insert a text before a finished step."""
        check_not_empty(text)
        is_moved = self.config.has_steps or step.worker < 0
        expected = COMMON if is_moved else step.name
        if to != expected:
            where = "the history" if is_moved else f"the text of {step.name}"
            raise ValueError(f"to must be {expected!r} before a step in {where}, got {to!r}")
        text = ended(self.config, text)
        self._edit(step, text, encode_given(self._call, text), keys, is_new=True)

    def _edit(self, step: Step, text: str, tokens: list[int], keys: str, is_new: bool = False) -> None:
        check_choice("keys", keys, KEYS)
        self._with_model(lambda: self._run.edit(step, text, tokens, keys, is_new))

    def _find_step(self, name: str, step: Step | int) -> Step:
        """Return a finished step, given itself or its index."""
        history = self.history
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < len(history):
            return history[step]
        for other in history:
            if other is step or other == step:
                return other
        raise ValueError(f"{name} must be one of the {len(history)} steps of the history, or its index, got {step!r}")

    def _check_open(self) -> None:
        if self._ended_by:
            raise RuntimeError(f"this session has been {self._ended_by}")
        self._check_idle()

    def _check_idle(self) -> None:
        if self._is_running:
            raise RuntimeError("this session is in a step: it was called again from a processor or a streamer")

    def _with_model(self, function: Callable[[], None]) -> None:
        """Call a function while the session holds the model, if the model has not changed since the session began."""
        location = self._model.device, self._model.dtype
        if not isinstance(self._model, ParallelGenerationMixin):
            raise RuntimeError("the model is not enabled any more: call hf_parallel.enable(model) to continue")
        if location != self._location:
            began = "{} in {}".format(*self._location)
            now = "{} in {}".format(*location)
            raise ValueError(f"the model was on {began} when this session began, now it is on {now}: move it back")
        claim = Claim()
        try:
            self._is_running = True
            with cpu_as_default(), torch.no_grad(), self._model.claimed(claim), self._run.loop.running():
                try:
                    self._run.cache.begin_call(self._call.model, claim, kept=True)
                except ValueError as error:
                    raise ValueError("the weights of the model have changed since this session began") from error
                function()
        finally:
            claim.active = False
            self._is_running = False
