"""Sample completions, prune the worst while they are written, return the best. Run: python examples/best_of.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

messages = [{"role": "user", "content": "Explain in one sentence why the sky is blue."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
out = model.generate(
    **prompt,
    generation_mode="best_of",
    tokenizer=tokenizer,
    num_candidates=8,
    prune_every=8,  # drop half of the candidates after every 8 tokens
    keep=0.5,
    do_sample=True,
    seed=0,
    max_new_tokens=32,
    return_dict_in_generate=True,
)
for index in out.order[0]:
    print(f"{out.ratings[0][index]:7.2f}  {' '.join(out.texts[0][index].split())}")
print(f"\n{len(out.pruned[0])} of {len(out.texts[0])} candidates pruned")

# Prints:
#   6 of 8 candidates pruned
