"""Trains a small transformer to share work as Hogwild! workers. Run: python examples/train_workers.py

A prompt has ten labeled lists of numbers, such as `31 7 50 b.` A worker takes the next list that nobody has taken, and
writes its label and its numbers in reverse: `Alice b 50 7 31.` If two workers take the same list in the same forward
pass, the one whose name comes later ends its step and takes another list. The script trains one model on runs of 1, 2
and 4 workers, and measures how many forward passes 1 to 4 workers need for new problems.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import hf_parallel
from hf_parallel.training import DataCollatorForParallel, ParallelExample, prepare_model

WORKERS = (1, 2, 4)  # that the model is trained with
MEASURED = (1, 2, 3, 4)
TARGET = 0.95  # share of right lists that the workers are to reach
ALONE = 3  # problems that are solved one by one, to measure the time of a forward pass
BATCH = 16
MAX_PASSES = 96
NAMES = ["Alice", "Bob", "Carol", "Dave"]
LABELS = list("abcdefghij")
NUMBERS = [str(number) for number in range(60)]
END = ".\n"  # of a list and of a step
WORDS = ["<pad>", "<s>", "</s>", END, *NAMES, *LABELS, *NUMBERS]
EMPTY = ("history_header", "others_header", "own_header", "step_gap", "redundancy_prompt", "answer_pattern")
HOGWILD = {"generation_mode": "hogwild", "step_prefix": "{name}", "separator": "\n", **dict.fromkeys(EMPTY, "")}
ABLATIONS = ({"layout": "interleaved"}, {"layout": "contiguous"}, {"step_move": "reencode"})
"""Settings of two workers that differ from training (Hogwild! Inference, appendix E.1)."""


def make_tokenizer(words=WORDS, pattern=r"\.\n|[^\s.]+", separator=" "):
    """Return a tokenizer with one token per word."""
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    if not separator:
        tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"}
    given = {"clean_up_tokenization_spaces": False, **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given)


def make_model(num_words, **sizes):
    """Return a model with random weights."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=num_words, max_position_embeddings=512, **ids, **sizes)
    return hf_parallel.enable(transformers.LlamaForCausalLM(config))


