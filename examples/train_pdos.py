"""Train a model to open parallel blocks (LoRA, docs/training_recipes.md). Run: python examples/train_pdos.py"""

import argparse
import json
import random
import re
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, set_seed

import hf_parallel
from hf_parallel import PDOSConfig
from hf_parallel.training import DataCollatorForParallel, ParallelExample, prepare_model

TOPICS = {
    "instruments": "a violin, a flute, a drum, a piano, a harp, a trumpet",
    "animals": "a tiger, a whale, a horse, an owl, a frog, a snake",
    "tools": "a hammer, a saw, a ladder, a drill, a rake, a knife",
    "vehicles": "a bicycle, a train, a bus, a tractor, a canoe, a rocket",
    "countries": "Italy, Norway, Peru, Japan, Egypt, Canada",
    "foods": "bread, cheese, rice, honey, soup, chocolate",
}
LISTS = {  # questions with several parts, and how their answers begin
    "Compare {items}.": "I compare them one by one.",
    "What do you know about {items}?": "I know something about each of them.",
    "Make a list that describes {items}.": "Here is the list.",
    "Tell me one thing about each of these {topic}: {items}.": "Here is one thing about each.",
    "Which of these {topic} is the best: {items}?": "I look at each of them.",
    "Name {number} {topic} and describe them.": "Here they are.",
}
SINGLE = ("What do you know about {item}?", "Describe {item}.", "Tell me one thing about {item}.", "Is {item} useful?")
OTHER = ("What is 7 + 5?", "Say hello to a friend.", "Who wrote Hamlet?", "Why is the sky blue?", "How are you?")
NEW_TOPICS = {  # of the evaluation, with questions that differ from those of the training
    "planets": "Mars, Venus, Jupiter, Saturn, Mercury, Neptune",
    "sports": "tennis, football, chess, golf, rowing, boxing",
    "buildings": "a castle, a church, a library, a lighthouse, a windmill, a hospital",
}
NEW_LISTS = (
    "What is the difference between {items}?",
    "Write one sentence about each of {items}.",
    "Give me an overview of these {topic}: {items}.",
    "List {number} {topic} with a short explanation of each.",
)
NEW_SINGLE = ("Explain to me what {item} is.", "Write one sentence about {item}.", "Why do people like {item}?")
SETTINGS = {"join": "rotate"}  # no `opening` and no `titles`: the model opens blocks itself

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60, help="of 2 examples each")
parser.add_argument("--prompts", type=int, default=20, help="held-out questions of each of the two kinds")
parser.add_argument("--output", type=Path, default=Path("trained-pdos"))
options = parser.parse_args()

started = time.time()
set_seed(0)
rng = random.Random(0)
warnings.filterwarnings("ignore", "nothing was generated in parallel")
model, tokenizer = hf_parallel.load_embedded_model()
hf_parallel.enable(model)


