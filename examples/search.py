"""Score candidates while they are written, drop the worst, fork the best. Run: python examples/search.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

messages = [{"role": "user", "content": "Write two sentences about a lighthouse."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
out = model.generate(
    **prompt,
    generation_mode="search",
    tokenizer=tokenizer,
    width=8,
    interval=8,  # after every 8 tokens ...
    keep=2,  # ... keep the two best, and fork each of them three times
    do_sample=True,
    seed=0,
    max_new_tokens=32,
    return_dict_in_generate=True,
)
tree = out.trees[0]
for index, branch in enumerate(tree):
    origin = "the prompt" if branch.parent is None else f"candidate {branch.parent + 1}"
    print(f"candidate {index + 1} continues {origin}, {branch.outcome}: {' '.join(branch.text.split())}")
print(f"\nBest: candidate {out.chosen[0] + 1} of {len(tree)}, after {out.num_selections[0]} selections")

# Prints:
#   Best: candidate ... of ..., after ... selections
