"""Task of a prompt: the last message of the user, without the instructions of the mode."""

from __future__ import annotations

import re
from os.path import commonprefix

from transformers import PreTrainedTokenizerBase

_FIRST, _REPLY, _SECOND = "hf-parallel-first", "hf-parallel-reply", "hf-parallel-second"


def find_task(prompt: str, tokenizer: PreTrainedTokenizerBase, instructions: str = "") -> str | None:
    """Return the task of a prompt; None if it cannot be separated from the mode's `instructions`.

    In a prompt of the tokenizer's chat template the task is the last user message. The instructions can precede it in
    this message, and do so in the prompt if there is no template.

    Parameters
    ----------
    prompt : str
        Text of the whole prompt, special tokens included.
    tokenizer
        Its chat template, if it has one, is the one of the prompt.
    instructions : str
        Rules of the mode, see `ModePrompt.rules`. Empty: none.

    Returns
    -------
    str or None
        The task without surrounding whitespace.
    """
    begin, end = _around_user_message(tokenizer)
    start, stop = prompt.rfind(begin) if begin else -1, prompt.rfind(end) if end else -1
    if 0 <= start <= stop - len(begin):
        prompt = prompt[start + len(begin) : stop]
    elif instructions.strip() not in prompt:
        return None
    return (prompt.rpartition(instructions.strip())[2] if instructions.strip() else prompt).strip()


def _around_user_message(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what the chat template writes before and after a user message; empty without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    chat = [{"role": "user", "content": _FIRST}]
    longer = [*chat, {"role": "assistant", "content": _REPLY}, {"role": "user", "content": _SECOND}]
    try:
        first, last = (
            str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            for messages in (chat, longer)
        )
    except Exception:  # templates are programs; this one cannot render these chats
        return "", ""
    before = [text.partition(mark)[0][::-1] for text, mark in ((first, _FIRST), (last, _SECOND))]
    # up to the reasoning, which variables of the template and modes open and close
    after = re.split("</?think>", first.partition(_FIRST)[2])[0]
    return commonprefix(before)[::-1], after.rstrip()
