"""Prompts of requests: checked, rendered by the chat template, and encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_parallel.engine import Engine
from hf_parallel.engine.arguments import encode_prompt
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.limits import Limits
from hf_parallel.engine.server.openai.images import chat_texts, encode_chat
from hf_parallel.engine.server.openai.reply_formats import ReplyFormat
from hf_parallel.engine.server.openai.schema import Body, ConversationBody, Prompt
from hf_parallel.engine.server.openai.tool_messages import ToolMessages, with_ordered_results
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.prompts import ENABLE_THINKING, Chat, Message
from hf_parallel.generation.validation import check_text


class PromptReader:
    """Reads the prompts of requests: texts, token ids, and chats with tools and images."""

    def __init__(self, engine: Engine, limits: Limits, reply_format: ReplyFormat, processor: Any = None) -> None:
        self.engine = engine
        self.limits = limits
        self.processor = processor
        self.tool_messages = ToolMessages.of(processor or engine.tokenizer, reply_format)
        config = engine.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if limits.tokens is not None and context and limits.tokens > context:
            raise ValueError(f"max_tokens={limits.tokens} is more than the context length of the model: {context}")
        self.max_tokens = limits.tokens or context or 2**20
        longest_token = max(map(len, engine.tokenizer.get_vocab()), default=1)
        self.max_characters = self.max_tokens * longest_token

    def encode(self, body: Body, prompt: Prompt, config: ParallelConfig, name: str) -> Mapping[str, torch.Tensor]:
        """Return the inputs of `generate` for a prompt of the field `name`."""
        template = body.chat_template_kwargs
        is_chat = isinstance(prompt, list) and not isinstance(prompt[0], int)
        if isinstance(prompt, list) and len(prompt) > self.max_tokens:
            items = "messages" if is_chat else "token ids"
            raise self._too_long(name, f"{self.max_tokens} {items}", len(prompt))
        if isinstance(prompt, str):
            self._check_prompt_text(prompt, config, name)
        elif not is_chat:
            self.check_ids(name, prompt)
        else:
            prompt = self.checked_chat(prompt, name)
            if "tool_calls" in prompt[-1]:  # a template would leave them out, or let the answer continue them
                raise APIError(400, f"{name} end with calls: send their results, in messages of the role tool", name)
            prompt, template = self._with_effort(body, prompt)
            if self.processor is not None:
                return encode_chat(self.processor, config, prompt, template, self.limits)
        return encode_prompt(prompt, config, self.engine.tokenizer, torch.device("cpu"), template)

    def _check_prompt_text(self, text: str, config: ParallelConfig, name: str) -> None:
        """Raise an error for an empty prompt, or for one that is too long."""
        if not text and not self.engine.tokenizer("").input_ids:
            raise APIError(400, f"{name} must have at least one token, got ''", name)
        self.check_length(name, len(text))
        if config.prompt.rules() is not None:
            self.check_length(name, len(config.prompt.task_text(text)))  # a template may hold it several times

    def _with_effort(self, body: Body, chat: Chat) -> tuple[list[Any], dict[str, object]]:
        """Return a chat and the variables of its template, with tools and effort."""
        template = dict(body.chat_template_kwargs or {})
        if not isinstance(body, ConversationBody):
            return self.with_tools(chat, [], template)
        effort = body.effort
        if effort is not None:
            source = str(self.engine.tokenizer.chat_template)
            variables = {"reasoning_effort": effort, ENABLE_THINKING: effort != "none"}
            used = {variable: value for variable, value in variables.items() if variable in source}
            if not used and effort != "none":
                raise APIError(400, f"the chat template has no variable for effort {effort!r}", body.effort_field)
            template |= used
        return self.with_tools(chat, body.callable_tools, template)

    def with_tools(
        self, chat: Chat, tools: list[dict[str, Any]], template: dict[str, object]
    ) -> tuple[list[Any], dict[str, object]]:
        """Return a chat and the variables of its template, with the tools that the answer may call."""
        characters = len(json.dumps(tools))
        self.check_length("tools", characters)
        return self.tool_messages.apply(chat, tools, template)

    def checked_chat(self, chat: Chat, name: str, after: bool = False) -> list[Message]:
        """Return a chat with its results in the order of their calls; `after`: the chat follows others.

        Raises an error for texts that are too long or that no tokenizer can read, for images that the model does not
        read, and for results of no call.
        """
        if self.processor is None and not all(isinstance(message["content"], str) for message in chat):
            message = f"the images of {name} cannot be read: the model, or the processor in its folder, reads text only"
            raise APIError(400, message, name)
        characters = sum(map(len, chat_texts(chat)))
        self.check_length(name, characters)
        for text in chat_texts(chat):
            check_text(name, text)
        return list(chat) if after else with_ordered_results(chat, name)

    def check_ids(self, name: str, tokens: Sequence[int]) -> None:
        """Raise an error for token ids outside the vocabulary."""
        size = vocabulary_size(self.engine.model)
        largest = max(tokens)
        if largest >= size:
            raise APIError(400, f"{name} must hold token ids below {size}, got {largest}", name)

    def check_length(self, name: str, characters: int) -> None:
        """Raise an error for text that cannot fit into the context length: tokenizing it would take seconds."""
        if characters > self.max_characters:
            raise self._too_long(name, f"{self.max_characters} characters", characters)

    def _too_long(self, name: str, limit: str, length: int) -> APIError:
        message = f"{name} may have at most {limit}, as the context length is {self.max_tokens} tokens, got {length}"
        return APIError(400, message, name, "context_length_exceeded")
