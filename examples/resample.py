"""Repeated samples of one state; visited states need no forward pass. Run: python examples/resample.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

messages = [{"role": "user", "content": "What is the capital of Italy? Answer in one sentence."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
logits_cache = hf_parallel.LogitsCache(max_bytes=2**30)  # shared by all calls, as is the KV cache
kv_cache = hf_parallel.SharedPrefixCache()
for seed in range(8):
    out = model.generate(
        **prompt,
        generation_mode="resample",
        logits_cache=logits_cache,
        past_key_values=kv_cache,
        do_sample=True,
        temperature=0.6,
        seed=seed,
        max_new_tokens=24,
        return_dict_in_generate=True,
    )
    text = tokenizer.decode(out.sequences[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{out.stats.replayed_tokens:>3} of {out.stats.decoded_tokens} tokens replayed: {' '.join(text.split())}")

# Prints:
#   ... of ... tokens replayed: ...
