"""Compares sequential and parallel answers (PDOS, section 4; Hogwild! Inference, section 4.1), all greedy.

`python -m benchmarks.parallel_answers --help`. There are three parts:

- `tasks`: problems with exact answers, by plain `generate`, PDOS with both joins, Skeleton-of-Thought, Chain-of-Draft,
  and PDOS with the rules of Chain-of-Draft. Tokens per second are those of the returned answer per second of decoding.
- `rotate_from_reencode`: KL(p || q) in nats for each token after a rotated block, whose branches did not attend to each
  other. q is the distribution that the token was chosen from, p that of a plain forward pass over the same text.
- `branches`: ten branches of fixed length and a short conclusion, compared with sequential decoding of as many tokens.

A small model does not open a block by itself and miscounts parts. With `--coach`, the answer therefore begins with the
first title, and the number of parts is fixed. This is the default for the embedded model; part three always does it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_parallel import CHAIN_OF_DRAFT, PDOSConfig, chain_of_draft_prompt, pdos_prompt
from hf_parallel.cli.measure import StepClock, dense_bytes
from hf_parallel.evaluation import GENERATED, ArithmeticProblem, PlanningProblem, RetrievalProblem
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.modes.pdos.token_text import encode_exactly, get_vocabulary

from .report import about, add_model_options, finish, new_path, set_up, table_of
from .rounds import compare, targets_table

Problem = RetrievalProblem | ArithmeticProblem | PlanningProblem
PARTS = {"retrieval": 10, "arithmetic": 5, "planning": 5}
"""Number of students, questions and aspects of a problem."""
SIZES: dict[str, Any] = {"parts": None, "branches": 10, "lengths": (24, 48), "conclusion": 24, "rounds": 3}
QUICK: dict[str, Any] = {"parts": 2, "branches": 2, "lengths": (2,), "conclusion": 2, "rounds": 1}
DRAFT_WORDS = 5
LIMITS = (("branch_stage", "at least", 4.0), ("whole_answer", "at least", 2.5), ("kv_bytes", "at most", 1.01))
"""Targets of the third part: tokens/s and KV bytes relative to sequential decoding."""


def ways_of(problem: Problem, tokenizer: Any, branch_tokens: int | None) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return prompt and settings of each method; `branch_tokens` are given for coached answers."""
    coached = branch_tokens is not None
    pdos: dict[str, Any] = {"generation_mode": "pdos", **(coaching(problem) if coached else {})}
    points: dict[str, Any] = {"generation_mode": "skeleton_of_thought"}
    if branch_tokens is not None:
        pdos["branch_max_new_tokens"] = points["point_tokens"] = branch_tokens
        points["outline_tokens"] = points["conclusion_tokens"] = 3 * branch_tokens
    plain = pdos_prompt(problem.prompt, tokenizer, parallel_hint=False)
    parallel = pdos_prompt(problem.prompt, tokenizer, parallel_hint=not coached)
    drafts = f"{CHAIN_OF_DRAFT.format(max_words=DRAFT_WORDS)}\n\n{problem.prompt}"
    return {
        "sequential": (plain, {}),
        "pdos_reencode": (parallel, pdos | {"join": "reencode"}),
        "pdos_rotate": (parallel, pdos | {"join": "rotate"}),
        "skeleton_of_thought": (plain, points),
        "chain_of_draft": (chain_of_draft_prompt(problem.prompt, tokenizer, DRAFT_WORDS), {}),
        "chain_of_draft_pdos": (pdos_prompt(drafts, tokenizer, parallel_hint=not coached), pdos | {"join": "reencode"}),
    }


