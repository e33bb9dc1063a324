"""fork_join: a model that was trained to fork writes parallel paths by itself. Run: python examples/fork_join.py

The demo model is not trained for it, so `opening` gives the plan.
"""

import hf_parallel

model, tokenizer = hf_parallel.load_embedded_model()
hf_parallel.enable(model)
chat = [{"role": "user", "content": "What do cats and dogs eat?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
plan = "<Parallel>\n<Goal>\n<Outline>\n1: Cats\n</Outline>\n<Outline>\n2: Dogs\n</Outline>\n</Goal>"

out = model.generate(
    **inputs,
    generation_mode="fork_join",
    dialect="multiverse",
    tokenizer=tokenizer,
    opening=plan,
    path_max_new_tokens=24,
    max_new_tokens=160,
    do_sample=False,
    return_dict_in_generate=True,
)
print(out.transcripts[0])
print("tokens of its paths:", *(len(path.tokens) for path in out.forks[0][0].paths))
print(f"critical path: {out.critical_path[0]} of {out.stats.decoded_tokens} tokens")

# Prints:
#   <Parallel>
#   tokens of its paths: ...
#   critical path: ... of ... tokens
