"""Answer in rounds: each answer of a round reads those of the last (PaCoRe). Run: python examples/agents_pacore.py

An answer begins as soon as the answers that it reads are there. The engine computes what their prompts share once.
"""

import re

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.agents import Chat, Runtime, agent, pacore
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path, such as "stepfun-ai/PaCoRe-8B"; None: the demo model
QUESTION = "Which is heavier, a kilogram of feathers or a pound of iron?"
ROUNDS = (4, 2)  # four answers, then two, then the last one
READS = 2  # how many answers of the last round an answer reads; the last one reads all
MAX_NEW_TOKENS = 48


@agent
async def coordinated(question):
    """Yield the messages between the rounds, and the last answer."""
    messages = []

    def compact(answer):
        """Return the message in an answer: here its first sentence. The default is what follows the thinking."""
        message = re.split(r"(?<=[.!?])\s", answer.strip())[0]
        messages.append(message)
        return message

    chat = Chat(do_sample=True, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS).user(question)
    answer = await pacore(chat, ROUNDS, reads=READS, compact=compact)
    yield {"messages": messages[:-1], "answer": answer}  # the last one is that of the answer itself


def main():
    """Answer the question, and print what the answers have told each other."""
    if MODEL is None:
        model, tokenizer = hf_parallel.load_embedded_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with Engine(model, tokenizer) as engine:
        result = Runtime(engine).run(coordinated, QUESTION)
    for number, message in enumerate(result.value["messages"], 1):
        print(f"message {number}: {' '.join(message.split())}")
    answer = " ".join(result.value["answer"].split())
    print(f"\nanswer: {answer}")
    stats = result.stats
    print(f"{stats.completions} answers; {stats.reused_tokens} of {stats.prompt_tokens} prompt tokens were shared")


if __name__ == "__main__":
    main()

# Prints:
#   message 1: ...
#   answer: ...
#   7 answers; ... of ... prompt tokens were shared
