"""Countdown, and a small model that is trained here in minutes: reach a target with given numbers, each used once.

A prompt is `9,7,5,3:24`. An answer has a line per operation, such as `9-5=4`, and ends with the whole expression:
`answer ((9-5)*3)+12;`. All intermediate results are positive integers.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_parallel import Candidate
from hf_parallel.evaluation.tasks.game24 import evaluate
from hf_parallel.progress import progress_bar

LARGEST = 50
"""Largest intermediate result and target."""
SMALLEST_TARGET = 10
HELD_OUT = 1000
"""Problems that no model is trained on."""
BOUNDARY = "\n"
PROBE_PROMPT = "answer "
ANSWER_PATTERN = r"answer ([^;\n]+);"
WORD = r"answer |\d+|\D"
WORDS = ["<pad>", "<s>", "</s>", PROBE_PROMPT, *"\n,:+-*/=();", *map(str, range(LARGEST + 1))]
PROMPT = re.compile(r"([\d,]+):(\d+)\n")
LINE = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
EARLY = 0.25
"""Fraction of the training examples that answer before all lines are written, as probes ask for."""
BATCH = 64
LEARNING_RATE = 2e-3
TOKEN_WEIGHT = 0.01
"""Weight of the mean log-probability in `check` and `look_ahead`: it ranks candidates that these do not tell apart."""


@dataclass(frozen=True)
class Problem:
    """Numbers, a target, and the solution that the model is trained on: its lines and its expression."""

    numbers: tuple[int, ...]
    target: int
    lines: tuple[str, ...]
    expression: str


@dataclass(frozen=True)
class Item:
    """A number that may still be used, and the expression that it is the value of."""

    value: int
    expression: str

    @property
    def operand(self) -> str:
        """The expression as a part of a longer one."""
        return self.expression if self.expression.isdigit() else f"({self.expression})"


def results(a: int, b: int) -> Iterator[tuple[str, int]]:
    """Yield the operations on two numbers whose results are allowed; `a` is not smaller than `b`."""
    if a + b <= LARGEST:
        yield "+", a + b
    if a > b:
        yield "-", a - b
    if a * b <= LARGEST:
        yield "*", a * b
    if a % b == 0:
        yield "/", a // b


def solve_all(items: Sequence[Item], lines: tuple[str, ...], found: dict[int, tuple[tuple[str, ...], str]]) -> None:
    """Add the first solution for each target that the items reach, lines and expression."""
    if len(items) == 1:
        found.setdefault(items[0].value, (lines, items[0].expression))
        return
    largest_first = sorted(items, key=lambda item: -item.value)
    for a, b in itertools.combinations(largest_first, 2):
        others = [item for item in largest_first if item is not a and item is not b]
        for sign, value in results(a.value, b.value):
            made = Item(value, f"{a.operand}{sign}{b.operand}")
            solve_all([*others, made], (*lines, f"{a.value}{sign}{b.value}={value}\n"), found)


def all_problems(count: int, highest: int) -> list[Problem]:
    """Return all problems of `count` numbers from 1 to `highest`, in random but fixed order."""
    problems = []
    for numbers in itertools.combinations_with_replacement(range(highest, 0, -1), count):
        found: dict[int, tuple[tuple[str, ...], str]] = {}
        solve_all([Item(number, str(number)) for number in numbers], (), found)
        for target, (lines, expression) in found.items():
            if target >= SMALLEST_TARGET:
                problems.append(Problem(numbers, target, lines, expression))
    random.Random(0).shuffle(problems)
    return problems


def write_prompt(problem: Problem) -> str:
    """Return the prompt of a problem."""
    return f"{','.join(map(str, problem.numbers))}:{problem.target}\n"


# Checks


def is_right(text: str, numbers: Sequence[int], target: int) -> bool:
    """Return whether the answer in a text uses each number once and equals the target."""
    answers = re.findall(ANSWER_PATTERN, text)
    if not answers:
        return False
    used: list[int] = []
    try:
        value = evaluate(ast.parse(answers[-1], mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


def read_lines(text: str, numbers: Sequence[int]) -> tuple[int, list[int]]:
    """Return the number of mistakes in the lines of a text, and the numbers that are left after them.

    A mistake is a line that is no operation, a number that is not left, or a wrong result.
    """
    left = list(numbers)
    mistakes = 0
    for line in text.split(BOUNDARY)[:-1]:
        match = LINE.fullmatch(line)
        if match is None:
            mistakes += 1
            continue
        a, b, result = int(match[1]), int(match[3]), int(match[4])
        for number in (a, b):
            if number in left:
                left.remove(number)
            else:
                mistakes += 1
        if a < b or (match[2], result) not in results(a, b):
            mistakes += 1
        left.append(result)
    return mistakes, left


def check(candidate: Candidate) -> float:
    """Score a candidate by the rules of the game: 1 for a right answer, -1 per mistake and for a wrong answer."""
    return _score(candidate, looks_ahead=False)


def look_ahead(candidate: Candidate) -> float:
    """Score like `check`, and -1 if the numbers that are left cannot reach the target: it solves the rest itself."""
    return _score(candidate, looks_ahead=True)


def _score(candidate: Candidate, looks_ahead: bool) -> float:
    match = PROMPT.search(candidate.prompt)
    assert match is not None, candidate.prompt
    numbers = [int(number) for number in match[1].split(",")]
    target = int(match[2])
    score = TOKEN_WEIGHT * candidate.mean_log_prob
    if is_right(candidate.text, numbers, target):
        return score + 1
    mistakes, left = read_lines(candidate.text, numbers)
    score -= mistakes + candidate.is_complete
    if looks_ahead and target not in reachable(tuple(sorted(left))):
        score -= 1
    return score


@cache
def reachable(numbers: tuple[int, ...]) -> set[int]:
    """Return the targets that some numbers reach."""
    found: dict[int, tuple[tuple[str, ...], str]] = {}
    solve_all([Item(number, str(number)) for number in numbers], (), found)
    return set(found)


# The model


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per number and per sign."""
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [WORDS.index(word) for word in re.findall(WORD, text)]


