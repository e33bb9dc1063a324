"""Trains a small model that spawns threads, as Adaptive Parallel Reasoning does. Run: python examples/train_calls.py

The question is for the largest digit of one to four lists, such as `4729|315|82=`. With several lists, the model calls
a thread for each: `<spawn>4729|315|82</spawn>`. A thread reads its list alone, writes the largest digit so far for each
digit, and returns the last one: `4779<join>9</join>`. The call is then replaced by what the threads have returned,
`[958]`, from which the model finds the answer: `999<join>9</join>`. With one list, it calls nobody.

Each thread, and the text before and after a call, is an ordinary training example.
"""

import argparse
import json
import random
import statistics
import time
import warnings
from itertools import accumulate
from pathlib import Path

import torch
import transformers
from train_workers import about, make_model, make_tokenizer

from hf_parallel import CallDialect

SPAWN = CallDialect(
    call=("<spawn>", "</spawn>"),
    separator="|",
    prompt="{message}=",
    returned=("<join>", "</join>"),
    around=("[", "]"),
    keeps_call=False,
)
WORDS = ["<pad>", "<s>", "</s>", *"0123456789|=[]", *SPAWN.call, *SPAWN.returned]
BATCH = 32
MAX_LISTS = 4
MAX_DIGITS = 5


def make_problem(rng):
    """Return one to four lists of two to five digits."""
    return ["".join(rng.choices("0123456789", k=rng.randint(2, MAX_DIGITS))) for _ in range(rng.randint(1, MAX_LISTS))]


def largest(digits):
    """Return what a thread writes: the largest digit so far after each digit, and the last of these."""
    return "".join(accumulate(digits, max)) + f"<join>{max(digits)}</join></s>"


def examples_of(problem):
    """Return the threads of a problem: what each reads, and what it writes."""
    question = "|".join(problem) + "="
    if len(problem) == 1:
        return [(question, largest(problem[0]))]
    found = "".join(map(max, problem))
    calling = (question, f"<spawn>{'|'.join(problem)}</spawn>")
    return [calling, (f"{question}[{found}]", largest(found)), *((f"{digits}=", largest(digits)) for digits in problem)]


def make_batch(rng, tokenizer):
    """Return tokens and labels, int64 `[BATCH, length]`. What a thread reads is no label."""
    pairs = []
    while len(pairs) < BATCH:
        examples = examples_of(make_problem(rng))
        pairs += examples[:2] + rng.sample(examples[2:], min(1, len(examples[2:])))
    rows = []
    for given, written in pairs[:BATCH]:
        given, written = (tokenizer(text, add_special_tokens=False).input_ids for text in (f"<s>{given}", written))
        rows.append((given + written, [-100] * len(given) + written))
    return pad(rows)


def pad(rows):
    """Return tokens and labels of rows, int64 `[rows, length]`."""
    ids, labels = zip(*((torch.tensor(tokens), torch.tensor(targets)) for tokens, targets in rows), strict=True)
    pad_sequence = torch.nn.utils.rnn.pad_sequence
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)


def train(model, tokenizer, steps, seed, make_batch=make_batch, learning_rate=4e-3):
    """Train a model on batches. Return the losses."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, min(100, steps // 8), steps)
    losses = []
    for step in range(steps):
        ids, labels = make_batch(rng, tokenizer)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}: loss {statistics.mean(losses[-100:]):.3f}", flush=True)
    return losses


def measure(model, tokenizer, problems):
    """Return how many problems were answered as they should be, by how many threads, and their lengths."""
    prompts = tokenizer(["<s>" + "|".join(lists) + "=" for lists in problems], padding=True, return_tensors="pt")
    out = model.generate(
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
        generation_mode="fork_join",
        dialect=SPAWN,
        tokenizer=tokenizer,
        max_new_tokens=300,
        do_sample=False,
        return_dict_in_generate=True,
    )
    paths = [[path for fork in forks for path in fork.paths] for forks in out.forks]
    spawned = [[path.message for path in of_answer] for of_answer in paths]
    wanted = [lists if len(lists) > 1 else [] for lists in problems]
    answers = [text.removesuffix("</s>") for text in out.transcripts]
    right = [f"<join>{max(map(max, lists))}</join>" for lists in problems]
    shown = next(index for index, lists in enumerate(problems) if len(lists) > 1)
    return {
        "spawned_as_asked": statistics.mean(a == b for a, b in zip(spawned, wanted, strict=True)),
        "right": statistics.mean(text.endswith(end) for text, end in zip(answers, right, strict=True)),
        "threads": statistics.mean(map(len, paths)),
        "tokens": out.stats.decoded_tokens / len(problems),
        "critical_path": statistics.mean(out.critical_path),
        "example": {
            "question": "|".join(problems[shown]) + "=",
            "answer": answers[shown],
            "threads": [path.text for path in paths[shown]],
        },
    }


def main():
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--problems", type=int, default=100, help="for the measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("trained-calls"), help="folder of model and report")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "nothing was generated in parallel")
    transformers.set_seed(options.seed)
    tokenizer = make_tokenizer(WORDS, "<[^>]*>|.", separator="")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    model = make_model(len(WORDS), initializer_range=0.1, rope_parameters=rope, **sizes)
    began = time.process_time()
    losses = train(model.train(), tokenizer, options.steps, options.seed)
    seconds = time.process_time() - began
    rng = random.Random(options.seed + 1)
    result = measure(model.eval(), tokenizer, [make_problem(rng) for _ in range(options.problems)])
    options.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.output / "model")
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    report = {**about(), "settings": settings, "training_cpu_seconds": seconds, "losses": losses, "result": result}
    (options.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"trained for {seconds:.0f} seconds of CPU time")
    print(f"{result['spawned_as_asked']:.0%} spawned the threads of their lists, {result['right']:.0%} right")
    print(json.dumps(result["example"]))


if __name__ == "__main__":
    main()

# Prints:
#   trained for
#   ... spawned the threads of their lists, ...
