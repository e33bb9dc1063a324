"""Replicas of an engine on one or many machines: a Ray Serve deployment whose router prefers a replica with the prefix.

Needs the extra `ray`. Ray places, restarts and scales the replicas. Each holds the whole model and an `Engine`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.engine.engine import Engine
from hf_parallel.generation.streaming import RowText


class EngineReplica:
    """One replica: an engine and the model that `load` returns.

    Parameters
    ----------
    load : callable
        Returns the model and its tokenizer (or None), in the process of the replica.
    **settings
        As of `Engine`.
    """

    def __init__(
        self, load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase | None]], **settings: Any
    ) -> None:
        self.engine = Engine(*load(), **settings).__enter__()

    async def generate(self, *arguments: Any, **settings: Any) -> Any:
        """Return the mode's output; arguments and errors as of `Engine.submit`."""
        handle = self.engine.submit(*arguments, **settings)
        try:
            return await handle.result_async()
        finally:
            handle.cancel()  # has an effect if the caller has cancelled

    async def stream(self, *arguments: Any, **settings: Any) -> AsyncIterator[RowText]:
        """Yield text as it is generated, with its row and event; call it with `handle.options(stream=True)`."""
        handle = self.engine.submit(*arguments, **settings)
        try:
            async for text in handle.texts_async():
                yield text
        finally:
            handle.cancel()

    async def stats(self) -> dict[str, object]:
        """Return `Engine.stats` of the replica that receives the call, and its id as `replica`."""
        from ray import serve

        return {"replica": serve.get_replica_context().replica_id.unique_id, **self.engine.stats.to_dict()}

    def check_health(self) -> None:
        """Raise `RuntimeError` if the engine has stopped. Ray then restarts the replica."""
        self.engine.check_open()

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close(drain=False)


def replicas(
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase | None]],
    num_replicas: int | str = 2,
    *,
    max_ongoing_requests: int = 64,
    imbalanced_threshold: int = 4,
    options: Mapping[str, object] | None = None,
    **settings: Any,
) -> object:
    """Return a Ray Serve application of engines, for `serve.run` or as an argument of another deployment's `bind`.

    Parameters
    ----------
    load : callable
        Returns the model and its tokenizer (or None). Each replica calls it, on its machine.
    num_replicas : int or "auto"
        "auto": Ray adds and removes replicas, as `options["autoscaling_config"]` says.
    max_ongoing_requests : int
        Calls that a replica accepts at the same time; the others wait at the caller.
    imbalanced_threshold : int
        If one replica has this many calls more than another one, the router prefers the less busy one to the one
        with the prefix.
    options : mapping, optional
        Other options of `serve.deployment`, such as `ray_actor_options={"num_gpus": 1}`.
    **settings
        As of `Engine`.

    Returns
    -------
    ray.serve.Application
        Its deployment has the methods `generate`, `stream` and `stats` of `EngineReplica`.

    Examples
    --------
    >>> from ray import serve
    >>> handle = serve.run(replicas(load_model, num_replicas=2))
    >>> handle.generate.remote("Three cities in Italy are", max_new_tokens=20).result().sequences
    """
    from hf_parallel.engine.prompt_router import PromptRouter  # raises `ImportError` that names the extra

    # isort: split
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    router = RequestRouterConfig(
        request_router_class=PromptRouter,
        # without eviction, Ray's tree of prompts grows without limit
        request_router_kwargs={"imbalanced_threshold": imbalanced_threshold, "do_eviction": True},
    )
    deployment = serve.deployment(
        num_replicas=num_replicas,
        max_ongoing_requests=max_ongoing_requests,
        request_router_config=router,
        **(options or {}),
    )(EngineReplica)
    return deployment.bind(load, **settings)
