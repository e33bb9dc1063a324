"""`/tokenize` and `/detokenize`, as in vLLM: the server's own tokens of a text or chat, and their text."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hf_parallel.detokenizer import decode
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.openai.schema import Flag, Items, Message, Text, Token, Tool, Tools
from hf_parallel.engine.server.openai.submission import Translator
from hf_parallel.generation.prompts import apply_template, check_template_kwargs
from hf_parallel.generation.validation import check_text


class TokenizeBody(BaseModel):
    """Body of `/tokenize`. Special tokens are added to texts by default; the chat template adds its own to a chat."""

    model_config = ConfigDict(extra="forbid")

    model: Text | None = None
    prompt: Text | None = None
    messages: Items[Message] | None = None
    tools: Tools[Tool] | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag = True
    chat_template_kwargs: dict[str, object] | None = None

    def answer(self, translator: Translator) -> dict[str, object]:
        """Return the body of the response."""
        tokenizer = translator.engine.tokenizer
        text = self.prompt
        if (text is None) == (self.messages is None):
            raise APIError(400, "give either prompt or messages", "prompt")
        if self.messages is None and self.tools:
            raise APIError(400, "tools need messages", "tools")
        if self.messages is not None:
            chat = translator.checked_chat([message.to_chat() for message in self.messages], "messages")
            tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
            chat, template = translator.with_tools(chat, tools, check_template_kwargs(self.chat_template_kwargs))
            text = apply_template(chat, tokenizer, add_generation_prompt=self.add_generation_prompt, **template)
        assert text is not None
        translator.check_length("prompt", len(text))
        check_text("prompt", text)
        special = self.messages is None if self.add_special_tokens is None else self.add_special_tokens
        tokens = tokenizer(text, add_special_tokens=special)["input_ids"]
        return {"count": len(tokens), "max_model_len": translator.max_tokens, "tokens": tokens}


class DetokenizeBody(BaseModel):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="forbid")

    model: Text | None = None
    tokens: Items[Token]

    def answer(self, translator: Translator) -> dict[str, object]:
        """Return the body of the response."""
        translator.check_length("tokens", len(self.tokens))
        translator.check_ids("tokens", self.tokens)
        return {"prompt": decode(translator.engine.tokenizer, self.tokens)}
