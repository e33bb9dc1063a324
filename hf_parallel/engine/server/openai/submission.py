"""Submission: a request of the engine, translated from a body. Only settings that are plain JSON data are accepted."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from hf_parallel.detokenizer import decode, hidden_tokens, special_tokens
from hf_parallel.engine import AgentHints, Engine
from hf_parallel.engine.arguments import encode_prompt
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.limits import Limits
from hf_parallel.engine.server.openai.forced_calls import ForcedCalls
from hf_parallel.engine.server.openai.images import chat_texts, encode_chat
from hf_parallel.engine.server.openai.replies import Reply, ReplySpec
from hf_parallel.engine.server.openai.reply_formats import reply_format
from hf_parallel.engine.server.openai.schema import Body, ConversationBody, Prompt
from hf_parallel.engine.server.openai.tool_messages import ToolMessages, with_ordered_results
from hf_parallel.engine.server.structured.grammar import JSONProcessor, call_grammar
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes import SharedPrefixConfig
from hf_parallel.generation.prompts import ENABLE_THINKING, Chat, Message
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.sampling.log_probs import TopLogProbs
from hf_parallel.generation.sampling.processors import OccurrencePenalty, ThinkingBudget
from hf_parallel.generation.sampling.stop_texts import StopTexts
from hf_parallel.generation.validation import check_text, suggestion

SAMPLING = (
    *("top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"),
)
"""Fields of a body that are settings of `generate`, with the same names."""
UNSUPPORTED = (
    *("access_programs", "audio", "background", "background_options", "context_management", "conversation"),
    *("echo", "function_call", "functions", "image", "include", "modalities", "moderation", "prediction", "prompt"),
    *("prompt_cache_options", "suffix", "tool_choice", "tools", "top_logprobs", "verbosity", "web_search_options"),
)
"""Fields of OpenAI that some or all endpoints do not support; values in `NEUTRAL` are accepted."""
NEUTRAL: tuple[object, ...] = (None, False, "", "none", "auto", [], ["text"])
GREEDY_BELOW = 1e-5  # temperatures below are 0: logits divided by them are not finite
MAX_TEXT = 4096
"""Characters of a setting that is text or a list of texts: the modes encode and format them for each prompt."""
MAX_PREFIX = 4096  # tokens at the end of a prompt that may be the beginning of the reply
MAX_ITEMS = 64  # items of a setting that is a list
BANNING = ("no_repeat_ngram_size", "min_new_tokens", "thinking_token_budget")
"""Settings that may ban every token that continues an answer in JSON, or that have no meaning in it."""
COMMON = ("seed", "cuda_graph")  # settings of all modes that a request cannot give as further fields


@dataclass
class Submission:
    """Arguments of `Engine.submit` for one prompt, or several at once, and what is needed to read its output."""

    engine: Engine
    config: ParallelConfig
    prompt: Mapping[str, torch.Tensor]
    arguments: dict[str, Any]
    prompts: int  # copies of the prompts: answers of the mode
    stops: list[str] = field(default_factory=list)
    log_probs: TopLogProbs | None = None
    prompt_log_probs: TopLogProbs | None = None  # the same, if log-probabilities of prompts are wanted
    echo: bool = False
    continues: bool = False  # whether the answer continues the text of the prompt
    is_empty: bool = False  # whether the token that it generates is not part of the answer
    has_mode: bool = False
    has_transcript: bool = False
    hints: AgentHints = field(default_factory=AgentHints)
    reply: ReplySpec | None = None  # None: the answer is its text
    is_constrained: bool = False  # whether a grammar begins with the answer, without reasoning
    forced_calls: Callable[[], ForcedCalls] | None = None  # makes the reader of an answer whose grammar is of calls
    hidden: frozenset[int] = frozenset()  # tokens that the text leaves out, besides those that end a row
    marks: set[int] = field(default_factory=set)  # special tokens that the text keeps for the reply's parser

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompts."""
        return int(self.prompt["attention_mask"].sum())

    def prompt_of(self, choice: int) -> list[int]:
        """Return the tokens of the prompt of a choice."""
        row = choice * len(self.prompt["input_ids"]) // self.choices
        return self.prompt["input_ids"][row][self.prompt["attention_mask"][row].bool()].tolist()  # type: ignore[no-any-return]

    def make_reply(self, choice: int) -> Reply | ForcedCalls | None:
        """Return the parser of a choice; None: its text is its content."""
        if self.forced_calls is not None:
            return self.forced_calls()
        if self.reply is None or self.is_constrained:  # JSON of a schema has no marks
            return None
        end = self.prompt_of(choice)[-MAX_PREFIX:] if self.config.traits.rows_continue_prompts else []
        return Reply(self.reply, decode(self.engine.tokenizer, end, skip_special_tokens=False))

    @property
    def rows_per_prompt(self) -> int:
        """Number of choices of each answer of the mode."""
        return 1 if self.config.traits.merges_rows else self.config.rows_per_prompt

    @property
    def choices(self) -> int:
        """Number of choices: one per row, or per prompt whose rows are merged."""
        return self.prompts * self.rows_per_prompt

    def choice(self, row: int) -> int:
        """Return the index of a row's choice; rows that are no choices belong to the first of their prompt."""
        place = self.config.rows.place(row, self.prompts)
        return place.prompt * self.rows_per_prompt + (place.index if place.index < self.rows_per_prompt else 0)

    def row_name(self, row: int) -> str:
        """Return the name of a row."""
        if self.config.traits.rows_continue_prompts and self.rows_per_prompt == 1:
            return self.config.rows.name(row)
        return self.config.rows.name(self.config.rows.place(row, self.prompts).index)


