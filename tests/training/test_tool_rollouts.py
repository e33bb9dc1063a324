"""Rollouts with tools: claims of TRL's tests of its tool loop, on its trainer and on ours; tokens, loss and cost."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from grpo_trainers import first_batch, grpo_arguments
from tool_tokenizer import Written, make_tool_model, make_tool_tokenizer, script_of

import hf_parallel
from hf_parallel.engine import Engine

trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))

from hf_parallel.training import SharedPrefixGRPOTrainer  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

SHARED = {"generation_mode": "shared_prefix"}
TRAINERS = [pytest.param(trl.GRPOTrainer, marks=pytest.mark.slow), SharedPrefixGRPOTrainer]
TOKENIZER = make_tool_tokenizer()


@pytest.fixture(scope="module", autouse=True)
def fast_collection() -> Iterator[None]:
    """Exclude what has been imported from garbage collection, which each training runs."""
    gc.freeze()
    yield
    gc.unfreeze()


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: A number.
        b: A number.

    Returns:
        Their sum.
    """
    return a + b


async def double(a: int) -> int:
    """
    Doubles a number.

    Args:
        a: A number.

    Returns:
        Twice the number.
    """
    return 2 * a


def fail() -> str:
    """
    Fails.

    Returns:
        Nothing.
    """
    raise RuntimeError("it broke")


def call(name: str, **arguments: int) -> str:
    """Return the text of a call, as the template writes it."""
    values = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<call>{{"name": "{name}", "arguments": {{{values}}}}}</call>'


class Rollouts:
    """A trainer whose model writes a script, and what its reward function has received."""

    def __init__(
        self,
        cls: type[Any],
        monkeypatch: pytest.MonkeyPatch,
        folder: Any,
        written: Written,
        prompts: Sequence[str] = ("go",),
        columns: dict[str, list[Any]] | None = None,
        model: Any = None,
        **given: Any,
    ) -> None:
        self.completions: list[list[dict[str, Any]]] = []
        self.ids: list[list[int]] = []
        model = model or make_tool_model(TOKENIZER)
        if cls is SharedPrefixGRPOTrainer:
            hf_parallel.enable(model)
            prepare = Engine.prepare

            def written_prepare(engine: Engine, *arguments: Any, **settings: Any) -> Any:
                return prepare(engine, *arguments, logits_processor=[written], **settings)

            monkeypatch.setattr(Engine, "prepare", written_prepare)
            given.setdefault("generation_kwargs", SHARED)
        else:
            generate = model.generate
            monkeypatch.setattr(
                model, "generate", lambda **settings: generate(**settings, logits_processor=[written]), raising=False
            )

        def reward(completions: list[Any], completion_ids: list[list[int]], **others: Any) -> list[float]:
            self.completions += completions
            self.ids += completion_ids
            return [float(len(str(completion)) % 7) for completion in completions]

        settings = {
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "max_completion_length": 200,
            "shuffle_dataset": False,
            "reward_funcs": reward,
        }
        data = {"prompt": [[{"role": "user", "content": prompt}] for prompt in prompts], **(columns or {})}
        self.trainer = cls(
            model=model,
            train_dataset=datasets.Dataset.from_dict(data),
            processing_class=make_tool_tokenizer(),
            **grpo_arguments(folder, trl.GRPOConfig, **settings | given),
        )

    @property
    def logs(self) -> dict[str, float]:
        (logs,) = (logs for logs in self.trainer.state.log_history if "loss" in logs)
        return logs  # type: ignore[no-any-return]

    def texts(self) -> list[list[str]]:
        """Return role and content of the messages of each rollout, and its tokens as text."""
        return [[f"{message['role']}: {message['content']}" for message in messages] for messages in self.completions]


