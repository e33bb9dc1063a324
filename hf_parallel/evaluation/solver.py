"""Solver: generates with one engine and scores what was written within each budget of decode passes.

An early finisher continues texts without a final answer (Hogwild! Inference, section 4.1 and appendix C).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.engine import Engine, RequestHandle
from hf_parallel.evaluation.collaboration import measure
from hf_parallel.evaluation.judge import Judge
from hf_parallel.evaluation.pass_clock import PassClock
from hf_parallel.evaluation.results import Result
from hf_parallel.evaluation.runs import NO_MODE, TEMPLATE, Finisher, Run
from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.evaluation.written import Written, written_until
from hf_parallel.files import JSONObject
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.modes import find_answer, find_matches, majority, normal_form
from hf_parallel.generation.prompts import build_prompt, check_template_kwargs, encode_task


@dataclass(eq=False)
class Generation:
    """A problem, a run, a sample, and the budgets that have no results yet."""

    problem: Problem
    index: int  # of the problem
    run: Run
    sample: int
    seed: int
    budgets: Sequence[int]

    @cached_property
    def _identity(self) -> str:
        return sha256(f"{self.problem.prompt}\0{self.problem.answer}".encode()).hexdigest()[:16]

    def key(self, budget: int) -> Result:
        """Return the fields that identify a result."""
        return {
            "task": self.problem.task,
            "index": self.index,
            "problem": self._identity,
            "mode": self.run.mode or NO_MODE,
            "settings": dict(self.run.settings),
            "budget": budget,
            "seed": self.seed,
            "sample": self.sample,
        }

    def texts(self, written: Written) -> list[str]:
        """Return the answers that vote, or the one text to score."""
        config = self.run.config()
        votes = config is not None and config.rows.vote
        return [row.rstrip() for row in written.rows] if votes else [written.text]

    def measured(self, written: Written) -> Result:
        """Return measures of several rows: their collaboration, and passes of two workers if rows are independent."""
        config = self.run.config()
        if config is None or config.max_rows_per_prompt == 1:
            return {}
        names = [config.rows.name(index) for index in range(len(written.generated))]
        found: Result = measure(written.generated, names, self.problem.prompt)
        if config.rows.style.visibility == "never":
            found["two_worker_passes"] = written.two_worker_passes
        return found

    def results(self, at_budgets: Sequence[Written], conclusions: Mapping[str, str]) -> list[Result]:
        """Score what was written within each budget, with the early finishers' conclusions by text; see `sweep`."""
        results = []
        scores = dict[str, float]()
        pattern = self.problem.answer_pattern
        for budget, written in zip(self.budgets, at_budgets, strict=True):
            texts = self.texts(written)
            finished = [text + conclusions.get(text, "") for text in texts]
            answers = [find_answer(pattern, text) for text in finished]
            winner, _ = majority([None if answer is None else normal_form(answer) for answer in answers])
            text = finished[winner]
            if text not in scores:
                scores[text] = self._score(text)
            measured = {"passes": written.passes, "tokens": written.tokens, "score": scores[text], "text": text}
            results.append({**self.key(budget), **measured, "answered": self.problem.has_answer(texts[winner])})
        return results

    def _score(self, text: str) -> float:
        score = float(self.problem.score(text))
        if not 0 <= score <= 1:
            name = type(self.problem).__name__
            raise ValueError(f"{name}.score of problem {self.index} must be a number from 0.0 to 1.0, got {score!r}")
        return score


