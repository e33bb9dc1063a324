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
from hf_parallel.evaluation.runs import TEMPLATE, Finisher, Run
from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.evaluation.written import Written, written_until
from hf_parallel.files import JSONObject
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.modes import NO_MODE, find_answer, find_matches, majority, normal_form
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
        if config is not None and config.rows.vote:
            return [row.rstrip() for row in written.rows]
        return [written.text]

    def measured(self, written: Written) -> Result:
        """Return measures of several rows: their collaboration, and passes of two workers if rows are independent."""
        config = self.run.config()
        if config is None or config.max_rows_per_prompt == 1:
            return {}
        names = [config.rows.name(index) for index in range(len(written.generated))]
        measures: Result = measure(written.generated, names, self.problem.prompt)
        if config.rows.style.visibility == "never":
            measures["two_worker_passes"] = written.two_worker_passes
        return measures

    def results(self, at_budgets: Sequence[Written], conclusions: Mapping[str, str]) -> list[Result]:
        """Score what was written within each budget, with the early finishers' conclusions by text; see `sweep`."""
        results = []
        scores = dict[str, float]()
        for budget, written in zip(self.budgets, at_budgets, strict=True):
            texts = self.texts(written)
            finished = [text + conclusions.get(text, "") for text in texts]
            winner = self._winner(finished)
            text = finished[winner]
            if text not in scores:
                scores[text] = self._score(text)
            result = self.key(budget)
            result |= {
                "passes": written.passes,
                "tokens": written.tokens,
                "score": scores[text],
                "text": text,
                "answered": self.problem.has_answer(texts[winner]),
            }
            results.append(result)
        return results

    def _winner(self, texts: Sequence[str]) -> int:
        """Return the index of a text with the answer that most texts have."""
        forms = []
        for text in texts:
            answer = find_answer(self.problem.answer_pattern, text)
            forms.append(None if answer is None else normal_form(answer))
        winner, _ = majority(forms)
        return winner

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
        rows_per_problem = 1
        for generation in generations:
            config = generation.run.config()
            if config is not None:
                rows_per_problem = max(rows_per_problem, config.max_rows_per_prompt)
        rows = self.concurrent * rows_per_problem
        num_finishers = rows * max(len(generation.budgets) for generation in generations)
        with Engine(
            self.model, self.tokenizer, self.max_kv_bytes, max_rows=max(rows, 64), max_waiting=num_finishers
        ) as engine:
            if not engine.leads:
                return
            for _, group in groupby(generations, key=lambda generation: id(generation.run)):
                of_run = list(group)
                for begin in range(0, len(of_run), self.concurrent):
                    yield from self._solve(engine, of_run[begin : begin + self.concurrent])

    def _solve(self, engine: Engine, batch: Sequence[Generation]) -> Iterator[list[Result]]:
        """Solve a batch: first all generations, then the early finishers, which would delay them."""
        clocks = [PassClock() for _ in batch]
        handles = []
        for generation, clock in zip(batch, clocks, strict=True):
            handles.append(self._submit(engine, generation, clock))
        outputs = [handle.result() for handle in handles]
        written = []
        measures = []
        finishers = []
        for generation, clock, handle, output in zip(batch, clocks, handles, outputs, strict=True):
            transcript = output.to_dict(self.tokenizer)
            has_conclusion = not self._always_finishes(generation)
            at_budgets = []
            of_budgets = []
            for budget in generation.budgets:
                at_budget = written_until(transcript, budget, has_conclusion=has_conclusion)
                at_budgets.append(at_budget)
                of_budgets.append({"seconds": clock.until(at_budget.passes, handle), **generation.measured(at_budget)})
            if generation.budgets[-1] == self.largest:
                of_budgets[-1]["kv_bytes"] = output.stats.kv_bytes
            written.append(at_budgets)
            measures.append(of_budgets)
            finishers.append(self._finish(engine, generation, output.record.prompts[0], at_budgets))
        for generation, at_budgets, of_budgets, finishing in zip(batch, written, measures, finishers, strict=True):
            conclusions = {text: self._conclusion(generation, handle) for text, handle in finishing.items()}
            results = generation.results(at_budgets, conclusions)
            for at_budget, measured, result in zip(at_budgets, of_budgets, results, strict=True):
                result |= measured
                if self.judge is not None:
                    result["rating"] = self._rating(engine, self.judge, generation, at_budget, result["text"])
            yield results

    def _rating(
        self, engine: Engine, judge: Judge, generation: Generation, written: Written, text: str
    ) -> float | None:
        """Return the rating of what a generation wrote within a budget."""

        def own_reply(prompt: str) -> str:
            task = encode_task(None, prompt, self.tokenizer, self.generation.get(TEMPLATE))
            handle = engine.submit(task, do_sample=False, max_new_tokens=128)
            return handle.result().answer_texts(self.tokenizer)[0]

        rows = (generation.run.config() or ParallelConfig()).rows
        texts = {rows.name(index): row for index, row in enumerate(written.rows)}
        return judge.rate(texts, text, generation.problem, own_reply)

    def _submit(self, engine: Engine, generation: Generation, clock: PassClock) -> RequestHandle:
        """Submit a generation up to the largest budget."""
        run = Run(generation.run.mode, {**self.generation, **generation.run.settings})
        config = run.config(generation.problem.answer_pattern)
        template = check_template_kwargs(run.settings.get(TEMPLATE))
        settings: dict[str, Any] = run.generation()
        settings |= {"max_new_tokens": self.largest, "seed": generation.seed, "streamer": clock}
        task = run.task(generation.problem.prompt)
        if config is None:
            prompt = encode_task(None, task, self.tokenizer, template)
            return engine.submit(prompt, **settings)
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

    def _conclusion(self, generation: Generation, handle: RequestHandle) -> str:
        """Return the text of an early finisher up to the end of its answer, with its prompt."""
        (text,) = handle.result().answer_texts(self.tokenizer)
        problem = generation.problem
        prompt = self.finisher.prompt_for(problem)
        conclusion = prompt + text
        if not problem.answer_pattern:
            return conclusion
        for match in find_matches(problem.answer_pattern, conclusion):
            if match.end() > len(prompt):
                return conclusion[: match.end()]
        return conclusion
