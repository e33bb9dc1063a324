"""`generation_mode="hogwild"`: workers that generate concurrently over one KV cache (Hogwild! Inference)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModePrompt, ModeRows, ModeTraits, RowPlace
from hf_parallel.generation.decoding.words import Words
from hf_parallel.generation.modes.hogwild.output import COMMON
from hf_parallel.generation.modes.hogwild.run import HogwildRun
from hf_parallel.generation.modes.hogwild.settings import HogwildSettings
from hf_parallel.generation.modes.hogwild.speech import address, check_not_empty, encode_given, max_tokens
from hf_parallel.generation.presets import PRESETS
from hf_parallel.generation.prompts import Chat, build_prompt
from hf_parallel.generation.settings import Arguments
from hf_parallel.models.probing.rotary import max_positions
from hf_parallel.transcript.sections import TranscriptStyle


class HogwildRows(ModeRows["HogwildConfig"]):
    """Workers. Row `-1 - i` is the common history of prompt `i`."""

    def place(self, row: int, num_prompts: int) -> RowPlace:
        return RowPlace(-1 - row, -1, None) if row < 0 else super().place(row, num_prompts)

    def name(self, index: int) -> str:
        return COMMON if index < 0 else self.config.names[index]

    def step_text(self, index: int, step: int, text: str) -> str:
        return text.removeprefix(self.config.step_prefix_of(self.name(index), step))

    @property
    def style(self) -> TranscriptStyle:  # type: ignore[override]
        """Columns of steps; a worker sees all steps of the others, or finished ones only."""
        layout = self.config.layout
        past = "" if layout == "contiguous" else "history"
        visibility = "ended" if layout == "interleaved" else "live"
        return TranscriptStyle("step", COMMON, visibility, "step", past, is_one_answer=True)


class HogwildPrompt(ModePrompt["HogwildConfig"]):
    """Rules of the collaboration. Workers think in the open."""

    thinking = True

    def rules(self) -> str:
        return self.config.collaboration_prompt.format(**self.config.prompt_fields())

    def task_text(self, task: str) -> str:
        return self.config.task_prompt.format(task=task)


@dataclass
class HogwildConfig(HogwildSettings):
    r"""Workers over one shared KV cache. `max_new_tokens` counts forward passes; each adds a token per worker.

    Parameters
    ----------
    num_workers : int
        Workers per prompt.
    layout : str
        `combined` (finished steps in a common history, unfinished ones visible while they are written), `interleaved`
        (only finished steps are visible) or `contiguous` (no history; each worker has one growing text).
    worker_names : list of str, optional
        Default: Alice, Bob, Carol, ...
    history_header : str
        Text before the history. Empty: none, as for the next three.
    others_header : str
        Text before the unfinished steps of the others.
    own_header : str
        Text before a worker's own step.
    own_headers : list of str, optional
        A text per worker instead of `own_header`, such as the worker's role.
    step_gap : str
        Text between the steps of two others.
    step_prefix : str
        Beginning of every step; may contain `{name}` and `{step}`.
    step_move : str
        `rotate`: the keys of a finished step are rotated to its place in the history. `reencode`: its tokens are
        recomputed there, without the other workers' unfinished steps (the ablation of appendix E.1). `reencode` raises
        an error if no step moves: in the `contiguous` layout, and with a `control_prompt`.
    openings : list of str, optional
        First words of each worker, after the prefix of its first step. Empty: none.
    separator : str
        Ends a step when it follows one of `sentence_ends` outside a code block.
    sentence_ends : list of str
        Possible ends of a sentence.
    code_fence : str
        Marks code blocks. Empty: code blocks are not recognized.
    redundancy_prompt : str
        Follows the next `step_prefix` after every `redundancy_interval` tokens of a prompt's workers. Empty: never.
    redundancy_interval : int
        See `redundancy_prompt`.
    tools : sequence of callable, optional
        Python functions, plain or coroutine functions, that workers may call. A step ends with a call: JSON with `name`
        and `arguments` between `call_tags`. The worker waits for the result while the others continue; the result
        becomes a step of the common history, or in the layout `contiguous` a line of the worker. A call that fails has
        the error as its result. Functions run in threads, which keep running if the run ends first. None: calls are
        text.
    call_tags : two str
        Texts that open and close a call.
    tool_result : str
        Text of a result; may contain `{name}` of the tool, `{worker}` and `{result}`.
    draft_tokens : int
        Maximum length of a draft: tokens that followed the same words in the text of another worker or in the history,
        verified in one forward pass. Tokens do not change. A pass that is computed ahead is kept if the drafts of all
        workers are right. 0: no drafts. Sessions, which take one pass at a time, and calls on a GPU, which queue passes
        ahead, use no drafts.
    control_prompt : str
        A yes/no question to the model: do the first worker's thoughts so far suffice to continue the answer? The other
        workers pause at first and after each paragraph, and continue while the answer is yes. It is asked after each
        paragraph of the first worker and each `control_interval` of its tokens, and is not kept. When the first worker
        has stopped (also by `</think>`), the others write to their end. Texts then are not split into steps. Empty: all
        workers write all the time.
    control_interval : int
        See `control_prompt`.
    answer_pattern : str
        Regular expression of a final answer; its first group, if any, is the answer. Empty: nothing is searched for.
    stop_on_answer : str
        `any`: all workers of a prompt stop when one has answered; `all`: each stops when it has answered; `never`.
    finisher_prompt : str
        If all workers stop without an answer, an early finisher reads all steps and continues this text.
    finisher_tokens : int
        Token budget of the early finisher. 0: there is none.
    collaboration_prompt : str
        System prompt of `hogwild_prompt`; may contain `{names}`, `{count}`, and the names of single workers as
        `{names[0]}`, `{names[1]}`, ..., which start over after the last worker.
    task_prompt : str
        Text of a task that is a string in `hogwild_prompt`; contains `{task}`.

    Notes
    -----
    All workers of a prompt share the model's positions (`max_position_embeddings`) and may use them up before
    `max_new_tokens` is reached. Then they stop, with one warning in the log, early enough for the finisher. Only if
    the prompt and `max_new_tokens` alone exceed the positions do workers continue beyond the last one, as `generate`
    does.

    `prefix_allowed_tokens_fn` receives the index of the prompt, the same for all its workers.

    With a `logits_cache`, a prompt is replayed while logits are cached for all of its active workers. At the first
    miss the skipped passes are computed in one forward pass.
    """

    mode: ClassVar[str] = "hogwild"
    traits = ModeTraits(
        rows=HogwildRows,
        prompt=HogwildPrompt,
        streams_text=True,
        merges_rows=True,
        rows_field="workers",
        presets=PRESETS["hogwild"],
    )

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. Assumes that no step is shorter than its `step_prefix`.

        A step is copied when it ends, with which a worker holds at most twice the tokens that it has generated, and two
        prefixes. No group exceeds the model's positions, unless prompt and `max_new_tokens` alone do.
        """
        count = call.count_tokens
        new_tokens = call.max_new_tokens
        prefix = max(count(self.step_prefix_of(name, new_tokens)) for name in self.names)
        per_worker = 2 * (new_tokens + prefix) + count(self.separator)
        max_steps = self.num_workers * (new_tokens // max(prefix, 1))  # after the first ones
        max_checks = min(max_steps, self.num_workers * new_tokens // self.redundancy_interval)
        per_group = self.num_workers * per_worker
        per_group += sum(map(count, self.headers))
        per_group += sum(map(count, self.openings or ()))
        per_group += max_checks * count(self.redundancy_prompt)
        per_group += count(self.control_prompt)
        per_group += count(self.finisher_prompt) + self.finisher_tokens
        positions = max_positions(call.model.config)
        longest = max(map(len, call.prompts)) + new_tokens
        if positions is not None and longest <= positions:
            per_group = min(per_group, positions + new_tokens + prefix)
        return call.prompt_tokens + call.num_rows * per_group

    def listens_to(self, call: GenerationCall, text: object, to: object) -> tuple[Words, int]:
        row = address(self, to)
        check_not_empty(text)
        assert isinstance(text, str)
        encode_given(call, text)
        return Words(text, row), max_tokens(self, call, text, row)

    def prepare(self, kwargs: Arguments) -> None:
        """Check the tokenizer before `generate` prepares the call."""
        check_tokenizer_given(kwargs, self.mode, "reads text to find the ends of steps")

    def make_run(self, call: GenerationCall) -> HogwildRun:
        return HogwildRun(self, call)


def hogwild_prompt(
    task: str | Chat, tokenizer: PreTrainedTokenizerBase, config: HogwildConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Build the prompt of a task for several workers (Hogwild! Inference, section 3.3 and appendix C).

    The collaboration prompt precedes the task. If the chat template knows `<think>`, the prompt opens it, unless it
    already ends with an open or closed thinking block. Parameters, `chat_template_kwargs` included, and return value:
    see `build_prompt`.
    """
    return build_prompt(HogwildConfig, task, tokenizer, config, **settings)
