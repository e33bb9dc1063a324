"""Chat templates of reasoning models: each place that renders one, and the errors of templates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from serving import MODEL, small_model
from transformers import pipeline

import hf_parallel.pipelines
from hf_parallel import HogwildSession
from hf_parallel.agents import Chat, Runtime, agent
from hf_parallel.engine import Engine
from hf_parallel.engine.server.limits import Limits
from hf_parallel.engine.server.openai.schema import ChatBody, CompletionBody
from hf_parallel.engine.server.openai.translator import Translator
from hf_parallel.evaluation import Run
from hf_parallel.evaluation.sweep import sweep
from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.generation.config import make_config

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
TEMPLATES = {
    "qwen3": TURNS + "{% if add_generation_prompt %}<assistant>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "smollm3": TURNS + "{% if add_generation_prompt %}<assistant>\n"
    "{% if '/no_think' in messages[0].content %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "deepseek": "{% if thinking is not defined %}{% set thinking = false %}{% endif %}" + TURNS +
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if thinking else '</think>' }}{% endif %}",
    "r1": TURNS + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}",
    "other": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
}  # fmt: skip
CLOSED = "\n<think>\n\n</think>\n\n"
ENDS: list[tuple[str, str, dict[str, Any], str, str, str]] = [
    # template, system message, variables, end of the prompt, the same with hogwild, with pdos
    ("qwen3", "Rule.", {}, "\n", "\n<think>\n", CLOSED),
    ("qwen3", "Rule.", {"enable_thinking": False}, CLOSED, CLOSED, CLOSED),
    ("qwen3", "Rule.", {"enable_thinking": True}, "\n", "\n<think>\n", "\n"),
    ("smollm3", "Rule.", {}, "\n", "\n<think>\n", "\n"),
    ("smollm3", "/no_think", {}, CLOSED, CLOSED, CLOSED),
    ("deepseek", "Rule.", {}, "</think>", "</think>", "</think>"),
    ("deepseek", "Rule.", {"thinking": True}, "<think>", "<think>", "<think>"),
    ("r1", "Rule.", {}, "<think>\n", "<think>\n", "<think>\n"),
    ("other", "Rule.", {}, "", "", ""),
]
TASK = "Add 2 and 2."


@dataclass(frozen=True)
class Number(Problem):
    """A problem whose texts all score 0."""

    def score(self, text: str) -> float:
        return 0.0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(*small_model()) as engine:
        yield engine


def record_requests(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that will hold the handles of all later requests of engines."""
    found: list[Any] = []
    submit = Engine.submit

    def recorded(*given: Any, **settings: Any) -> Any:
        found.append(submit(*given, **settings))
        return found[-1]

    patch.setattr(Engine, "submit", recorded)
    return found


