"""Images in chats: decodes `data:` URLs within limits, and processes them. Nothing is fetched, no file is opened."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from reprlib import repr as _shortened
from typing import Any

from transformers.image_utils import load_image

from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.limits import Limits
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.prompts import Chat, render_prompt

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")


def chat_texts(chat: Chat) -> Iterator[str]:
    """Yield the texts that a chat template may write: contents (texts, or lists of parts), names, calls and others."""
    for message in chat:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            for part in content:
                if "text" in part:
                    yield part["text"]
        for key, value in message.items():
            if key != "content":
                yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def encode_chat(processor: Any, config: ParallelConfig, chat: Chat, template: Any, limits: Limits) -> dict[str, Any]:
    """Return the inputs of `generate` for a chat with URLs of images, and with the instructions of a mode."""
    _check_placeholders(processor, chat, template)
    images: list[Any] = []

    def parts(content: Any) -> list[dict[str, object]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        for part in content:
            if "image" in part:
                images.append(_decode(part["image"], images, limits))
        return [part if "text" in part else {"type": "image"} for part in content]

    chat = [{**message, "content": parts(message["content"])} for message in chat]
    text = render_prompt(config.prompt, chat, processor, template)
    settings = {}
    bos_token = processor.tokenizer.bos_token
    if bos_token and text.startswith(bos_token):  # as apply_chat_template
        settings["add_special_tokens"] = False
    try:
        return dict(processor(text=text, images=[images] if images else None, return_tensors="pt", **settings))
    except Exception as error:  # of many kinds, such as for an image that is too small
        raise _error(f"the model's processor cannot read them: {type(error).__name__}: {error}") from error


def _check_placeholders(processor: Any, chat: Chat, template: Any) -> None:
    """Raise an error for a text that the processor would take for an image."""
    placeholders = []
    for owner in (processor, processor.tokenizer):
        token = getattr(owner, "image_token", None)
        if token:
            placeholders.append(token)
    for text in (*chat_texts(chat), json.dumps(template, ensure_ascii=False)):
        for token in placeholders:
            if token in text:
                raise _error(f"a text must not hold {token!r}, the placeholder of images")


def _decode(url: str, earlier: list[Any], limits: Limits) -> Any:
    """Decode an image of a request after the earlier ones; of an animation, the first image."""
    from PIL import Image

    if len(earlier) == limits.images:
        raise _error(f"a request may have at most {limits.images} images")
    content = _content(url, limits.image_bytes)
    decoded_pixels = sum(image.width * image.height for image in earlier)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:  # reads the size, decodes nothing
            if image.width * image.height + decoded_pixels > limits.image_pixels:
                message = f"a request may have images of at most {limits.image_pixels} pixels together"
                raise _error(f"{message}, got one of {image.width} x {image.height}")
            return load_image(image)
    except APIError:
        raise
    except Exception as error:  # decoders raise errors of many kinds
        reason = "unknown format" if "BytesIO" in str(error) else f"{type(error).__name__}: {error}"
        raise _error(f"an image cannot be decoded as one of {', '.join(FORMATS)}: {reason}") from error


def _content(url: str, limit: int) -> bytes:
    """Return what a `data:` URL holds."""
    head, _, data = url.partition(",")
    scheme, _, kind = head.partition(":")
    if scheme.lower() != "data":
        raise _error(f"the server fetches no images: send a URL that begins with data:image/, got {_shortened(url)}")
    media_type, *parameters = kind.lower().split(";")
    if media_type not in TYPES or parameters[-1:] != ["base64"]:
        allowed = f"data:TYPE;base64, with a TYPE of {', '.join(TYPES)}"
        raise _error(f"the URL of an image must begin with {allowed}; got {_shortened(head)}")
    size = len(data) // 4 * 3 - data[-2:].count("=")
    if size > limit:
        raise _error(f"an image may have at most {limit} bytes, got {size}")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise _error(f"the URL of an image holds no valid base64: {error}") from error


def _error(message: str) -> APIError:
    return APIError(400, f"messages: {message}", "messages")
