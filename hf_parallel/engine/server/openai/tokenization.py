"""`/tokenize` and `/detokenize`, as in vLLM: the server's own tokens of a text or chat, and their text."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hf_parallel.detokenizer import decode
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.openai.schema import Flag, Items, Message, Text, Token, Tool, Tools
from hf_parallel.engine.server.openai.translator import Translator
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
        prompts = translator.prompts
        tokenizer = translator.engine.tokenizer
        text = self.prompt
        if (text is None) == (self.messages is None):
            raise APIError(400, "give either prompt or messages", "prompt")
        if self.messages is None and self.tools:
            raise APIError(400, "tools need messages", "tools")
        if self.messages is not None:
            chat = prompts.checked_chat([message.to_chat() for message in self.messages], "messages")
            tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
            chat, template = prompts.with_tools(chat, tools, check_template_kwargs(self.chat_template_kwargs))
            text = apply_template(chat, tokenizer, add_generation_prompt=self.add_generation_prompt, **template)
        assert text is not None
        prompts.check_length("prompt", len(text))
        check_text("prompt", text)
        adds_special_tokens = self.add_special_tokens
        if adds_special_tokens is None:
            adds_special_tokens = self.messages is None
        tokens = tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"]
        return {"count": len(tokens), "max_model_len": prompts.max_tokens, "tokens": tokens}


class DetokenizeBody(BaseModel):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="forbid")

    model: Text | None = None
    tokens: Items[Token]

    def answer(self, translator: Translator) -> dict[str, object]:
        """Return the body of the response."""
        translator.prompts.check_length("tokens", len(self.tokens))
        translator.prompts.check_ids("tokens", self.tokens)
        return {"prompt": decode(translator.engine.tokenizer, self.tokens)}
