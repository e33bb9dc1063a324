"""`generation_mode="self_consistency"`: several answers to one prompt, of which one is chosen.

By majority (Wang et al., Self-Consistency, 2022), or by the model, which reads all of them (Hogwild! Inference, 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.arguments import check_tokenizer_given, encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import (
    SAMPLING,
    Preset,
    RowPlace,
    check_choice,
    check_int,
    check_template,
    check_text,
)
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.final_answers import BOXED, check_pattern, find_answer, majority, normal_form
from hf_parallel.generation.modes.stages import (
    Stage,
    TextRequest,
    check_vocabulary,
    give_back,
    refuse_what_counts_from_the_prompt,
)
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.prefill import tree_of
from hf_parallel.generation.resampling.config import ReplayConfig
from hf_parallel.transcript.sections import TranscriptStyle


@dataclass
class SelfConsistencyConfig(ReplayConfig):
    r"""Independent answers over one prompt, and a vote. `max_new_tokens` counts the tokens of each answer.

    Parameters
    ----------
    num_answers : int
        Answers per prompt; more than one need `do_sample=True`.
    vote : str
        `majority`: an answer that holds what most answers say is returned, as `generate` would have given it. `final`:
        the model reads all answers, one behind the other, and goes on from `conclusion_prompt`.
    answer_pattern : str
        Regular expression of a final answer; its first group, if it has one, is the answer. The last one in a text
        counts. Empty: none is looked for, which only `final` can do without.
    answer_header : str
        Before each answer that the model reads; `{number}` is filled in.
    conclusion_prompt : str
        Behind the last of them.
    conclusion_tokens : int
        Tokens that the model gets there; it stops at a final answer.

    Notes
    -----
    A `ParallelStreamer` hears answer `k` of prompt `p` as row `p * num_answers + k`, and what the model writes in the
    end as row `batch * num_answers + p`. `put` gets the tokens that are returned, when they are known.
    """

    mode: ClassVar[str] = "self_consistency"
    streams_text: ClassVar[bool] = True
    streams_tokens: ClassVar[str] = "at_end"
    rows_name: ClassVar[str] = "texts"
    presets: ClassVar[Mapping[str, Preset]] = {"embedded": Preset(generation=SAMPLING)}
    example_arguments: ClassVar[Mapping[str, str]] = {"do_sample": "True"}

    num_answers: int = 5
    vote: str = "majority"
    answer_pattern: str = BOXED
    answer_header: str = "\n\n### Attempt {number}\n\n"
    conclusion_prompt: str = "\n\n### Result\n\nHaving compared the attempts above, the final answer is \\boxed{"
    conclusion_tokens: int = 64

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        check_int("num_answers", self.num_answers, at_least=1)
        check_choice("vote", self.vote, ("majority", "final"))
        check_pattern("answer_pattern", self.answer_pattern)
        if self.vote == "majority" and not self.answer_pattern:
            raise ValueError("answer_pattern must not be empty for vote='majority', which counts final answers")
        check_template("answer_header", self.answer_header, number=1)
        check_text("conclusion_prompt", self.conclusion_prompt)
        check_int("conclusion_tokens", self.conclusion_tokens, at_least=1)

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Look whether the tokenizer is there and works, before anything is prepared."""
        check_tokenizer_given(kwargs, self.mode)

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ParallelConfig.place`. A conclusion comes after the answers and spans all of them."""
        answers = num_prompts * self.num_answers
        if row < answers:
            prompt, index = divmod(row, self.num_answers)
            return RowPlace(prompt, index, index)
        return RowPlace(row - answers, self.num_answers, None)

    def row_name(self, index: int) -> str:
        """Name of an answer or of the conclusion."""
        return f"Answer {index + 1}" if index < self.num_answers else "Conclusion"

    @property
    def transcript_style(self) -> TranscriptStyle:
        """Answers do not see each other; a conclusion sees all of them."""
        return TranscriptStyle("answer", "conclusion")

    def run(self, call: GenerationCall) -> Any:
        """Write all answers at once over the prompts, then choose."""
        self._check_call(call)
        cache, n = tree_of(call), self.num_answers
        answers = [
            [self._passage(call, prompt, row * n + i) for i in range(n)] for row, prompt in enumerate(call.prompts)
        ]
        ids = call.input_ids.repeat_interleave(n, dim=0)
        loop = Stage(self, call, cache, answers, input_ids=ids, seed=self.seed).run()
        found = [[find_answer(self.answer_pattern, answer.text.text) for answer in of] for of in answers]
        votes = [majority(given) for given in found]
        told = {
            "texts": [[answer.text.text for answer in of] for of in answers],
            "found": found,
            "votes": [count for _, count in votes],
        }
        if self.vote == "final":
            return self._conclude(call, cache, loop, answers, told)
        chosen = [index for index, _ in votes]
        told |= {"chosen": chosen, "conclusions": [""] * call.num_rows}
        told["answers"] = [given[index] for given, index in zip(found, chosen, strict=True)]
        tokens = [of[index].tokens for of, index in zip(answers, chosen, strict=True)]
        output = give_back(call, cache, tokens, loop.stats, SelfConsistencyOutput, **told)
        return _with_scores(output, loop, [row * n + index for row, index in enumerate(chosen)], max(map(len, tokens)))

    def _conclude(
        self,
        call: GenerationCall,
        cache: SharedPrefixCache,
        loop: DecodeLoop,
        answers: Sequence[Sequence[TextRequest]],
        told: dict[str, Any],
    ) -> Any:
        """Let the model read all answers to a prompt and give the final one."""
        read = [self._reading(call, of) for of in answers]
        readers = [
            TextRequest(
                np.concatenate((prompt, np.array(tokens, np.int64))),
                self.conclusion_tokens,
                IncrementalDetokenizer(call.tokenizer),
                call.num_rows * self.num_answers + row,
                self.conclusion_prompt,
                lambda text: self._final(text) is not None,
            )
            for row, (prompt, tokens) in enumerate(zip(call.prompts, read, strict=True))
        ]
        noise = loop.sampler.noise  # a conclusion goes on where the first answer's randomness ended
        seed = None if noise is None else noise[:: self.num_answers]
        reader = Stage(self, call, cache, [readers], seed=seed, stats=loop.stats).run()
        final = [self._final(reader.text.text) for reader in readers]
        told |= {"answers": final, "conclusions": [self.conclusion_prompt + reader.text.text for reader in readers]}
        told["chosen"] = [_agreeing(given, answer) for given, answer in zip(told["found"], final, strict=True)]
        tokens = [before + reader.tokens for before, reader in zip(read, readers, strict=True)]
        output = give_back(call, cache, tokens, loop.stats, SelfConsistencyOutput, **told)
        return _with_scores(output, reader, range(call.num_rows), max(len(reader.tokens) for reader in readers))

    def _passage(self, call: GenerationCall, prompt: np.ndarray, row: int) -> TextRequest:
        return TextRequest(prompt, call.max_new_tokens, IncrementalDetokenizer(call.tokenizer), row)

    def _reading(self, call: GenerationCall, answers: Sequence[TextRequest]) -> list[int]:
        """Tokens of all answers with their headers and of the conclusion's prompt."""
        tokens: list[int] = []
        for number, answer in enumerate(answers, start=1):
            tokens += encode(call.tokenizer, self.answer_header.format(number=number)) + answer.text.tokens
        return tokens + encode(call.tokenizer, self.conclusion_prompt)

    def _final(self, text: str) -> str | None:
        return find_answer(self.answer_pattern, self.conclusion_prompt + text)

    def _check_call(self, call: GenerationCall) -> None:
        if self.num_answers > 1 and not call.generation_config.do_sample:
            raise ValueError(f"num_answers={self.num_answers} greedy answers would all be alike: give do_sample=True")
        if self.vote == "final":
            refuse_what_counts_from_the_prompt(call, "vote='final'")
            headers = [self.answer_header.format(number=number + 1) for number in range(self.num_answers)]
            check_vocabulary(call, [*headers, self.conclusion_prompt])


def _agreeing(given: Sequence[str | None], final: str | None) -> int | None:
    """Index of the first answer that is equal to the final one."""
    forms = [None if answer is None else normal_form(answer) for answer in given]
    return None if final is None or normal_form(final) not in forms else forms.index(normal_form(final))


def _with_scores(output: Any, loop: DecodeLoop, rows: Sequence[int], steps: int) -> Any:
    """Give an output the scores and logits of the rows of a loop that were chosen, `[rows, vocabulary]` per step."""
    for name in ("scores", "logits"):
        kept = getattr(loop.sampler, name)
        if kept is not None:
            setattr(output, name, tuple(step[list(rows)] for step in kept[:steps]))
    return output


@dataclass
class SelfConsistencyOutput(ParallelOutput):
    """All answers, and which was chosen.

    Attributes
    ----------
    sequences : int64 [batch, length]
        `majority`: each prompt with the answer that was chosen. `final`: each prompt with all that the model read and
        wrote in the end.
    scores, logits : tuple of [batch, vocabulary], optional
        Of the answer that was chosen, or of what was written behind `conclusion_prompt`.
    texts : list of list of str
        Per prompt all answers.
    found : list of list of (str or None)
        Per prompt the final answer in each of them.
    votes : list of dict of str to int
        Per prompt how many gave each final answer, in its normal form (`answers.normal_form`), first seen first.
    chosen : list of (int or None)
        Per prompt the index of the answer that was chosen: the first that gives the winner, or the first at all where
        no final answer was found. `final`: the first that says what the model said in the end; None: none does.
    answers : list of (str or None)
        Per prompt the final answer.
    conclusions : list of str
        Per prompt what the model wrote in the end, its prompt included; empty for `majority`.
    """

    texts: list[list[str]] | None = None
    found: list[list[str | None]] | None = None
    votes: list[dict[str, int]] | None = None
    chosen: list[int | None] | None = None
    answers: list[str | None] | None = None
    conclusions: list[str] | None = None

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """The votes, and the answer that was chosen."""
        votes = ", ".join(f"{form}: {count}" for form, count in (self.votes or ())[prompt].items())
        chosen, answer = (self.chosen or ())[prompt], (self.answers or ())[prompt]
        found = (("Answer", answer), ("Votes", votes), ("Chosen", None if chosen is None else f"answer {chosen + 1}"))
        return [(label, text) for label, text in found if text]
