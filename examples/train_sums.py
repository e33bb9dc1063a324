"""Teaches the demo model to share a list of sums between Hogwild! workers (LoRA). Run: python examples/train_sums.py

A prompt lists six sums, such as `c 12+9`. A worker takes the next sum that nobody has taken, and writes `Alice: c
12+9=21`. It sees the unfinished steps of the others. The script trains one adapter on scripted runs of 1, 2 and 4
workers, and measures on new problems how many forward passes 1 to 4 workers need, before and after training.
`--quick` runs the same path with a tiny random model.
"""

import argparse
import json
import random
import re
import string
import tempfile
import time
from pathlib import Path

import numpy as np
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from train_workers import Scripted, about, train

import hf_parallel
from hf_parallel.progress import progress_bar
from hf_parallel.training import DataCollatorForParallel, ParallelExample, prepare_model

WORKERS = (1, 2, 4)  # that the model is trained with
MEASURED = (1, 2, 3, 4)
BATCH = 4
RANK = 16
RUNS = 32  # scripted ones that are computed together
LISTS = 8  # that are solved together
NAMES = ["Alice", "Bob", "Carol", "Dave"]
LABELS = "abcdef"
MAX_PASSES = 64
GRID = 4  # passes between two columns of the report
EMPTY = ("history_header", "others_header", "own_header", "step_gap", "redundancy_prompt", "answer_pattern")
HOGWILD = {
    "generation_mode": "hogwild",
    "worker_names": NAMES,
    "collaboration_prompt": "",
    "step_prefix": "{name}:",
    "separator": "\n",
    "sentence_ends": list(string.printable.strip()),  # any line is a step
    **dict.fromkeys(EMPTY, ""),
}
STEP = re.compile(r"\w+: ([a-z]) (\d+)\+(\d+)=(\d+)\n")


def make_problem(rng):
    """Return the terms of one sum per label."""
    firsts = [rng.choice((rng.randint(1, 9), rng.randint(10, 49))) for _ in LABELS]
    return [(first, rng.randint(1, 9)) for first in firsts]


def write_prompt(problem, num_workers):
    """Return the prompt of a problem, as `build_prompt` makes it without a chat template."""
    *first, last = NAMES[:num_workers]
    names = f"{', '.join(first)} and {last} share" if first else f"{last} solves"
    sums = ", ".join(f"{label} {a}+{b}" for label, (a, b) in zip(LABELS, problem, strict=True))
    return f"{names} these sums: {sums}\n\n"


def write_step(label, terms):
    """Return what a worker writes about a sum, after its name."""
    a, b = terms
    return f" {label} {a}+{b}={a + b}\n"


def write_example(num_workers):
    """Return a solved problem, to show the task to a model that is not trained."""
    problem = [(7, 5), (30, 4), (18, 6), (3, 9), (26, 7), (11, 1)]
    text = write_prompt(problem, num_workers)
    for index, item in enumerate(zip(LABELS, problem, strict=True)):
        text += f"{NAMES[index % num_workers]}:{write_step(*item)}"
    return f"{text}\n"


def solve(problem, num_workers, tokenizer):
    """Return the tokens that each worker should write, one per pass, given what the passes before have written.

    Workers that begin a step in the same pass take the next sums in the order of their names.
    """
    sums = [tokenizer(write_step(*item)).input_ids for item in zip(LABELS, problem, strict=True)]
    texts = [[] for _ in range(num_workers)]
    steps = [[] for _ in range(num_workers)]  # what is missing of each worker's step
    working = set(range(num_workers))
    while working:
        for worker in sorted(working):
            if not steps[worker]:
                if not sums:
                    texts[worker].append(tokenizer.eos_token_id)
                    working.remove(worker)
                    continue
                steps[worker] = sums.pop(0)
            texts[worker].append(steps[worker].pop(0))
    return texts


def generate(model, tokenizer, prompts, num_workers, **settings):
    """Return the output of workers that share each prompt."""
    tokenizer.padding_side = "left"
    return model.generate(
        **tokenizer(prompts, padding=True, return_tensors="pt"),
        **HOGWILD | {"worker_names": NAMES[:num_workers]},
        tokenizer=tokenizer,
        num_workers=num_workers,
        do_sample=False,
        return_dict_in_generate=True,
        **settings,
    )


def make_model(tokenizer, **sizes):
    """Return a model with random weights for the tokenizer."""
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **ids, **sizes)
    return hf_parallel.enable(transformers.LlamaForCausalLM(config))


def make_smallest_model(tokenizer):
    """Return a model that can only write what it is made to write."""
    return make_model(tokenizer, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)


