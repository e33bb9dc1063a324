"""`generation_mode="async_reasoning"`: one model thinks, listens and answers at the same time (AsyncReasoning)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hf_parallel.generation.modes.hogwild.config import HogwildConfig
from hf_parallel.generation.presets import PRESETS
from hf_parallel.generation.prompts import END_THINK
from hf_parallel.generation.settings import NOT_REMOTE


@dataclass
class AsyncReasoningConfig(HogwildConfig):
    r"""A thinker and a writer over one cache: two workers of `hogwild`. The first decides when the second writes.

    The thinker sees the prompt, the answer so far and its thoughts; the writer sees the prompt, the thoughts so far and
    the answer. They share keys and values, rotated to the positions of each. The writer starts when the model says that
    the thoughts suffice, and pauses after each paragraph. The call ends with the answer. `max_new_tokens` limits each.

    Settings as in `HogwildConfig`, with other defaults. Source: Asynchronous Reasoning, arXiv 2512.10931.
    """

    mode: ClassVar[str] = "async_reasoning"
    traits = replace(HogwildConfig.traits, presets=PRESETS["async_reasoning"])

    worker_names: Sequence[str] | None = ("Thinker", "Writer")
    history_header: str = ""
    others_header: str = ""
    own_headers: Sequence[str] | None = (
        "\n\n[The answer above grows while you think. Your private thoughts:]",
        f"\n\n[More thoughts will appear here.]\n{END_THINK}",
    )
    step_prefix: str = "\n\n"
    control_prompt: str = (
        "\n\nWait: are my thoughts far enough ahead of the answer above to write one more paragraph of it (yes/no)?\n"
    )
    answer_pattern: str = field(default="", metadata=NOT_REMOTE)
    stop_on_answer: str = "never"
    collaboration_prompt: str = (
        "You think and answer at the same time: your private thoughts and your answer to the user grow side by side. "
        "Think step by step in short paragraphs, first about what the answer needs first, and check what it says "
        "already. Now and then you are asked whether the thoughts suffice for one more paragraph of the answer; say "
        "yes as soon as they do. In the answer, first say what you are going to do, then report what the thoughts have "
        "found so far and no more, and end with the result. New messages of the user stand before both."
    )
