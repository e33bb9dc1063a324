"""Eight completions of one prompt, which is computed and stored once. Run: python examples/shared_prefix.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

prompt = "Three reasons to take the train instead of the plane, in one sentence each:\n\n1."
ids = tokenizer(prompt, return_tensors="pt").input_ids
out = model.generate(
    ids,
    generation_mode="shared_prefix",
    num_return_sequences=8,
    do_sample=True,
    seed=0,
    max_new_tokens=32,
    return_dict_in_generate=True,
)
for number, text in enumerate(tokenizer.batch_decode(out.sequences[:, ids.shape[1] :], skip_special_tokens=True)):
    print(f"{number}: {' '.join(text.split())}")
print(f"\n{out.stats.prefilled_tokens} prompt tokens computed for {len(out.sequences)} completions.")

# Prints:
#   7: ...
#   ... prompt tokens computed for 8 completions.
