"""Images in chats: answers equal `generate`'s, and images that are none, too large or elsewhere change nothing.

The tests that decode images need Pillow.
"""

from __future__ import annotations

import base64
import io
import json
import random
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import FAMILIES
from transformers import Gemma3ForConditionalGeneration, Gemma3Processor, PreTrainedTokenizerFast

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from serving import MODEL, Served, check_error, served  # noqa: E402
from small_tokenizers import byte_level  # noqa: E402

from hf_parallel import LogitsCache  # noqa: E402
from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server import Limits  # noqa: E402
from hf_parallel.models.loading import load_model, load_processor  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: "
    "{% for part in m['content'] %}{{ '<boi>' if part['type'] == 'image' else part['text'] }}{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Of chats whose messages hold lists of parts only, as SmolVLM's."""
LIMITS = Limits(body_bytes=1 << 18, images=3, image_bytes=1 << 16, image_pixels=1 << 16)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A model of Gemma 3 with a tokenizer and a processor, from the folder in which all of them were saved."""
    pytest.importorskip("PIL")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    more = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), clean_up_tokenization_spaces=False, **names, extra_special_tokens=more
    )
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4)
    config = FAMILIES["gemma3"].config()
    config.image_token_id, config.text_config.vocab_size = tokenizer.convert_tokens_to_ids("<img>"), len(tokenizer)
    config.text_config.max_position_embeddings, config.tie_word_embeddings = 4096, False
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(0.2 * torch.randn_like(parameter))
    folder = str(tmp_path_factory.mktemp("gemma"))
    for part in (model, processor):
        part.save_pretrained(folder)
    model, tokenizer = load_model(folder)
    return model, tokenizer, load_processor(model, folder)


@pytest.fixture(scope="module")
def server(loaded: tuple[Any, Any, Any]) -> Iterator[Served]:
    model, tokenizer, processor = loaded
    with Engine(model, tokenizer) as engine, served(engine, LIMITS, processor=processor) as running:
        yield running


def image(seed: int, kind: str = "PNG", size: tuple[int, int] = (20, 12)) -> Any:
    """Return a random image, after a round trip through a format."""
    from PIL import Image

    pixels = random.Random(seed).randbytes(size[0] * size[1] * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", size, pixels).save(file, kind)
    return Image.open(file)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def url_of(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def shown(seed: int, kind: str = "PNG") -> dict[str, Any]:
    return part(url_of(image(seed, kind).fp.getvalue(), kind.lower()))


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def generated(loaded: tuple[Any, Any, Any], content: list[dict[str, Any]], tokens: int) -> str:
    """Return the greedy answer of plain `generate`."""
    model, tokenizer, processor = loaded
    arguments = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    inputs = processor.apply_chat_template([{"role": "user", "content": content}], **arguments)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("kinds", [("PNG",), ("JPEG", "WEBP"), ("GIF", "PNG", "GIF"), ()], ids=str)
def test_answers_equal_generate(server: Served, loaded: tuple[Any, Any, Any], kinds: tuple[str, ...]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    given = [text("What is"), *(shown(seed, kind) for seed, kind in enumerate(kinds)), text("this?")]
    images = [{"type": "image", "image": image(seed, kind)} for seed, kind in enumerate(kinds)]
    arguments = {"model": MODEL, "messages": [{"role": "user", "content": given}], "temperature": 0, "max_tokens": 12}
    expected = generated(loaded, [text("What is"), *images, text("this?")], 12)
    answer = client.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == expected
    streamed = client.chat.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


def ask(server: Served, *content: dict[str, Any]) -> str:
    answer = server.chat(messages=[{"role": "user", "content": list(content)}])
    return str(answer["choices"][0]["message"]["content"])


def header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size, and holds few bytes."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", zlib.compress(b"\0" * 4096)), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(own)) + kind + own + struct.pack(">I", zlib.crc32(kind + own)) for kind, own in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


WRONG = {
    "another machine": (["https://example.com/a.png"], "fetches no images: .*'https://example.com/a.png'"),
    "a file": (["file:///etc/passwd"], "fetches no images"),
    "another type": (["data:image/svg+xml;base64,PHN2Zy8+"], "TYPE of image/png.*svg"),
    "no base64": (["data:image/png;base64,%%%%"], "no valid base64"),
    "noise": ([url_of(b"no image" * 99)], "cannot be decoded as one of PNG, JPEG, WEBP, GIF: unknown format"),
    "half an image": ([url_of(header(200, 200))], "cannot be decoded"),
    "a large file": ([url_of(b"x" * (LIMITS.image_bytes + 1))], "at most 65536 bytes, got 65537"),
    "many pixels": ([url_of(header(9000, 8000))], "at most 65536 pixels together, got one of 9000 x 8000"),
    "more than Pillow's limit": ([url_of(header(60_000, 60_000))], "DecompressionBombError"),
    "many images": ([4], "at most 3 images"),
}
BAD_TEXT = {"a placeholder in the text": "Look: <boi>", "image tokens in the text": "Look: <img><img><img><img>"}


@pytest.mark.parametrize("name", [*WRONG, *BAD_TEXT])
def test_bad_images_are_named_and_nothing_is_lost(server: Served, name: str) -> None:
    good = [text("What is this?"), shown(1)]
    before, kv_bytes = ask(server, *good), server.engine.stats.kv_bytes
    if name in BAD_TEXT:
        content, words = [*good, text(BAD_TEXT[name])], "must not hold '<(boi|img)>'"
    else:
        urls, words = WRONG[name]
        content = [text("What?"), *([shown(1)] * 4 if urls == [4] else map(part, urls))]
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": stream}
        error = check_error(server.post("/v1/chat/completions", **body), 400)
        assert error["param"] == "messages"
        assert re.search(words, error["message"]), error
    assert (ask(server, *good), server.engine.stats.kv_bytes) == (before, kv_bytes)


def test_placeholders_of_images_are_found_in_all_texts_that_a_template_may_write(server: Served) -> None:
    ask_image = {"role": "user", "content": [text("What is this?"), shown(1)]}
    call = {"id": "1", "function": {"name": "look", "arguments": json.dumps({"x": ["<boi>"]})}}
    called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    tool = {"type": "function", "function": {"name": "look", "description": "Reads <img>"}}
    for body in (
        {"messages": [{**ask_image, "name": "<boi>"}]},
        {"messages": [ask_image, {"role": "assistant", "content": "x", "reasoning_content": "<boi>"}, ask_image]},
        {"messages": [ask_image, *called]},
        {"messages": [ask_image], "tools": [tool]},
        {"messages": [ask_image], "chat_template_kwargs": {"title": "<boi>"}},
    ):
        error = check_error(server.post("/v1/chat/completions", **body, max_tokens=1), 400)
        assert "placeholder of images" in error["message"]


def test_an_image_in_a_tools_output_is_read(server: Served) -> None:
    calls = [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]
    before = [{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": calls}]
    output = {"role": "tool", "tool_call_id": "1", "content": [shown(1)]}
    same = {"role": "user", "content": [text("<tool_response>\n"), shown(1), text("\n</tool_response>")]}
    found, expected = (server.chat(messages=[*before, one], temperature=0, max_tokens=8) for one in (output, same))
    assert found["choices"][0]["message"] == expected["choices"][0]["message"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"] < 400


def test_cached_logits_belong_to_an_image_by_its_content_also_after_a_restart(
    loaded: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    shared, tokenizer, processor = loaded
    model = Gemma3ForConditionalGeneration(shared.config).eval()  # an engine of other tests holds the shared one
    model.load_state_dict(shared.state_dict())

    def ask(running: Served, seed: int, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": [shown(seed), text("What?")]}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 1, "seed": 3, **body}
        response = running.post("/v1/chat/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def replayed(answer: dict[str, Any]) -> int:
        return answer["usage"]["completion_tokens_details"]["replayed_tokens"]

    cache = LogitsCache()
    cache.salt = bytes(range(16))  # as one that another process has saved
    with Engine(model, tokenizer) as engine, served(engine, processor=processor, logits_cache=cache) as running:
        alone = [ask(running, seed)["choices"] for seed in (1, 2, 1)]
        answers = [ask(running, seed, replay="stepwise") for seed in (1, 2, 1)]
        assert [answer["choices"] for answer in answers] == alone
        assert [replayed(answer) for answer in answers[:2]] == [0, 0]
        assert replayed(answers[2]) == answers[2]["usage"]["completion_tokens"] > 0
    cache.save(tmp_path / "logits")
    cache = LogitsCache.load(tmp_path / "logits")
    with Engine(model, tokenizer) as engine, served(engine, processor=processor, logits_cache=cache) as running:
        answer = ask(running, 2, replay="stepwise")
        assert answer["choices"] == alone[1]
        assert replayed(answer) == answer["usage"]["completion_tokens"] > 0
