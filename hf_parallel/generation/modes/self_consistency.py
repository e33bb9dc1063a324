"""`generation_mode="self_consistency"`: choose among several answers to a prompt.

Either by majority (Wang et al., Self-Consistency, 2022), or by the model, which reads all of them (Hogwild! Inference,
section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hf_parallel.generation.arguments import check_tokenizer_given, encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.caller import name_prompts, warn_caller
from hf_parallel.generation.config import Generated, ModeRows, ModeTraits, RowPlace
from hf_parallel.generation.decoding.replay.config import ReplayConfig
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.final_answers import (
    BOXED,
    check_pattern,
    describe_pattern,
    find_answer,
    majority,
    normal_form,
)
from hf_parallel.generation.modes.stages import (
    CompletionRow,
    StagedRun,
    check_no_prompt_relative_settings,
    check_vocabulary,
)
from hf_parallel.generation.outputs import ALWAYS, ParallelOutput
from hf_parallel.generation.presets import PRESETS
from hf_parallel.generation.settings import NOT_REMOTE, Arguments
from hf_parallel.generation.validation import check_choice, check_int, check_template, check_text
from hf_parallel.transcript.sections import TranscriptStyle


class SelfConsistencyRows(ModeRows["SelfConsistencyConfig"]):
    """Answers, which do not see each other, and conclusions, which see all answers to their prompt."""

    style = TranscriptStyle("answer", "conclusion")

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ModeRows.place`. A conclusion spans the columns of all answers."""
        num_answers = self.config.num_answers
        answers = num_prompts * num_answers
        if row < answers:
            prompt, index = divmod(row, num_answers)
            return RowPlace(prompt, index, index)
        return RowPlace(row - answers, num_answers, None)

    def name(self, index: int) -> str:
        return super().name(index) if index < self.config.num_answers else "Conclusion"

    @property
    def vote(self) -> bool:
        return self.config.vote == "majority"

    @property
    def ends_with_finisher(self) -> bool:
        return self.config.vote == "final"