def make_small_model(num_words):
    """Return a model of two layers to train from scratch."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 100.0}  # no text is long
    # With the standard deviation of 0.02, which is for wider models, learning to look up numbers takes much longer.
    return prepare_model(make_model(num_words, initializer_range=1 / 16, rope_parameters=rope, **sizes))


def make_problem(rng):
    """Return a list of two to five numbers per label, all different."""
    numbers = iter(rng.sample(NUMBERS, len(NUMBERS)))
    return [[next(numbers) for _ in range(rng.randint(2, 5))] for _ in LABELS]


def encode(problems, tokenizer):
    """Return the prompts of problems."""
    lines = [[[*row, label, END] for row, label in zip(problem, LABELS, strict=True)] for problem in problems]
    texts = ["<s>" + END + "".join(map(" ".join, of_problem)) for of_problem in lines]
    return tokenizer(texts, padding=True, return_token_type_ids=False, return_tensors="pt")


def solve(problem, num_workers):
    """Return the words that each worker should write, one per pass, given what the passes before have written."""
    texts = [[] for _ in range(num_workers)]
    steps = [[] for _ in range(num_workers)]  # what is missing of each worker's step
    lists = [None] * num_workers  # that the workers are at
    num_taken = 0
    while any(text[-1:] != ["</s>"] for text in texts):
        seen, free = list(lists), num_taken
        for worker, (text, step) in enumerate(zip(texts, steps, strict=True)):
            if text[-1:] == ["</s>"]:
                continue
            if not step:
                index = free or worker  # in the first pass, the names decide
                if index == len(problem):
                    text.append("</s>")
                    continue
                step += [LABELS[index], *reversed(problem[index]), END]
                lists[worker], num_taken = index, max(num_taken, index + 1)
            elif text[-1] in LABELS and seen[worker] in seen[:worker]:
                step[:] = [END]
            text.append(step.pop(0))
            if not step:
                lists[worker] = None
    return texts


class Scripted(transformers.LogitsProcessor):
    """Lets the rows write given tokens."""

    def __init__(self, texts):
        self.tokens = [iter(text) for text in texts]

    def __call__(self, input_ids, scores):
        """Leave the next token of each row as the only one."""
        tokens = torch.tensor([[next(of_row, 0)] for of_row in self.tokens])
        return torch.full_like(scores, -1e4).scatter(1, tokens, 0.0)


def make_layout(rng, model, tokenizer, num_workers):
    """Return the example of a run in which the workers write what they should; any model can run it."""
    problem = make_problem(rng)
    texts = solve(problem, num_workers)
    out = model.generate(
        **encode([problem], tokenizer),
        **HOGWILD,
        tokenizer=tokenizer,
        num_workers=num_workers,
        max_new_tokens=max(map(len, texts)),
        logits_processor=[Scripted([[WORDS.index(word) for word in text] for text in texts])],
        return_dict_in_generate=True,
    )
    return ParallelExample.from_output(out)


class Examples(torch.utils.data.IterableDataset):
    """Endless examples: the layout of a run does not depend on its numbers, so each example gets new ones."""

    def __init__(self, layouts, seed):
        self.layouts, self.seed = layouts, seed

    def __iter__(self):
        rng = np.random.default_rng(self.seed)
        while True:
            of_batch = self.layouts[rng.choice(WORKERS)]
            for _ in range(BATCH):
                example, words = of_batch[rng.integers(len(of_batch))], np.arange(len(WORDS))
                rng.shuffle(words[-len(NUMBERS) :])
                yield replace(example, input_ids=words[example.input_ids], target_ids=words[example.target_ids])


def train(model, dataset, collator, steps, folder, **settings):
    """Train a model. Return it and the losses."""
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=min(50, steps // 8),
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=not sys.stderr.isatty(),
        use_cpu=True,
        **{
            "per_device_train_batch_size": BATCH,
            "logging_steps": max(1, min(50, steps // 2)),
            "save_strategy": "no",
            "adam_beta2": 0.98,
            **settings,
        },
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset, data_collator=collator)
    trainer.train()
    return model.eval(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(model, tokenizer, problems, num_workers, shared, **settings):
    """Return the output, and the steps of the workers, per problem: (words, forward pass that ended the step).

    Without `shared`, each worker has a run of its own.
    """
    runs, workers = (1, num_workers) if shared else (num_workers, 1)
    out = model.generate(
        **encode([problem for problem in problems for _ in range(runs)], tokenizer),
        **HOGWILD,
        **settings,
        tokenizer=tokenizer,
        num_workers=workers,
        max_new_tokens=MAX_PASSES,
        return_dict_in_generate=True,
    )
    found = [[] for _ in problems]
    for index, steps in enumerate(out.history):
        found[index // runs] += [
            (tokenizer.decode(step.tokens).split(), step.forward_pass) for step in steps if step.forward_pass
        ]
    return out, found


def measure(model, tokenizer, problems, num_workers, shared, **settings):
    """Return how many passes the workers need, and how much of their text is about lists that others do, too."""
    ended, tokens, duplicated, repeated = [], 0, 0, 0
    _, found = run(model, tokenizer, problems, num_workers, shared, **settings)
    began, passes = time.process_time(), 0
    for problem in problems[:ALONE]:
        passes += run(model, tokenizer, [problem], num_workers, shared, **settings)[0].stats.forward_passes
    pass_seconds = (time.process_time() - began) / passes
    for problem, steps in zip(problems, found, strict=True):
        for label, numbers in zip(LABELS, problem, strict=True):
            of_list = [(words[2:-1], end) for words, end in steps if words[1:2] == [label]]
            answers = sorted((end, answer) for answer, end in of_list if answer)
            right = bool(answers) and answers[0][1] == numbers[::-1]
            ended.append(answers[0][0] if right else np.inf)
            lengths = [len(answer) + 2 for answer, _ in of_list]  # and label and end
            tokens += sum(lengths)
            duplicated += sum(lengths) - max(lengths, default=0)
            repeated += len(answers) > 1
    ended = np.sort(ended)
    needed = ended[int(np.ceil(TARGET * len(ended))) - 1]
    return {
        "workers": num_workers,
        "shared": shared,
        **settings,
        "accuracy": float(np.isfinite(ended).mean()),
        "passes": int(needed) if np.isfinite(needed) else None,
        "pass_seconds": pass_seconds,  # of CPU time, of a problem alone
        "accuracy_by_pass": [round(float((ended <= i).mean()), 4) for i in range(0, 80, 4)],
        "accuracy_by_50_ms": [round(float((ended * pass_seconds <= i / 20).mean()), 4) for i in range(12)],
        "duplicated_tokens": duplicated / max(tokens, 1),
        "repeated_lists": repeated / len(ended),
    }


def about():
    """Return the first entry of a report."""
    machine = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {"machine": machine}


def train_new_model(tokenizer, options):
    """Return a trained model, and the losses and seconds of its training."""
    rng, began = random.Random(options.seed), time.perf_counter()
    smallest = make_model(len(WORDS), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    layouts = {n: [make_layout(rng, smallest, tokenizer, n) for _ in range(options.layouts)] for n in WORKERS}
    made = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        transformers.set_seed(options.seed)
        examples, collator = Examples(layouts, options.seed), DataCollatorForParallel(tokenizer)
        model, losses = train(
            make_small_model(len(WORDS)), examples, collator, options.steps, folder, seed=options.seed
        )
    seconds = {"layouts_seconds": made - began, "training_seconds": time.perf_counter() - made}
    return model, {**seconds, "losses": losses}


def main():
    """Train, measure, print a table and write a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--layouts", type=int, default=64, help="runs per number of workers from which examples come")
    parser.add_argument("--problems", type=int, default=100, help="for the measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write a report in JSON")
    words = "folder of a trained model; if it does not exist, the model is trained and saved there"
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=words)
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    if options.model and options.model.exists():
        model, of_training = hf_parallel.enable(transformers.LlamaForCausalLM.from_pretrained(options.model)), {}
    else:
        model, of_training = train_new_model(tokenizer, options)
        if options.model:
            model.save_pretrained(options.model)
    rng = random.Random(f"new problems {options.seed}")  # other ones than those of the training
    problems = [make_problem(rng) for _ in range(options.problems)]
    ways = [(n, shared) for n in MEASURED for shared in (True, False) if n > 1 or shared]
    results = [measure(model, tokenizer, problems, n, shared) for n, shared in ways]
    results += [measure(model, tokenizer, problems, 2, True, **settings) for settings in ABLATIONS]
    print(f"{'workers':>13}  {'accuracy':>8}  {'passes':>6}  {'ratio':>5}  duplicated")
    for result in results:
        kind = result.get("layout") or result.get("step_move") or ("" if result["shared"] else "independent")
        name = f"{result['workers']} {kind}".strip()
        passes, alone = result["passes"], results[0]["passes"]
        result["ratio"] = passes / alone if passes and alone else None
        figures = f"{passes or '-':>6}  {format(result['ratio'] or np.nan, '.2f'):>5}"
        print(f"{name:>13}  {result['accuracy']:>8.1%}  {figures}  {result['duplicated_tokens']:>10.1%}")
    if options.output:
        settings = {name: value for name, value in vars(options).items() if name not in ("output", "model")}
        report = {**about(), "settings": settings, "parameters": model.num_parameters(), **of_training}
        options.output.write_text(json.dumps(report | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