@dataclass
class _Constraint:
    """The grammar of the answers to a request."""

    processor: JSONProcessor
    forced_calls: Callable[[], ForcedCalls] | None  # see `Submission`


class Translator:
    """Translates bodies of requests into submissions, within the limits."""

    def __init__(self, engine: Engine, limits: Limits, processor: Any = None) -> None:
        self.engine = engine
        self.limits = limits
        self.processor = processor
        self.format = reply_format(engine.tokenizer)
        self.tool_messages = ToolMessages.of(processor or engine.tokenizer, self.format)
        config = engine.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if limits.tokens is not None and context and limits.tokens > context:
            raise ValueError(f"max_tokens={limits.tokens} is more than the context length of the model: {context}")
        self.max_tokens = limits.tokens or context or 2**20
        self.max_characters = self.max_tokens * max(map(len, engine.tokenizer.get_vocab()), default=1)

    def translate(self, body: Body, prompts: Sequence[Prompt], field_name: str) -> Submission:
        """Return the submission for one prompt of a body, or several: texts, chats or token ids."""
        (submission,) = self.translate_groups(body, [prompts], field_name)
        return submission

    def translate_groups(self, body: Body, groups: Sequence[Sequence[Prompt]], field_name: str) -> list[Submission]:
        """Return a submission for each group of prompts of a body. A grammar is compiled once for all of them."""
        submissions = [self._submission(body, group, field_name) for group in groups]
        self._check_log_probs(body, submissions)
        constraint = self._constraint(body, submissions[0].config)
        for submission in submissions:
            self._add_processors(submission, body, constraint)
        return submissions

    def _submission(self, body: Body, prompts: Sequence[Prompt], field_name: str) -> Submission:
        config, sampling = self._settings(body)
        encoded = _padded([self._encode(body, prompt, config, field_name) for prompt in prompts])
        begin = encoded["input_ids"].shape[1]
        rows = body.answers * config.max_rows_per_prompt
        if rows > self.limits.rows:
            message = f"a request may have at most {self.limits.rows} rows, this one has {rows}"
            default = type(config)()
            most = config.max_rows_per_prompt
            sent = {name: getattr(default, name) for name in config.fields() if name in (body.model_extra or {})}
            fewer = [name for name in sent if replace(config, **{name: sent[name]}).max_rows_per_prompt < most]
            raise APIError(400, message, [*fewer, "n" if body.answers > 1 else "generation_mode"][0])
        arguments = {**sampling, "max_new_tokens": max(1, self._new_tokens(body, begin, field_name))}
        if body.answers > 1:
            arguments["num_return_sequences"] = body.answers
            if arguments.get("do_sample") is False:
                raise APIError(400, f"temperature=0 gives {body.answers} equal answers; set n to 1", "n")
        submission = Submission(self.engine, config, encoded, arguments, body.answers * len(prompts), body.stops)
        submission.echo = bool(getattr(body, "echo", False))
        submission.is_empty = body.max_tokens == 0
        submission.continues = all(map(_is_continued, prompts))
        submission.has_mode = body.generation_mode is not None
        submission.has_transcript = bool(body.transcript)
        given = (body.agent_hints or {}).items()
        submission.hints = AgentHints.of({name: value for name, value in given if value is not None})
        submission.reply = self._reply(body)
        return submission

    def _reply(self, body: Body) -> ReplySpec | None:
        if not isinstance(body, ConversationBody) or not (body.callable_tools or self.format.thinks):
            return None
        return ReplySpec(self.format, body.callable_tools, 1 if body.parallel_tool_calls is False else None)

    def _settings(self, body: Body) -> tuple[ParallelConfig, dict[str, object]]:
        """Return the config of the mode, and the settings of `generate` for sampling."""
        model_config = self.engine.model.generation_config
        name = body.generation_mode
        cls = SharedPrefixConfig if name is None else MODES.get(name, SharedPrefixConfig)
        if cls.traits.needs_logits_cache:
            raise APIError(400, f"{name!r} needs a logits_cache, which a request cannot give", "generation_mode")
        allowed = [] if name is None else _fields_of_requests(cls)
        given = {}
        for key, value in (body.model_extra or {}).items():
            if key in UNSUPPORTED:
                if value not in NEUTRAL:
                    raise APIError(400, f"{key} is not supported", key)
            elif key in allowed:
                if value is not None:
                    given[key] = self._plain(key, value)
            else:
                modes = [mode for mode, other in MODES.items() if key in _fields_of_requests(other)]
                hint = suggestion(key, (*allowed, *type(body).model_fields))
                if modes:
                    hint = f"; it is a setting of the generation_mode {' or '.join(modes)}"
                raise APIError(400, f"{key} is no field of this request{hint}", key)
        if body.max_tokens == 0 and not getattr(body, "echo", False):
            raise APIError(400, "max_tokens=0 needs echo=true", "max_tokens")
        if body.prompt_logprobs is not None and body.stream:
            raise APIError(400, "prompt_logprobs are not streamed: leave out stream", "prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise APIError(400, "stream_options needs stream=true", "stream_options")
        settings = given
        settings["seed"] = secrets.randbits(62) if body.seed is None else body.seed
        arguments = {"generation_mode": cls.mode if name is None else name, **settings}
        config = take_parallel_config(model_config, arguments)
        assert config is not None
        limited = config.traits.rows_setting
        excess = config.max_rows_per_prompt - self.limits.rows // body.answers
        if limited not in ("", *given) and 0 < excess < getattr(config, limited):
            config = replace(config, **{limited: getattr(config, limited) - excess})
        known = {key for key, value in vars(model_config).items() if value is not None}
        known |= set(config.chosen_preset.generation)
        sampling = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
        if body.temperature is not None:
            sampling["do_sample"] = body.temperature >= GREEDY_BELOW
        elif "do_sample" not in known:
            sampling["do_sample"] = True
        if sampling.get("do_sample"):
            if body.temperature is not None or "temperature" not in known:
                sampling["temperature"] = float(1 if body.temperature is None else body.temperature)
            if "top_k" not in known:  # transformers' default is 50
                sampling.setdefault("top_k", 0)
        if body.top_p is not None and sampling.get("do_sample", True):
            sampling["top_p"] = body.top_p
        if body.logit_bias:
            sampling["sequence_bias"] = self._bias(body.logit_bias)
        return config, sampling

    def _plain(self, name: str, value: object) -> object:
        """Return a setting, if it holds nothing that would exhaust time or memory."""
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_ITEMS:
            raise APIError(400, f"{name} may have at most {MAX_ITEMS} items, got {len(items)}", name)
        texts = [json.dumps(item) if isinstance(item, dict) else item for item in items]
        characters = sum(len(text) for text in texts if isinstance(text, str))
        if characters > MAX_TEXT:
            raise APIError(400, f"{name} may have at most {MAX_TEXT} characters, got {characters}", name)
        for item in items:
            if isinstance(item, int) and not isinstance(item, bool) and abs(item) > self.max_tokens:
                raise APIError(400, f"{name} may be at most {self.max_tokens}, got {item}", name)
        return value

    def _bias(self, biases: Mapping[str, float]) -> list[list[object]]:
        size = vocabulary_size(self.engine.model)
        for token in biases:
            known = token.isdecimal() and len(token) < 10 and int(token) < size and str(int(token)) == token
            if not known:
                message = f"logit_bias must map token ids below {size} to numbers, got {token!r}"
                raise APIError(400, message, "logit_bias")
        return [[[int(token)], float(bias)] for token, bias in biases.items()]

    def _encode(self, body: Body, prompt: Prompt, config: ParallelConfig, name: str) -> Mapping[str, torch.Tensor]:
        tokenizer = self.engine.tokenizer
        template = body.chat_template_kwargs
        is_chat = isinstance(prompt, list) and not isinstance(prompt[0], int)
        if isinstance(prompt, list) and len(prompt) > self.max_tokens:
            raise self._too_long(name, f"{self.max_tokens} {'messages' if is_chat else 'token ids'}", len(prompt))
        if isinstance(prompt, str):
            if not prompt and not tokenizer("").input_ids:
                raise APIError(400, f"{name} must have at least one token, got ''", name)
            self.check_length(name, len(prompt))
            if config.prompt.rules() is not None:
                self.check_length(name, len(config.prompt.task_text(prompt)))  # a template may hold it several times
        elif not is_chat:
            self.check_ids(name, prompt)
        else:
            prompt = self.checked_chat(prompt, name)
            if "tool_calls" in prompt[-1]:  # a template would leave them out, or let the answer continue them
                raise APIError(400, f"{name} end with calls: send their results, in messages of the role tool", name)
            prompt, template = self._with_effort(body, prompt)
            if self.processor is not None:
                return encode_chat(self.processor, config, prompt, template, self.limits)
        return encode_prompt(prompt, config, tokenizer, torch.device("cpu"), template)

    def _with_effort(self, body: Body, chat: Chat) -> tuple[list[Any], dict[str, object]]:
        """Return a chat and the variables of its template, with tools and effort."""
        template = dict(body.chat_template_kwargs or {})
        source = str(self.engine.tokenizer.chat_template)
        if isinstance(body, ConversationBody) and (effort := body.effort) is not None:
            known = {"reasoning_effort": effort, ENABLE_THINKING: effort != "none"}
            read = {variable: value for variable, value in known.items() if variable in source}
            if not read and effort != "none":
                raise APIError(400, f"the chat template has no variable for effort {effort!r}", body.effort_field)
            template |= read
        return self.with_tools(chat, body.callable_tools if isinstance(body, ConversationBody) else [], template)

    def with_tools(
        self, chat: Chat, tools: list[dict[str, Any]], template: dict[str, object]
    ) -> tuple[list[Any], dict[str, object]]:
        """Return a chat and the variables of its template, with the tools that the answer may call."""
        self.check_length("tools", len(json.dumps(tools)))
        return self.tool_messages.apply(chat, tools, template)

    def check_ids(self, name: str, tokens: Sequence[int]) -> None:
        """Raise an error for token ids outside the vocabulary."""
        if max(tokens) >= (size := vocabulary_size(self.engine.model)):
            raise APIError(400, f"{name} must hold token ids below {size}, got {max(tokens)}", name)

    def checked_chat(self, chat: Chat, name: str) -> list[Message]:
        """Return a chat with its results in the order of their calls.

        Raises an error for texts that are too long or that no tokenizer can read, for images that the model does not
        read, and for results of no call.
        """
        if self.processor is None and not all(isinstance(message["content"], str) for message in chat):
            message = f"the images of {name} cannot be read: the model, or the processor in its folder, reads text only"
            raise APIError(400, message, name)
        self.check_length(name, sum(map(len, chat_texts(chat))))
        for text in chat_texts(chat):
            check_text(name, text)
        return with_ordered_results(chat, name)

    def check_length(self, name: str, characters: int) -> None:
        """Raise an error for text that cannot fit into the context length: tokenizing it would take seconds."""
        if characters > self.max_characters:
            raise self._too_long(name, f"{self.max_characters} characters", characters)

    def _too_long(self, name: str, limit: str, given: int) -> APIError:
        message = f"{name} may have at most {limit}, as the context length is {self.max_tokens} tokens, got {given}"
        return APIError(400, message, name, "context_length_exceeded")

    def _new_tokens(self, body: Body, begin: int, name: str) -> int:
        left = self.max_tokens - begin
        wanted = body.budget
        if wanted is None:
            default = self.engine.model.generation_config.max_new_tokens or self.limits.default_tokens
            wanted = min(default, max(left, 1))
        if wanted > left:
            cause = name if begin >= self.max_tokens else "max_tokens"
            message = f"but {begin} of {name} and {wanted} new tokens were requested"
            message = f"the context length is {self.max_tokens} tokens, {message}"
            raise APIError(400, message, cause, "context_length_exceeded")
        least = body.min_new_tokens or 0
        size = vocabulary_size(self.engine.model)
        if least > wanted:
            message = f"min_new_tokens must be at most the {wanted} new tokens, got {least}"
            raise APIError(400, message, "min_new_tokens")
        if body.no_repeat_ngram_size == 1 and begin + wanted > size:
            message = f"no_repeat_ngram_size=1 needs a vocabulary of {begin + wanted} tokens, this one has {size}"
            raise APIError(400, message, "no_repeat_ngram_size")
        return wanted

    def _check_log_probs(self, body: Body, submissions: Sequence[Submission]) -> None:
        """Raise an error if the response would hold too many log-probabilities."""
        top = body.top_logprobs_wanted
        prompt_top = body.prompt_logprobs_wanted
        count = 0
        for submission in submissions:
            if top is not None:
                count += submission.choices * submission.arguments["max_new_tokens"] * (1 + top)
            if prompt_top is not None:
                count += body.answers * submission.prompt_tokens * (1 + prompt_top)
        if count > (most := self.limits.log_probs):
            message = f"a response may hold at most {most} log-probabilities, tokens times alternatives, not {count}"
            is_prompts = body.prompt_logprobs is not None
            raise APIError(400, message, "prompt_logprobs" if is_prompts else "logprobs")

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
        return _Constraint(self._json(schema, 0, field_name), forced_calls)

    def _add_processors(self, submission: Submission, body: Body, constraint: _Constraint | None) -> None:
        config = submission.config
        begin = submission.prompt["input_ids"].shape[1]
        processors: list[object] = []
        criteria: list[object] = []
        features = {"logprobs": body.top_logprobs_wanted, "prompt_logprobs": body.prompt_logprobs}
        features |= {"echo": getattr(body, "echo", None) or None}
        for name, wanted in features.items():
            if wanted is not None and not config.traits.rows_continue_prompts:
                raise _unsupported(name, config)
        if constraint is not None:
            processors.append(constraint.processor.for_prompt(begin))
            submission.arguments["eos_token_id"] = end_tokens(self.engine.model, self.engine.tokenizer)
            submission.is_constrained = True
            submission.forced_calls = constraint.forced_calls
        if submission.reply is not None and (submission.forced_calls is not None or not submission.is_constrained):
            submission.marks = submission.reply.marks(special_tokens(self.engine.tokenizer))
        named = "\n".join([config.format_texts, *body.stops])
        submission.hidden = hidden_tokens(self.engine.tokenizer, (), named) - submission.marks
        if body.frequency_penalty or body.presence_penalty:
            penalties = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
            processors.append(OccurrencePenalty(begin, *penalties))
        if isinstance(body, ConversationBody) and body.thinking_token_budget is not None:
            budget = self._thinking_budget(body.thinking_token_budget, submission.prompt["input_ids"])
            processors += [] if submission.is_constrained else [budget]  # without reasoning
        top = body.top_logprobs_wanted
        prompt_top = body.prompt_logprobs_wanted
        if top is not None or prompt_top is not None:
            self.check_ids("label_token_ids", [0, *body.label_tokens])
            collector = TopLogProbs(top or 0, prompt_top, body.label_tokens)
            submission.log_probs = None if top is None else collector
            submission.prompt_log_probs = None if prompt_top is None else collector
            processors.append(collector)
        if prompt_top is not None and len(submission.prompt) > 2:
            raise APIError(400, "prompt_logprobs are not supported for prompts with images", "prompt_logprobs")
        if body.stops:
            for stop in body.stops:
                check_text("stop", stop)
            tokenizer = self.engine.tokenizer
            criteria.append(StopTexts(tokenizer, body.stops, submission.hidden, submission.marks, submission.continues))
        if processors:
            submission.arguments["logits_processor"] = processors
        if criteria:
            submission.arguments["stopping_criteria"] = criteria

    def _thinking_budget(self, budget: int, prompt: torch.Tensor) -> ThinkingBudget:
        tokenizer = self.engine.tokenizer
        marks = self.format.thinking_marks
        begin, end = [encode(tokenizer, mark) for mark in marks] if len(marks) == 2 else ([], [])
        if not begin or len(end) != 1:
            message = "thinking_token_budget needs a model whose reasoning has an opening mark and ends with one token"
            raise APIError(400, message, "thinking_token_budget")
        found = ThinkingBudget(budget, begin, end[0], 0)
        last = decode(tokenizer, prompt[0, -len(begin) - 2 :].tolist(), skip_special_tokens=False).rstrip()
        found.known = int(found.opens(prompt).sum()) - last.endswith(marks[0])
        return found

    def _calls(self, body: ConversationBody) -> tuple[str, Callable[[], ForcedCalls]]:
        """Return the grammar of an answer that has to call tools, and what makes the reader of such an answer."""
        if not self.format.call:
            message = "the model writes arguments in a format without a grammar: tool_choice must be auto or none"
            raise APIError(400, message, "tool_choice")
        several = body.parallel_tool_calls is not False and body.tool_choice == "required"
        between = self.format.between if several else None
        tools = body.callable_tools
        grammar = call_grammar(self.format.call, tools, between, self.engine.tokenizer)
        return grammar, partial(ForcedCalls, self.format.call, tools, between)

    def _json(self, schema: dict[str, object] | str, begin: int, name: str) -> JSONProcessor:
        model = self.engine.model
        tokenizer = self.engine.tokenizer
        ends = end_tokens(model, tokenizer)
        if not ends:
            message = f"{name} needs a token that ends the answer: the model's generation_config has no eos_token_id"
            raise APIError(400, f"{message}, and the tokenizer no eos_token", name)
        try:
            return JSONProcessor(schema, tokenizer, vocabulary_size(model), ends, begin, name)
        except ImportError as error:
            raise APIError(400, f"{name} needs llguidance, which the server has not installed", name) from error


def _fields_of_requests(cls: type[ParallelConfig]) -> list[str]:
    """Return the settings of a mode that a request may have as further fields."""
    refused = (*COMMON, *cls.not_remote())
    return [name for name in cls.fields() if name not in refused]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer, those of the model's generation config or else of its tokenizer."""
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


def _unsupported(name: str, config: ParallelConfig) -> APIError:
    return APIError(400, f"{name} is not supported with generation_mode={config.mode!r}", name)


def _padded(prompts: Sequence[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    """Return several prompts, `[1, length]` each, as rows that are padded on the left; one prompt as it is."""
    if len(prompts) == 1:
        return prompts[0]
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    return {
        name: torch.cat([F.pad(prompt[name], (longest - prompt[name].shape[1], 0)) for prompt in prompts])
        for name in ("input_ids", "attention_mask")
    }


def _schema(body: Body) -> dict[str, object] | None:
    """Return the JSON schema of the answer; None: any text."""
    given = body.answer_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    schema = getattr(given, "json_schema", given)
    if schema is None or schema.definition is None:
        raise APIError(400, f"{body.format_field} of the type json_schema needs a schema", body.format_field)
    return schema.definition  # type: ignore[no-any-return]
