"""Replicas of an engine, by Ray Serve. Run: python examples/ray_replicas.py

Needs `pip install . 'ray[serve]>=2.60'` from a clone. Ray places, restarts and scales the replicas,
on one or many machines. Each holds the whole model and an `Engine`. The router prefers the replica that has the prefix.
"""

from ray import serve

# `ray.serve.llm.request_router` has the same class, but its import needs vLLM or SGLang
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.config import RequestRouterConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the embedded model
SYSTEM_PROMPTS = ["Answer in one short sentence. " * 8, "Answer like a pirate. " * 8]
QUESTIONS = ["Why is the sky blue?", "What is a prime number?"]


class Router(PrefixCacheAffinityRouter):
    """Ray's prefix-aware router, which reads the prompt from the arguments of `Engine.submit`."""

    def _extract_text_from_request(self, pending_request):
        prompt, settings = pending_request.args[0] if pending_request.args else "", pending_request.kwargs
        if isinstance(prompt, list):  # a chat
            prompt = "".join(f"{message['role']}\n{message['content']}\n" for message in prompt)
        # requests share prefixes if salt and mode are equal, too
        return f"{settings.get('cache_salt')}\n{settings.get('generation_mode')}\n{prompt}" if prompt else None


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=64,
    ray_actor_options={"num_cpus": 0.5},  # on GPUs: {"num_gpus": 1}
    # without eviction, the router's tree of prompts grows without limit
    request_router_config=RequestRouterConfig(
        request_router_class=Router, request_router_kwargs={"imbalanced_threshold": 4, "do_eviction": True}
    ),
)
class Replica:
    """An engine in a process of its own. Arguments as of `Engine.submit`."""

    def __init__(self, model_id, **settings):
        if model_id is None:
            model, tokenizer = hf_parallel.load_embedded_model()
        else:
            model, tokenizer = AutoModelForCausalLM.from_pretrained(model_id), AutoTokenizer.from_pretrained(model_id)
        self.engine = Engine(model, tokenizer, **settings).__enter__()

    async def generate(self, prompt, **settings):
        """Return the mode's output."""
        handle = self.engine.submit(prompt, **settings)
        try:
            return await handle.result_async()
        finally:
            handle.cancel()  # has an effect if the caller has cancelled

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
