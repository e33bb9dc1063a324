"""Paths of one question exchange summaries while they think (LeaP). Run: python examples/agents_leap.py

After INTERVAL tokens, each path writes a summary, reads those of its least similar peers, and continues.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.agents import Chat, Runtime, agent, leap
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path of a reasoning model, such as "Qwen/QwQ-32B"; None: the demo model
QUESTION = "How many days are there from the 3rd of March to the 12th of April? Think in short paragraphs."
PATHS = 3
INTERVAL = 48  # the authors': 2048
SUMMARY = 24  # maximum number of tokens of a summary; the authors': 256
MAX_NEW_TOKENS = 160


@agent
async def peers(question):
    """Yield the paths."""
    chat = Chat(do_sample=True, temperature=0.6, top_p=0.95, min_p=0.05, max_new_tokens=MAX_NEW_TOKENS)
    yield await leap(chat.user(question), PATHS, INTERVAL, exchanges=2, peers=1, summary_max_new_tokens=SUMMARY)


def main():
    """Run the paths, and print what each has told the others, and the end of its text."""
    if MODEL is None:
        model, tokenizer = hf_parallel.load_embedded_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with Engine(model, tokenizer) as engine:
        result = Runtime(engine).run(peers, QUESTION)
    for number, path in enumerate(result.value, 1):
        print(f"path {number}, {path.tokens} tokens, {len(path.messages)} summaries")
        for message in path.messages:
            readers = ", ".join(f"path {index + 1}" for index in message.read) or "nobody"
            print(f"  {' '.join(message.text.split())!r}, then read {readers}")
        print(f"  ... {' '.join(path.text.split())[-80:]}")


if __name__ == "__main__":
    main()

# Prints:
#   path 1, ... tokens, ... summaries
#   path 2, ... tokens, ... summaries
#   path 3, ... tokens, ... summaries