def chat(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": TASK}]


# Each place gets a chat or a text, a mode (None: plain `generate`) and variables, and returns the text of the prompt.


def of_engine(engine: Engine, given: Any, mode: str | None, template: Any) -> str:
    settings = {"do_sample": False, "max_new_tokens": 1, "chat_template_kwargs": template, **SETTINGS.get(mode, {})}
    return engine.tokenizer.decode(engine.submit(given, mode, **settings).result().record.prompts[0])


def of_agents(engine: Engine, given: Any, mode: str | None, template: Any) -> str:
    settings = {} if mode is None else {"generation_mode": mode, **SETTINGS.get(mode, {})}

    @agent
    async def answer() -> Any:
        talk = Chat(messages=given, chat_template_kwargs=template, do_sample=False, **settings)
        yield await talk.gen(max_new_tokens=1)

    with pytest.MonkeyPatch.context() as patch:
        submitted = record_requests(patch)
        Runtime(engine, logits_cache=False).run(answer)
    return engine.tokenizer.decode(submitted[-1].result().record.prompts[0])


def of_server(engine: Engine, given: Any, mode: str | None, template: Any) -> str:
    common = {"model": MODEL, "max_tokens": 1, "chat_template_kwargs": template, "generation_mode": mode}
    common |= SETTINGS.get(mode, {})
    body: Any
    if isinstance(given, str):
        body = CompletionBody.model_validate({**common, "prompt": given})
    else:
        body = ChatBody.model_validate({**common, "messages": given})
    submission = Translator(engine, Limits()).translate(body, [given], "messages")
    return engine.tokenizer.decode(submission.prompt["input_ids"][0])


def of_pipeline(engine: Engine, given: Any, mode: str | None, template: Any) -> str:
    if engine not in PIPELINES:
        PIPELINES[engine] = pipeline(TASK_NAME, model=small_model()[0], tokenizer=engine.tokenizer)
    pipe = PIPELINES[engine]
    config = None if mode is None else make_config(mode, SETTINGS.get(mode))
    settings, _, _ = pipe._sanitize_parameters(chat_template_kwargs=template, parallel_config=config)
    return engine.tokenizer.decode(pipe.preprocess(given, **settings)["input_ids"][0])


def of_builder(engine: Engine, given: Any, mode: str | None, template: Any) -> str:
    mode = mode or "shared_prefix"  # which has no instructions
    own = {"chat_template_kwargs": template, **SETTINGS.get(mode, {})}
    prompt = hf_parallel.build_prompt(mode, given, engine.tokenizer, **own)
    return engine.tokenizer.decode(prompt["input_ids"][0])


SETTINGS: dict[str | None, Any] = {"pdos": {"parallel_hint": False}, "hogwild": {"finisher_tokens": 0}}
PIPELINES: dict[Engine, Any] = {}
TASK_NAME = "parallel-text-generation"
OF_CHATS = [of_engine, of_agents, of_server, of_pipeline, of_builder]


@pytest.mark.parametrize("place", OF_CHATS)
def test_the_rendered_end_of_a_chat_decides_whether_thinking_is_open(place: Any, engine: Engine) -> None:
    for kind, system, template, end, hogwild, pdos in ENDS:
        engine.tokenizer.chat_template = TEMPLATES[kind]
        for mode, expected in ((None, end), ("shared_prefix", end), ("hogwild", hogwild), ("pdos", pdos)):
            text = place(engine, chat(system), mode, template)
            assert text.endswith(f"<user>{TASK}<assistant>{expected}"), (kind, template, mode, text)
            assert text.count(system) == 1


@pytest.mark.parametrize("place", OF_CHATS)
def test_rules_follow_the_task_of_a_chat_if_the_paper_of_the_mode_has_them_there(
    place: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.tokenizer.chat_template = TEMPLATES["other"]
    monkeypatch.setitem(SETTINGS, "pdos", {"preset": "paper", "format_prompt": "Use {branch_marker}."})
    rules = "Use ####."
    talk = [{"role": "user", "content": "First."}, {"role": "assistant", "content": "Yes."}, *chat("")[1:]]
    text = place(engine, talk, "pdos", None)
    assert f"<user>First.<assistant>Yes.<user>{TASK}\n\n{rules}<assistant>" in text
    if place is of_builder:
        engine.tokenizer.chat_template = None
        assert place(engine, TASK, "pdos", None) == f"{TASK}\n\n{rules}\n\n"


def test_prompts_of_sessions_sweeps_and_drafts_receive_the_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = record_requests(monkeypatch)
    model, tokenizer = small_model()
    tokenizer.chat_template = TEMPLATES["qwen3"]
    for template, closed in (({"enable_thinking": False}, True), (None, False)):
        given = {"chat_template_kwargs": template}
        with HogwildSession(model, tokenizer, TASK, max_new_tokens=1, **given) as session:
            ids = session.output().sequences[0].tolist()
        assert (CLOSED in tokenizer.decode(ids)) is closed
        sweep(model, tokenizer, [Number(TASK, "4")], [Run(settings=given), Run("hogwild", given)], [1], do_sample=False)
        for handle in handles:
            assert (CLOSED in tokenizer.decode(handle.result().record.prompts[0])) is closed
        handles.clear()
