"""Runs of agents as rollouts: tokens are those that were sampled, and the loss is that of all requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grpo_trainers import first_batch, grpo_arguments
from tool_tokenizer import make_tool_model, make_tool_tokenizer

import hf_parallel
from hf_parallel.agents import AgentError, Chat, agent, gather, next, spawn

trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))

from hf_parallel.training import SharedPrefixGRPOTrainer, make_agent_rollout_func  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

TOKENIZER = make_tool_tokenizer()
REWRITES = TOKENIZER.chat_template.replace("m.content", "(m.content | upper if m.role == 'assistant' else m.content)")
"""A template that rewrites answers, as those that drop thinking."""
TEXT_ONLY = {"generation_mode": "shared_prefix", "suppress_tokens": [*range(8)]}
"""So that answers have no tokens that their text leaves out."""


@agent
async def helper(question: str) -> str:
    chat = Chat().user(question)
    return await chat.gen(max_new_tokens=5)


@agent
async def ask(prompt: list[dict[str, Any]]) -> dict[str, Any]:
    """Two drafts, a retry of one, a sub-agent, and an answer that reads all of it."""
    chat = Chat(messages=prompt)
    drafts = chat.fork(2)
    await gather(*(draft.gen(max_new_tokens=6) for draft in drafts))
    first = drafts[0]
    first.user("again")
    await first.gen(max_new_tokens=7)
    child = spawn(helper, "help: " + first.messages[-1]["content"])
    first.user(await next(child))
    texts = await first.sample(2, max_new_tokens=4)
    return {"texts": texts, "length": len(first.messages)}


def make_trainer(tmp_path: Any, template: str | None = None, run: Any = ask, **given: Any) -> tuple[Any, list[Any]]:
    """Return a trainer in float64 whose rollouts are runs of an agent, and what its reward function has received."""
    received: list[Any] = []

    def reward(completions: list[Any], values: list[Any], **columns: Any) -> list[float]:
        received.extend(values)
        return [float(len(str(completion)) % 5) for completion in completions]

    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 32,
        "generation_kwargs": {"generation_mode": "shared_prefix"},
        "reward_funcs": reward,
        "rollout_func": make_agent_rollout_func(run),
    }
    prompts = [[{"role": "user", "content": text}] for text in ("what", "why not")]
    trainer = SharedPrefixGRPOTrainer(
        model=hf_parallel.enable(given.pop("model", None) or make_tool_model(TOKENIZER).double()),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        **grpo_arguments(tmp_path, trl.GRPOConfig, **settings | given),
    )
    return trainer, received


def test_loss_and_gradients_are_those_of_all_requests(tmp_path: Any) -> None:
    """Each computed as a row of its own; in the tree, every node is computed once."""
    trainer, values = make_trainer(tmp_path)
    inputs = first_batch(trainer)
    rows = inputs["parallel_requests"]
    assert [len(row) for row in rows] == [6] * 8
    assert {value["length"] for value in values} == {5}
    model = trainer.model
    computed: list[int] = []
    handle = model.model.embed_tokens.register_forward_hook(lambda m, args, out: computed.append(args[0].numel()))
    loss = trainer.compute_loss(model, inputs)
    handle.remove()
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    terms = []
    separate = 0
    for row, ids, advantage in zip(rows, inputs["completion_ids"], inputs["advantages"], strict=True):
        assert ids.tolist()[: sum(len(r.completion) for r in row)] == [token for r in row for token in r.completion]
        for request in row:
            logits = model(input_ids=torch.tensor([request.prompt + request.completion])).logits[0]
            separate += len(logits)
            log_probs = logits[len(request.prompt) - 1 : -1].log_softmax(-1)
            chosen = log_probs.gather(1, torch.tensor(request.completion)[:, None])[:, 0]
            assert chosen.tolist() == pytest.approx(request.log_probs, abs=1e-4)
            terms.append((chosen - chosen.detach()).exp() * -advantage)
    expected = torch.cat(terms).mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-6 * float(parameter.grad.abs().max()))
    assert sum(computed) < separate / 2


@pytest.mark.parametrize("template", [None, REWRITES], ids=["kept", "rewritten"])
def test_later_requests_begin_with_the_tokens_that_were_sampled(template: str | None, tmp_path: Any) -> None:
    """Where the template rewrites an answer, the request leaves the tree there."""
    trainer, _ = make_trainer(tmp_path, template, generation_kwargs=TEXT_ONLY)
    for row in first_batch(trainer)["parallel_requests"]:
        (again,) = (r for r in row if TOKENIZER.decode(r.prompt).count("<assistant>") == 2)
        first = [r.prompt + r.completion for r in row if again.prompt[: len(r.prompt)] == r.prompt and r is not again]
        assert len(first) == 2, "the drafts"
        assert any(again.prompt[: len(ids)] == ids for ids in first) == (template is None)


def test_first_ratios_of_agents_are_exactly_one(tmp_path: Any) -> None:
    trainer, _ = make_trainer(
        tmp_path, model=make_tool_model(TOKENIZER), sampled_log_probs=True, num_iterations=2, temperature=0.8, top_k=30
    )
    inputs = first_batch(trainer)
    trainer._requests = inputs["parallel_requests"]
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    length = inputs["completion_ids"].shape[1]
    log_probs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)
    ratios = torch.exp(log_probs - inputs["old_per_token_logps"])[inputs["completion_mask"].bool()]
    assert len(ratios) > 200
    assert (ratios == 1).all()


def test_agents_train(tmp_path: Any) -> None:
    trainer, values = make_trainer(tmp_path, model=make_tool_model(TOKENIZER), max_steps=2)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert len(values) == 16
    assert any(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())


@agent
async def hot(prompt: list[dict[str, Any]]) -> str:
    return await Chat(messages=prompt).gen(temperature=2.0)


@agent
async def idle(prompt: list[dict[str, Any]]) -> str:
    return "nothing"


@pytest.mark.parametrize(("run", "message"), [(hot, "temperature=2.0 is not one of"), (idle, "without a request")])
def test_agents_that_cannot_be_trained_raise(run: Any, message: str, tmp_path: Any) -> None:
    trainer, _ = make_trainer(tmp_path, run=run)
    with pytest.raises((AgentError, ValueError), match=message):
        trainer.train()
    with pytest.raises(TypeError, match="agent must be an agent"):
        make_agent_rollout_func(len)  # type: ignore[arg-type]