def make_examples(rng, tokenizer, count):
    """Return examples in random order: scripted runs, which any model can compute, as their layout is what counts."""
    model = make_smallest_model(tokenizer)
    examples = []
    for number in progress_bar(range(-(-count // RUNS)), what="Examples", unit="batches"):
        num_workers = WORKERS[number % len(WORKERS)]
        problems = [make_problem(rng) for _ in range(RUNS)]
        texts = [text for problem in problems for text in solve(problem, num_workers, tokenizer)]
        out = generate(
            model,
            tokenizer,
            [write_prompt(problem, num_workers) for problem in problems],
            num_workers,
            max_new_tokens=max(map(len, texts)),
            logits_processor=[Scripted(texts)],
        )
        whole = ParallelExample.from_output(out)
        for index in range(RUNS):
            rows = range(index * num_workers, (index + 1) * num_workers)
            examples.append(whole.of_rows(list(rows)))
    rng.shuffle(examples)
    return examples[:count]


def read_answers(history):
    """Return the first answer about each label, as (pass that ended its step, terms and result); and further ones."""
    answers, repeated = {}, 0
    for step in history:
        match = STEP.fullmatch(step.text)
        if match and step.forward_pass:
            label, *numbers = match.groups()
            repeated += label in answers
            answers.setdefault(label, (step.forward_pass, tuple(map(int, numbers))))
    return answers, repeated


def count_tokens(history, num_workers):
    """Return how many tokens each worker has generated, which is the number of its passes."""
    last = {step.worker: step.forward_pass for step in history}
    return [last[worker] or MAX_PASSES for worker in range(num_workers)]


def measure(model, tokenizer, problems, num_workers, prefix="", **settings):
    """Return how many sums are right after how many passes, and what the workers spent."""
    ended, tokens, passes, repeated = [], [], [], 0
    for first in range(0, len(problems), LISTS):
        of_batch = problems[first : first + LISTS]
        prompts = [prefix + write_prompt(problem, num_workers) for problem in of_batch]
        out = generate(model, tokenizer, prompts, num_workers, max_new_tokens=MAX_PASSES, **settings)
        for problem, history in zip(of_batch, out.history, strict=True):
            answers, more = read_answers(history)
            repeated += more
            for label, (a, b) in zip(LABELS, problem, strict=True):
                end, numbers = answers.get(label, (np.inf, None))
                ended.append(end if numbers == (a, b, a + b) else np.inf)
            of_workers = count_tokens(history, num_workers)
            passes.append(max(of_workers))
            tokens.append(sum(of_workers))
    ended = np.array(ended)
    solved = np.isfinite(ended).reshape(len(problems), -1).all(1)
    return {
        "workers": num_workers,
        "problems": len(problems),
        "accuracy": float(np.isfinite(ended).mean()),
        "solved": float(solved.mean()),  # problems with all sums right
        "passes": float(np.mean(passes)),  # until the last worker stops
        "tokens": float(np.mean(tokens)),  # of all workers
        "repeated": repeated / len(ended),  # answers to a sum that had one already
        "accuracy_by_pass": [round(float((ended <= limit).mean()), 4) for limit in range(0, MAX_PASSES + 1, GRID)],
        "example": out.transcripts[0],
    }


def print_results(results):
    """Print a line per measurement: figures of the end, and right sums by number of passes."""
    limits = range(2 * GRID, MAX_PASSES + 1, 2 * GRID)
    print(f"{'':34} right  solved  passes  tokens  repeated | right sums after", *limits, "passes")
    for result in results:
        by_pass = " ".join(f"{result['accuracy_by_pass'][limit // GRID]:4.0%}" for limit in limits)
        name = f"{result['model']}, workers: {result['workers']}"
        print(
            f"{name:34} {result['accuracy']:5.1%} {result['solved']:6.1%} {result['passes']:7.1f} "
            f"{result['tokens']:7.1f} {result['repeated']:8.1%}  | {by_pass}"
        )


def teach(model, tokenizer, options):
    """Return the model with a trained adapter, and figures of its training."""
    began = time.perf_counter()
    examples = make_examples(random.Random(options.seed), tokenizer, options.steps * BATCH)
    made = time.perf_counter()
    count = model.config.num_hidden_layers
    layers = list(range(count // 3, count))  # no gradients are needed below
    lora = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(prepare_model(model), lora)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "seed": options.seed,
            "per_device_train_batch_size": BATCH,
            "logging_steps": max(1, options.steps // 20),
        }
        model, losses = train(model, examples, DataCollatorForParallel(tokenizer), options.steps, folder, **settings)
    return model, {
        "steps": options.steps,
        "batch": BATCH,
        "rank": RANK,
        "tokens": sum(map(len, examples)),
        "losses": losses,
        "examples_seconds": made - began,
        "training_seconds": time.perf_counter() - made,
    }


def main():
    """Measure, train, and measure again; write the report and the adapter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help=f"of {BATCH} examples each")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems")
    parser.add_argument("--untrained", type=int, default=8, help="number of these for the model before training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("trained-sums"), help="folder of report and adapter")
    parser.add_argument("--again", action="store_true", help="measure the adapter in the folder, without training")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, few steps and problems")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.problems, options.untrained = 12, 2, 1

    began = time.perf_counter()
    transformers.set_seed(options.seed)
    model, tokenizer = hf_parallel.load_embedded_model(preset=False)  # whose repetition penalty would forbid digits
    if options.quick:
        model = make_model(tokenizer, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    hf_parallel.enable(model)
    rng = random.Random(f"held out {options.seed}")
    problems = [make_problem(rng) for _ in range(options.problems)]

    results = []
    untrained = problems[: options.untrained]
    for num_workers in WORKERS:
        results.append({"model": "untrained", **measure(model, tokenizer, untrained, num_workers)})
        result = measure(model, tokenizer, untrained, num_workers, write_example(num_workers))
        results.append({"model": "with an example", **result})
    adapter, path = options.output / "adapter", options.output / "report.json"
    if options.again:
        model = PeftModel.from_pretrained(model, adapter)
        training = json.loads(path.read_text())["training"]
    else:
        model, training = teach(model, tokenizer, options)
        model.save_pretrained(adapter)
    model = model.merge_and_unload()
    for num_workers in MEASURED:
        results.append({"model": "trained", **measure(model, tokenizer, problems, num_workers)})
    unseen = measure(model, tokenizer, problems, 2, layout="interleaved")
    results.append({"model": "sees ended steps", **unseen})

    report = {**about(), "training": training, "results": results, "seconds": time.perf_counter() - began}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print("losses:", *(round(loss, 3) for loss in training["losses"]))
    print_results(results)


if __name__ == "__main__":
    main()
