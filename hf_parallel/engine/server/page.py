"""The page at `/`: a prompt, a mode with its settings, and its rows side by side as they are written.

`page.html` and `page.js` are filled like the page of a transcript. The page holds no key: it asks for one if the server
answers that it needs one. Its content security policy allows its own script and style only.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import inspect
import re
from pathlib import Path

from starlette.responses import HTMLResponse

from hf_parallel.engine.server.logits_cache import FIELD
from hf_parallel.engine.server.openai.mode_settings import COMMON
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.registry import MODES
from hf_parallel.transcript.page import HUES, fill
from hf_parallel.transcript.sections import is_plain

_CODE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_PARAMETER = re.compile(r"^(\w[\w, ]*) : .*\n((?:(?: {4}.*)?(?:\n|$))+)", re.MULTILINE)


def page(replays: bool = False) -> HTMLResponse:
    """Return the page for the modes that are registered now. `replays`: the server caches logits."""
    modes = [describe(cls, replays) for cls in MODES.values() if replays or not cls.traits.needs_logits_cache]
    text = fill(Path(__file__).with_name("page.html"), schema={"hues": HUES, "modes": modes})
    policy = [f"{name} 'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors")]
    code = dict(_CODE.findall(text))
    for tag in ("script", "style"):
        digest = hashlib.sha256(code[tag].encode()).digest()
        policy.append(f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'")
    policy += ["connect-src 'self'", "img-src data:"]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def describe(cls: type[ParallelConfig], replays: bool = False) -> dict[str, object]:
    """Return a mode as plain data: the settings that a request can give, and what the page needs to draw its rows."""
    config = cls()
    hidden = {*COMMON, *cls.not_remote()}
    if not replays:
        hidden.add(FIELD)
    fields = [field for field in dataclasses.fields(cls) if field.init and field.name not in hidden]
    descriptions = _parameter_descriptions(cls)
    settings = []
    for field in fields:
        default = getattr(config, field.name)
        settings.append(
            {
                "name": field.name,
                "type": str(field.type),
                "about": descriptions.get(field.name, ""),
                "default": default if is_plain(default) else None,
            }
        )
    positions = [config.rows.place(row, 1) for row in range(-1, config.max_rows_per_prompt + 2)]
    across = {config.rows.name(position.index) for position in positions if position.column is None}
    return {
        "name": cls.mode,
        "about": inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0],
        "answers": cls.traits.rows_continue_prompts,  # whether each row is a choice
        "across": sorted(across),
        "reads": config.rows.style.visibility != "never",
        "listens": cls.listens_to is not ParallelConfig.listens_to,
        "settings": settings,
    }


def _parameter_descriptions(cls: type[ParallelConfig]) -> dict[str, str]:
    """Return the descriptions of the settings of a mode, from the docstrings of its class and of its bases."""
    descriptions: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docstring = inspect.cleandoc(vars(base).get("__doc__") or "")
        for names, text in _PARAMETER.findall(docstring):
            description = " ".join(text.split())
            for name in names.split(", "):
                descriptions[name] = description
    return descriptions
