"""Settings of hogwild and async_reasoning for small models."""

from __future__ import annotations

from hf_parallel.generation.presets import SAMPLING, Preset
from hf_parallel.generation.settings import Arguments

_SMALL_MODEL: Arguments = {
    "history_header": "",
    "others_header": "",
    "own_header": "\n\n",
    "step_prefix": "{name}:",
    "redundancy_prompt": "",
    "answer_pattern": "",
    "finisher_tokens": 0,
    "task_prompt": "Task: {task}",
    "collaboration_prompt": """{names} solve tasks together. They talk in short sentences, share the work and agree on \
a plan. Example:

Task: Plan a birthday party for our sister.

{names[0]}: I will bake a chocolate cake with strawberries. Can you write the invitations?

{names[1]}: Yes, I will write ten invitations tonight. Who takes care of the music?

{names[2]}: I will ask my cousin, he plays the guitar.

{names[3]}: Great, then I will buy lemonade and paper cups.""",
}
EMBEDDED_PRESET = Preset(_SMALL_MODEL, SAMPLING)
"""For a model of 135 million parameters, which follows an example dialogue better than headings and rules."""

_SMALL_THINKER: Arguments = {
    "own_headers": ["\n\n", "\n\n"],
    "step_prefix": "{name}:",
    "control_prompt": "\n\nCan the Writer say more now? Answer yes or no:\n\n",
    "collaboration_prompt": """A Thinker thinks in short sentences, and a Writer tells the user what the Thinker \
has found. Example:

Task: What is 3 + 4 + 5?

Thinker: First 3 + 4 = 7. Then 7 + 5 = 12.

Writer: The sum of 3 and 4 is 7. With 5 it is 12.""",
    "task_prompt": "Task: {task}",
}
EMBEDDED_THINKER = Preset(_SMALL_THINKER, SAMPLING)
"""The same for `async_reasoning`."""
