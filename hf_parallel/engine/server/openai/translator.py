"""Translator: makes submissions of bodies, with the logits processors and stopping criteria that their fields need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.detokenizer import decode, hidden_tokens, special_tokens
from hf_parallel.engine import AgentHints, Engine
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.limits import Limits
from hf_parallel.engine.server.openai.forced_calls import ForcedCalls
from hf_parallel.engine.server.openai.mode_settings import SettingsReader
from hf_parallel.engine.server.openai.prompts import PromptReader
from hf_parallel.engine.server.openai.replies import ReplySpec
from hf_parallel.engine.server.openai.reply_formats import reply_format
from hf_parallel.engine.server.openai.schema import Body, ConversationBody, Prompt
from hf_parallel.engine.server.openai.submission import Submission
from hf_parallel.engine.server.structured.grammar import JSONProcessor, call_grammar
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.sampling.log_probs import TopLogProbs
from hf_parallel.generation.sampling.processors import OccurrencePenalty, ThinkingBudget
from hf_parallel.generation.sampling.stop_texts import StopTexts
from hf_parallel.generation.validation import check_text

BANNING = ("no_repeat_ngram_size", "min_new_tokens", "thinking_token_budget")
"""Settings that may ban every token that continues an answer in JSON, or that have no meaning in it."""


@dataclass
class _Constraint:
    """The grammar of the answers to a request."""

    processor: JSONProcessor
    forced_calls: Callable[[], ForcedCalls] | None  # see `Submission`


class Translator:
    """Translates bodies of requests into submissions, within the limits."""

    def __init__(
        self, engine: Engine, limits: Limits, processor: Any = None, logits_cache: LogitsCache | None = None
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.format = reply_format(engine.tokenizer)
        self.prompts = PromptReader(engine, limits, self.format, processor)
        self.settings = SettingsReader(engine, limits.rows, self.prompts.max_tokens, logits_cache)

    def translate(self, body: Body, prompts: Sequence[Prompt], field_name: str) -> Submission:
        """Return the submission for one prompt of a body, or several: texts, chats or token ids."""
        (submission,) = self.translate_groups(body, [prompts], field_name)
        return submission

    def translate_groups(self, body: Body, groups: Sequence[Sequence[Prompt]], field_name: str) -> list[Submission]:
        """Return a submission for each group of prompts of a body. A grammar is compiled once for all of them."""
        submissions = [self._submission(body, group, field_name) for group in groups]
        log_probs_field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        self._check_log_probs(sum(_num_log_probs(body, submission) for submission in submissions), log_probs_field)
        constraint = self._constraint(body, submissions[0].config)
        for submission in submissions:
            self._check_features(body, submission.config)
            self._constrain(submission, constraint)
            self._add_processors(submission, body, constraint)
            self._add_stop_texts(submission, body)
        return submissions

    def _submission(self, body: Body, prompts: Sequence[Prompt], field_name: str) -> Submission:
        """Return a submission without processors and criteria."""
        config, sampling = self.settings.read(body)
        inputs = _padded([self.prompts.encode(body, prompt, config, field_name) for prompt in prompts])
        begin = inputs["input_ids"].shape[1]
        self._check_rows(body, config)
        arguments = {**sampling, "max_new_tokens": max(1, self._new_tokens(body, begin, field_name))}
        if body.answers > 1:
            arguments["num_return_sequences"] = body.answers
            if arguments.get("do_sample") is False:
                raise APIError(400, f"temperature=0 gives {body.answers} equal answers; set n to 1", "n")
        hints = {name: value for name, value in (body.agent_hints or {}).items() if value is not None}
        return Submission(
            engine=self.engine,
            config=config,
            prompt=inputs,
            arguments=arguments,
            prompts=body.answers * len(prompts),
            stops=body.stops,
            echo=bool(getattr(body, "echo", False)),
            is_empty=body.max_tokens == 0,
            continues=_continues(body, prompts),
            has_mode=body.generation_mode is not None,
            has_transcript=bool(body.transcript),
            hints=AgentHints.of(hints),
            reply=self._reply(body),
        )

    def _check_rows(self, body: Body, config: ParallelConfig) -> None:
        """Raise an error for more rows than the limit. It names a field whose default would reduce them."""
        rows = _num_rows(body, config)
        if rows <= self.limits.rows:
            return
        cause = "n" if body.answers > 1 else "generation_mode"
        default = type(config)()
        for name in config.fields():
            if name in (body.model_extra or {}):
                with_default = replace(config, **{name: getattr(default, name)})
                if with_default.max_rows_per_prompt < config.max_rows_per_prompt:
                    cause = name
                    break
        raise APIError(400, f"a request may have at most {self.limits.rows} rows, this one has {rows}", cause)

    def _reply(self, body: Body) -> ReplySpec | None:
        if not isinstance(body, ConversationBody):
            return None
        if not body.callable_tools and not self.format.thinks:
            return None
        most_calls = 1 if body.parallel_tool_calls is False else None
        return ReplySpec(self.format, body.callable_tools, most_calls)

    def _new_tokens(self, body: Body, begin: int, name: str) -> int:
        """Return the number of new tokens after a prompt of `begin` tokens. Raises an error if they do not fit."""
        max_tokens = self.prompts.max_tokens
        left = max_tokens - begin
        new_tokens = body.budget
        if new_tokens is None:
            default = self.engine.model.generation_config.max_new_tokens or self.limits.default_tokens
            new_tokens = min(default, max(left, 1))
        if new_tokens > left:
            cause = name if begin >= max_tokens else "max_tokens"
            message = f"the context length is {max_tokens} tokens, "
            message += f"but {begin} of {name} and {new_tokens} new tokens were requested"
            raise APIError(400, message, cause, "context_length_exceeded")
        least = body.min_new_tokens or 0
        if least > new_tokens:
            message = f"min_new_tokens must be at most the {new_tokens} new tokens, got {least}"
            raise APIError(400, message, "min_new_tokens")
        size = vocabulary_size(self.engine.model)
        if body.no_repeat_ngram_size == 1 and begin + new_tokens > size:
            message = f"no_repeat_ngram_size=1 needs a vocabulary of {begin + new_tokens} tokens, this one has {size}"
            raise APIError(400, message, "no_repeat_ngram_size")
        return new_tokens

    def check_together(self, bodies: Sequence[Body], submissions: Sequence[Submission], field_name: str) -> None:
        """Raise an error, naming `field_name`, if submissions, one for each body, exceed the limits together."""
        num_rows = 0
        num_log_probs = 0
        for body, submission in zip(bodies, submissions, strict=True):
            num_rows += _num_rows(body, submission.config)
            num_log_probs += _num_log_probs(body, submission)
        if num_rows > self.limits.rows:
            message = f"the forks of a request may have at most {self.limits.rows} rows together, these have {num_rows}"
            raise APIError(400, message, field_name)
        self._check_log_probs(num_log_probs, field_name)

    def _check_log_probs(self, count: int, field_name: str) -> None:
        """Raise an error if a response would hold too many log-probabilities."""
        most = self.limits.log_probs
        if count > most:
            message = f"a response may hold at most {most} log-probabilities, tokens times alternatives, not {count}"
            raise APIError(400, message, field_name)

    def _constraint(self, body: Body, config: ParallelConfig) -> _Constraint | None:
        """Return the grammar of the answers to all prompts of a body, compiled; None: any text."""
        schema: dict[str, object] | str | None = _schema(body)
        field_name = body.format_field
        forced_calls = None
        if isinstance(body, ConversationBody) and body.must_call:
            if schema is not None:
                raise APIError(400, f"{field_name} cannot be combined with a tool_choice of calls", "tool_choice")
            field_name = "tool_choice"
            schema, forced_calls = self._calls(body)
        if schema is None:
            return None
        if not config.traits.rows_continue_prompts:
            raise _unsupported(field_name, config)
        for name in BANNING:
            if getattr(body, name, None):
                raise APIError(400, f"{name} cannot be combined with {field_name}", name)
        return _Constraint(self._json_processor(schema, field_name), forced_calls)

    def _calls(self, body: ConversationBody) -> tuple[str, Callable[[], ForcedCalls]]:
        """Return the grammar of an answer that has to call tools, and what makes the reader of such an answer."""
        if not self.format.call:
            message = "the model writes arguments in a format without a grammar: tool_choice must be auto or none"
            raise APIError(400, message, "tool_choice")
        allows_several = body.parallel_tool_calls is not False and body.tool_choice == "required"
        between = self.format.between if allows_several else None
        tools = body.callable_tools
        grammar = call_grammar(self.format.call, tools, between, self.engine.tokenizer)
        return grammar, partial(ForcedCalls, self.format.call, tools, between)

    def _json_processor(self, schema: dict[str, object] | str, name: str) -> JSONProcessor:
        model = self.engine.model
        tokenizer = self.engine.tokenizer
        ends = end_tokens(model, tokenizer)
        if not ends:
            message = f"{name} needs a token that ends the answer: the model's generation_config has no eos_token_id"
            raise APIError(400, f"{message}, and the tokenizer no eos_token", name)
        try:
            return JSONProcessor(schema, tokenizer, vocabulary_size(model), ends, 0, name)
        except ImportError as error:
            raise APIError(400, f"{name} needs llguidance, which the server has not installed", name) from error

    def _check_features(self, body: Body, config: ParallelConfig) -> None:
        """Raise an error for fields that need rows which continue their prompts, in other modes."""
        if config.traits.rows_continue_prompts:
            return
        if body.top_logprobs_wanted is not None:
            raise _unsupported("logprobs", config)
        if body.prompt_logprobs is not None:
            raise _unsupported("prompt_logprobs", config)
        if getattr(body, "echo", None):
            raise _unsupported("echo", config)

    def _constrain(self, submission: Submission, constraint: _Constraint | None) -> None:
        """Set what the reader of an answer needs to know of its grammar, and the marks that its text keeps."""
        tokenizer = self.engine.tokenizer
        if constraint is not None:
            submission.arguments["eos_token_id"] = end_tokens(self.engine.model, tokenizer)
            submission.is_constrained = True
            submission.forced_calls = constraint.forced_calls
        has_marks = submission.forced_calls is not None or not submission.is_constrained
        if submission.reply is not None and has_marks:
            submission.marks = submission.reply.marks(special_tokens(tokenizer))
        shown_texts = "\n".join([submission.config.format_texts, *submission.stops])
        submission.hidden = hidden_tokens(tokenizer, (), shown_texts) - submission.marks

    def _add_processors(self, submission: Submission, body: Body, constraint: _Constraint | None) -> None:
        """Add the logits processors that the fields of a body need."""
        begin = submission.prompt["input_ids"].shape[1]
        processors: list[object] = []
        if constraint is not None:
            processors.append(constraint.processor.for_prompt(begin))
        if body.frequency_penalty or body.presence_penalty:
            processors.append(OccurrencePenalty(begin, body.frequency_penalty or 0.0, body.presence_penalty or 0.0))
        if isinstance(body, ConversationBody) and body.thinking_token_budget is not None:
            budget = self._thinking_budget(body.thinking_token_budget, submission.prompt["input_ids"])
            if not submission.is_constrained:  # else the answer has no reasoning
                processors.append(budget)
        top = body.top_logprobs_wanted
        prompt_top = body.prompt_logprobs_wanted
        if top is not None or prompt_top is not None:
            self.prompts.check_ids("label_token_ids", [0, *body.label_tokens])
            collector = TopLogProbs(top or 0, prompt_top, body.label_tokens)
            submission.log_probs = None if top is None else collector
            submission.prompt_log_probs = None if prompt_top is None else collector
            processors.append(collector)
        if prompt_top is not None and len(submission.prompt) > 2:
            raise APIError(400, "prompt_logprobs are not supported for prompts with images", "prompt_logprobs")
        if processors:
            submission.arguments["logits_processor"] = processors

    def _add_stop_texts(self, submission: Submission, body: Body) -> None:
        """Add the stopping criterion of the texts that end an answer."""
        if not body.stops:
            return
        for stop in body.stops:
            check_text("stop", stop)
        submission.arguments["stopping_criteria"] = [
            StopTexts(self.engine.tokenizer, body.stops, submission.hidden, submission.marks, submission.continues)
        ]

    def _thinking_budget(self, budget: int, prompt: torch.Tensor) -> ThinkingBudget:
        """Return the processor that ends reasoning after `budget` tokens."""
        tokenizer = self.engine.tokenizer
        begin: list[int] = []
        end: list[int] = []
        marks = self.format.thinking_marks
        if len(marks) == 2:
            begin = encode(tokenizer, marks[0])
            end = encode(tokenizer, marks[1])
        if not begin or len(end) != 1:
            message = "thinking_token_budget needs a model whose reasoning has an opening mark and ends with one token"
            raise APIError(400, message, "thinking_token_budget")
        processor = ThinkingBudget(budget, begin, end[0], 0)
        last_tokens = prompt[0, -len(begin) - 2 :].tolist()
        last_text = decode(tokenizer, last_tokens, skip_special_tokens=False).rstrip()
        processor.known = int(processor.opens(prompt).sum()) - last_text.endswith(marks[0])
        return processor


def _num_rows(body: Body, config: ParallelConfig) -> int:
    """Return the largest number of rows of a prompt of a body."""
    return body.answers * config.max_rows_per_prompt


def _num_log_probs(body: Body, submission: Submission) -> int:
    """Return the largest number of log-probabilities that the answers to a submission hold."""
    count = 0
    if body.top_logprobs_wanted is not None:
        count += submission.choices * submission.arguments["max_new_tokens"] * (1 + body.top_logprobs_wanted)
    if body.prompt_logprobs_wanted is not None:
        count += body.answers * submission.prompt_tokens * (1 + body.prompt_logprobs_wanted)
    return count


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: from the model's generation config, else from its tokenizer."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [int(ends)]


def _is_continued(prompt: Prompt) -> bool:
    """Whether an answer continues the text of a prompt: a text, token ids, or a chat that ends with an answer."""
    if isinstance(prompt, str):  # which may be empty
        return True
    last = prompt[-1]
    return not isinstance(last, Mapping) or last["role"] == "assistant"


def _continues(body: Body, prompts: Sequence[Prompt]) -> bool:
    """Whether the answers to a body continue the texts of its prompts."""
    forked = body._forked if isinstance(body, ConversationBody) else None
    if forked is not None and forked.continues is not None:
        return forked.continues
    return all(map(_is_continued, prompts))


def _unsupported(name: str, config: ParallelConfig) -> APIError:
    return APIError(400, f"{name} is not supported with generation_mode={config.mode!r}", name)


def _padded(prompts: Sequence[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    """Return several prompts, `[1, length]` each, as rows that are padded on the left. A single prompt is unchanged."""
    if len(prompts) == 1:
        return prompts[0]
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    inputs = {}
    for name in ("input_ids", "attention_mask"):
        rows = []
        for prompt in prompts:
            row = prompt[name]
            rows.append(F.pad(row, (longest - row.shape[1], 0)))
        inputs[name] = torch.cat(rows)
    return inputs


def _schema(body: Body) -> dict[str, object] | None:
    """Return the JSON schema of the answer; None: any text."""
    answer_format = body.answer_format
    if answer_format is None or answer_format.type == "text":
        return None
    if answer_format.type == "json_object":
        return {"type": "object"}
    schema = getattr(answer_format, "json_schema", answer_format)
    if schema is None or schema.definition is None:
        raise APIError(400, f"{body.format_field} of the type json_schema needs a schema", body.format_field)
    return schema.definition  # type: ignore[no-any-return]
