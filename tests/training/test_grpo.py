"""TRL's trainers with shared prefixes: steps equal those of TRL; log-probabilities of runs of all modes."""

from __future__ import annotations

import copy
import gc
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from grpo_trainers import first_batch, grpo_arguments
from tiny_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM

import hf_parallel
from hf_parallel.training import teacher_forced_logits

trl, peft, datasets = (pytest.importorskip(name) for name in ("trl", "peft", "datasets"))

from hf_parallel.training import SharedPrefixGRPOTrainer, make_rollout_func  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

SHARED = {"generation_mode": "shared_prefix"}
PROMPTS = ["say it now", "please", "say more, and then more"]
ENDS = [tiny.EOS, *range(100, 116)]
"""End-of-sequence tokens, words of the tokenizer: so many that completions have different lengths."""


@pytest.fixture(scope="module", autouse=True)
def fast_collection() -> Iterator[None]:
    """Exclude what has been imported from garbage collection, which each training runs."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model, from which a trainer loads its reference model."""
    folder = tmp_path_factory.mktemp("model")
    model = copy.deepcopy(tiny.build("llama"))
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    return folder


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def make_trainer(cls: Any, checkpoint: Path, *, enable: bool = True, config: Any = trl.GRPOConfig, **given: Any) -> Any:
    """Return a trainer of the tiny model; `given` are arguments of the trainer or its config."""
    model = given.pop("model", None) or AutoModelForCausalLM.from_pretrained(checkpoint)
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 3}
    return cls(
        model=hf_parallel.enable(model) if enable else model,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 2}),
        processing_class=make_tokenizer(),
        **{"reward_funcs": reward, **grpo_arguments(checkpoint, config, **settings | given)},
    )


def steps(trainer: Any) -> list[dict[str, float]]:
    """Train; return what is logged for each step."""
    trainer.train()
    return [logs for logs in trainer.state.log_history if "loss" in logs]


LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
SETTINGS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "rollouts shared": {"generation_kwargs": SHARED},
    "several iterations": {
        "num_iterations": 2,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
        "generation_kwargs": SHARED,
    },
    "reference model": {"beta": 0.1, "gradient_checkpointing": True},
    "micro-batches without targets": {
        "mask_truncated_completions": True,
        "max_completion_length": 4,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "generation_kwargs": {**SHARED, "top_k": 5}},
    "LoRA": {"peft_config": LORA, "beta": 0.1, "generation_kwargs": SHARED},
    "entropy bonus": {"entropy_coef": 0.5},
}
QUICK = ("one micro-batch", "several iterations", "LoRA", "entropy bonus")
COMPARED = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length", "kl")


def assert_equal_steps(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == 3
    for step, other in zip(found, expected, strict=True):
        for name in set(COMPARED) & set(other):
            assert step[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS])
def test_steps_equal_those_of_trl(name: str, checkpoint: Path) -> None:
    settings = SETTINGS[name]
    expected = steps(make_trainer(trl.GRPOTrainer, checkpoint, **settings))
    found = steps(make_trainer(SharedPrefixGRPOTrainer, checkpoint, **settings))
    assert_equal_steps(found, expected)
    assert expected[0]["completions/min_length"] < expected[0]["completions/max_length"]


def test_several_prompts_of_a_micro_batch_are_rows_and_each_is_computed_once(checkpoint: Path) -> None:
    trainer = make_trainer(SharedPrefixGRPOTrainer, checkpoint)
    given: list[torch.Tensor] = []
    trainer.model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: given.append(args[0]) if args[0].shape[1] > 1 else None
    )
    inputs = first_batch(trainer)
    given.clear()
    trainer.compute_loss(trainer.model, inputs)
    (ids,) = given
    lengths = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist()
    assert len(ids) == 2 < len(lengths) == 8
    assert ids.shape[1] < sum(lengths) / 2


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("gemma2", 0.0), ("llama", 0.1)],
    ids=["soft-capping", "attention dropout"],
)
def test_losses_leave_an_enabled_model_its_own_attention(name: str, dropout: float, checkpoint: Path) -> None:
    """It generates between the losses without a mode."""
    model = copy.deepcopy(tiny.build(name))
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    model.config.attention_dropout = dropout
    trainer = make_trainer(SharedPrefixGRPOTrainer, checkpoint, model=model, max_steps=2)
    before = model.config._attn_implementation
    assert len(steps(trainer)) == 2
    assert model.config._attn_implementation == before


