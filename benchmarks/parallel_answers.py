"""Compares sequential and parallel greedy answers (PDOS, section 4; Hogwild! Inference, section 4.1).

There are two parts:

- `rotate_from_reencode`: KL(p || q) in nats for each token after a rotated block, whose branches did not attend to each
  other. q is the distribution of the token in `pdos`, p its distribution in a plain forward pass over the same text.
- `branches`: ten branches of fixed length and a short conclusion, compared with sequential decoding of the same number
  of tokens.

A small model opens no block by itself and miscounts parts. So the answer begins with the first title, and the number of
parts is fixed. `hf-parallel evaluate` compares the accuracy of modes.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch

from hf_parallel import PDOSConfig, pdos_prompt
from hf_parallel.evaluation import GENERATED, ArithmeticProblem, PlanningProblem, RetrievalProblem
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.modes.branches.token_text import encode_exactly, get_vocabulary
from hf_parallel.progress import progress_bar

from .measure import StepClock, dense_bytes
from .report import compare

Problem = RetrievalProblem | ArithmeticProblem | PlanningProblem
PARTS = {"retrieval": 10, "arithmetic": 5, "planning": 5}
"""Number of students, questions or aspects of a problem."""
SIZES: dict[str, Any] = {"problems": 2, "new_tokens": 320, "parts": None, "part_tokens": 20, "branches": 10}
SIZES |= {"lengths": (24, 48), "conclusion": 24, "rounds": 3}
QUICK: dict[str, Any] = {"problems": 1, "new_tokens": 100, "parts": 2, "part_tokens": 6, "branches": 2}
QUICK |= {"lengths": (2,), "conclusion": 2, "rounds": 1}
LIMITS = (("branch_stage", "at least", 4.0), ("whole_answer", "at least", 2.5), ("kv_bytes", "at most", 1.01))
"""Targets of the second part: tokens per second and KV bytes relative to sequential decoding."""


@torch.no_grad()
def distance(model: Any, output: Any, prompt_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the distributions after joined blocks with those of a plain forward pass over the same text.

    Return the divergence, float64 `[positions]`, and whether the top tokens are equal, bool `[positions]`.
    """
    blocks, length = output.blocks[0], len(output.logits)
    ends = [*(block.start for block in blocks[1:]), length]
    positions = [position for block, end in zip(blocks, ends, strict=False) for position in range(block.end, end)]
    chosen = [position for position in positions if output.logits[position].any()]  # all zeros if the token was forced
    if not chosen:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
    plain = model(input_ids=output.sequences, use_cache=False, logits_to_keep=length + 1).logits[0, chosen]
    found = torch.cat([output.logits[position] for position in chosen])
    expected, given = (logits.cpu().double().log_softmax(-1) for logits in (plain, found))
    divergence = torch.nn.functional.kl_div(given, expected, reduction="none", log_target=True).sum(-1)
    return divergence, expected.argmax(-1) == given.argmax(-1)


def branches_of(model: Any, tokenizer: Any, length: int, join: str, sizes: Any) -> dict[str, Any]:
    """Compare an answer that has branches of fixed length with sequential decoding of as many tokens."""
    problem = RetrievalProblem.make(0, sizes.branches)
    prompt = pdos_prompt(problem.prompt, tokenizer, parallel_hint=False)
    settings = coaching(problem) | {"branch_stops": (), "branch_max_new_tokens": length, "join": join}
    given = len(tokenize(model, tokenizer, settings["opening"]))
    settings |= {"generation_mode": "pdos", "tokenizer": tokenizer, "suppress_tokens": endings(model, tokenizer)}
    needed = sizes.branches * (length + 2 * settings["max_title_tokens"]) + 64
    output = generate(model, prompt, **settings, max_new_tokens=given + needed)
    if output.fallback[0] is not None:
        raise RuntimeError(f"the model generated no block of {sizes.branches} branches: {output.fallback[0]}")
    settings["max_new_tokens"] = output.blocks[0][0].end + sizes.conclusion
    rounds = []
    for _ in progress_bar(range(sizes.rounds), what=f"{length} tokens, {join}", unit="rounds"):
        ours = generate(model, prompt, **settings)
        opened = prompt["input_ids"].shape[1] + given
        tokens, clock = ours.sequences.shape[1] - opened, StepClock()
        ids = ours.sequences[:, :opened]
        more = {"max_new_tokens": tokens, "suppress_tokens": settings["suppress_tokens"], "streamer": clock}
        plain = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **more)
        seconds, stage = sum(clock.step_seconds), ours.stages["branches"]
        ratios = {
            "branch_stage": stage.decoded_tokens / stage.seconds * seconds / tokens,
            "whole_answer": seconds / ours.stats.decode_seconds,
            "kv_bytes": ours.stats.kv_bytes / dense_bytes(plain.past_key_values),
        }
        stages = {name: asdict(of) for name, of in ours.stages.items()}
        rounds.append({"tokens": tokens, "sequential_seconds": seconds, "stages": stages, "ratios": ratios})
    medians = {name: statistics.median(one["ratios"][name] for one in rounds) for name, *_ in LIMITS}
    return {"length": length, "join": join, "ratios": medians, "rounds": rounds}


