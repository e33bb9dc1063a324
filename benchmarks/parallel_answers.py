"""Compares sequential and parallel answers (PDOS, section 4; Hogwild! Inference, section 4.1), all greedy.

`python -m benchmarks.parallel_answers --help`. There are three parts:

- `tasks`: problems with exact answers, by plain `generate`, PDOS with both joins, Skeleton-of-Thought, Chain-of-Draft,
  and PDOS with the rules of Chain-of-Draft. Tokens per second are the tokens of the returned answer, divided by the
  seconds of decoding. Markers and headings count; a given opening and a discarded outline do not.
- `rotate_from_reencode`: error of `join="rotate"`. After a rotated block, the answer attends to branches that did not
  attend to each other. The error of each token after such a block is the Kullback-Leibler divergence KL(p || q) in
  nats: q is the distribution that the token was chosen from, p that of a plain forward pass over the same text.
- `branches`: ten branches of fixed length and a short conclusion, compared with sequential decoding of the same number
  of tokens after the same prompt and opening.

A small model does not open a block by itself and miscounts parts. With `--coach`, the answer therefore begins with the
first title, and the number of parts is fixed. This is the default for the embedded model; part three always does it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_parallel import CHAIN_OF_DRAFT, GenerationStats, PDOSConfig, PDOSOutput, chain_of_draft_prompt, pdos_prompt
from hf_parallel.cli.measure import StepClock, dense_bytes
from hf_parallel.evaluation import GENERATED, ArithmeticProblem, PlanningProblem, RetrievalProblem
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.modes.pdos.token_text import Vocabulary, encode_exactly, get_vocabulary

from .__main__ import about, add_model_options, finish, new_path, set_up, table_of

Log = Callable[[str], None]
AnyProblem = RetrievalProblem | ArithmeticProblem | PlanningProblem
Way = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Prompt and settings of a call."""
PARTS = {"retrieval": 10, "arithmetic": 5, "planning": 5}
"""Number of students, questions and aspects of a problem."""
DRAFT_WORDS = 5
"""Maximum number of words of a step in Chain-of-Draft."""
WARM_UP_TOKENS = 64
TARGETS = {"branch_stage": ("at_least", 4.0), "whole_answer": ("at_least", 2.5), "kv_bytes": ("at_most", 1.01)}
"""Targets of the third part: tokens/s and KV bytes relative to sequential decoding."""

FIGURES = ("mean_kl", "median_kl", "max_kl", "same_best_token")


@dataclass
class Answered:
    """Scores and costs of the answers of one method; `kv_bytes` and `reserved_bytes` are peaks."""

    scores: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    answer_tokens: int = 0
    decoded_tokens: int = 0
    forward_passes: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_bytes: int = 0
    reserved_bytes: int = 0

    def summary(self) -> dict[str, Any]:
        """Return an entry of the report."""
        rate = self.answer_tokens / self.decode_seconds if self.decode_seconds else None
        return {"score": statistics.mean(self.scores), "tokens_per_second": rate} | asdict(self)


