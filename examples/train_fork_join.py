"""Trains a model to fork by itself, and compares it with sequential text (docs/modes/fork_join.md).

    python examples/train_fork_join.py lists  # a model of 1.37 million parameters, from scratch, with nested forks
    python examples/train_fork_join.py sums  # the demo model, with LoRA, in the format of Multiverse

Half of the training texts fork, half are sequential texts of the same kind. The end of a question says which is wanted.
"""

import argparse
import json
import random
import re
import statistics
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from train_workers import about, make_small_model, make_tokenizer, train

import hf_parallel
from hf_parallel.generation.dialects import DIALECTS
from hf_parallel.training import DataCollatorForParallel, Dialect, prepare_model

MAX_NEW_TOKENS = 600
NAMES = ("Ann", "Ben", "Eva", "Tom", "Kim", "Max", "Zoe", "Leo")


@dataclass
class Part:
    """Part of an answer: a text, or parts that do not see each other, and a conclusion."""

    text: str = ""
    parts: list["Part"] = field(default_factory=list)
    conclusion: str = ""
    end: str = ""  # text after the region


class Sums:
    """Question: points of three to five people, eight numbers each. Answer: the sum of each, then who has most."""

    dialect = DIALECTS["multiverse"]
    plan = ("<Parallel>\n<Goal>\n", "<Outline>\n{number}:{title}\n</Outline>\n", "</Goal>")
    closing, mark = "</Conclusion>\n</Parallel>\n", ""
    tags = [f"<{end}{name}>" for name in ("Parallel", "Goal", "Outline", "Path", "Conclusion") for end in ("", "/")]
    ends = {
        "forked": " Think step by step and in parallel before answering.\n",
        "sequential": " Think step by step before answering.\n",
    }
    steps, problems, settings = 200, 30, {"per_device_train_batch_size": 1, "adam_beta2": 0.999}

    def load(self):
        """Return the demo model with a LoRA adapter, and its tokenizer."""
        from peft import LoraConfig, get_peft_model

        model, tokenizer = hf_parallel.load_embedded_model()
        pieces = [tokenizer(tag).input_ids for tag in self.tags]
        tokenizer.add_tokens(self.tags)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        added = tokenizer.convert_tokens_to_ids(self.tags)
        with torch.no_grad():
            weight = model.get_input_embeddings().weight
            weight[added] = torch.stack([weight[of_tag].mean(0) for of_tag in pieces])
        sizes = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "trainable_token_indices": added}
        lora = LoraConfig(task_type="CAUSAL_LM", **sizes)
        return get_peft_model(prepare_model(hf_parallel.enable(model)), lora), tokenizer

    def problem(self, rng):
        """Return a question and its answer."""
        people, sums = rng.sample(NAMES, rng.randint(3, 5)), [0, 0]
        while sums.count(max(sums)) > 1:
            points = [[rng.randint(1, 6) for _ in range(8)] for _ in people]
            sums = [sum(of_one) for of_one in points]
        parts = [Part(f" {name} {running(of_one)}\n") for name, of_one in zip(people, points, strict=True)]
        told = " ".join(f"{name}: {'+'.join(map(str, of_one))}." for name, of_one in zip(people, points, strict=True))
        totals = ", ".join(f"{name} {total}" for name, total in zip(people, sums, strict=True))
        most = people[sums.index(max(sums))]
        return f"Who has the most points? {told}", Part(parts=parts, conclusion=f"{totals}\n", end=most)