def make_model(hidden_size: int, layers: int) -> LlamaForCausalLM:
    """Return a model with random weights."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=128,
        # The standard deviation of 0.02 is for wider models.
        initializer_range=1 / 16,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def make_example(problem: Problem, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return the tokens of a solved problem and their labels; -100 marks tokens without a loss."""
    prompt = [1, *encode(write_prompt(problem))]
    is_early = rng.random() < EARLY
    num_lines = rng.randrange(len(problem.lines)) if is_early else len(problem.lines)
    lines = encode("".join(problem.lines[:num_lines]))
    answer = [*encode(f"{PROBE_PROMPT}{problem.expression};"), 2]
    labels = [-100] * len(prompt) + lines + answer
    if is_early:
        labels[len(prompt) + len(lines)] = -100  # the model does not learn to answer early by itself
    return prompt + lines + answer, labels


def make_batch(problems: Sequence[Problem], rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of examples, int64 `[examples, length]`, padded on the right."""
    examples = [make_example(problem, rng) for problem in problems]
    length = max(len(tokens) for tokens, _ in examples)
    tokens = [tokens + [0] * (length - len(tokens)) for tokens, _ in examples]
    labels = [labels + [-100] * (length - len(labels)) for _, labels in examples]
    return torch.tensor(tokens), torch.tensor(labels)


def train(model: LlamaForCausalLM, problems: Sequence[Problem], steps: int, seed: int) -> dict[str, Any]:
    """Train a model, and return figures of the training."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(50, steps // 8 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * step / steps)),
    )
    losses = []
    num_tokens = 0
    began = time.process_time()
    model.train()
    for _ in progress_bar(range(steps), what="Training", unit="steps"):
        tokens, labels = make_batch(rng.choices(problems, k=BATCH), rng)
        num_tokens += tokens.numel()
        logits = model(input_ids=tokens).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    every = max(1, steps // 10)
    return {
        "steps": steps,
        "batch": BATCH,
        "seed": seed,
        "tokens": num_tokens,
        "parameters": model.num_parameters(),
        "cpu_seconds": time.process_time() - began,
        "losses": [statistics.mean(losses[first : first + every]) for first in range(0, steps, every)],
    }


def load_or_train(
    folder: Path | None, problems: Sequence[Problem], hidden_size: int, layers: int, steps: int, seed: int
) -> tuple[Any, dict[str, Any]]:
    """Return the model of a folder and figures of its training; train it first, and save it there, if it is new."""
    if folder is not None and (folder / "training.json").exists():
        saved = LlamaForCausalLM.from_pretrained(folder).eval()
        return saved, json.loads((folder / "training.json").read_text())
    torch.manual_seed(seed)
    model: Any = make_model(hidden_size, layers)
    training = train(model, problems, steps, seed)
    if folder is not None:
        model.save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n")
    return model, training
