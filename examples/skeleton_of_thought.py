"""An outline, its points in parallel, and a conclusion. Run: python examples/skeleton_of_thought.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

messages = [{"role": "user", "content": "Describe the planets Mars, Venus and Jupiter."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
out = model.generate(
    **prompt,
    generation_mode="skeleton_of_thought",
    tokenizer=tokenizer,
    max_points=4,
    max_new_tokens=32,  # per text
    do_sample=False,
    return_dict_in_generate=True,
)
print(out.texts[0])
print(f"\n{len(out.points[0])} points were generated in parallel.")
print(f"{out.stats.decoded_tokens} tokens in {out.stats.forward_passes} forward passes.")

# Prints:
#   ... tokens in ... forward passes.
