"""Measures training with shared prefixes against TRL.

Completions of one long prompt: the loss with its gradients (a tree against full rows), the rollouts, and a whole step
of GRPO. Full rows are computed in micro-batches, as all at once need more memory than most machines have.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

import hf_parallel
from hf_parallel.progress import progress_bar
from hf_parallel.training import ParallelExample, SharedPrefixGRPOTrainer
from hf_parallel.training.states import states_branched
from hf_parallel.training.tree import Targets, computing_targets, tree_batch

from .measure import generate_batch, long_prompt, timed

TARGETS = (
    ("loss_of_full_rows_by_tree", "at least", 6.0, "forward and backward pass: full rows relative to the tree"),
    ("rollouts_of_generate_by_ours", "at least", 5.0, "rollouts: generate relative to shared_prefix"),
    ("rollouts_of_continuous_batching_by_ours", "at least", 1.0, "rollouts: continuous batching relative to ours"),
    ("step_of_stock_by_ours", "at least", 4.0, "a whole step of GRPO: TRL relative to both shared"),
)
STEPS = ("both_shared", "stock")
"""Ways of a whole step."""
SIZES: dict[str, Any] = {"prompt": 1024, "completions": 16, "new_tokens": 64, "rounds": 2, "rows": 4}
"""`rows`: rows of a micro-batch of full rows, divides `completions`. Each round of the loss times the tree and one
micro-batch."""
QUICK: dict[str, Any] = {"prompt": 48, "completions": 4, "new_tokens": 4, "rows": 2, "rounds": 1}


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    ids = long_prompt(tokenizer, sizes.prompt)
    rollouts, step = rollouts_of(model, ids, sizes), {}
    for way in STEPS:
        print(f"step of GRPO, {way}")
        step[way] = grpo_step(hf_parallel.enable(copy.deepcopy(model)), tokenizer, ids, sizes, way)
    loss = loss_of(model, ids[0].tolist(), sizes)  # last, as it changes the model's forward
    ratios = {
        "loss_of_full_rows_by_tree": loss["full_rows"] / loss["tree"],
        "rollouts_of_generate_by_ours": rollouts["generate"] / rollouts["shared_prefix"],
        "step_of_stock_by_ours": step["stock"] / step["both_shared"],
    }
    if "continuous_batching" in rollouts:
        ratios["rollouts_of_continuous_batching_by_ours"] = rollouts["continuous_batching"] / rollouts["shared_prefix"]
    return {"rollouts": rollouts, "step": step, "loss": loss, "ratios": ratios}


def loss_of(model: Any, prompt: list[int], sizes: Any) -> dict[str, float]:
    """Return the seconds of forward and backward pass of all completions."""
    model.train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    completions = random_completions(model, sizes)
    tree, full_rows = [], []
    for number in progress_bar(range(sizes.rounds), what="Loss", unit="rounds"):
        some = completions[number * sizes.rows % sizes.completions :][: sizes.rows]
        tree.append(timed(partial(backward, of_tree, model, prompt, completions))[0])
        full_rows.append(timed(partial(backward, of_full_rows, model, prompt, some))[0])
    micro_batches = sizes.completions / sizes.rows
    return {"tree": statistics.median(tree), "full_rows": statistics.median(full_rows) * micro_batches}


def random_completions(model: Any, sizes: Any) -> list[list[int]]:
    """Return random completions, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    shape = sizes.completions, sizes.new_tokens
    return torch.randint(3, model.config.vocab_size, shape, generator=generator).tolist()


def rollouts_of(model: Any, ids: torch.Tensor, sizes: Any) -> dict[str, Any]:
    """Return the seconds of the completions of one prompt, each way as GRPOTrainer calls it."""
    batch = ids.repeat(sizes.completions, 1)
    sampling = {"do_sample": True, "max_new_tokens": sizes.new_tokens, "min_new_tokens": sizes.new_tokens}
    found: dict[str, Any] = {}
    for mode in ("shared_prefix", None):
        print(f"rollouts, {mode or 'generate'}")
        given = {"generation_mode": mode, "attention_mask": torch.ones_like(batch), **sampling}
        model.generate(batch[:, -2:], generation_mode=mode, max_new_tokens=2)  # loads what the first call loads
        found[mode or "generate"] = timed(partial(model.generate, batch, **given))[0]
    print("rollouts, continuous batching")
    try:
        batching = partial(generate_batch, model, batch.tolist(), sizes.new_tokens, do_sample=True)
        found["continuous_batching"] = timed(batching)[0]
    except Exception as error:  # an error is reported as a result
        found["error_of_continuous_batching"] = f"{type(error).__name__}: {error}"
    return found


def lengths(completions: list[str], **columns: Any) -> list[float | None]:
    """Return the reward of each completion."""
    return [float(len(text)) for text in completions]


def grpo_step(model: Any, tokenizer: Any, ids: torch.Tensor, sizes: Any, way: str, steps: int = 1) -> float:
    """Return the seconds of the last of some steps of GRPO, which change the model: rollouts, loss, optimizer."""
    shared = way == "both_shared"
    rows = sizes.completions if shared else sizes.rows
    trainer = (SharedPrefixGRPOTrainer if shared else GRPOTrainer)(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lengths,
        train_dataset=Dataset.from_dict({"prompt": [tokenizer.decode(ids[0])] * steps}),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            num_generations=sizes.completions,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=sizes.completions // rows,
            max_completion_length=sizes.new_tokens,
            gradient_checkpointing=False,
            generation_kwargs={"min_new_tokens": sizes.new_tokens}
            | ({"generation_mode": "shared_prefix"} if shared else {}),
            bf16=False,
            use_cpu=model.device.type == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    return [logs["step_time"] for logs in trainer.state.log_history if "step_time" in logs][-1]


def backward(way: Callable[..., torch.Tensor], *given: Any) -> None:
    """Compute log-probabilities and their gradients."""
    way(*given).sum().backward()


def of_tree(model: Any, prompt: list[int], completions: list[list[int]]) -> torch.Tensor:
    """Compute a tree as `SharedPrefixGRPOTrainer` does, with TRL's head."""
    tree = ParallelExample.from_tree([prompt] * len(completions), completions)
    batch = tree_batch([tree], model.config, model.dtype, model.device)
    targets = Targets(0, tree.target_queries.tolist(), tree.target_ids.tolist())
    with states_branched(model, [tree]), computing_targets(model, [targets]):
        return model(**batch, shift_labels=torch.tensor([targets.ids]), fused_lm_head=True).log_probs


def of_full_rows(model: Any, prompt: list[int], completions: list[list[int]]) -> torch.Tensor:
    """Compute rows of prompt and completion as TRL does."""
    ids = torch.tensor([[*prompt, *completion] for completion in completions])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    mask = torch.ones_like(ids)
    return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
