"""`pipeline("parallel-text-generation")`: the tokens of `generate`, and output fields of the modes as plain data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pyarrow
import pytest
import small_tokenizers
import tiny
import torch
from image_models import build_image_model, image_prompts
from mode_cases import BUILT_IN, small_call, small_config
from tiny_tokenizer import make_tokenizer
from torch.utils.data import Dataset
from transformers import BatchFeature, pipeline
from transformers.pipelines import image_text_to_text
from transformers.pipelines.pt_utils import KeyDataset

import hf_parallel
from hf_parallel.generation import MODES
from hf_parallel.generation.outputs import grouped

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["Say what 12 and 30 give.", "Say what 7 and 5 give, and then why.", "Oslo or Rome?"]
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Oslo or Rome?"},
]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny.build("llama"))


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = copy.deepcopy(small_tokenizers.make("split_marker"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def make(model: Any, tokenizer: Any, **kwargs: Any) -> Any:
    return pipeline("parallel-text-generation", model=model, tokenizer=tokenizer, **kwargs)


def prepared(mode: str, prompt: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return one prompt as a caller of `generate` prepares it."""
    config = small_config(mode)
    if config.prompt.rules() is not None:
        return hf_parallel.build_prompt(mode, prompt, tokenizer, config)
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer.apply_chat_template(prompt, return_tensors="pt", return_dict=True, add_generation_prompt=True)


def generated(model: Any, tokenizer: Any, mode: str, prompts: list[Any], **settings: Any) -> list[Any]:
    """Return the tokens that `generate` returns for each prompt of a batch: a row, or all rows if they are merged."""
    ids, mask = tiny.left_pad([prepared(mode, prompt, tokenizer)["input_ids"][0] for prompt in prompts])
    arguments = {**small_call(mode), "tokenizer": tokenizer, **settings}
    tokens = hf_parallel.enable(model).generate(ids, attention_mask=mask, **arguments).tolist()
    return grouped(tokens, len(prompts)) if MODES[mode].traits.merges_rows else tokens


def tokens_of(results: Any) -> list[Any]:
    return [record["generated_token_ids"] for records in results for record in records]


