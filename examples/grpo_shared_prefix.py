"""GRPO with each prompt computed once, compared with TRL. Run: python examples/grpo_shared_prefix.py

The reward is the proportion of words of at most three letters. Needs the extra `train` (docs/install.md).
"""

import copy
import sys
import tempfile
from statistics import mean, median

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_parallel
from hf_parallel.training import SharedPrefixGRPOTrainer

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
COMPARED, STEPS = 3, 30  # steps of the comparison, and of the training
NEW_TOKENS = 24

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)

RULES = """You are the guide of a small museum by the sea. It has three rooms. The first room shows boats: a rowing boat
from 1890, the model of a steamer, and the sails of a fishing boat that came back without its crew. The second room
shows what people found on the beach: bottles with letters in them, amber, the bones of a whale, and a clock that still
runs. The third room belongs to the lighthouse. Its lamp is two metres high and was lit every night for eighty years.
Children may turn it. The museum opens at ten and closes at five, and it has no cafe, but the harbour is near. Visitors
ask you questions. Answer each of them in a few plain sentences that a child understands, and use no long words."""
QUESTIONS = ["What is in the first room?", "Can I touch the lamp?", "Where can we eat?", "What did the whale eat?"]
chats = [[{"role": "system", "content": RULES}, {"role": "user", "content": question}] for question in QUESTIONS]


def short_words(completions, **columns):
    words = [completion[0]["content"].split() for completion in completions]
    return [mean(len(word) <= 3 for word in of) if of else 0.0 for of in words]


def train(trainer_class, steps, **generation_kwargs):
    trainer = trainer_class(
        model=hf_parallel.enable(copy.deepcopy(model)),
        processing_class=tokenizer,
        reward_funcs=short_words,
        train_dataset=Dataset.from_dict({"prompt": chats * steps}),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            num_generations=8,
            per_device_train_batch_size=16,  # two prompts in one micro-batch, as a tree is small
            max_completion_length=NEW_TOKENS,
            learning_rate=3e-5,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            # so that no row ends early: plain `generate` samples, and drops, further tokens for rows that have ended
            generation_kwargs={"min_new_tokens": NEW_TOKENS, **generation_kwargs},
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=not sys.stderr.isatty(),
            seed=0,
        ),
    )
    trainer.train()
    return [logs for logs in trainer.state.log_history if "reward" in logs]


shared = {"generation_mode": "shared_prefix"}
ways = {
    "stock": (GRPOTrainer, {}),
    "rollouts shared": (GRPOTrainer, shared),
    "rollouts and loss shared": (SharedPrefixGRPOTrainer, shared),
}
logs = {name: train(cls, COMPARED, **settings) for name, (cls, settings) in ways.items()}
learned = train(SharedPrefixGRPOTrainer, STEPS, **shared)

for name, steps in logs.items():
    print(f"{name}: {median(step['step_time'] for step in steps):.1f} seconds per step")
for key in ("reward", "grad_norm"):
    most = max(abs(steps[i][key] - logs["stock"][i][key]) for steps in logs.values() for i in range(COMPARED))
    print(f"largest difference of {key}: {most:.6f}")
first, last = (mean(step["reward"] for step in steps) for steps in (learned[:5], learned[-5:]))
print(f"reward in {STEPS} steps: {first:.2f} to {last:.2f}")

# Prints:
#   stock: ... seconds per step
#   rollouts shared: ... seconds per step
#   rollouts and loss shared: ... seconds per step
#   largest difference of reward: ...
#   reward in ... steps: ... to ...
