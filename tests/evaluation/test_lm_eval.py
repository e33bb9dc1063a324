"""The backend `hf-parallel` of lm-eval gives the scores and texts of `hf`, and computes shared prefixes once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import yaml

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import set_seed

import hf_parallel
from hf_parallel.evaluation.lm_eval import ParallelLM

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = [
    {
        "question": f"Which city is {word} than Rome?",
        "choices": ["Oslo", "Köln, in 2024", f"the {word} one", "none"],
        "gold": number % 4,
    }
    for number, word in enumerate(["colder", "older", "smaller", "newer", "larger", "hotter"])
]
CHOICE: dict[str, Any] = {
    "task": "cities",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "fewshot_split": "test",
    "num_fewshot": 2,
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
}
LETTERS = {**CHOICE, "task": "letters", "doc_to_choice": "{{['A', 'B', 'C', 'D']}}"}
ROLLING: dict[str, Any] = {
    "task": "texts",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}} {{choices}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
WRITING: dict[str, Any] = {
    "task": "writing",
    "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{choices[0]}}",
    "fewshot_split": "test",
    "num_fewshot": 2,
    "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 20},
    "metric_list": [{"metric": "exact_match"}],
}
TASKS = [CHOICE, LETTERS, ROLLING, WRITING]
NAMES = [task["task"] for task in TASKS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files, their data, and a random model with its tokenizer."""
    path = tmp_path_factory.mktemp("lm_eval")
    lines = [json.dumps(row) for row in ROWS]
    (path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path / "rows.jsonl")}}}
    for task in TASKS:
        (path / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **data, "test_split": "test"}))
    tokenizer = small_tokenizers.make("byte_level")
    small_tokenizers.small_llama(tokenizer, initializer_range=0.3).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> HFLM:
    return HFLM(str(folder / "model"), device="cpu", batch_size=4)


def backend(folder: Path, **options: Any) -> ParallelLM:
    return ParallelLM(str(folder / "model"), device="cpu", **options)


