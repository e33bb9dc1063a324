"""Settings with which the embedded model does something sensible, for the demo and the command line."""

from __future__ import annotations

from typing import Any

SMALL_MODEL: dict[str, Any] = {
    "history_header": "",
    "others_header": "",
    "own_header": "\n\n",
    "step_prefix": "{name}:",
    "redundancy_prompt": "",
    "answer_pattern": "",
    "finisher_tokens": 0,
    "collaboration_prompt": """{names} solve tasks together. They talk in short sentences, share the work and agree on \
a plan. Example:

Task: Plan a birthday party for our sister.

Alice: I will bake a chocolate cake with strawberries. Can you write the invitations?

Bob: Yes, I will write ten invitations tonight. Who takes care of the music?

Alice: I will ask my cousin, he plays the guitar.

Bob: Great, then I will buy lemonade and paper cups.""",
}
"""Of hogwild, for a model of 135 million parameters, which follows an example and is confused by headings."""
SMALL_MODEL_TASK = "Task: {task}"
"""How a task looks in that example."""

SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 5,
}
"""Of `generate`, for a model that repeats itself when it is greedy."""