ROUND = {
    "several tools in one answer, coroutine functions last": (
        ["hm " + call("double", a=4) + call("add", a=1, b=2) + "<end>", "so 3<end>"],
        ["assistant: hm", "tool: 3", "tool: 8", "assistant: so 3"],
        2,
        0,
    ),
    "a tool that fails": (
        [call("fail") + "<end>", "oh<end>"],
        ["assistant: ", "tool: {'error': 'it broke'}", "assistant: oh"],
        1,
        1,
    ),
    "a tool that does not exist": (
        [call("nothing") + "<end>", "oh<end>"],
        ["assistant: ", "tool: {'error': 'Tool nothing not found.'}", "assistant: oh"],
        1,
        1,
    ),
    "arguments that a tool does not take": (
        [call("double", z=1) + "<end>", "oh<end>"],
        ["assistant: ", "tool: {'error': \"double() got an unexpected keyword argument 'z'\"}", "assistant: oh"],
        1,
        1,
    ),
    "a call that is no JSON": (['<call>{"name": </call><end>'], ['assistant: {"name": '], 0, 0),
    "an answer without a call": (["fine<end>"], ["assistant: fine"], 0, 0),
    "three turns": (
        [call("add", a=1, b=2) + "<end>", call("add", a=3, b=4) + "<end>", "7<end>"],
        ["assistant: ", "tool: 3", "assistant: ", "tool: 7", "assistant: 7"],
        2,
        0,
    ),
}
"""Answers, the messages of a rollout, and its numbers of calls and failures."""


@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize("name", ROUND)
def test_calls_of_tools(name: str, cls: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    turns, messages, num_calls, num_failures = ROUND[name]
    rollouts = Rollouts(
        cls, monkeypatch, tmp_path, script_of(TOKENIZER, lambda prompt: turns), tools=[add, double, fail]
    )
    rollouts.trainer.train()
    assert rollouts.texts() == [messages] * 2
    assert rollouts.logs["tools/call_frequency"] == num_calls
    assert rollouts.logs["tools/failure_frequency"] == (num_failures / num_calls if num_calls else 0)
    sampled = sum(len(TOKENIZER(turn, add_special_tokens=False).input_ids) for turn in turns)
    assert rollouts.logs["completions/mean_length"] == sampled, "tokens of tools are not counted"
    text = TOKENIZER.decode(rollouts.ids[0])
    assert text.startswith(turns[0])
    assert text.endswith(turns[-1])


CALL = call("add", a=1, b=2) + "<end>"
ANSWERS = [CALL, "three<end>"]
NUM_CALL = len(TOKENIZER(CALL).input_ids)
NUM_RESULT = len(TOKENIZER("\n<tool>3<end>\n<assistant>").input_ids)
BEGUN = ["assistant: ", "tool: 3"]
LIMITS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "no place for the result": ({"max_completion_length": NUM_CALL + NUM_RESULT - 1}, BEGUN[:1], NUM_CALL),
    "no place after it": ({"max_completion_length": NUM_CALL + NUM_RESULT}, BEGUN, NUM_CALL + NUM_RESULT),
    "place for three tokens": (
        {"max_completion_length": NUM_CALL + NUM_RESULT + 3},
        [*BEGUN, "assistant: thr"],
        NUM_CALL + NUM_RESULT + 3,
    ),
    "a call that is cut": (
        {"max_completion_length": NUM_CALL - 8},
        ['assistant: {"name": "add", "argum'],
        NUM_CALL - 8,
    ),
    "no iterations": ({"max_tool_calling_iterations": 0}, BEGUN[:1], NUM_CALL),
    "one iteration": (
        {"max_tool_calling_iterations": 1},
        [*BEGUN, "assistant: three"],
        NUM_CALL + NUM_RESULT + 6,
    ),
}
"""Arguments, the messages of a rollout, and the number of its tokens."""


