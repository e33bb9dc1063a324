"""Measures training with shared prefixes against TRL: `python -m benchmarks.training --help`.

Completions of one long prompt: the loss with its gradients (a tree against full rows), its peak memory, the rollouts,
and a whole step of GRPO. Full rows are computed in micro-batches, as all at once need more memory than most machines
have. For the memory, each way runs in a process of its own, and the memory of all full rows is extrapolated from
smaller batches.
"""

from __future__ import annotations

import copy
import multiprocessing
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

import hf_parallel
from hf_parallel.models.loading import load_model
from hf_parallel.training import ParallelExample, SharedPrefixGRPOTrainer
from hf_parallel.training.states import states_branched
from hf_parallel.training.tree import Targets, computing_targets, tree_batch

from .continuous_batching import generate_batch
from .measure import long_prompt
from .report import run_benchmark
from .rounds import timed

TARGETS = (
    ("loss_of_full_rows_by_tree", "at least", 6.0, "forward and backward pass: full rows relative to the tree"),
    ("memory_of_tree_by_full_rows", "at most", 0.25, "its peak memory: the tree relative to full rows"),
    ("rollouts_of_generate_by_ours", "at least", 5.0, "rollouts: generate relative to shared_prefix"),
    ("rollouts_of_continuous_batching_by_ours", "at least", 1.0, "rollouts: continuous batching relative to ours"),
    ("step_of_stock_by_ours", "at least", 4.0, "a whole step of GRPO: TRL relative to both shared"),
)
"""Ratio, direction, limit, and description of the ratio."""