class Lists:
    """Groups of lists. The answer reverses each list, then collects first numbers per group and over all groups."""

    dialect = Dialect(region=("[", "="), branch=("(", ")"), outline="#", fork="|", opening="({number}:")
    plan = ("[", "#{number}:", "|")
    closing, mark = "", "/"
    ends = {"forked": "parallel:", "sequential": "sequential:"}
    steps, problems, settings = 1800, 100, {"per_device_train_batch_size": 12}

    def load(self):
        """Return a model with random weights, and its tokenizer."""
        labels = [f"{a}{b}:" for a in range(1, 5) for b in ("", *(f".{c}" for c in range(1, 5)))]
        words = ["<pad>", "<s>", "</s>", *"[=()|/", *self.ends.values(), *labels, *map("#{}".format, labels)]
        words += [f"{number}," for number in range(60)]
        return make_small_model(len(words)), make_tokenizer(words, r"#?[\d.]+:|\d+,|[a-z]+:|.", separator="")

    def problem(self, rng):
        """Return a question and its answer."""
        numbers = iter(rng.sample(range(60), 60))
        draw = lambda: [next(numbers) for _ in range(rng.randint(3, 5))]  # noqa: E731
        groups = [[draw() for _ in range(rng.randint(2, 3))] for _ in range(rng.randint(2, 3))]
        question, parts = "", []
        for index, group in enumerate(groups, start=1):
            question += "".join(f"{index}.{i}:{listed(of_one)}" for i, of_one in enumerate(group, start=1))
            lists = [Part(listed(of_one[::-1])) for of_one in group]
            parts.append(Part(parts=lists, conclusion=listed(of_one[-1] for of_one in group)))
        return question, Part(parts=parts, conclusion=listed(group[0][-1] for group in groups))


def listed(numbers):
    """Return numbers as text."""
    return "".join(f"{number}," for number in numbers)


def running(numbers):
    """Return a sum that is computed from left to right."""
    text, total = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        total += number
        text += f"+{number}={total}"
    return text


def write(part, task, forks, before=""):
    """Return the text of an answer, with forks in the format of the task's dialect or as sequential text."""
    if not part.parts:
        return part.text
    pairs = [(f"{before}{index}", of_one) for index, of_one in enumerate(part.parts, start=1)]
    texts = [write(of_one, task, forks, f"{number}.") for number, of_one in pairs]
    if not forks:
        written = [f"{number}:{text}" for (number, _), text in zip(pairs, texts, strict=True)]
        return "".join(written) + task.mark + part.conclusion + part.end
    dialect, (begin, outline, fork) = task.dialect, task.plan
    gap = dialect.first_text("")[0]
    text = "".join(outline.format(number=number, title=of_one.text.rpartition(" ")[0]) for number, of_one in pairs)
    text = begin + text + fork + gap
    for (number, _), of_path in zip(pairs, texts, strict=True):
        text += dialect.first_text(number)[1] + of_path + dialect.branch[1] + dialect.gap
    return text + dialect.joined_text + part.conclusion + task.closing + part.end


def lowest(part, before=""):
    """Yield number and text of each part without parts."""
    for index, of_one in enumerate(part.parts, start=1):
        yield from lowest(of_one, f"{before}{index}.") if of_one.parts else [f"{before}{index}:{of_one.text}"]


class Examples(torch.utils.data.IterableDataset):
    """Endless examples: forked and sequential ones in turn."""

    def __init__(self, task, seed):
        self.task, self.seed = task, seed

    def __iter__(self):
        rng = random.Random(self.seed)
        while True:
            for way, end in self.task.ends.items():
                question, part = self.task.problem(rng)
                yield {"prompt": question + end, "completion": write(part, self.task, way == "forked")}


class Clock(transformers.LogitsProcessor):
    """Processor and streamer that records when each pass has its logits, and how many rows get a token from it."""

    def __init__(self):
        self.times, self.rows = [], []

    def __call__(self, input_ids, scores):
        """Record the time."""
        self.times.append(time.perf_counter())
        self.rows.append(0)
        return scores

    def write_row(self, row, text, event):
        """Count a token."""
        self.rows[-1] += event == "token"

    def put(self, value):
        """Ignore tokens."""

    def end(self):
        """Ignore the end."""

    def seconds(self):
        """Return the seconds from the first pass to the last, and the same number of passes at their median time."""
        steps = defaultdict(list)  # by number of rows
        for rows, (begin, end) in zip(self.rows[1:], pairwise(self.times), strict=True):
            steps[rows].append(end - begin)
        taken = [second for of_rows in steps.values() for second in of_rows]
        at_median = sum(len(of_rows) * statistics.median(of_rows) for of_rows in steps.values())
        return {"seconds": sum(taken), "steps_seconds": at_median}


