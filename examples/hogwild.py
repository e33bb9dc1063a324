"""Two workers on one task that read each other's text. Run: python examples/hogwild.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

prompt = hf_parallel.hogwild_prompt("Plan a picnic in the park.", tokenizer, num_workers=2)
out = model.generate(
    **prompt,
    generation_mode="hogwild",
    tokenizer=tokenizer,
    num_workers=2,
    seed=5,
    max_new_tokens=48,  # forward passes; each appends one token per worker
    return_dict_in_generate=True,
)
for step in out.history[0]:
    print(f"pass {step.forward_pass or '-':>3}  {' '.join(step.text.split())}")

# Prints:
#   pass  ...  Alice: ...
#   pass  ...  Bob: ...