@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_conversations(name: str, cls: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    settings, messages, num_tokens = LIMITS[name]
    rollouts = Rollouts(
        cls, monkeypatch, tmp_path, script_of(TOKENIZER, lambda prompt: ANSWERS), tools=[add], **settings
    )
    rollouts.trainer.train()
    (first, second), (ids, _) = rollouts.texts(), rollouts.ids
    assert first == second == messages or name == "a call that is cut" and first[0].startswith("assistant: {")
    assert len(ids) == num_tokens
    assert rollouts.logs["tools/call_frequency"] == (name not in ("a call that is cut", "no iterations"))


@pytest.mark.parametrize("cls", TRAINERS)
def test_a_result_that_the_model_cannot_read_is_left_out(
    cls: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The model has as many positions as the prompt, the call and the result have tokens."""
    prompt = "<system>add <end>\n<user>go<end>\n<assistant>"
    model = make_tool_model(TOKENIZER)
    model.config.max_position_embeddings = len(TOKENIZER(prompt).input_ids) + NUM_CALL + NUM_RESULT
    written = script_of(TOKENIZER, lambda prompt: ANSWERS)
    given = {"tools": [add], "max_completion_length": NUM_CALL + NUM_RESULT, "model": model}
    rollouts = Rollouts(cls, monkeypatch, tmp_path, written, **given)
    rollouts.trainer.train()
    assert rollouts.texts() == [BEGUN[:1]] * 2


class Counting:
    """An environment that counts."""

    def reset(self, start: int, **columns: Any) -> str:
        self.count = start
        return f" from {start}"

    def count_up(self, by: int) -> int:
        """
        Counts up.

        Args:
            by: How far.

        Returns:
            The count.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self) -> None:
        raise AssertionError


class Silent:
    """An environment without an observation and without a reward of its own."""

    def reset(self, **columns: Any) -> None:
        self.said: list[int] = []

    async def say(self, number: int) -> str:
        """
        Says a number.

        Args:
            number: The number.

        Returns:
            What was said so far.
        """
        self.said.append(number)
        return str(self.said)


@pytest.mark.parametrize("cls", TRAINERS)
def test_environments_are_of_one_rollout_each(cls: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Methods are tools, `reset` completes the prompt and sees the columns, `get_reward` is a reward."""

    def turns(prompt: str) -> list[str]:
        assert "count_up" in prompt
        assert "_hidden" not in prompt
        by = 2 if "from 5" in prompt else 3
        return [call("count_up", by=by) + "<end>", call("count_up", by=by) + "<end>", "ok<end>"]

    rollouts = Rollouts(
        cls,
        monkeypatch,
        tmp_path,
        script_of(TOKENIZER, turns),
        prompts=("go", "go"),
        columns={"start": [5, 9]},
        environment_factory=Counting,
        per_device_train_batch_size=4,
    )
    rollouts.trainer.train()
    expected = [f"{BEGUN[0]}|tool: {a}|{BEGUN[0]}|tool: {b}|assistant: ok" for a, b in [(7, 9), (12, 15)]]
    assert Counter("|".join(messages) for messages in rollouts.texts()) == Counter(expected * 2)
    assert rollouts.logs["rewards/Counting/mean"] == 12


@pytest.mark.parametrize("cls", TRAINERS)
def test_examples_choose_their_environments(cls: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def turns(prompt: str) -> list[str]:
        name = "say" if "say" in prompt else "count_up"
        other = "count_up" if name == "say" else "say"
        argument = {"number": 4} if name == "say" else {"by": 4}
        return [call(name, **argument) + call(other) + "<end>", "ok<end>"]

    rollouts = Rollouts(
        cls,
        monkeypatch,
        tmp_path,
        script_of(TOKENIZER, turns),
        prompts=("go", "go"),
        columns={"start": [1, 1], "environment": ["loud", "counter"]},
        environment_factory={"loud": Silent, "counter": Counting},
        per_device_train_batch_size=4,
    )
    rollouts.trainer.train()
    missing = "tool: {'error': 'Tool %s not found.'}"
    loud = ["assistant: ", missing % "count_up", "tool: [4]", "assistant: ok"]
    counter = ["assistant: ", "tool: 5", missing % "say", "assistant: ok"]
    assert sorted(map(str, rollouts.texts())) == sorted(map(str, [loud, loud, counter, counter]))


@pytest.mark.parametrize("cls", TRAINERS)
def test_templates_without_tools_raise(cls: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("tool_tokenizer.TEMPLATE", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="does not support tool calling"):
        Rollouts(cls, monkeypatch, tmp_path, script_of(TOKENIZER, lambda prompt: ANSWERS), tools=[add])


def test_images_of_tools_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def draw() -> list[dict[str, Any]]:
        """
        Draws.

        Returns:
            An image.
        """
        return [{"type": "image", "image": None}]

    written = script_of(TOKENIZER, lambda prompt: [call("draw") + "<end>"])
    rollouts = Rollouts(SharedPrefixGRPOTrainer, monkeypatch, tmp_path, written, tools=[draw])
    with pytest.raises(ValueError, match="tool draw returned an image"):
        rollouts.trainer.train()


# Rollouts that differ


START, CALL_MARK, END = (TOKENIZER.convert_tokens_to_ids(mark) for mark in ("<assistant>", "<call>", "<end>"))
LETTERS = TOKENIZER("abcd").input_ids
DIGITS = TOKENIZER("0123456789").input_ids
SKELETON = TOKENIZER(call("add", a=0, b=0) + "<end>").input_ids


def two_calls(ids: list[int]) -> list[int]:
    """Return the tokens that may follow: two answers are letters and a call with any digits, a third is letters."""
    begin = len(ids) - ids[::-1].index(START)
    answer = ids[begin:]
    if CALL_MARK in answer:
        token = SKELETON[len(answer) - answer.index(CALL_MARK)]
        return DIGITS if token in DIGITS else [token]
    last = END if ids.count(START) == 3 else CALL_MARK
    return [*LETTERS, last] if len(answer) < 12 else [last]


PROMPTS = ["what is it", "tell me all of what you know about numbers", "go", "add some of them, please"]


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Rollouts:
    """Eight conversations of three turns for each of four prompts, in float64."""
    return Rollouts(
        SharedPrefixGRPOTrainer,
        monkeypatch,
        tmp_path,
        Written(two_calls),
        prompts=PROMPTS,
        model=make_tool_model(TOKENIZER).double(),
        tools=[add],
        per_device_train_batch_size=32,
        num_generations=8,
        temperature=0.9,
    )


def rows_of(inputs: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    """Return the prompt, completion and mask of sampled tokens of each row of a batch."""
    rows = []
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    for prompt, seen, completion, is_token, sampled in zip(*(inputs[name] for name in names), strict=True):
        kept = is_token.bool()
        rows.append((prompt[seen.bool()].tolist(), completion[kept].tolist(), sampled[kept].tolist()))
    return rows


def test_tokens_are_those_that_were_sampled(crowd: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is between them is what the template writes for the tool, computed once from whole conversations."""
    handles: list[tuple[list[int], Any]] = []
    prepare = Engine.prepare

    def recorded(engine: Engine, prompt: list[int], *arguments: Any, **settings: Any) -> Any:
        request = prepare(engine, prompt, *arguments, **settings)
        handles.append((prompt, request.handle))
        return request

    monkeypatch.setattr(Engine, "prepare", recorded)
    rows = rows_of(first_batch(crowd.trainer))
    assert len({len(completion) for _, completion, _ in rows}) > 8
    turns = Counter((*prompt, *handle.row_tokens(0)) for prompt, handle in handles)
    assert turns.total() == 32 * 3
    for prompt, completion, mask in rows:
        ends = [index + 1 for index in range(len(mask)) if mask[index] and not (*mask, 0)[index + 1]]
        assert len(ends) == 3
        for end in ends:
            turns.subtract([(*prompt, *completion[:end])])
        text = TOKENIZER.decode(completion)
        for index in range(2):
            a, b = (int(text.split(f'"{name}": ')[index + 1][0]) for name in "ab")
            suffix = TOKENIZER(f"\n<tool>{a + b}<end>\n<assistant>").input_ids
            begin = ends[index]
            assert completion[begin : begin + len(suffix)] == suffix
            assert mask[begin : begin + len(suffix)] == [0] * len(suffix)
            assert mask[begin + len(suffix)]
    assert not any(turns.values())


def test_loss_and_gradients_are_those_of_separate_rows(crowd: Rollouts) -> None:
    """Tokens of tools have no part in the loss."""
    inputs = first_batch(crowd.trainer)
    model = crowd.trainer.model
    loss = crowd.trainer.compute_loss(model, inputs)
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    terms = []
    for (prompt, completion, mask), advantage in zip(rows_of(inputs), inputs["advantages"], strict=True):
        ids = torch.tensor([prompt + completion])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.9
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        log_probs = log_probs[torch.tensor(mask).bool()]
        terms.append((log_probs - log_probs.detach()).exp() * -advantage)
    expected = torch.cat(terms).mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        scale = float(parameter.grad.abs().max())  # norms round to float32
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-6 * scale)
    assert any(gradient.abs().max() > 1e-3 for gradient in found)


def count_tokens(model: Any) -> list[int]:
    """Return a list that grows by the number of tokens of each forward pass."""
    counts: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: counts.append(args[0].numel()))
    return counts