def evaluate(lm: Any, folder: Path, tasks: Sequence[str], **options: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found: Any = simple_evaluate(lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options)
    return found


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """Return the raw answers of the model."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def request(context: str, **gen_kwargs: Any) -> Instance:
    return Instance("generate_until", {}, (context, gen_kwargs), 0)


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 50}, {"max_length": 48}], ids=str)
def test_scores_equal_those_of_hf(folder: Path, options: dict[str, Any]) -> None:
    length = {name: value for name, value in options.items() if name == "max_length"}
    tasks = [name for name in NAMES if name != "writing"]
    expected = evaluate(HFLM(str(folder / "model"), device="cpu", batch_size=2, **length), folder, tasks)
    found = evaluate(backend(folder, **options), folder, tasks)
    for task in tasks:
        numbers = {name: value for name, value in expected["results"][task].items() if isinstance(value, float)}
        assert numbers
        ours = {name: found["results"][task][name] for name in numbers}
        for name in [name for name in numbers if "perplexity" in name]:  # large: the logarithm is what was measured
            numbers[name], ours[name] = math.log(numbers[name]), math.log(ours[name])
        assert ours == pytest.approx(numbers, rel=1e-6)
    for task in tasks[:2]:
        pairs = zip(answers(found, task), answers(expected, task), strict=True)
        flat = [(own[0], other[0]) for of_doc, others in pairs for own, other in zip(of_doc, others, strict=True)]
        assert [own[1] for own, _ in flat] == [other[1] for _, other in flat]
        assert [own[0] for own, _ in flat] == pytest.approx([other[0] for _, other in flat], rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
def test_greedy_texts_equal_those_of_hf(folder: Path, plain: HFLM, batch_size: Any) -> None:
    expected = answers(evaluate(plain, folder, ["writing"]), "writing")
    assert answers(evaluate(backend(folder, batch_size=batch_size), folder, ["writing"]), "writing") == expected
    assert len({str(text) for text in expected}) > 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_samples_depend_on_the_seed_and_repeats_differ(folder: Path, batch_size: int) -> None:
    lm, texts = backend(folder, batch_size=batch_size), []
    for seed, own in ((0, {}), (0, {}), (1, {}), (0, {"seed": 5}), (1, {"seed": 5}), (0, {"seed": 6})):
        set_seed(seed)
        given = request("Let us look at", do_sample=True, temperature=1.0, max_gen_toks=8, **own)
        texts.append(lm.generate_until([given] * 4, disable_tqdm=True))
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4] != texts[5]
    assert all(len(set(repeats)) > 1 for repeats in texts)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("self_consistency", {"num_answers": 3, "answer_pattern": "[a-z]+", "do_sample": True, "temperature": 0.8}),
        ("hogwild", {"num_workers": 2, "do_sample": False}),
        ("pdos", {"do_sample": False}),
        ("skeleton_of_thought", {"do_sample": False}),
        ("resample", {"do_sample": True, "temperature": 0.8}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_mode_gives_one_text_per_request(folder: Path, mode: str, settings: dict[str, Any]) -> None:
    contexts = ["Question: which city", "Let us look at"]
    by_request = backend(folder, batch_size=2)
    requests = [request(context, generation_mode=mode, max_gen_toks=12, **settings) for context in contexts * 2]
    texts = by_request.generate_until(requests, disable_tqdm=True)
    assert len(texts) == 4
    assert all(isinstance(text, str) for text in texts)
    own = {name: value for name, value in settings.items() if name in hf_parallel.generation.MODES[mode].fields()}
    rest = {name: value for name, value in settings.items() if name not in own}
    by_model = backend(folder, batch_size=2, generation_mode=mode, **own)
    set_seed(0)
    first = by_model.generate_until([request(context, max_gen_toks=12, **rest) for context in contexts])
    set_seed(0)
    assert first == by_request.generate_until(requests[:2], disable_tqdm=True)


@pytest.mark.parametrize(
    ("dialect", "opening", "joined"),
    [
        ("parallel_r1", "<Parallel>", "<Parallel><Path>.+</Path><Path>.+</Path></Parallel>\n<Summary>"),
        ('{"region": ["[", "]"], "branch": ["(", ")"]}', "[", r"\[\(.+\)\(.+\)\]"),
    ],
)
def test_the_text_of_an_answer_with_forks_has_its_paths(folder: Path, dialect: str, opening: str, joined: str) -> None:
    settings = {"dialect": dialect, "opening": opening, "path_max_new_tokens": 5}
    lm = backend(folder, generation_mode="fork_join", **settings)
    (text,) = lm.generate_until([request("Let us look at", max_gen_toks=70, do_sample=False)], disable_tqdm=True)
    assert re.match(joined, text, re.DOTALL)


def test_a_text_ends_at_the_first_stop_text(folder: Path, plain: HFLM) -> None:
    contexts = ["Let us look at", "Question: which city"]
    whole = plain.generate_until([request(context, max_gen_toks=24) for context in contexts], disable_tqdm=True)
    stops = sorted({text[len(text) // 2] for text in whole})
    requests = [request(context, max_gen_toks=24, until=stops) for context in contexts]
    lm = backend(folder, batch_size=2)
    texts = lm.generate_until(requests, disable_tqdm=True)
    assert texts == plain.generate_until(requests, disable_tqdm=True)
    assert texts == [re.split("|".join(map(re.escape, stops)), text)[0] for text in whole]
    assert lm.stats.decoded_tokens < 48


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generation_mode": "hogwyld"}, "did you mean 'hogwild'"),
        ({"generation_mode": "hogwild", "num_workers": 0}, "num_workers must be .*got 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be .*got 0"),
        ({"pretrained": None}, "pretrained must be"),
    ],
)
def test_invalid_settings_raise_before_the_model_is_loaded(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelLM(**{"pretrained": "no/such/model", **options})


def test_local_completions_of_a_server_give_the_scores_of_hf(folder: Path) -> None:
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx2", "tenacity", "aiohttp"):
        pytest.importorskip(name)
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from serving import MODEL, served
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_parallel.engine import Engine

    path = str(folder / "model")
    expected = evaluate(HFLM(path, device="cpu", batch_size=2), folder, ["cities", "letters"])
    with (
        Engine(AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)) as engine,
        served(engine) as server,
    ):
        url, tokens = f"{server.url}/v1/completions", engine.stats.prefilled_tokens
        lm = LocalCompletionsAPI(url, "huggingface", model=MODEL, tokenizer=path, batch_size=4, max_length=1000)
        found = evaluate(lm, folder, ["cities", "letters"])
        assert engine.stats.prefilled_tokens > tokens
    for task in ("cities", "letters"):
        numbers = {name: value for name, value in expected["results"][task].items() if isinstance(value, float)}
        assert {name: found["results"][task][name] for name in numbers} == pytest.approx(numbers)
        pairs = zip(answers(found, task), answers(expected, task), strict=True)
        flat = [(own[0], other[0]) for of_doc, others in pairs for own, other in zip(of_doc, others, strict=True)]
        assert [own[1] for own, _ in flat] == [other[1] for _, other in flat]
        assert [own[0] for own, _ in flat] == pytest.approx([other[0] for _, other in flat], rel=1e-6, abs=1e-5)