def generate(model: Any, prompt: Any, **settings: Any) -> Any:
    """Call `generate` with greedy decoding."""
    prompt = {name: tensor.to(model.device) for name, tensor in prompt.items()}
    return model.generate(**prompt, do_sample=False, return_dict_in_generate=True, **settings)


def coaching(problem: Problem) -> dict[str, Any]:
    """Return settings that open a block with a one-line branch for each part of the problem."""
    if isinstance(problem, RetrievalProblem):
        said, first, count = "I check the students one by one.", problem.students[0], len(problem.students)
    elif isinstance(problem, ArithmeticProblem):
        said, first, count = "I solve the problems one by one.", "Problem 1", len(problem.answers)
    else:
        said, first, count = "I look at one aspect after the other.", problem.aspects[0], len(problem.aspects)
    form = PDOSConfig()
    return {
        "opening": f"{said}\n{form.branch_marker}{first}{form.title_end}",
        "terminator": f"{form.branch_marker}Result{form.title_end}",
        **{"min_branches": count, "max_branches": count, "max_title_tokens": 8, "max_blocks": 1},
        "branch_stops": ("\n",),
    }


def tokenize(model: Any, tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, as an opening is tokenized."""
    return encode_exactly(tokenizer, get_vocabulary(tokenizer, vocabulary_size(model)), text) or []


def endings(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that may end a branch or an answer: special tokens and parts of the branch marker."""
    vocabulary, eos = get_vocabulary(tokenizer, vocabulary_size(model)), model.generation_config.eos_token_id
    marker = PDOSConfig().branch_marker.encode()
    marked = {token for token, text in enumerate(vocabulary.texts) if any(byte in marker for byte in text)}
    return sorted(marked | vocabulary.special | set(eos if isinstance(eos, list) else [eos] if eos is not None else []))


def divergence_of(model: Any, tokenizer: Any, task: str, sizes: Any) -> Any:
    """Return the divergence of rotated answers to a task's problems from the same texts reencoded."""
    kept = []
    for seed in progress_bar(range(sizes.problems), what=f"Answers to {task}", unit="problems"):
        problem = GENERATED[task].make(seed, sizes.parts or PARTS[task])
        prompt = pdos_prompt(problem.prompt, tokenizer, parallel_hint=False)
        settings = coaching(problem) | {"generation_mode": "pdos", "join": "rotate"}
        settings["branch_max_new_tokens"] = sizes.part_tokens
        more = {"tokenizer": tokenizer, "max_new_tokens": sizes.new_tokens, "output_logits": True}
        kept.append(distance(model, generate(model, prompt, **settings, **more), prompt["input_ids"].shape[1]))
    divergence, same = (torch.cat(of) for of in zip(*kept, strict=True))
    if not len(divergence):
        return {"positions": 0}
    found = {"mean_kl": divergence.mean(), "median_kl": divergence.median(), "max_kl": divergence.max()}
    found["same_best_token"] = same.double().mean()
    return {"positions": len(divergence), **{name: value.item() for name, value in found.items()}}


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    diverged = {task: divergence_of(model, tokenizer, task, sizes) for task in PARTS}
    compared = [
        branches_of(model, tokenizer, length, join, sizes)
        for length in sizes.lengths
        for join in ("reencode", "rotate")
    ]
    targets = []
    for one in compared:
        words = f"{one['length']} tokens, {one['join']}"
        targets += compare(one["ratios"], [(*limit, f"{words}: {limit[0].replace('_', ' ')}") for limit in LIMITS])
    return {"rotate_from_reencode": diverged, "branches": compared, "targets": targets}