def test_a_turn_computes_only_what_is_new(crowd: Rollouts, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Each token of the tree once; TRL computes all of a conversation in each of its turns."""
    counts = count_tokens(crowd.trainer.model)
    rows = rows_of(first_batch(crowd.trainer))
    prompts = {tuple(prompt) for prompt, _, _ in rows}
    new = sum(map(len, prompts)) + sum(len(completion) - 1 for _, completion, _ in rows)
    computed = sum(counts)
    assert computed <= 1.01 * new + 64, "and the tokens by which the engine measures their size"

    monkeypatch.undo()
    expected = {tuple(prompt): [] for prompt in prompts}
    for prompt, completion, _ in rows:
        expected[tuple(prompt)].append(prompt + completion)
    forced: list[list[int]] = []

    def follow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, float("-inf"))
        for row, ids in enumerate(input_ids.tolist()):
            begin = next(index for index, token in enumerate(ids) if token)
            token = (*forced[row], *[0] * 300)[len(ids) - begin]
            only[row, token] = 0.0
        return only

    replayed = Rollouts(
        trl.GRPOTrainer,
        monkeypatch,
        tmp_path,
        follow,  # type: ignore[arg-type]
        prompts=PROMPTS,
        model=make_tool_model(TOKENIZER).double(),
        tools=[add],
        per_device_train_batch_size=32,
        num_generations=8,
    )
    generate = replayed.trainer._generate_single_turn

    def turn(prompt_ids: list[list[int]], *arguments: Any, **named: Any) -> Any:
        left = [ids for of_prompt in expected.values() for ids in of_prompt]
        forced.clear()
        for prompt in prompt_ids:
            (index, ids) = next((i, ids) for i, ids in enumerate(left) if ids[: len(prompt)] == prompt)
            forced.append(left.pop(index))
        return generate(prompt_ids, *arguments, **named)

    monkeypatch.setattr(replayed.trainer, "_generate_single_turn", turn)
    counts = count_tokens(replayed.trainer.model)
    same = rows_of(first_batch(replayed.trainer))
    assert Counter(str(row) for row in same) == Counter(str(row) for row in rows)
    assert sum(counts) > 2.5 * computed


def test_conversations_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """One waits in its tool until the other has ended its third turn but one."""
    has_gone = asyncio.Event()

    async def wait() -> str:
        """
        Waits.

        Returns:
            What happened.
        """
        await asyncio.wait_for(has_gone.wait(), 60)
        return "over"

    async def go(step: int) -> str:
        """
        Goes.

        Args:
            step: The step.

        Returns:
            What happened.
        """
        if step == 3:
            has_gone.set()
        return "went"

    def turns(prompt: str) -> list[str]:
        if "slow" in prompt:
            return [call("wait") + "<end>", "a<end>"]
        return [*(call("go", step=step) + "<end>" for step in (1, 2, 3)), "b<end>"]

    given = {"prompts": ("slow", "fast"), "tools": [wait, go], "per_device_train_batch_size": 4}
    rollouts = Rollouts(SharedPrefixGRPOTrainer, monkeypatch, tmp_path, script_of(TOKENIZER, turns), **given)
    rollouts.trainer.train()
    assert Counter(messages[-1] for messages in rollouts.texts()) == {"assistant: a": 2, "assistant: b": 2}
    assert ["assistant: ", "tool: over", "assistant: a"] in rollouts.texts()


def test_first_ratios_of_conversations_are_exactly_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A turn that continues a row has the bits of the trainer's pass over the tree."""
    number = iter(range(10**6))

    def answer(tokenizer: Any, ids: list[int], **given: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": next(number) % 7, "b": 1}}}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    monkeypatch.setattr("hf_parallel.training.conversations.parse_response", answer)
    settings = {"max_tool_calling_iterations": 2, "num_iterations": 2, "max_steps": 2, "top_k": 40, "temperature": 0.8}
    rollouts = Rollouts(
        SharedPrefixGRPOTrainer,
        monkeypatch,
        tmp_path,
        Written(lambda ids: None),
        prompts=PROMPTS,
        tools=[add],
        sampled_log_probs=True,
        per_device_train_batch_size=8,
        generation_kwargs={**SHARED, "eos_token_id": [END, *LETTERS, *DIGITS]},
        **settings,
    )
    trainer = rollouts.trainer
    passes: list[torch.Tensor] = []
    compute = trainer._get_per_token_logps_and_entropies

    def recorded(*arguments: Any, **named: Any) -> Any:
        result = compute(*arguments, **named)
        passes.append(result[0].detach())
        return result

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", recorded)
    inputs = first_batch(trainer)
    assert not passes or not passes[0].any(), "no pass computes old log-probabilities"
    passes.clear()
    trainer.compute_loss(trainer.model, inputs)
    sampled = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    ratios = torch.exp(passes[0] - inputs["old_per_token_logps"])[sampled]
    assert len(ratios) > 100
    assert (sampled.sum(1) < inputs["completion_mask"].sum(1)).all()
    assert (ratios == 1).all()
    assert (passes[0][~sampled] == 0).all()