@dataclass(frozen=True)
class TasksBenchmark:
    """Problems solved by all methods.

    Parameters
    ----------
    tasks : tuple of str
    problems : int
        Number of problems per task.
    parts : int, optional
        Number of parts per problem, default `PARTS`.
    new_tokens : int
        Maximum number of tokens of an answer.
    branch_tokens : int, optional
        Maximum number of tokens of a branch or point; three times that for outlines and conclusions.
    coached : bool
    """

    tasks: tuple[str, ...] = tuple(GENERATED)
    problems: int = 2
    parts: int | None = None
    new_tokens: int = 320
    branch_tokens: int | None = 20
    coached: bool = True

    def run(self, model: Any, tokenizer: Any, log: Log) -> dict[str, Any]:
        """Solve all problems by all methods; return two entries of the report."""
        answered, distances = {}, {}
        for task in self.tasks:
            found: dict[str, Answered] = {}
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            for seed in range(self.problems):
                problem = self._problem(seed, task)
                for name, way in self.ways(problem, tokenizer).items():
                    log(f"{task}, problem {seed + 1} of {self.problems}: {name}")
                    self.answer(model, tokenizer, problem, way, found.setdefault(name, Answered()))
                log(f"{task}, problem {seed + 1} of {self.problems}: divergence of rotate from reencode")
                kept.append(self._distance(model, tokenizer, problem))
            answered[task] = {name: of.summary() for name, of in found.items()}
            distances[task] = summary_of(kept)
        return {"tasks": answered, "rotate_from_reencode": distances}

    def ways(self, problem: AnyProblem, tokenizer: Any) -> dict[str, Way]:
        """Return all methods by name."""
        hint = not self.coached  # a coached answer begins inside the block
        plain = pdos_prompt(problem.prompt, tokenizer, parallel_hint=False)
        parallel = pdos_prompt(problem.prompt, tokenizer, parallel_hint=hint)
        drafting = CHAIN_OF_DRAFT.format(max_words=DRAFT_WORDS)
        both = pdos_prompt(f"{drafting}\n\n{problem.prompt}", tokenizer, parallel_hint=hint)
        pdos: dict[str, Any] = {"generation_mode": "pdos", "branch_max_new_tokens": self.branch_tokens}
        pdos |= coaching(problem) if self.coached else {}
        points: dict[str, Any] = {"generation_mode": "skeleton_of_thought"}
        if self.branch_tokens is not None:
            several = 3 * self.branch_tokens
            points |= {"point_tokens": self.branch_tokens, "outline_tokens": several, "conclusion_tokens": several}
        return {
            "sequential": (plain, {}),
            "pdos_reencode": (parallel, pdos | {"join": "reencode"}),
            "pdos_rotate": (parallel, pdos | {"join": "rotate"}),
            "skeleton_of_thought": (plain, points),
            "chain_of_draft": (chain_of_draft_prompt(problem.prompt, tokenizer, DRAFT_WORDS), {}),
            "chain_of_draft_pdos": (both, pdos | {"join": "reencode"}),
        }

    def answer(self, model: Any, tokenizer: Any, problem: AnyProblem, way: Way, into: Answered) -> None:
        """Solve a problem by one method, and add its score and cost."""
        prompt, settings = way
        clock, began = StepClock(), time.perf_counter()
        helper = {"tokenizer": tokenizer} if settings else {"streamer": clock}
        output = generate(model, prompt, max_new_tokens=self.new_tokens, **helper, **settings)
        into.seconds += time.perf_counter() - began
        tokens = output.sequences[0, prompt["input_ids"].shape[1] :]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        into.texts.append(text)
        into.scores.append(problem.score(text))
        into.answer_tokens += len(tokens) - len(tokenize(model, tokenizer, settings.get("opening", "")))
        cache, passes = output.past_key_values, len(tokens)  # plain generate: the prefill yields the first token
        plain = GenerationStats(passes, decoded_tokens=passes, decode_seconds=sum(clock.step_seconds))
        stats = output.stats if settings else replace(plain, kv_bytes=dense_bytes(cache))
        into.decoded_tokens += stats.decoded_tokens
        into.forward_passes += stats.forward_passes
        into.decode_seconds += stats.decode_seconds
        into.kv_bytes = max(into.kv_bytes, stats.kv_bytes)
        into.reserved_bytes = max(into.reserved_bytes, cache.pool.arena.reserved_bytes if settings else stats.kv_bytes)
        into.fallbacks += filter(None, output.fallback if settings else ())

    def _distance(self, model: Any, tokenizer: Any, problem: AnyProblem) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence of a rotated answer from the same text reencoded; see `distance`."""
        prompt, settings = self.ways(problem, tokenizer)["pdos_rotate"]
        more = {"tokenizer": tokenizer, "max_new_tokens": self.new_tokens, "output_logits": True}
        output = generate(model, prompt, **settings, **more)
        return distance(model, output, prompt["input_ids"].shape[1])

    def _problem(self, seed: int, task: str) -> AnyProblem:
        return GENERATED[task].make(seed, self.parts or PARTS[task])


@dataclass(frozen=True)
class BranchesBenchmark:
    """Branches of fixed length compared with sequential decoding.

    Parameters
    ----------
    branches : int
    lengths : tuple of int
        Numbers of tokens per branch to measure.
    conclusion : int
        Number of tokens after the block.
    rounds : int
    """

    branches: int = 10
    lengths: tuple[int, ...] = (24, 48)
    conclusion: int = 24
    rounds: int = 3

    def run(self, model: Any, tokenizer: Any, log: Log) -> list[dict[str, Any]]:
        """Measure every length with both joins; return an entry of the report."""
        problem = RetrievalProblem.make(0, self.branches)
        prompt = pdos_prompt(problem.prompt, tokenizer, parallel_hint=False)
        results = []
        for length in self.lengths:
            settings = self._settings(model, tokenizer, problem, length)
            joins: dict[str, dict[str, Any]] = {}
            for join in ("reencode", "rotate"):
                joins[join] = {"settings": settings | {"join": join}, "rounds": []}
                log(f"{self.branches} branches of {length} tokens, {join}: size of the answer")
                joins[join]["settings"]["max_new_tokens"] = self._size(model, prompt, joins[join]["settings"])
            for number in range(self.rounds):
                for join, of in joins.items():
                    log(f"{self.branches} branches of {length} tokens, {join}, round {number + 1} of {self.rounds}")
                    of["rounds"].append(self._measure(model, prompt, of["settings"]))
            for join, of in joins.items():
                ratios = {name: statistics.median(one["ratios"][name] for one in of["rounds"]) for name in TARGETS}
                results.append({"length": length, "join": join, "ratios": ratios, "rounds": of["rounds"]})
        return results

    def _settings(self, model: Any, tokenizer: Any, problem: AnyProblem, length: int) -> dict[str, Any]:
        """Return settings under which no branch ends early and the answer has enough tokens."""
        settings = coaching(problem) | {"branch_stops": (), "branch_max_new_tokens": length}
        given = len(tokenize(model, tokenizer, settings["opening"]))
        needed = self.branches * (length + 2 * settings["max_title_tokens"]) + 64
        silent = endings(model, get_vocabulary(tokenizer, vocabulary_size(model)))
        more = {"generation_mode": "pdos", "tokenizer": tokenizer, "suppress_tokens": silent}
        return settings | more | {"max_new_tokens": given + needed}

    def _size(self, model: Any, prompt: dict[str, torch.Tensor], settings: dict[str, Any]) -> int:
        """Return the number of tokens of the answer with its conclusion."""
        output = generate(model, prompt, **settings)
        if output.fallback[0] is not None:
            raise RuntimeError(f"the model generated no block of {self.branches} branches: {output.fallback[0]}")
        return output.blocks[0][0].end + self.conclusion

    def _measure(self, model: Any, prompt: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, Any]:
        """Measure one round: the answer, then sequential decoding of the same number of tokens."""
        ours = generate(model, prompt, **settings)
        opened = prompt["input_ids"].shape[1] + len(tokenize(model, settings["tokenizer"], settings["opening"]))
        given, tokens, clock = ours.sequences[:, :opened], ours.sequences.shape[1] - opened, StepClock()
        opened_prompt = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        silent = settings["suppress_tokens"]
        plain = generate(model, opened_prompt, max_new_tokens=tokens, suppress_tokens=silent, streamer=clock)
        seconds, stage = sum(clock.step_seconds), ours.stages["branches"]
        return {
            "prompt_tokens": opened,
            "answer_tokens": tokens,
            "sequential_tokens": plain.sequences.shape[1] - opened,
            "sequential_seconds": seconds,
            "seconds": ours.stats.decode_seconds,
            "stages": {name: asdict(of) for name, of in ours.stages.items()},
            "ratios": {
                "branch_stage": stage.decoded_tokens / stage.seconds * seconds / tokens,
                "whole_answer": seconds / ours.stats.decode_seconds,
                "kv_bytes": ours.stats.kv_bytes / dense_bytes(plain.past_key_values),
            },
        }


def generate(model: Any, prompt: dict[str, torch.Tensor], **settings: Any) -> Any:
    """Call `generate` with greedy decoding."""
    prompt = {name: tensor.to(model.device) for name, tensor in prompt.items()}
    return model.generate(**prompt, do_sample=False, return_dict_in_generate=True, **settings)


def coaching(problem: AnyProblem) -> dict[str, Any]:
    """Return settings that open a block with one branch of one line per part of the problem."""
    if isinstance(problem, RetrievalProblem):
        said, first, count = "I check the students one by one.", problem.students[0].name, len(problem.students)
    elif isinstance(problem, ArithmeticProblem):
        said, first, count = "I solve the problems one by one.", "Problem 1", len(problem.questions)
    else:
        said, first, count = "I look at one aspect after the other.", problem.aspects[0], len(problem.aspects)
    fmt = PDOSConfig()
    return {
        "opening": f"{said}\n{fmt.branch_marker}{first}{fmt.title_end}",
        "terminator": f"{fmt.branch_marker}Result{fmt.title_end}",
        "min_branches": count,
        "max_branches": count,
        "max_title_tokens": 8,
        "max_blocks": 1,
        "branch_stops": ("\n",),
    }


def tokenize(model: Any, tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, tokenized as an opening is."""
    return encode_exactly(tokenizer, get_vocabulary(tokenizer, vocabulary_size(model)), text) or []