@dataclass(eq=False)
class Solver:
    """Solves problems with one model. Parameters as in `sweep`; `largest` is the largest budget."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    largest: int
    finisher: Finisher
    generation: JSONObject
    concurrent: int
    max_kv_bytes: int | None
    judge: Judge | None = None

    def solve(self, generations: Sequence[Generation]) -> Iterator[list[Result]]:
        """Yield the results of each generation; at most `concurrent` are generated together, all of one run."""
        if not generations:
            return
        configs = [one.run.config() for one in generations]
        rows = self.concurrent * max(1 if config is None else config.max_rows_per_prompt for config in configs)
        waiting = rows * max(len(one.budgets) for one in generations)  # finishers
        with Engine(
            self.model, self.tokenizer, self.max_kv_bytes, max_rows=max(rows, 64), max_waiting=waiting
        ) as engine:
            for _, group in groupby(generations if engine.leads else (), key=lambda one: id(one.run)):
                of_run = list(group)
                for begin in range(0, len(of_run), self.concurrent):
                    yield from self._solve(engine, of_run[begin : begin + self.concurrent])

    def _solve(self, engine: Engine, batch: Sequence[Generation]) -> Iterator[list[Result]]:
        """Solve a batch: first all generations, then the early finishers, which would delay them."""
        clocks = [PassClock() for _ in batch]
        submitted = [self._submit(engine, one, clock) for one, clock in zip(batch, clocks, strict=True)]
        outputs = [handle.result() for handle in submitted]
        written = []
        measured = []
        finishing = []
        for one, clock, handle, output in zip(batch, clocks, submitted, outputs, strict=True):
            transcript = output.to_dict(self.tokenizer)
            has_conclusion = not self._always_finishes(one)
            at_budgets = [written_until(transcript, budget, has_conclusion=has_conclusion) for budget in one.budgets]
            written.append(at_budgets)
            seconds = [clock.until(within.passes, handle) for within in at_budgets]
            further = [
                {"seconds": took, **one.measured(within)} for took, within in zip(seconds, at_budgets, strict=True)
            ]
            if one.budgets[-1] == self.largest:
                further[-1]["kv_bytes"] = output.stats.kv_bytes
            measured.append(further)
            finishing.append(self._finish(engine, one, output.record.prompts[0], at_budgets))
        for one, at_budgets, further, handles in zip(batch, written, measured, finishing, strict=True):
            conclusions = {text: self._conclusion(one, handle) for text, handle in handles.items()}
            results = one.results(at_budgets, conclusions)
            for result, values in zip(results, further, strict=True):
                result |= values
            if self.judge is not None:
                for at_budget, result in zip(at_budgets, results, strict=True):
                    result["rating"] = self._rating(engine, self.judge, one, at_budget, result["text"])
            yield results

    def _rating(self, engine: Engine, judge: Judge, one: Generation, written: Written, text: str) -> float | None:
        def own(prompt: str) -> str:
            task = encode_task(None, prompt, self.tokenizer, self.generation.get(TEMPLATE))
            return engine.submit(task, do_sample=False, max_new_tokens=128).result().answer_texts(self.tokenizer)[0]

        rows = (one.run.config() or ParallelConfig()).rows
        texts = {rows.name(index): row for index, row in enumerate(written.rows)}
        return judge.rate(texts, text, one.problem, own)

    def _submit(self, engine: Engine, one: Generation, clock: PassClock) -> RequestHandle:
        run = Run(one.run.mode, {**self.generation, **one.run.settings})
        config = run.config(one.problem.answer_pattern)
        template = check_template_kwargs(run.settings.get(TEMPLATE))
        settings: dict[str, Any] = {**run.generation(), "max_new_tokens": self.largest, "seed": one.seed}
        settings["streamer"] = clock
        task = run.task(one.problem.prompt)
        if config is None:
            return engine.submit(encode_task(None, task, self.tokenizer, template), **settings)
        prompt = build_prompt(type(config), task, self.tokenizer, config, chat_template_kwargs=template)
        return engine.submit(prompt, generation_mode=config.mode, parallel_config=config, **settings)

    def _finish(
        self, engine: Engine, one: Generation, prompt: torch.Tensor, at_budgets: Sequence[Written]
    ) -> dict[str, RequestHandle]:
        """Submit early finishers for texts that need one; return their handles by text."""
        suffix = self.finisher.prompt_for(one.problem)
        always = self._always_finishes(one)
        texts = dict.fromkeys(text for written in at_budgets for text in one.texts(written)) if suffix else {}
        return {
            text: engine.submit(
                prompt.tolist() + encode(self.tokenizer, text + suffix),
                max_new_tokens=self.finisher.tokens_for(one.problem),
                do_sample=False,
            )
            for text in texts
            if always or not one.problem.has_answer(text)
        }

    def _always_finishes(self, one: Generation) -> bool:
        """Return whether the early finisher takes the place of the mode's own, which reads all rows."""
        config = one.run.config()
        return config is not None and config.rows.ends_with_finisher and bool(self.finisher.prompt_for(one.problem))

    def _conclusion(self, one: Generation, handle: RequestHandle) -> str:
        """Return the text of an early finisher up to the end of its answer, with its prompt."""
        (text,) = handle.result().answer_texts(self.tokenizer)
        prompt = self.finisher.prompt_for(one.problem)
        if not one.problem.answer_pattern:
            return prompt + text
        ends = [match.end() for match in find_matches(one.problem.answer_pattern, prompt + text)]
        return (prompt + text)[: next((end for end in ends if end > len(prompt)), None)]