class Rows(Dataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


# The tokens


@pytest.mark.parametrize("mode", BUILT_IN)
@pytest.mark.parametrize("prompt", [PROMPTS[0], CHAT], ids=["string", "chat"])
def test_a_prompt_gives_the_tokens_of_generate(mode: str, prompt: Any, model: Any, tokenizer: Any) -> None:
    pipe = make(model, tokenizer, **small_call(mode))
    assert tokens_of([pipe(prompt, return_tensors=True)]) == generated(model, tokenizer, mode, [prompt])


class Calls:
    """A streamer that records the number of prompts of each call of `generate`."""

    def __init__(self) -> None:
        self.prompts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 2:
            self.prompts.append(len(value))

    def end(self) -> None:
        pass


@pytest.mark.parametrize("mode", BUILT_IN)
@pytest.mark.parametrize("prompts", [PROMPTS, [CHAT, CHAT[1:], CHAT[:2]]], ids=["strings", "chats"])
def test_a_list_gives_the_tokens_of_one_call_of_generate(mode: str, prompts: Any, model: Any, tokenizer: Any) -> None:
    pipe, calls = make(model, tokenizer, return_tensors=True, **small_call(mode)), Calls()
    assert tokens_of(pipe(prompts, streamer=calls)) == generated(model, tokenizer, mode, prompts)
    assert calls.prompts == [3]


def _generator(rows: list[Any]) -> Iterator[Any]:
    yield from rows


def _dataset(rows: list[Any]) -> Any:
    return datasets.Dataset(pyarrow.table({"text": rows}), fingerprint="rows")


def _keyed(rows: list[Any]) -> Any:
    return KeyDataset(_dataset(rows), "text")


def _column(rows: list[Any]) -> Any:
    return _dataset(rows)["text"]


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("prompts", [PROMPTS, [CHAT[1:], CHAT[:2], CHAT]], ids=["strings", "chats"])
def test_a_dataset_gives_the_tokens_of_generate_batch_by_batch(
    batch_size: int | None, prompts: Any, model: Any, tokenizer: Any
) -> None:
    few = {"max_new_tokens": 4}
    pipe = make(model, tokenizer, **{**small_call("hogwild"), **few})
    cuts = [prompts[i : i + (batch_size or 1)] for i in range(0, 3, batch_size or 1)]
    expected = [row for cut in cuts for row in generated(model, tokenizer, "hogwild", cut, **few)]
    sources: list[Callable[..., Any]] = [Rows, _generator, _keyed, _column]
    for source in sources:
        results = pipe(source(prompts), batch_size=batch_size, return_tensors=True)
        assert tokens_of(results) == expected, source.__name__


@pytest.mark.parametrize("mode", [None, "hogwild"])
def test_inputs_that_are_not_prompts_raise(mode: str | None, model: Any, tokenizer: Any) -> None:
    pipe = make(model, tokenizer, generation_mode=mode)
    wrong: list[Any] = [None, 3, b"Oslo", {"text": "Oslo"}, _dataset(PROMPTS), [[]], ["Oslo", [3]], [{"text": "Oslo"}]]
    for given in wrong:
        for call in (lambda given=given: pipe(given), lambda given=given: list(pipe(Rows([given])))):
            with pytest.raises(ValueError, match="prompts must be a string"):
                call()


# Prompt helpers


def test_a_chat_that_ends_with_the_assistant_is_continued(model: Any, tokenizer: Any) -> None:
    prompt = hf_parallel.hogwild_prompt(CHAT[:3], tokenizer, collaboration_prompt="Talk.")
    assert tokenizer.decode(prompt["input_ids"][0]).endswith("<assistant>Yes?")
    pipe = make(model, tokenizer, **small_call("hogwild"))
    ((record,),) = pipe([CHAT[:3]])
    (new,) = pipe(CHAT[:3], return_full_text=False)
    assert record["generated_text"][:2] == CHAT[:2]
    assert record["generated_text"][2:] == [{"role": "assistant", "content": "Yes?" + new["generated_text"]}]


# Results


def test_hogwild_returns_one_record_of_all_workers(model: Any, tokenizer: Any) -> None:
    given = {**small_call("hogwild"), "stop_on_answer": "never", "answer_pattern": "[a-z]"}
    results = make(model, tokenizer, **given)(PROMPTS, return_full_text=False)
    ids, mask = tiny.left_pad([prepared("hogwild", prompt, tokenizer)["input_ids"][0] for prompt in PROMPTS])
    out = model.generate(ids, attention_mask=mask, tokenizer=tokenizer, return_dict_in_generate=True, **given)
    for i, (record,) in enumerate(results):
        assert record["generated_text"] == record["transcript"] == out.transcripts[i]
        assert record["workers"] == out.texts[3 * i : 3 * i + 3]
        assert [step["tokens"] for step in record["history"]] == [step.tokens for step in out.history[i]]
        assert record["answer"] == out.answers[i]
        assert record["stats"]["decoded_tokens"] == out.stats.decoded_tokens


def test_texts_of_results_are_those_of_the_output_without_end_tokens(model: Any, tokenizer: Any) -> None:
    """Though the tokenizer does not know them as special, unless special tokens are asked for."""
    ends = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    settings = {"eos_token_id": ends, "max_new_tokens": 30, "do_sample": True, "seed": 3, "num_return_sequences": 2}
    settings["generation_mode"] = "shared_prefix"
    pipe = make(model, tokenizer, **settings)
    ids, mask = tiny.left_pad([prepared("shared_prefix", prompt, tokenizer)["input_ids"][0] for prompt in PROMPTS])
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
    texts = [record["generated_text"] for one in pipe(PROMPTS, return_full_text=False) for record in one]
    assert texts == out.answer_texts(tokenizer)
    whole = [record["generated_text"] for one in pipe(PROMPTS, skip_special_tokens=False) for record in one]
    for row, (text, raw) in enumerate(zip(texts, whole, strict=True)):
        last = int(out.sequences[row, out.record.lengths[row] - 1])
        assert last in ends
        assert raw.startswith(PROMPTS[row // 2] + text + tokenizer.decode([last]))


@pytest.mark.parametrize("mode", ["shared_prefix", "hogwild"])
def test_results_have_log_probabilities_if_asked_for(mode: str, model: Any, tokenizer: Any) -> None:
    pipe = make(model, tokenizer, log_probs=True, **small_call(mode))
    found = [record["log_probs"] for one in pipe(PROMPTS) for record in one]
    ids, mask = tiny.left_pad([prepared(mode, prompt, tokenizer)["input_ids"][0] for prompt in PROMPTS])
    settings = {"tokenizer": tokenizer, "return_dict_in_generate": True, **small_call(mode)}
    out = model.generate(ids, attention_mask=mask, **settings)
    assert found == [record["log_probs"] for record in out.to_records(log_probs=True)]
    assert all("log_probs" not in record for record in pipe(PROMPTS[0], log_probs=False))
    with pytest.raises(ValueError, match="log_probs=True needs a generation_mode"):
        pipe(PROMPTS[0], generation_mode=None)


# Settings


def test_a_mode_stored_with_the_model_is_used(model: Any, tokenizer: Any) -> None:
    model.generation_config.generation_mode = "hogwild"
    model.generation_config.parallel_config = {"num_workers": 4}
    pipe = make(model, tokenizer, max_new_tokens=4)
    assert len(pipe(PROMPTS[0])[0]["workers"]) == 4
    assert len(pipe(PROMPTS[0], num_workers=2)[0]["workers"]) == 2
    assert "workers" not in pipe(PROMPTS[0], generation_mode=None)[0]


# The stock pipeline


class _Processor:
    """Stands in for a model's processor, which needs Pillow or torchvision; an "image" of a message is its number."""

    chat_template = "{{ messages }}"

    def __init__(self, family: str) -> None:
        self.family, self.tokenizer = family, make_tokenizer()

    def apply_chat_template(self, chat: Any, **_: object) -> BatchFeature:
        return BatchFeature(image_prompts(self.family, [[part["image"] for part in chat[0]["content"]]]))

    def post_process_image_text_to_text(self, ids: torch.Tensor, **settings: Any) -> list[str]:
        return self.tokenizer.batch_decode(ids, **settings)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_images_work_in_the_pipeline_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_text_to_text, "requires_backends", lambda *_: None)  # Pillow, which loads images
    model, processor = hf_parallel.enable(build_image_model(family)), _Processor(family)
    pipe = pipeline("image-text-to-text", model=model, processor=processor)  # type: ignore[call-overload]
    chat = [{"role": "user", "content": [{"type": "image", "image": 1}, {"type": "image", "image": 2}]}]
    settings = {"generation_mode": "shared_prefix", "num_return_sequences": 3, "do_sample": True, "seed": 1}
    results = pipe(text=chat, max_new_tokens=6, generate_kwargs=dict(settings), return_full_text=False)
    inputs = image_prompts(family, [[1, 2]])
    expected = model.generate(**inputs, **settings, max_new_tokens=6)[:, inputs["input_ids"].shape[1] :]
    assert [one["generated_text"] for one in results] == processor.tokenizer.batch_decode(
        expected, skip_special_tokens=True
    )
    workers = {"generation_mode": "hogwild", "num_workers": 2, "tokenizer": processor.tokenizer}
    assert len(pipe(text=chat, max_new_tokens=6, generate_kwargs=workers)) == 2
