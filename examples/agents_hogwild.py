"""Hogwild! workers as an agent, and one that checks their text. Run: python examples/agents_hogwild.py

Two workers write one answer together and see each other's text. Another agent says what is missing, and they write
again.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.agents import Chat, Runtime, agent, next, resume, spawn
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
TASK = "Plan a picnic in the park."
ROUNDS = 2


@agent
async def write(task):
    """Yield an answer; receive what is missing."""
    chat = Chat(generation_mode="hogwild", num_workers=2, max_new_tokens=48).user(task)
    while True:
        remark = yield await chat.gen()
        chat.user(f"{remark} Write a better answer.")


@agent
async def check(task):
    """Receive an answer, and yield `ok` or what is missing."""
    answer = yield
    while True:
        chat = Chat("You check answers. Say ok, or what is missing in a few words.", max_new_tokens=24)
        answer = yield (await chat.user(f"Task: {task}\n\nAnswer:\n{answer}").gen()).strip()


@agent
async def team(task):
    """Yield the last answer and all remarks."""
    writer, checker = spawn(write, task), spawn(check, task)
    await next(checker)
    remarks = []
    for number in range(ROUNDS):
        if number:
            await resume(writer, remarks[-1])
        answer = await next(writer)
        await resume(checker, answer)
        remarks.append(await next(checker))
        if remarks[-1].lower().startswith("ok"):
            break
    yield {"answer": answer, "remarks": remarks}


def main():
    """Run the team and print what it wrote."""
    if MODEL is None:
        model, tokenizer = hf_parallel.load_embedded_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with Engine(model, tokenizer) as engine:
        result = Runtime(engine).run(team, TASK)
    print(result.value["answer"].strip())
    for number, remark in enumerate(result.value["remarks"], 1):
        print(f"remark {number}: {' '.join(remark.split())}")


if __name__ == "__main__":
    main()

# Prints:
#   remark 1: ...
