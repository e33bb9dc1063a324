"""The independent parts of one answer, decoded in parallel. Run: python examples/pdos.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

task, settings = "Describe the planets Mars, Venus and Jupiter in one sentence each.", {"parallel_hint": True}
if MODEL is None:  # the demo model is too small to write the skeleton itself
    skeleton = "Here they are.\n####Mars:......\n####Venus:......\n####Jupiter:......\n####All in all:"
    settings = {"opening": skeleton, "terminator": "####All in all:", "parallel_hint": False, "branch_stops": ["\n"]}
prompt = hf_parallel.pdos_prompt(task, tokenizer, **settings)
out = model.generate(
    **prompt,
    generation_mode="pdos",
    tokenizer=tokenizer,
    max_blocks=1,
    max_new_tokens=160,
    do_sample=False,
    return_dict_in_generate=True,
    **settings,
)
print(out.transcripts[0])
for block in out.blocks[0]:
    print(f"\n{len(block.branches)} parts were decoded in parallel: {[part.title for part in block.branches]}")
print(f"\n{out.stats.decoded_tokens} tokens in {out.stats.forward_passes} forward passes.")

# Prints:
#   3 parts were decoded in parallel: ['Mars', 'Venus', 'Jupiter']
#   ... tokens in ... forward passes.
