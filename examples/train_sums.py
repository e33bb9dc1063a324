"""Teaches the demo model to share a list of sums between Hogwild! workers (LoRA). Run: python examples/train_sums.py

A prompt lists six sums, such as `c 12+9`. A worker takes the next sum that nobody has taken, and writes `Alice: c
12+9=21`. It sees the unfinished steps of the others. The script trains one adapter on scripted runs of 1, 2 and 4
workers, and measures on new problems how many forward passes 1 to 4 workers need, before and after training. `--grpo`
then trains the adapter by reinforcement learning on its own runs of 2, 3 and 4 workers, for right sums in few passes.
`--quick` runs the same path with a tiny random model.
"""

import argparse
import copy
import json
import random
import re
import string
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from train_workers import Scripted, about, train

import hf_parallel
from hf_parallel.evaluation.collaboration import duplicated_work
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
EXPLORED = (2, 3, 4)  # numbers of workers in reinforcement learning
GENERATIONS = 8  # runs of a problem
PROBLEMS = 2  # per step
PASS_COST = 0.005  # so that a sum is worth 33 passes
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


def read_rows(history, num_workers):
    """Return what each worker has generated, without its name: the pass in which each step ended, and its text."""
    rows = [[] for _ in range(num_workers)]
    for step in history:
        rows[step.worker].append((step.forward_pass or MAX_PASSES, step.text.removeprefix(f"{step.name}:")))
    return rows


def measure(model, tokenizer, problems, num_workers, prefix="", **settings):
    """Return how many sums are right after how many passes, and what the workers spent."""
    ended, tokens, passes, repeated, duplicated = [], [], [], [], []
    for first in range(0, len(problems), LISTS):
        of_batch = problems[first : first + LISTS]
        prompts = [prefix + write_prompt(problem, num_workers) for problem in of_batch]
        out = generate(model, tokenizer, prompts, num_workers, max_new_tokens=MAX_PASSES, **settings)
        for prompt, problem, history in zip(prompts, of_batch, out.history, strict=True):
            answers, more = read_answers(history)
            repeated.append(more / len(LABELS))
            duplicated.append(duplicated_work(read_rows(history, num_workers), prompt))
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
        "repeated": float(np.mean(repeated)),  # answers to a sum that had one already
        "duplicated": float(np.mean(duplicated)),  # the same, estimated by the measure of `evaluate`
        "by_problem": {"repeated": repeated, "duplicated": duplicated},
        "accuracy_by_pass": [round(float((ended <= limit).mean()), 4) for limit in range(0, MAX_PASSES + 1, GRID)],
        "example": out.transcripts[0],
    }


def merge(model, folder):
    """Return a copy of a model with the saved adapter in its weights."""
    return PeftModel.from_pretrained(copy.deepcopy(model), folder).merge_and_unload()


def measure_each(name, model, tokenizer, problems):
    """Return the measurements of a model for each number of workers."""
    return [{"model": name, **measure(model, tokenizer, problems, number)} for number in MEASURED]


def rank_correlation(results):
    """Return Spearman's correlation of repeated sums with duplicated work, over all runs of several trained workers.

    None if all runs are equal in one of them.
    """
    ranks = []
    for measured in ("repeated", "duplicated"):
        runs = [
            value
            for result in results
            if result["workers"] > 1 and result["model"] not in ("untrained", "with an example")
            for value in result["by_problem"][measured]
        ]
        values, index, counts = np.unique(runs, return_inverse=True, return_counts=True)
        if len(values) < 2:
            return None
        ranks.append((counts.cumsum() - (counts - 1) / 2)[index])  # equal values share their mean rank
    return float(np.corrcoef(ranks)[0, 1])


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