def endings(model: Any, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens that may end a branch or an answer: special ones, and parts of the branch marker."""
    eos = model.generation_config.eos_token_id
    marker = PDOSConfig().branch_marker.encode()
    marked = {token for token, text in enumerate(vocabulary.texts) if any(byte in marker for byte in text)}
    return sorted(marked | vocabulary.special | set(eos if isinstance(eos, list) else [eos] if eos is not None else []))


@torch.no_grad()
def distance(model: Any, output: PDOSOutput, prompt_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the distributions after joined blocks with those of a plain forward pass over the same text.

    Parameters
    ----------
    model
    output : PDOSOutput
        Output for one prompt, with `logits`.
    prompt_length : int

    Returns
    -------
    (divergence, same) : float64 [positions], bool [positions]
        Kullback-Leibler divergence in nats from the distribution of the plain pass, and whether the top token is equal.
    """
    assert output.blocks is not None
    assert output.logits is not None
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


def summary_of(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Return the divergences of several answers per position, and their statistics."""
    divergence, same = (torch.cat(parts) for parts in zip(*kept, strict=True))
    found: dict[str, Any] = dict.fromkeys(FIGURES)
    if len(divergence):
        values = (divergence.mean(), divergence.median(), divergence.max(), same.double().mean())
        found = dict(zip(FIGURES, (value.item() for value in values), strict=True))
    kl = [[float(f"{value:.4g}") for value in of.tolist()] for of, _ in kept]
    return {"positions": len(divergence)} | found | {"kl": kl}


def targets(branches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the ratios with their targets."""
    found = []
    for result in branches:
        for name, (bound, limit) in TARGETS.items():
            value = result["ratios"][name]
            met = value >= limit if bound == "at_least" else value <= limit
            case = {"length": result["length"], "join": result["join"], "ratio": name}
            found.append(case | {"value": value, bound: limit, "met": met})
    return found


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the tables."""
    for task, ways in report["tasks"].items():
        table = table_of(task, "score", "tokens/s", "passes", "seconds", "KV, MB", "fell back")
        for name, way in ways.items():
            table.add_row(
                name.replace("_", " "),
                f"{way['score']:.2f}",
                cell(way["tokens_per_second"], ".1f"),
                str(way["forward_passes"]),
                f"{way['seconds']:.1f}",
                f"{way['kv_bytes'] / 1e6:.1f}",
                f"{len(way['fallbacks'])} of {len(way['scores'])}",
            )
        console.print(table)
    table = table_of("rotate from reencode, nats", "positions", "mean", "median", "max", "same top token")
    for task, of in report["rotate_from_reencode"].items():
        table.add_row(task, str(of["positions"]), *(cell(of[name], ".4f") for name in FIGURES))
    console.print(table)
    headings = [f"{name}, {bound} {limit}".replace("_", " ") for name, (bound, limit) in TARGETS.items()]
    count = report["settings"]["branches"]["branches"]
    table = table_of(f"{count} branches relative to sequential decoding", *headings)
    verdicts = iter(report["targets"])
    for result in report["branches"]:
        row = [next(verdicts) for _ in TARGETS]
        verdict = (f"{one['value']:.3f} {'met' if one['met'] else 'MISSED'}" for one in row)
        table.add_row(f"{result['length']} tokens, {result['join']}", *verdict)
    console.print(table)
    if report["quick"]:
        console.print("(--quick: the figures are meaningless)")


def cell(value: float | None, form: str) -> str:
    """Format a figure; empty for None."""
    return "" if value is None else format(value, form)


def benchmarks(options: argparse.Namespace) -> tuple[TasksBenchmark, BranchesBenchmark]:
    """Return the selected benchmarks."""
    coached = options.model is None if options.coach is None else options.coach
    tasks = TasksBenchmark(coached=coached, branch_tokens=20 if coached else None)
    branches = BranchesBenchmark()
    if options.quick:
        tasks = replace(tasks, tasks=("planning",), problems=1, parts=2, new_tokens=40, branch_tokens=2)
        branches = BranchesBenchmark(branches=2, lengths=(2,), conclusion=2, rounds=1)
    given = {name: getattr(options, name) for name in ("tasks", "problems", "new_tokens", "branch_tokens")}
    tasks = replace(tasks, **{name: value for name, value in given.items() if value is not None})
    return tasks, replace(branches, rounds=options.rounds or branches.rounds)


def main() -> int:
    """Run the benchmark; return the exit status."""
    options = _parse()
    console = Console(highlight=False)
    model, tokenizer = set_up(options)
    tasks, branches = benchmarks(options)
    log = partial(console.print, markup=False)
    settings = {"tasks": asdict(tasks), "branches": asdict(branches)}
    report = about(model, options) | {"quick": options.quick, "settings": settings}
    if not options.quick:
        log("warm-up")
        replace(tasks, tasks=tasks.tasks[:1], problems=1, new_tokens=WARM_UP_TOKENS).run(model, tokenizer, log)
    report |= tasks.run(model, tokenizer, log)
    report["branches"] = branches.run(model, tokenizer, log)
    report["targets"] = targets(report["branches"])
    finish(console, report, options.output or new_path("parallel-answers", options.quick), show)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_answers", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    add_model_options(parser)
    parser.add_argument("--tasks", nargs="+", choices=tuple(GENERATED), help="default: all; with --quick: planning")
    parser.add_argument("--problems", type=int, metavar="N", help="problems per task (2)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="maximum tokens of an answer (320)")
    parser.add_argument("--branch-tokens", type=int, metavar="N", help="maximum tokens of a branch (20 if coached)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of the third part (3)")
    parser.add_argument("--coach", action=argparse.BooleanOptionalAction, help="default: the embedded model only")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