CALLS = {"call": ["[", "]"], "separator": "|", "joined": "{text}.", "around": ["<", ">"], "keeps_call": False}
RUNS: dict[str, dict[str, Any]] = {
    "hogwild": {"num_workers": 2, "collaboration_prompt": "{names}", "finisher_tokens": 0},
    "pdos": {"format_prompt": "Go", "opening": "", "titles": ["a", "b"], "branch_max_new_tokens": 5},
    "fork_join": {"dialect": {"region": ["[", "]"], "branch": ["(", ")"]}, "opening": "[", "path_max_new_tokens": 5},
    "calls": {"dialect": CALLS, "opening": "So [a|bc]", "path_max_new_tokens": 5},
}
"""Settings of a mode, or of `fork_join` with paths that return text."""


def rollouts(mode: str, checkpoint: Path, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Return a trainer whose completions are runs, and the first batch of its loss."""
    trainer = make_trainer(
        SharedPrefixGRPOTrainer,
        checkpoint,
        rollout_func=make_rollout_func("fork_join" if mode == "calls" else mode, **RUNS[mode]),
        **{"max_completion_length": 60, "num_generations": 2, "per_device_train_batch_size": 4, **given},
    )
    return trainer, first_batch(trainer)


@pytest.mark.parametrize("mode", RUNS)
def test_gradients_of_runs_are_those_of_their_layouts(mode: str, checkpoint: Path) -> None:
    trainer, inputs = rollouts(mode, checkpoint, temperature=0.8)
    examples = inputs["parallel_examples"]
    assert len({tuple(example.target_ids.tolist()) for example in examples}) == 4, "the runs of a prompt differ"
    assert all(len(set(example.target_rows.tolist())) >= 2 for example in examples)
    model = trainer.model
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    terms = []
    for row, (example, advantage) in enumerate(zip(examples, inputs["advantages"], strict=True)):
        logits = teacher_forced_logits(model, example)[torch.from_numpy(example.target_queries)] / 0.8
        log_probs = logits.log_softmax(-1).gather(1, torch.from_numpy(example.target_ids)[:, None])[:, 0]
        sampled = inputs["sampling_per_token_logps"][row, : len(log_probs)]
        torch.testing.assert_close(log_probs, sampled, rtol=0, atol=1e-4)
        terms.append((log_probs - log_probs.detach()).exp() * -advantage)
    expected = torch.cat(terms).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    expected.backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", RUNS)
def test_rewards_know_the_passes_of_each_run(mode: str, checkpoint: Path) -> None:
    columns: list[dict[str, Any]] = []

    def record(completions: list[str], **given: Any) -> list[float]:
        columns.append(given)
        return reward(completions)

    _, inputs = rollouts(mode, checkpoint, reward_funcs=record)
    (given,) = columns
    assert len(set(given["passes"])) > 1
    for passes, ids in zip(given["passes"], given["completion_ids"], strict=True):
        (example,) = (e for e in inputs["parallel_examples"] if e.target_ids.tolist() == ids)
        longest = max(Counter(example.target_rows.tolist()).values())  # a row samples a token per pass
        if mode == "hogwild":
            assert passes == longest
        assert longest <= passes <= len(ids)


@pytest.mark.slow
def test_answers_with_forks_train(checkpoint: Path) -> None:
    trainer, _ = rollouts("fork_join", checkpoint, max_completion_length=30)
    for step in steps(trainer):
        assert 0 < step["grad_norm"] < 1e3


def first_ratios(trainer: Any) -> torch.Tensor:
    """Train, and return the importance ratios of all tokens in the first loss over each generation batch."""
    compute = trainer._compute_loss
    ratios: list[torch.Tensor] = []

    def compute_loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), dim=1)
        mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), dim=1)
        trainer._examples = inputs.get("parallel_examples")
        num_tokens = inputs["completion_ids"].shape[1]
        log_probs, *_ = trainer._get_per_token_logps_and_entropies(model, ids, mask, num_tokens)
        ratio = torch.exp(log_probs - inputs["old_per_token_logps"])
        ratios.append(ratio[inputs["completion_mask"].bool()].detach())
        return compute(model, inputs)  # type: ignore[no-any-return]

    trainer._compute_loss = compute_loss
    trainer.train()
    return torch.cat(ratios)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_first_ratios_are_exactly_one(checkpointing: bool, checkpoint: Path) -> None:
    """With truncated distributions and temperature, too; PyTorch's own kernels have other last bits."""
    settings = {"max_steps": 4, "max_completion_length": 24, "generation_kwargs": SHARED}
    settings |= {"gradient_checkpointing": checkpointing, "top_p": 0.9, "top_k": 50, "temperature": 0.7}
    ratios = first_ratios(make_trainer(SharedPrefixGRPOTrainer, checkpoint, sampled_log_probs=True, **settings))
    assert len(ratios) > 150
    assert (ratios == 1).all()


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}], ids=str)
def test_ratios_by_other_kernels_are_not_one(
    truncation: dict[str, int], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But close to it, as on a GPU: the loss is under the distribution that was sampled there, too."""
    monkeypatch.setattr("hf_parallel.training.grpo.computes_exactly", lambda model: False)
    settings = {"max_steps": 2, "max_completion_length": 24, "generation_kwargs": SHARED, **truncation}
    ratios = first_ratios(make_trainer(SharedPrefixGRPOTrainer, checkpoint, sampled_log_probs=True, **settings))
    assert not (ratios == 1).all()
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=1e-3, atol=0)


@pytest.mark.parametrize("mode", RUNS)
def test_first_ratios_of_runs(mode: str, checkpoint: Path) -> None:
    """Exactly one, but where rows see blocks of others at other positions: workers, and rows after a join."""
    trainer, _ = rollouts(mode, checkpoint, sampled_log_probs=True, max_steps=2)
    ratios = first_ratios(trainer)
    if mode in ("hogwild", "fork_join"):
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=1e-4, atol=0)
    else:
        assert (ratios == 1).all()


def test_the_pass_for_old_log_probs_is_skipped(checkpoint: Path) -> None:
    """Two updates per generation, for which TRL computes old log-probabilities."""
    passes = {}
    for sampled in (False, True):
        settings = {"max_steps": 2, "num_iterations": 2, "generation_kwargs": SHARED}
        trainer = make_trainer(SharedPrefixGRPOTrainer, checkpoint, sampled_log_probs=sampled, **settings)
        calls: list[object] = []
        layout = trainer._layout

        def counted(*args: Any, layout: Any = layout, calls: list[object] = calls) -> Any:
            calls.append(args)
            return layout(*args)

        trainer._layout = counted
        trainer.train()
        passes[sampled] = len(calls)
    assert passes == {False: 3, True: 2}


def test_sampled_log_probs_need_a_mode_and_a_distribution_that_the_loss_knows(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="needs a mode of this package"):
        make_trainer(SharedPrefixGRPOTrainer, checkpoint, sampled_log_probs=True)
    for settings, message in (
        ({"generation_kwargs": SHARED, "repetition_penalty": 1.2}, "repetition_penalty=1.0, got 1.2"),
        ({"generation_kwargs": {**SHARED, "min_new_tokens": 4}}, "min_new_tokens=0, got 4"),
        ({"generation_kwargs": {**SHARED, "temperature": 0.5}}, "temperature=1.0, got 0.5"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_trainer(SharedPrefixGRPOTrainer, checkpoint, sampled_log_probs=True, **settings)


def test_first_ratios_are_one_under_settings_of_the_model_s_own_config(checkpoint: Path) -> None:
    """Which `generate` merges with those of the trainer."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.generation_config.min_p = 0.1
    settings = {"max_steps": 2, "generation_kwargs": {**SHARED, "suppress_tokens": list(range(40, 60))}}
    trainer = make_trainer(SharedPrefixGRPOTrainer, checkpoint, model=model, sampled_log_probs=True, **settings)
    assert (first_ratios(trainer) == 1).all()


def test_trainers_that_cannot_compute_runs_raise(checkpoint: Path) -> None:
    ours, func = SharedPrefixGRPOTrainer, make_rollout_func("hogwild", **RUNS["hogwild"])
    for cls, settings, message in (
        (trl.GRPOTrainer, {"rollout_func": func}, "runs of hogwild need a SharedPrefixGRPOTrainer"),
        (ours, {"rollout_func": func, "enable": False}, "call hf_parallel.enable(model) first"),
        (ours, {"generation_kwargs": SHARED, "enable": False}, "call hf_parallel.enable(model) first"),
        (ours, {"generation_kwargs": {"generation_mode": "hogwild"}}, "make_rollout_func('hogwild')"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_trainer(cls, checkpoint, **settings).train()


def test_a_copy_of_a_trained_model_raises_instead_of_computing_the_original(checkpoint: Path) -> None:
    trainer = make_trainer(SharedPrefixGRPOTrainer, checkpoint, generation_kwargs=SHARED)
    ids = torch.tensor([[5, 6, 7]])
    assert trainer.model.generate(ids, **SHARED, max_new_tokens=2).shape[1] > 3
    with pytest.raises(ValueError, match="this model is a copy"):
        copy.deepcopy(trainer.model).generate(ids, **SHARED, max_new_tokens=2)


def test_a_model_given_by_name_is_enabled_for_rollouts(checkpoint: Path) -> None:
    func = make_rollout_func("hogwild", **RUNS["hogwild"])
    for settings in ({"generation_kwargs": SHARED}, {"rollout_func": func}, {}):
        trainer = make_trainer(SharedPrefixGRPOTrainer, checkpoint, model=str(checkpoint), enable=False, **settings)
        assert hf_parallel.is_enabled(trainer.model) == bool(settings)