def chat(*questions):
    """Return the model's inputs for a batch of questions."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    given = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    return tokenizer.apply_chat_template(messages, **given)


def ask(topics, questions):
    """Return a question about some things of a random topic, before and after the words are filled in, and these."""
    topic, things = rng.choice(list(topics.items()))
    chosen = rng.sample(things.split(", "), rng.randint(2, 4))
    number = ("two", "three", "four")[len(chosen) - 2]
    words = {"topic": topic, "number": number, "item": chosen[0], "items": f"{', '.join(chosen[:-1])} and {chosen[-1]}"}
    question = rng.choice(list(questions))
    return question, question.format(**words), {**words, "chosen": chosen}


def sentences(questions):
    """Return the first sentence of the model's own answer to each question."""
    inputs = chat(*(f"{question} Answer in one short sentence." for question in questions))
    rows = model.generate(**inputs, do_sample=False, max_new_tokens=24)[:, inputs["input_ids"].shape[1] :]
    texts = [text.strip().split("\n")[0] for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
    ended = [re.match(r".*?[.!?](?=\s|$)", text) for text in texts]
    return [end[0] if end else text.rpartition(",")[0] + "." for text, end in zip(texts, ended, strict=True)]


def answer(question, words):
    """Return an answer with a block: the sentences of its things, each under a title."""
    parts = [f"####{thing.removeprefix('a ').removeprefix('an ').capitalize()}: " for thing in words["chosen"]]
    block = "".join(f"{part}{known[thing]}\n" for part, thing in zip(parts, words["chosen"], strict=True))
    return f"{LISTS[question]}\n{block}####%%%%\nThat is what I know about these {words['topic']}."


def generate(*questions):
    """Generate answers in the mode `pdos`."""
    given = {"do_sample": False, "max_new_tokens": 160, "return_dict_in_generate": True}
    return model.generate(**chat(*questions), generation_mode="pdos", tokenizer=tokenizer, **SETTINGS, **given)


def share(out):
    """Return the share of the answers that have a well-formed block."""
    return sum(bool(blocks) and not why for blocks, why in zip(out.blocks, out.fallback, strict=True)) / len(out.blocks)


# Data: as many answers with a block as ordinary ones
things = [thing for items in TOPICS.values() for thing in items.split(", ")]
own = sentences([*(f"What is {thing}?" for thing in things), *OTHER])
known, others = dict(zip(things, own, strict=False)), list(zip(OTHER, own[len(things) :], strict=True))
texts = []
for number in range(2 * options.steps):
    question, asked, words = ask(TOPICS, LISTS if number % 2 else SINGLE)
    if question in LISTS:
        texts.append((asked, answer(question, words)))
    else:
        texts.append(rng.choice(others) if rng.random() < 0.2 else (asked, known[words["item"]]))
examples = []
for asked, text in texts:
    prompt = chat(asked)["input_ids"][0].tolist()
    examples.append(
        ParallelExample.from_text(text + tokenizer.eos_token, tokenizer, PDOSConfig(**SETTINGS), prompt=prompt)
    )

lists = [ask(NEW_TOPICS, NEW_LISTS)[1] for _ in range(options.prompts)]
ordinary = [ask(NEW_TOPICS, NEW_SINGLE)[1] for _ in range(options.prompts)]
before = generate(*lists)

# Training
model = get_peft_model(
    prepare_model(model), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
)
arguments = TrainingArguments(
    output_dir=str(options.output),
    max_steps=options.steps,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    warmup_steps=options.steps // 8,
    logging_steps=options.steps // 8 or 1,
    remove_unused_columns=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=not sys.stderr.isatty(),
    seed=0,
)
trainer = Trainer(model, arguments, train_dataset=examples, data_collator=DataCollatorForParallel(tokenizer))
trained = time.time()
trainer.train()
trained = time.time() - trained
model.eval()

# Evaluation
after, after_ordinary = generate(*lists), generate(*ordinary)
alone = [generate(question) for question, blocks in zip(lists, after.blocks, strict=True) if blocks]
report = {
    "date": date.today().isoformat(),
    "threads": torch.get_num_threads(),
    "examples": len(examples),
    "tokens": sum(map(len, examples)),
    "questions": options.prompts,
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "share_before": share(before),
    "share_after": share(after),
    "share_of_ordinary": share(after_ordinary),
    "passes": sum(out.stats.forward_passes for out in alone),
    "answer_tokens": sum(len(tokenizer.encode(out.transcripts[0])) + 1 for out in alone),  # with end-of-sequence
    "training_seconds": trained,
    "seconds": time.time() - started,
    "answers": [*zip(lists, after.transcripts, strict=True), *zip(ordinary, after_ordinary.transcripts, strict=True)],
}
options.output.mkdir(parents=True, exist_ok=True)
(options.output / "report.json").write_text(json.dumps(report, indent=1))
print("losses:", *(round(loss, 2) for loss in report["losses"]))
print(f"lists with a block: {report['share_before']:.0%} before, {report['share_after']:.0%} after")
print(f"ordinary answers with a block: {report['share_of_ordinary']:.0%}")
print(f"{report['answer_tokens']} tokens of lists in {report['passes']} forward passes")

# The adapter, with the mode and its settings
model.generation_config.generation_mode, model.generation_config.parallel_config = "pdos", SETTINGS
folder = hf_parallel.hub.export(model, options.output / "adapter", tokenizer=tokenizer)
print(f"loaded by hf_parallel.hub.load({str(folder)!r})")

# Prints:
#   losses: ...
#   lists with a block: 0% before, ...% after
#   ordinary answers with a block: ...%
#   ... tokens of lists in ... forward passes
#   loaded by hf_parallel.hub.load('...')