def measure(model, tokenizer, task, problems, timed):
    """Return the accuracy and cost of forked and of sequential answers to the same problems."""

    def answer(questions, **settings):
        inputs = tokenizer(questions, padding=True, return_token_type_ids=False, return_tensors="pt")
        given = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, "return_dict_in_generate": True, **settings}
        return model.generate(**inputs, generation_mode="fork_join", dialect=task.dialect, tokenizer=tokenizer, **given)

    found = {}
    for way, end in task.ends.items():
        questions = [question + end for question, _ in problems]
        outs = [answer(questions[first : first + 10]) for first in range(0, len(questions), 10)]
        texts = [text.removesuffix(tokenizer.eos_token) for out in outs for text in out.transcripts]
        right = [write(part, task, way == "forked") for _, part in problems]
        results = [
            (text[-len(part.end or part.conclusion) :], part) for text, (_, part) in zip(texts, problems, strict=True)
        ]
        alone = []
        for question in questions[:timed]:
            clock = Clock()
            out = answer([question], logits_processor=[clock], streamer=clock)
            alone.append({"forward_passes": out.stats.forward_passes, **clock.seconds()})
        figures = {
            "answers_with_forks": [bool(forks) for out in outs for forks in out.forks],
            "right_conclusions": [part.conclusion in text for text, (_, part) in zip(texts, problems, strict=True)],
            "right_results": [result == (part.end or part.conclusion) for result, part in results],
            "right_parts": [  # no further number follows
                re.search(re.escape(one) + r"(?!\d+,)", text) is not None
                for text, (_, part) in zip(texts, problems, strict=True)
                for one in lowest(part)
            ],
            "right_texts": [a == b for a, b in zip(texts, right, strict=True)],
            "tokens": [len(tokenizer.encode(text)) + 1 for text in texts],
            "critical_path": [steps for out in outs for steps in out.critical_path],
            **{name: [one[name] for one in alone] for name in alone[0]},
        }
        found[way] = {name: statistics.mean(values) for name, values in figures.items()} | {"example": texts[0]}
        found[way]["wall_by_steps"] = found[way]["seconds"] / found[way]["steps_seconds"]
    return found


def main():
    """Train, measure, print a table and write a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["lists", "sums"])
    parser.add_argument("--steps", type=int, help="of training (default: 1800 for lists, 200 for sums)")
    parser.add_argument("--problems", type=int, help="for the measurement (default: 100 for lists, 30 for sums)")
    parser.add_argument("--timed", type=int, default=5, help="problems of these that are measured alone, for the times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("trained-fork-join"), help="folder of model and report")
    options = parser.parse_args()
    task = {"lists": Lists, "sums": Sums}[options.task]()
    options.steps, options.problems = options.steps or task.steps, options.problems or task.problems
    warnings.filterwarnings("ignore", "nothing was generated in parallel")
    transformers.set_seed(options.seed)
    model, tokenizer = task.load()
    collator, began = DataCollatorForParallel(tokenizer, task.dialect), time.perf_counter()
    examples = Examples(task, options.seed)
    model, losses = train(model, examples, collator, options.steps, options.output, seed=options.seed, **task.settings)
    seconds = time.perf_counter() - began
    model.save_pretrained(options.output / "model")
    if options.task == "sums":
        model = model.merge_and_unload()
    rng = random.Random(options.seed + 1)
    results = measure(model, tokenizer, task, [task.problem(rng) for _ in range(options.problems)], options.timed)
    for way, figures in results.items():
        print(f"{way}: {figures['right_results']:.0%} right, {figures['forward_passes']:.0f} forward passes")
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    report = {**about(), "settings": settings, "training_seconds": seconds, "losses": losses, "ways": results}
    (options.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