@dataclass
class SelfConsistencyConfig(ReplayConfig["SelfConsistencyOutput"]):
    r"""Independent answers to each prompt, and a vote. `max_new_tokens` is the budget of each answer.

    Parameters
    ----------
    num_answers : int
        Answers per prompt. More than one require `do_sample=True`.
    vote : str
        `majority`: return the first answer whose final answer has the most votes, as `generate` would return it.
        `final`: append all answers to the prompt, and let the model continue after `conclusion_prompt`.
    answer_pattern : str
        Regular expression of a final answer: its first group, if it has one, else the whole match. The last match in a
        text counts. Empty (only with `final`): extract no final answers.
    answer_header : str
        Text before each answer, with `vote="final"`; `{number}` is filled in.
    conclusion_prompt : str
        Text after the last answer, with `vote="final"`; the conclusion continues it.
    conclusion_tokens : int
        Token budget of the conclusion, which ends with its final answer.

    Notes
    -----
    A `ParallelStreamer` receives answer `k` of prompt `p` as row `p * num_answers + k`, and the conclusion as row
    `batch * num_answers + p`. `put` receives the returned tokens once they are known.
    """

    mode: ClassVar[str] = "self_consistency"
    traits = ModeTraits(
        rows=SelfConsistencyRows,
        keeps_states=True,
        streams_text=True,
        streams_tokens="at_end",
        presets=PRESETS["self_consistency"],
        example_arguments={"do_sample": "True"},
    )

    num_answers: int = 5
    vote: str = "majority"
    answer_pattern: str = field(default=BOXED, metadata=NOT_REMOTE)
    answer_header: str = "\n\n### Attempt {number}\n\n"
    conclusion_prompt: str = "\n\n### Result\n\nHaving compared the attempts above, the final answer is \\boxed{"
    conclusion_tokens: int = 64

    def validate(self) -> None:
        super().validate()
        check_int("num_answers", self.num_answers, at_least=1)
        check_choice("vote", self.vote, ("majority", "final"))
        check_pattern("answer_pattern", self.answer_pattern)
        if self.vote == "majority" and not self.answer_pattern:
            raise ValueError("answer_pattern must not be empty for vote='majority', which counts final answers")
        check_template("answer_header", self.answer_header, number=1)
        check_text("conclusion_prompt", self.conclusion_prompt)
        check_int("conclusion_tokens", self.conclusion_tokens, at_least=1)

    def prepare(self, kwargs: Arguments) -> None:
        check_tokenizer_given(kwargs, self.mode)

    def make_run(self, call: GenerationCall) -> SelfConsistencyRun:
        return SelfConsistencyRun(self, call)

    @property
    def max_rows_per_prompt(self) -> int:
        return self.num_answers

    def max_states(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_states`. A conclusion is another prompt, with a row."""
        return super().max_states(call) + (0 if self.vote == "majority" else 4 * call.num_rows)

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. A conclusion reads all answers again."""
        total = super().max_kv_tokens(call)
        if self.vote == "majority":
            return total
        conclusion = call.count_tokens(self.conclusion_prompt) + self.conclusion_tokens
        for number in range(1, self.num_answers + 1):
            conclusion += call.count_tokens(self.answer_header.format(number=number)) + call.max_new_tokens
        return total + call.num_rows * conclusion


class SelfConsistencyRun(StagedRun):
    """One call of the mode: all answers in one stage, and with `vote="final"` all conclusions in another."""

    def __init__(self, config: SelfConsistencyConfig, call: GenerationCall) -> None:
        self.config = config
        if config.num_answers > 1 and not call.generation_config.do_sample:
            raise ValueError(f"num_answers={config.num_answers} greedy answers would be equal: give do_sample=True")
        self.headers = [config.answer_header.format(number=number + 1) for number in range(config.num_answers)]
        if config.vote == "final":
            check_no_prompt_relative_settings(call, "vote='final'")
            check_vocabulary(call, [*self.headers, config.conclusion_prompt])
        super().__init__(config, call)

    def generate(self) -> Steps[Generated]:
        """Generate all answers, then choose one of each prompt or conclude."""
        config = self.config
        call = self.call
        n = self.config.num_answers
        all_rows = [self.completion(number // n, number) for number in range(call.num_rows * n)]
        answers = [all_rows[start : start + n] for start in range(0, len(all_rows), n)]  # rows by prompt
        ids = call.input_ids.repeat_interleave(n, dim=0)  # the prompts that processors receive
        loop = yield from self.run_stage(all_rows, input_ids=ids, seed=config.seed)
        found: list[list[str | None]] = []
        winners = []
        votes = []
        for of_prompt in answers:
            of_rows = [find_answer(config.answer_pattern, row.text) for row in of_prompt]
            winner, counts = majority(_forms(of_rows))
            found.append(of_rows)
            winners.append(winner)
            votes.append(counts)
        if config.vote == "majority":
            chosen: list[int | None] = [*winners]
            rows = [prompt * n + winner for prompt, winner in enumerate(winners)]
            returned = [all_rows[row] for row in rows]
            read: list[list[int]] = [[] for _ in rows]
            final = [of_rows[winner] for of_rows, winner in zip(found, winners, strict=True)]
        else:
            read = [self._reading(of_prompt) for of_prompt in answers]
            rows = list(range(call.num_rows))
            rngs = loop.sampler.rngs  # a conclusion continues the RNG of its prompt's first answer
            returned = [self._conclusion(prompt, tokens) for prompt, tokens in enumerate(read)]
            loop = yield from self.run_stage(returned, seed=None if rngs is None else rngs[::n])
            final = [self._final_answer(row.text) for row in returned]
            chosen = [_index_of(answer, of_rows) for answer, of_rows in zip(final, found, strict=True)]
        conclusions = [""] * len(returned)
        if config.vote == "final":
            conclusions = [row.prefix + row.text for row in returned]
        tokens = []
        log_probs = []
        for prefix, row in zip(read, returned, strict=True):
            tokens.append(prefix + row.tokens)
            log_probs.append([math.nan] * len(prefix) + row.log_probs)
        output = self.output(
            SelfConsistencyOutput,
            tokens,
            log_probs,
            texts=[[row.text for row in of_prompt] for of_prompt in answers],
            found=found,
            votes=votes,
            chosen=chosen,
            answers=final,
            conclusions=conclusions,
        )
        self._warn_without(final)
        for name in ("scores", "logits"):
            steps = getattr(loop.sampler, name)
            if steps is not None:
                longest = max(len(row.tokens) for row in returned)
                setattr(output, name, tuple(step[rows] for step in steps[:longest]))
        return output

    def _conclusion(self, prompt: int, read: Sequence[int]) -> CompletionRow:
        config = self.config
        row = self.call.num_rows * self.config.num_answers + prompt
        return self.completion(prompt, row, read, config.conclusion_tokens, config.conclusion_prompt, self._concludes)

    def _warn_without(self, answers: Sequence[str | None]) -> None:
        """Warn about prompts without a final answer."""
        missing = [answer is None for answer in answers]
        if not any(missing) or not self.config.answer_pattern:
            return
        text = "conclusion"
        result = "final answer"
        if self.config.vote == "majority":
            text = "answer"
            result = "vote"
        pattern = describe_pattern(self.config.answer_pattern)
        warn_caller(f"no {text} to {name_prompts(missing)} matches {pattern}, so there is no {result}")

    def _reading(self, answers: Sequence[CompletionRow]) -> list[int]:
        """Return the tokens of all answers with their headers, and of `conclusion_prompt`."""
        tokens: list[int] = []
        for header, answer in zip(self.headers, answers, strict=True):
            tokens += encode(self.call.tokenizer, header) + answer.detokenizer.visible
        return tokens + encode(self.call.tokenizer, self.config.conclusion_prompt)

    def _concludes(self, text: str) -> bool:
        return self._final_answer(text) is not None

    def _final_answer(self, conclusion: str) -> str | None:
        return find_answer(self.config.answer_pattern, self.config.conclusion_prompt + conclusion)


def _forms(answers: Sequence[str | None]) -> list[str | None]:
    return [None if answer is None else normal_form(answer) for answer in answers]


def _index_of(final: str | None, answers: Sequence[str | None]) -> int | None:
    """Return the index of the first answer that equals the final one; None: there is none."""
    if final is None:
        return None
    form = normal_form(final)
    forms = _forms(answers)
    return forms.index(form) if form in forms else None


@dataclass
class SelfConsistencyOutput(ParallelOutput):
    """All answers, and the chosen one.

    Attributes
    ----------
    sequences : int64 [batch, length]
        `majority`: each prompt with the chosen answer. `final`: each prompt with all answers and their headers,
        `conclusion_prompt` and the conclusion.
    scores, logits : tuple of [batch, vocabulary], optional
        Of the chosen answer, or of the tokens after `conclusion_prompt`.
    """

    item_names: ClassVar[Mapping[str, str]] = {"answers": "answer", "conclusions": "conclusion"}

    texts: list[list[str]] = ALWAYS
    """Per prompt all answers."""
    found: list[list[str | None]] = ALWAYS
    """Per prompt the final answer in each of them."""
    votes: list[dict[str, float]] = ALWAYS
    """Per prompt the votes by normal form (see `normal_form`), in order of first occurrence; the first wins a tie."""
    chosen: list[int | None] = ALWAYS
    """Per prompt the index of the chosen answer: the first with the winning final answer, or 0 without votes. `final`:
    the first that agrees with the conclusion, or None."""
    answers: list[str | None] = ALWAYS
    """Per prompt the final answer."""
    conclusions: list[str] = ALWAYS
    """Per prompt the conclusion, `conclusion_prompt` included; empty for `majority`."""

    def ranking(self, prompt: int) -> tuple[list[int], list[int]]:
        votes = self.votes[prompt]
        chosen = self.chosen[prompt]
        keys = []
        for index, answer in enumerate(self.found[prompt]):
            score = 0.0 if answer is None else votes[normal_form(answer)]
            keys.append((-score, index != chosen, index))
        order = [index for _, _, index in sorted(keys)]
        return order, [] if chosen is None else [chosen]

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        votes = [f"{form}: {round(count, 3)}" for form, count in self.votes[prompt].items()]
        chosen = self.chosen[prompt]
        texts = {
            "Answer": self.answers[prompt],
            "Votes": ", ".join(votes),
            "Chosen": None if chosen is None else f"answer {chosen + 1}",
        }
        return [(label, text) for label, text in texts.items() if text]
