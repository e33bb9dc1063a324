"""PromptRouter: sends a request to the replica that has its prefix. Needs Ray Serve (extra `ray`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    # `ray.serve.llm.request_router` has the same class, but its import needs vLLM or SGLang.
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
except ImportError as error:
    raise ImportError("replicas of an engine need Ray Serve: pip install 'hf_parallel[ray]'") from error


class PromptRouter(PrefixCacheAffinityRouter):
    """Ray's prefix-aware router, for calls with the arguments of `Engine.submit`.

    Calls without a prompt, such as HTTP requests to an ingress, are balanced by queue length.
    """

    def _extract_text_from_request(self, pending_request: Any) -> str | None:
        prompt, mode = (list(pending_request.args) + [None, None])[:2]
        text, given = _text_of(prompt), pending_request.kwargs
        # a mode may have instructions of its own, which come before the text
        return f"{given.get('cache_salt')}\n{mode or given.get('generation_mode')}\n{text}" if text else None


def _text_of(prompt: object) -> str:
    """Return a text whose prefixes are those of a prompt, empty if it is not one that `Engine.submit` takes."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return _text_of(prompt.get("input_ids"))
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, list | tuple) or not items:
        return ""
    if isinstance(items[0], Mapping):
        return "".join(f"{message.get('role')}\n{message.get('content')}\n" for message in items)
    return " ".join(map(str, items[0] if isinstance(items[0], list | tuple) else items))  # the router needs one text
