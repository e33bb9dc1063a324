"""Several answers to one question and a majority vote. Run: python examples/self_consistency.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

messages = [{"role": "user", "content": "What is 7 + 5?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
out = model.generate(
    **prompt,
    generation_mode="self_consistency",
    tokenizer=tokenizer,
    num_answers=6,
    # no operand; the last match counts; the default is \boxed{...}
    answer_pattern=r"(?:=|is|equals) *(\d+)",
    do_sample=True,
    temperature=0.7,
    top_p=0.9,
    seed=0,
    max_new_tokens=32,
    return_dict_in_generate=True,
)
for text, found in zip(out.texts[0], out.found[0], strict=True):
    print(f"{found or '-':>6}  {' '.join(text.split())}")
print(f"\nvotes: {out.votes[0]}, answer: {out.answers[0]}")

# Prints:
#   votes: {'12': ...}, answer: 12