def answer(model: Any, tokenizer: Any, problem: Problem, way: tuple[Any, dict[str, Any]], tokens: int) -> Any:
    """Solve a problem by one method; return its score and cost."""
    prompt, settings = way
    clock, began = StepClock(), time.perf_counter()
    helper = {"tokenizer": tokenizer} if settings else {"streamer": clock}
    output = generate(model, prompt, max_new_tokens=tokens, **helper, **settings)
    seconds = time.perf_counter() - began
    new = output.sequences[0, prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return {
        "score": problem.score(text),
        "text": text,
        "answer_tokens": len(new) - len(tokenize(model, tokenizer, settings.get("opening", ""))),
        "forward_passes": output.stats.forward_passes if settings else len(new),
        "seconds": seconds,
        "decode_seconds": output.stats.decode_seconds if settings else sum(clock.step_seconds),
        "kv_bytes": output.stats.kv_bytes if settings else dense_bytes(output.past_key_values),
        "fallback": output.fallback[0] if settings else None,
    }


def summary_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of one method on one task."""
    total = {name: sum(one[name] for one in answers) for name in ("forward_passes", "seconds", "decode_seconds")}
    tokens = sum(one["answer_tokens"] for one in answers)
    return {
        **{"answers": answers, "score": statistics.mean(one["score"] for one in answers), **total},
        "tokens_per_second": tokens / total["decode_seconds"] if total["decode_seconds"] else None,
        "kv_bytes": max(one["kv_bytes"] for one in answers),
        "fallbacks": sum(one["fallback"] is not None for one in answers),
    }


@torch.no_grad()
def distance(model: Any, output: Any, prompt_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the distributions after joined blocks with those of a plain forward pass over the same text.

    Returns the divergence, float64 `[positions]`, and whether the top token is equal, bool `[positions]`.
    """
    blocks, length = output.blocks[0], len(output.logits)
    ends = [*(block.start for block in blocks[1:]), length]
    positions = [position for block, end in zip(blocks, ends, strict=False) for position in range(block.end, end)]
    chosen = [position for position in positions if output.logits[position].any()]  # zeros: the token was forced
    if not chosen:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
    plain = model(input_ids=output.sequences, use_cache=False, logits_to_keep=length + 1).logits[0, chosen]
    found = torch.cat([output.logits[position] for position in chosen])
    expected, given = (logits.cpu().double().log_softmax(-1) for logits in (plain, found))
    divergence = torch.nn.functional.kl_div(given, expected, reduction="none", log_target=True).sum(-1)
    return divergence, expected.argmax(-1) == given.argmax(-1)


def branches_of(model: Any, tokenizer: Any, length: int, join: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Compare an answer with branches of fixed length with sequential decoding of the same number of tokens."""
    problem = RetrievalProblem.make(0, sizes["branches"])
    prompt = pdos_prompt(problem.prompt, tokenizer, parallel_hint=False)
    settings = coaching(problem) | {"branch_stops": (), "branch_max_new_tokens": length, "join": join}
    given = len(tokenize(model, tokenizer, settings["opening"]))
    settings |= {"generation_mode": "pdos", "tokenizer": tokenizer, "suppress_tokens": endings(model, tokenizer)}
    needed = sizes["branches"] * (length + 2 * settings["max_title_tokens"]) + 64
    output = generate(model, prompt, **settings, max_new_tokens=given + needed)
    if output.fallback[0] is not None:
        raise RuntimeError(f"the model generated no block of {sizes['branches']} branches: {output.fallback[0]}")
    settings["max_new_tokens"] = output.blocks[0][0].end + sizes["conclusion"]
    rounds = []
    for _ in range(sizes["rounds"]):
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
    """Return settings that open a block with one branch of one line per part of the problem."""
    if isinstance(problem, RetrievalProblem):
        said, first, count = "I check the students one by one.", problem.students[0].name, len(problem.students)
    elif isinstance(problem, ArithmeticProblem):
        said, first, count = "I solve the problems one by one.", "Problem 1", len(problem.questions)
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
    """Return the tokens of a text, tokenized as an opening is."""
    return encode_exactly(tokenizer, get_vocabulary(tokenizer, vocabulary_size(model)), text) or []


def endings(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that may end a branch or an answer: special ones, and parts of the branch marker."""
    vocabulary, eos = get_vocabulary(tokenizer, vocabulary_size(model)), model.generation_config.eos_token_id
    marker = PDOSConfig().branch_marker.encode()
    marked = {token for token, text in enumerate(vocabulary.texts) if any(byte in marker for byte in text)}
    return sorted(marked | vocabulary.special | set(eos if isinstance(eos, list) else [eos] if eos is not None else []))


def run(model: Any, tokenizer: Any, sizes: dict[str, Any], problems: int, tokens: int, branch: int | None) -> Any:
    """Run all parts; return the entries of the report."""
    solved: dict[str, dict[str, Any]] = {}
    diverged: dict[str, dict[str, Any]] = {}
    for task, cls in GENERATED.items():
        made = [cls.make(seed, sizes["parts"] or PARTS[task]) for seed in range(problems)]
        found: dict[str, list[Any]] = {}
        kept = []
        for problem in made:
            ways = ways_of(problem, tokenizer, branch)
            for name, way in ways.items():
                found.setdefault(name, []).append(answer(model, tokenizer, problem, way, tokens))
            prompt, settings = ways["pdos_rotate"]
            more = {"tokenizer": tokenizer, "max_new_tokens": tokens, "output_logits": True}
            output = generate(model, prompt, **settings, **more)
            kept.append(distance(model, output, prompt["input_ids"].shape[1]))
        solved[task] = {name: summary_of(answers) for name, answers in found.items()}
        divergence, same = (torch.cat(parts) for parts in zip(*kept, strict=True))
        diverged[task] = {"positions": len(divergence)}
        if len(divergence):
            diverged[task] |= {"mean_kl": divergence.mean().item(), "median_kl": divergence.median().item()}
            diverged[task] |= {"max_kl": divergence.max().item(), "same_best_token": same.double().mean().item()}
    compared = [
        branches_of(model, tokenizer, length, join, sizes)
        for length in sizes["lengths"]
        for join in ("reencode", "rotate")
    ]
    targets = []
    for one in compared:
        words = f"{one['length']} tokens, {one['join']}"
        targets += compare(one["ratios"], [(*limit, f"{words}: {limit[0].replace('_', ' ')}") for limit in LIMITS])
    return {"tasks": solved, "rotate_from_reencode": diverged, "branches": compared, "targets": targets}


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the tables."""
    for task, ways in report["tasks"].items():
        table = table_of(task, "score", "tokens/s", "passes", "seconds", "KV, MB", "fell back")
        for name, way in ways.items():
            cells = (f"{way['score']:.2f}", f"{way['tokens_per_second'] or 0:.1f}", str(way["forward_passes"]))
            more = (f"{way['seconds']:.1f}", f"{way['kv_bytes'] / 1e6:.1f}", str(way["fallbacks"]))
            table.add_row(name.replace("_", " "), *cells, *more)
        console.print(table)
    table = table_of("rotate from reencode, nats", "positions", "mean", "median", "max", "same top token")
    for task, of in report["rotate_from_reencode"].items():
        table.add_row(task, *(f"{value:.4g}" for value in of.values()))
    console.print(table)
    console.print(targets_table(report["targets"]))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    prog, words = "python -m benchmarks.parallel_answers", str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog=prog, description=words)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    add_model_options(parser)
    parser.add_argument("--problems", type=int, default=2, metavar="N", help="problems per task (2)")
    parser.add_argument("--new-tokens", type=int, default=320, metavar="N", help="maximum tokens of an answer (320)")
    parser.add_argument("--coach", action=argparse.BooleanOptionalAction, help="default: the embedded model only")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    options = parser.parse_args(arguments)
    coached = options.model is None if options.coach is None else options.coach
    model, tokenizer = set_up(options)
    sizes, branch = QUICK if options.quick else SIZES, (6 if options.quick else 20) if coached else None
    problems, tokens = (1, 100) if options.quick else (options.problems, options.new_tokens)
    settings = {**sizes, "problems": problems, "new_tokens": tokens, "branch_tokens": branch}
    report = about(model, options) | {"quick": options.quick, "settings": settings}
    report |= run(model, tokenizer, sizes, problems, tokens, branch)
    finish(Console(highlight=False), report, options.output or new_path("parallel-answers", options.quick), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
