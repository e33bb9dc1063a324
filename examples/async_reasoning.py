"""A model that thinks, listens and answers at the same time. Run: python examples/async_reasoning.py

In a terminal, thoughts and answer grow side by side. For comparison, the model then thinks first and answers later.
"""

import shutil
import sys
import textwrap
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
TASK = "Plan a picnic in the park."
ARRIVES = {12: "The user adds: we have no car."}  # pass: a message that arrives before it
TOKENS = 32  # maximum of the thoughts, and of the answer

if MODEL is None:
    model, tokenizer = hf_parallel.load_embedded_model()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)


def draw(session):
    """Draw the texts in columns, on a terminal only."""
    if not sys.stdout.isatty():
        return
    size = shutil.get_terminal_size()
    width = size.columns // 2 - 2
    columns = []
    for name, text in session.texts.items():
        lines = [part for line in text.strip().splitlines() for part in textwrap.wrap(line, width) or [""]]
        state = "writes" if name in session.writing else "waits"
        shown = [f"{line:{width}}" for line in lines[-(size.lines - 3) :]]
        columns.append([f"\033[1m{f'{name} {state}':{width}}\033[0m", *shown])
    print("\033[H\033[2J", end="")  # to the upper left, and clear
    for row in range(max(map(len, columns))):
        print("  ".join(lines[row] if row < len(lines) else " " * width for lines in columns))
    sys.stdout.flush()


def talk(only_begin=False, **settings):
    """Write thoughts and an answer. Return the session, and the passes and seconds until the answer began."""
    session = hf_parallel.HogwildSession(
        model, tokenizer, TASK, generation_mode="async_reasoning", seed=0, max_new_tokens=TOKENS, **settings
    )
    nothing, began, first = session.texts["Writer"], time.perf_counter(), None
    while session.writing and not (first and only_begin):
        if session.passes in ARRIVES:
            session.inject("common", ARRIVES[session.passes])
        session.step()
        if first is None and session.texts["Writer"] != nothing:
            first = session.passes, time.perf_counter() - began
        draw(session)
    return session, first


session, (passes, seconds) = talk()
# Without paragraphs and intervals, the model is never asked whether the thoughts suffice: the answer follows them.
_, (later_passes, later_seconds) = talk(only_begin=True, control_interval=TOKENS + 1, separator="\n\n---\n\n")
for name, text in session.texts.items():
    print(f"{name}: {' '.join(text.split()).removeprefix(f'{name}: ')}")
print(f"thinking and answering: the answer began at pass {passes}, after {seconds:.1f} s")
print(f"thinking, then answering: the answer began at pass {later_passes}, after {later_seconds:.1f} s")

# Prints:
#   Thinker: ...
#   Writer: ...
#   thinking and answering: the answer began at pass ..., after ... s
#   thinking, then answering: the answer began at pass ..., after ... s