def teach(model, tokenizer, options, folder):
    """Train an adapter on scripted runs, and save it. Return figures of the training."""
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
    model = get_peft_model(prepare_model(copy.deepcopy(model)), lora)
    with tempfile.TemporaryDirectory() as outputs:
        settings = {
            "seed": options.seed,
            "per_device_train_batch_size": BATCH,
            "logging_steps": max(1, options.steps // 20),
        }
        model, losses = train(model, examples, DataCollatorForParallel(tokenizer), options.steps, outputs, **settings)
    model.save_pretrained(folder)
    return {
        "steps": options.steps,
        "batch": BATCH,
        "rank": RANK,
        "tokens": sum(map(len, examples)),
        "losses": losses,
        "examples_seconds": made - began,
        "training_seconds": time.perf_counter() - made,
    }


def reward(completions, passes, problem, **columns):
    """Return the share of right sums of each run, less a little for each forward pass."""
    rewards = []
    for transcript, num_passes, terms in zip(completions, passes, problem, strict=True):
        answers = {}
        for label, *numbers in STEP.findall(f"{transcript}\n"):
            answers.setdefault(label, list(map(int, numbers)))
        right = [answers.get(label) == [a, b, a + b] for label, (a, b) in zip(LABELS, terms, strict=True)]
        rewards.append(float(np.mean(right)) - PASS_COST * num_passes)
    return rewards


def reinforce(model, tokenizer, options, adapter, folder):
    """Continue an adapter by GRPO, and save it to a folder. Return figures of the training."""
    from datasets import Dataset
    from trl import GRPOConfig

    from hf_parallel.training import SharedPrefixGRPOTrainer, make_rollout_func

    began = time.perf_counter()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None  # prompts are those of `write_prompt`
    settings = {name: value for name, value in HOGWILD.items() if name != "generation_mode"}
    rollout_funcs = {}
    for num_workers in EXPLORED:
        names = {"num_workers": num_workers, "worker_names": NAMES[:num_workers]}
        rollout_funcs[num_workers] = make_rollout_func("hogwild", **settings | names)
    rng = random.Random(f"grpo {options.seed}")
    numbers = {}  # of workers, by prompt
    rows = []
    for step in range(options.grpo):
        num_workers = EXPLORED[step % len(EXPLORED)]
        for _ in range(PROBLEMS):
            problem = make_problem(rng)
            prompt = write_prompt(problem, num_workers).rstrip()  # the mode appends the blank line
            numbers[prompt] = num_workers
            rows.append({"prompt": prompt, "problem": problem})

    def rollout(prompts, trainer):
        """Return runs of the prompts of a step, which are for the same number of workers."""
        return rollout_funcs[numbers[prompts[0]]](prompts, trainer)

    model = PeftModel.from_pretrained(copy.deepcopy(model), adapter, is_trainable=True)
    with tempfile.TemporaryDirectory() as outputs:
        arguments = GRPOConfig(
            output_dir=outputs,
            max_steps=options.grpo,
            num_generations=GENERATIONS,
            per_device_train_batch_size=GENERATIONS * PROBLEMS,
            max_completion_length=MAX_PASSES,
            shuffle_dataset=False,
            learning_rate=3e-4,
            lr_scheduler_type="linear",
            warmup_steps=3,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=not sys.stderr.isatty(),
            seed=options.seed,
        )
        trainer = SharedPrefixGRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            rollout_func=rollout,
            args=arguments,
        )
        trainer.train()
    model.save_pretrained(folder)
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "steps": options.grpo,
        "problems": PROBLEMS,  # of a step
        "generations": GENERATIONS,
        "workers": [EXPLORED[step % len(EXPLORED)] for step in range(options.grpo)],
        "tokens": steps[-1]["num_tokens"],
        "rewards": [step["reward"] for step in steps],
        "training_seconds": time.perf_counter() - began,
    }


def main():
    """Measure, train, and measure again; write the report and the adapter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help=f"of {BATCH} examples each")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems")
    parser.add_argument("--untrained", type=int, default=8, help="number of these for the model before training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("trained-sums"), help="folder of report and adapter")
    parser.add_argument("--again", action="store_true", help="measure the adapters in the folder, without training")
    words = f"then train by GRPO, 24 steps by default, each with {GENERATIONS} runs of {PROBLEMS} problems"
    parser.add_argument("--grpo", type=int, nargs="?", const=24, default=0, metavar="STEPS", help=words)
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
    path, adapter, reinforced = (options.output / name for name in ("report.json", "adapter", "adapter-grpo"))
    earlier = json.loads(path.read_text()) if options.again else {}
    training = earlier.get("training") or teach(model, tokenizer, options, adapter)
    trained = merge(model, adapter)
    results += measure_each("trained", trained, tokenizer, problems)
    unseen = measure(trained, tokenizer, problems, 2, layout="interleaved")
    results.append({"model": "sees ended steps", **unseen})

    report = {**about(), "training": training, "results": results}
    if options.grpo or "grpo" in earlier:
        report["grpo"] = reinforce(model, tokenizer, options, adapter, reinforced) if options.grpo else earlier["grpo"]
        results += measure_each("after GRPO", merge(model, reinforced), tokenizer, problems)
    report["rank_correlation"] = rank_correlation(results)
    report["seconds"] = time.perf_counter() - began
    path.write_text(json.dumps(report, indent=1) + "\n")
    print("losses:", *(round(loss, 3) for loss in training["losses"]))
    if "grpo" in report:
        print("rewards:", *(round(value, 3) for value in report["grpo"]["rewards"]))
    print_results(results)
    if report["rank_correlation"] is not None:
        print(f"rank correlation of repeated sums with `duplicated`: {report['rank_correlation']:.2f}")


if __name__ == "__main__":
    main()
