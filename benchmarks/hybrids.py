"""Completions of one long prompt on a model whose layers keep states: the shape of Qwen3.5, with random weights.

The bound is the same batch over a prompt of 4 tokens. Transformers cannot repeat a hybrid's cache for more rows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import hf_parallel

from .report import run_benchmark, set_up
from .shared_prefix import TARGETS, SharedPrefixBenchmark

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "vocab_size": 49152,
}
"""100 million parameters. Three of four layers have linear attention, with heads of 128 dimensions."""
TOY = SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 300}


def qwen3_5(sizes: dict[str, Any]) -> Any:
    """Return a random model in evaluation mode, without EOS token, so that all rows have the maximum length."""
    torch.manual_seed(0)
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **ends, tie_word_embeddings=True)).eval()


def load(options: Any) -> tuple[Any, Any]:
    """Return the model of the options, or a random one."""
    if options.model:
        return set_up(options)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    model = hf_parallel.enable(qwen3_5(TOY if options.quick else SIZES))
    options.model = f"random Qwen3.5 of {model.num_parameters() / 1e6:.0f} million parameters"
    return model, None


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        sizes = (48, 3, 4, 1) if options.quick else (2048, 16, 16, options.rounds)
        benchmark = replace(SharedPrefixBenchmark(*sizes), generate_batch=False, prefilled_cache=False)
        return benchmark.run(model, torch.randint(1, model.config.vocab_size, (1, benchmark.prompt)))

    return run_benchmark("hybrids", __doc__, measure, TARGETS, load, rounds=5)


if __name__ == "__main__":
    sys.exit(main())
