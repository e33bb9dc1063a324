"""Trains a small model to use a calculator, by GRPO over conversations. Run: python examples/train_calculator.py

A question is a sum, a difference or a product, such as `37*46`. The right answer needs a call, such as `<call>{"name":
"multiply", "arguments": {"a": 37, "b": 46}}</call>`, whose result the model repeats. A model of two layers is first
trained on conversations in which the answer is guessed half of the time, and a wrong tool is called in a fifth. Then
GRPO rewards right answers, with rollouts and loss by `SharedPrefixGRPOTrainer`. `--compare STEPS` trains with TRL's
trainer, too. Needs the extra `train` (docs/install.md).
"""

import argparse
import copy
import json
import operator
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import transformers
from datasets import Dataset
from train_calls import pad, train
from train_workers import about, make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_parallel
from hf_parallel.training import SharedPrefixGRPOTrainer

OPERATIONS = {"+": ("add", operator.add), "-": ("subtract", operator.sub), "*": ("multiply", operator.mul)}
NAMES = [name for name, _ in OPERATIONS.values()]
BEGIN, BETWEEN, SECOND, END = '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}"
MARKS = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "<tool>", "<call>", "</call>"]
WORDS = [*MARKS, BEGIN, BETWEEN, SECOND, END, *NAMES, *"0123456789+-*"]
PATTERN = r'<[^>]*>|\{"name": "|", "arguments": \{"a": |, "b": |\}\}|[a-z]+|.'
TEMPLATE = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}</s>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "</s>", "content": "text"},
    },
}
RIGHT_CALLS, GUESSES = 0.3, 0.5  # of the conversations before GRPO; the others call a wrong tool
BATCH = 32
PROMPTS = 4  # per step of GRPO
GENERATIONS = 8  # conversations of a prompt


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: A number.
        b: A number.

    Returns:
        Their sum.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """
    Subtracts two numbers.

    Args:
        a: A number.
        b: The number that is taken from it.

    Returns:
        Their difference.
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: A number.
        b: A number.

    Returns:
        Their product.
    """
    return a * b


def make_question(rng):
    """Return two numbers and the sign between them."""
    return rng.randint(10, 99), rng.choice("+-*"), rng.randint(10, 99)


def answer_of(question):
    """Return the answer of a question."""
    a, sign, b = question
    return OPERATIONS[sign][1](a, b)


def conversation(rng):
    """Return a conversation before GRPO, as pairs of a text and whether the model writes it."""
    question = make_question(rng)
    a, sign, b = question
    asked = (f"<user>{a}{sign}{b}</s><assistant>", False)
    name, function = OPERATIONS[sign]
    kind = rng.random()
    if kind < GUESSES:
        return [asked, (f"{rng.randint(10, 999)}</s>", True)]
    if kind >= GUESSES + RIGHT_CALLS:
        name, function = rng.choice([other for other in OPERATIONS.values() if other[0] != name])
    result = function(a, b)
    call = f"<call>{BEGIN}{name}{BETWEEN}{a}{SECOND}{b}{END}</call></s>"
    return [asked, (call, True), (f"<tool>{result}</s><assistant>", False), (f"{result}</s>", True)]


def make_batch(rng, tokenizer):
    """Return tokens and labels, int64 `[BATCH, length]`. Questions and answers of tools are no labels."""
    rows = []
    for _ in range(BATCH):
        ids = []
        labels = []
        for text, is_written in conversation(rng):
            tokens = tokenizer(text, add_special_tokens=False).input_ids
            ids += tokens
            labels += tokens if is_written else [-100] * len(tokens)
        rows.append((ids, labels))
    return pad(rows)


def is_right(completions, answer, **columns):
    """Return 1 for each conversation whose last message is the answer."""
    return [float(messages[-1]["content"] == str(of)) for messages, of in zip(completions, answer, strict=True)]


def learn(trainer_class, model, tokenizer, steps, seed, learning_rate, **generation_kwargs):
    """Train by GRPO. Return the mean reward of each step, and the seconds of CPU time."""
    rng = random.Random(seed)
    questions = [make_question(rng) for _ in range(PROMPTS * steps)]
    prompts = [[{"role": "user", "content": f"{a}{sign}{b}"}] for a, sign, b in questions]
    trainer = trainer_class(
        model=hf_parallel.enable(copy.deepcopy(model)),
        processing_class=tokenizer,
        reward_funcs=is_right,
        tools=[add, subtract, multiply],
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": list(map(answer_of, questions))}),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            num_generations=GENERATIONS,
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            max_completion_length=64,
            max_tool_calling_iterations=2,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            generation_kwargs=generation_kwargs,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
        ),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    return [logs["reward"] for logs in trainer.state.log_history if "reward" in logs], seconds


def main():
    """Train, and print the rewards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm-up", type=int, default=1500, help="steps before GRPO")
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    parser.add_argument("--compare", type=int, default=0, help="steps of GRPO by TRL's trainer, for each seed")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=64, help="of the model")
    parser.add_argument("--output", type=Path, default=Path("trained-calculator"), help="folder of the report")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.set_seed(0)
    tokenizer = make_tokenizer(WORDS, PATTERN, separator="")
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE
    sizes = {"hidden_size": options.hidden_size, "intermediate_size": 4 * options.hidden_size}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    model = make_model(len(WORDS), initializer_range=0.1, rope_parameters=rope, **sizes)
    scale = 64 / options.hidden_size  # of learning rates
    losses = train(model.train(), tokenizer, options.warm_up, 0, make_batch, learning_rate=4e-3 * scale)
    ways = {"shared": (SharedPrefixGRPOTrainer, options.steps, {"generation_mode": "shared_prefix"})}
    if options.compare:
        ways["trl"] = (GRPOTrainer, options.compare, {})
    runs = []
    for seed in range(options.seeds):
        for way, (trainer_class, steps, generation_kwargs) in ways.items():
            rewards, seconds = learn(
                trainer_class, model, tokenizer, steps, seed, learning_rate=1e-3 * scale, **generation_kwargs
            )
            runs.append({"way": way, "seed": seed, "rewards": rewards, "cpu_seconds": seconds})
            first, last = (statistics.mean(part) for part in (rewards[:5], rewards[-5:]))
            print(f"{way}, seed {seed}: right {first:.0%} to {last:.0%}, {seconds / steps:.2f} s of CPU time per step")
    options.output.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    report = {**about(), "settings": settings, "losses": losses, "runs": runs}
    (options.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

# Prints:
#   shared, seed 0: right
