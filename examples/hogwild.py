"""Two workers on one task, who read each other as they write. Run: python examples/hogwild.py"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.generation.config import SAMPLING
from hf_parallel.generation.modes.hogwild.presets import EMBEDDED_PRESET

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the small model that comes as a package

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
hf_parallel.enable(model)

config = hf_parallel.HogwildConfig(num_workers=2, seed=0, **(EMBEDDED_PRESET.settings if MODEL is None else {}))
prompt = hf_parallel.hogwild_prompt("Task: Plan a picnic in the park.", tokenizer, config)
out = model.generate(
    **prompt,
    parallel_config=config,
    tokenizer=tokenizer,
    max_new_tokens=48,  # forward passes: in each, every worker gets one token
    return_dict_in_generate=True,
    **SAMPLING,
)
for step in out.history[0]:
    print(f"pass {step.forward_pass or '-':>3}  {' '.join(step.text.split())}")
