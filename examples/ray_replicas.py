"""Replicas of an engine, by Ray Serve. Run: python examples/ray_replicas.py

Needs the extra `ray` (docs/install.md). Ray places, restarts and scales the replicas, on one or many machines. Each
holds the whole model and an `Engine`. The router prefers the replica that has computed the beginning of the prompt.
"""

import random
from collections import Counter, OrderedDict, defaultdict

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
SYSTEM_PROMPTS = ["Answer in one short sentence. " * 8, "Answer like a pirate. " * 8]
QUESTIONS = ["Why is the sky blue?", "What is a prime number?"]


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has received the longest prefix of its prompt.

    Prompts are compared in parts of 64 characters. A prompt of which no replica has a tenth goes to the replica that
    has received the least text. So does one whose replica has more than `imbalance` open requests beyond another's.
    """

    def initialize_state(self, imbalance=4, max_parts=100_000):
        self.imbalance = imbalance
        self.max_parts = max_parts  # that are remembered of each replica
        self.parts = defaultdict(OrderedDict)  # by replica: hashes of the prefixes that it has received
        self.received = Counter()  # parts, by replica

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        """Return the replicas in groups, the preferred ones first."""
        if not candidate_replicas:
            return []
        text = prefix_of(pending_request)
        prefixes = hashes(text)
        known = {replica: self.num_known(replica.replica_id, prefixes) for replica in candidate_replicas}
        best = max(candidate_replicas, key=lambda replica: (known[replica], random.random()))
        lengths = {replica: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in candidate_replicas}
        is_balanced = lengths[best] <= min(lengths.values()) + self.imbalance
        if known[best] and known[best] * 10 >= len(prefixes) and is_balanced:
            first = best
        else:
            first = min(candidate_replicas, key=lambda one: (lengths[one], self.received[one.replica_id]))
        return [[first], [replica for replica in candidate_replicas if replica is not first]]

    def on_request_routed(self, pending_request, replica_id, result):
        """Remember the prompt."""
        parts = self.parts[replica_id]
        for prefix in hashes(prefix_of(pending_request)):
            parts[prefix] = None
            parts.move_to_end(prefix)
            self.received[replica_id] += 1
        while len(parts) > self.max_parts:
            parts.popitem(last=False)

    def num_known(self, replica_id, prefixes):
        """Return how many of the prefixes, shortest first, a replica has received."""
        parts = self.parts[replica_id]
        return next((count for count, prefix in enumerate(prefixes) if prefix not in parts), len(prefixes))


def prefix_of(pending_request):
    """Return the text whose prefixes requests can share: salt and mode, which separate them, then the prompt."""
    if pending_request is None or not pending_request.args:
        return ""
    prompt, settings = pending_request.args[0], pending_request.kwargs
    if isinstance(prompt, list):  # a chat
        prompt = "".join(f"{message['role']}\n{message['content']}\n" for message in prompt)
    return f"{settings.get('cache_salt')}\n{settings.get('generation_mode')}\n{prompt}"


def hashes(text, size=64):
    """Return a hash of each prefix of a text that has a multiple of `size` characters."""
    found, last = [], 0
    for start in range(0, len(text) - size + 1, size):
        last = hash((last, text[start : start + size]))
        found.append(last)
    return found


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=64,
    ray_actor_options={"num_cpus": 0.5},  # on GPUs: {"num_gpus": 1}
    request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
)
class Replica:
    """An engine in a process of its own. Arguments as of `Engine.submit`."""

    def __init__(self, model_id, **settings):
        if model_id is None:
            model, tokenizer = hf_parallel.load_embedded_model()
        else:
            model = AutoModelForCausalLM.from_pretrained(model_id)
            tokenizer = AutoTokenizer.from_pretrained(model_id)
        self.engine = Engine(model, tokenizer, **settings).__enter__()

    async def generate(self, prompt, **settings):
        """Return the mode's output."""
        handle = self.engine.submit(prompt, **settings)
        try:
            return await handle.result_async()
        finally:
            handle.cancel()  # has an effect if the caller has canceled

    async def stream(self, prompt, **settings):
        """Yield pieces of text; call it with `handle.options(stream=True)`."""
        handle = self.engine.submit(prompt, **settings)
        try:
            async for row, text, event in handle.texts_async():
                yield row, text, event
        finally:
            handle.cancel()

    def check_health(self):
        """Raise `RuntimeError` if the engine has stopped. Ray then restarts the replica."""
        self.engine.check_open()


def main():
    """Ask each question with each system prompt, and print what the replicas had cached."""
    serve.start(proxy_location="Disabled")  # no HTTP: this process alone sends requests
    replicas = serve.run(Replica.bind(MODEL, max_kv_bytes=2**30), route_prefix=None)
    for question in QUESTIONS:
        for system in SYSTEM_PROMPTS:
            chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            output = replicas.generate.remote(chat, max_new_tokens=24).result()
            cached, computed = output.stats.reused_tokens, output.stats.prefilled_tokens
            print(f"{question} {computed} tokens of the prompt computed, {cached} cached")
    for _, text, _ in replicas.options(stream=True).stream.remote("The sea is", max_new_tokens=24):
        print(text, end="", flush=True)
    print()
    serve.shutdown()


if __name__ == "__main__":
    main()

# Prints:
#   Why is the sky blue? ... tokens of the prompt computed, 0 cached
#   What is a prime number? ... tokens of the prompt computed, ... cached
