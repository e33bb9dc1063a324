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
        arguments = pending_request.args
        text = prompt_text(arguments[0]) if arguments else ""
        if not text:
            return None
        given = pending_request.kwargs
        mode = arguments[1] if len(arguments) > 1 else given.get("generation_mode")
        # a mode may have instructions of its own, which come before the text
        return f"{given.get('cache_salt')}\n{mode}\n{text}"


def prompt_text(prompt: object) -> str:
    """Return a text whose prefixes are those of a prompt, empty if it is not one that `Engine.submit` takes."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return prompt_text(prompt.get("input_ids"))
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        return "".join(f"{message.get('role')}\n{message.get('content')}\n" for message in prompt)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, list | tuple) or not ids:
        return ""
    row = ids[0] if isinstance(ids[0], list | tuple) else ids  # the router needs one text
    return " ".join(map(str, row))