@dataclass(frozen=True)
class TrainingBenchmark:
    """Settings and run.

    Parameters
    ----------
    prompt, completions, new_tokens : int
    rows : int
        Rows of a micro-batch of full rows. Divides `completions`.
    rounds : int
        Rounds of the loss. Each times the tree and one micro-batch.
    memory_rows : tuple of int
        Batch sizes of full rows whose peak memory is measured.
    """

    prompt: int = 1024
    completions: int = 16
    new_tokens: int = 64
    rows: int = 4
    rounds: int = 2
    memory_rows: tuple[int, ...] = (1, 2, 4)

    def run(self, model: Any, tokenizer: Any, in_process: Callable[..., Any]) -> dict[str, Any]:
        """Return the entries of the report. `in_process` calls `peak_memory` for this model in a new process."""
        ids = long_prompt(tokenizer, self.prompt)
        report: dict[str, Any] = {"settings": asdict(self), "memory": self._memory(in_process)}
        report["rollouts"] = self._rollouts(model, ids)
        report["step"] = self._steps(model, tokenizer, ids)
        report["loss"] = self._loss(model, ids[0].tolist())  # last, as it changes the model's forward
        loss, memory, rollouts = report["loss"], report["memory"], report["rollouts"]
        report["ratios"] = {
            "loss_of_full_rows_by_tree": loss["full_rows"] / loss["tree"],
            "memory_of_tree_by_full_rows": memory["tree"] / memory["full_rows"],
            "rollouts_of_generate_by_ours": rollouts["generate"] / rollouts["shared_prefix"],
            "step_of_stock_by_ours": report["step"]["stock"] / report["step"]["both_shared"],
        }
        if "continuous_batching" in rollouts:
            ratio = rollouts["continuous_batching"] / rollouts["shared_prefix"]
            report["ratios"]["rollouts_of_continuous_batching_by_ours"] = ratio
        return report

    def _loss(self, model: Any, prompt: list[int]) -> dict[str, float]:
        """Return the seconds of forward and backward pass of all completions."""
        model.train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        completions = self.random_completions(model)
        tree, full_rows = [], []
        for number in range(self.rounds):
            print(f"loss, round {number + 1} of {self.rounds}")
            some = completions[number * self.rows % self.completions :][: self.rows]
            tree.append(timed(partial(backward, of_tree, model, prompt, completions))[0])
            full_rows.append(timed(partial(backward, of_full_rows, model, prompt, some))[0])
        micro_batches = self.completions / self.rows
        return {"tree": statistics.median(tree), "full_rows": statistics.median(full_rows) * micro_batches}

    def random_completions(self, model: Any) -> list[list[int]]:
        """Return random completions, the same at each call."""
        shape = self.completions, self.new_tokens
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, model.config.vocab_size, shape, generator=generator).tolist()

    def _memory(self, in_process: Callable[..., Any]) -> dict[str, Any]:
        """Return the bytes that forward and backward pass need beyond the weights."""
        print("peak memory of the tree")
        found: dict[str, Any] = {"tree": in_process("tree", self.completions)}
        for rows in self.memory_rows:
            print(f"peak memory of full rows, {rows} at once")
            found[f"{rows}_full_rows"] = in_process("full_rows", rows)
        measured = [float(found[f"{rows}_full_rows"]) for rows in self.memory_rows]
        slope, intercept = statistics.linear_regression(self.memory_rows, measured)
        return found | {"full_rows": intercept + slope * self.completions, "per_row": slope, "of_no_row": intercept}

    def _rollouts(self, model: Any, ids: torch.Tensor) -> dict[str, Any]:
        """Return the seconds of the completions of one prompt, each way as GRPOTrainer calls it."""
        batch = ids.repeat(self.completions, 1)
        sampling = {"do_sample": True, "max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens}
        found: dict[str, Any] = {}
        for mode in ("shared_prefix", None):
            print(f"rollouts, {mode or 'generate'}")
            given = {"generation_mode": mode, "attention_mask": torch.ones_like(batch), **sampling}
            model.generate(batch[:, -2:], generation_mode=mode, max_new_tokens=2)  # loads what the first call loads
            found[mode or "generate"] = timed(partial(model.generate, batch, **given))[0]
        print("rollouts, continuous batching")
        try:
            run = partial(generate_batch, model, batch.tolist(), self.new_tokens, do_sample=True)
            found["continuous_batching"] = timed(run)[0]
        except Exception as error:  # an error is reported as a result
            found["error_of_continuous_batching"] = f"{type(error).__name__}: {error}"
        return found

    def _steps(self, model: Any, tokenizer: Any, ids: torch.Tensor) -> dict[str, Any]:
        """Return the seconds of one step of GRPO: rollouts, loss, optimizer."""
        prompt = tokenizer.decode(ids[0])
        shared = {"generation_mode": "shared_prefix"}
        ways: dict[str, tuple[Any, int, dict[str, Any]]] = {
            "both_shared": (SharedPrefixGRPOTrainer, self.completions, shared),
            "stock": (GRPOTrainer, self.rows, {}),
        }
        found = {}
        for name, (cls, rows, generation) in ways.items():
            print(f"step of GRPO, {name}")
            trainer = cls(
                model=hf_parallel.enable(copy.deepcopy(model)),
                processing_class=tokenizer,
                reward_funcs=lambda completions, **columns: [float(len(text)) for text in completions],
                train_dataset=Dataset.from_dict({"prompt": [prompt]}),
                args=GRPOConfig(
                    output_dir=tempfile.mkdtemp(),
                    max_steps=1,
                    num_generations=self.completions,
                    per_device_train_batch_size=rows,
                    gradient_accumulation_steps=self.completions // rows,
                    max_completion_length=self.new_tokens,
                    gradient_checkpointing=False,
                    generation_kwargs={"min_new_tokens": self.new_tokens, **generation},
                    bf16=False,
                    use_cpu=True,
                    logging_steps=1,
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                ),
            )
            trainer.train()
            found[name] = next(logs["step_time"] for logs in trainer.state.log_history if "step_time" in logs)
        return found


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


def peak_memory(benchmark: TrainingBenchmark, path: str | None, threads: int, way: str, rows: int) -> int:
    """Return the bytes of the process during forward and backward pass, less those before it."""
    torch.set_num_threads(threads)
    model, tokenizer = load_model(path, torch.float32, "cpu", preset=False)
    model.train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    prompt = long_prompt(tokenizer, benchmark.prompt)[0].tolist()
    completions = benchmark.random_completions(model)[:rows]
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    seen = [before]

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    backward({"tree": of_tree, "full_rows": of_full_rows}[way], model, prompt, completions)
    done.set()
    watcher.join()
    return max(seen) - before


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        benchmark = TrainingBenchmark(rounds=options.rounds)
        if options.quick:
            benchmark = TrainingBenchmark(48, 4, 4, rows=2, rounds=1, memory_rows=(1, 2))

        def in_process(*given: Any) -> Any:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return pool.apply(peak_memory, (benchmark, options.model, torch.get_num_threads(), *given))

        return benchmark.run(model, tokenizer, in_process)

    return run_benchmark("training", __doc__, measure, TARGETS, rounds=2)


if __name__ == "__main__":
    sys.exit(main())
