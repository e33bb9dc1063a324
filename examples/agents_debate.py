"""Three agents debate over one shared context, and a judge decides. Run: python examples/agents_debate.py

All see the same conversation; only the last message says who speaks. So the engine computes it once for all, and the
arguments of a round are one batch.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.agents import Chat, Runtime, agent, gather, next, resume, spawn
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
QUESTION = "Should a small town build a library, a swimming pool or a park?"
SIDES = {"Ana": "the library", "Ben": "the swimming pool", "Cem": "the park"}
RULES = "Three people debate. Each answers the others in one or two sentences."


def conversation(question, arguments, **settings):
    """Return the context that all share."""
    chat = Chat(RULES, **settings).user(f"Question: {question}")
    for name, argument in arguments:
        chat.user(f"{name} says: {argument}")
    return chat


@agent
async def debater(name, side, question):
    """Yield an argument; receive the arguments of all so far."""
    arguments = []
    while True:
        chat = conversation(question, arguments, max_new_tokens=48, do_sample=True, temperature=0.7)
        chat.user(f"You are {name} and want {side}. Speak now.")
        arguments = yield " ".join((await chat.gen()).split())


@agent
async def judge(question, arguments):
    """Return the name of the winner; None if the answer has none."""
    chat = conversation(question, arguments, max_new_tokens=8)
    chat.user(f"You are the judge. Whose arguments are best? Answer with one name: {', '.join(SIDES)}.")
    answer = await chat.gen()
    return min((name for name in SIDES if name in answer), key=answer.index, default=None)


@agent
async def debate(question, rounds=2):
    """Yield the arguments in order, and the winner."""
    debaters = {name: spawn(debater, name, side, question) for name, side in SIDES.items()}
    arguments = []
    for number in range(rounds):
        if number:
            for one in debaters.values():
                await resume(one, arguments)
        said = await gather(*(next(one) for one in debaters.values()))
        arguments += zip(debaters, said, strict=True)
    yield {"arguments": arguments, "winner": await next(spawn(judge, question, arguments))}


def main():
    """Run a debate and print it."""
    if MODEL is None:
        model, tokenizer = hf_parallel.load_embedded_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with Engine(model, tokenizer) as engine:
        result = Runtime(engine).run(debate, QUESTION)
    for name, argument in result.value["arguments"]:
        print(f"{name}: {argument}")
    print(f"\nwinner: {result.value['winner']}")
    print(f"{result.stats.reused_tokens} of {result.stats.prompt_tokens} prompt tokens were shared")


if __name__ == "__main__":
    main()

# Prints:
#   Ana: ...
#   Ben: ...
#   Cem: ...
#   winner: ...
#   ... of ... prompt tokens were shared
