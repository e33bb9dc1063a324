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

from hf_parallel.engine.server.openai.submission import COMMON
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.registry import MODES
from hf_parallel.transcript.page import HUES, fill
from hf_parallel.transcript.sections import is_plain

_CODE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_PARAMETER = re.compile(r"^(\w[\w, ]*) : .*\n((?:(?: {4}.*)?(?:\n|$))+)", re.MULTILINE)


def page() -> HTMLResponse:
    """Return the page for the modes that are registered now."""
    modes = [describe(cls) for cls in MODES.values() if not cls.traits.needs_logits_cache]
    text = fill(Path(__file__).with_name("page.html"), schema={"hues": HUES, "modes": modes})
    own = {tag: hashlib.sha256(code.encode()).digest() for tag, code in _CODE.findall(text)}
    allowed = [f"{tag}-src 'sha256-{base64.b64encode(own[tag]).decode()}'" for tag in ("script", "style")]
    closed = [f"{name} 'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors")]
    policy = "; ".join([*closed, *allowed, "connect-src 'self'", "img-src data:"])
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(text, headers=headers | {"Cache-Control": "no-cache"})


def describe(cls: type[ParallelConfig]) -> dict[str, object]:
    """Return a mode as plain data: the settings that a request can give, and what the page needs to draw its rows."""
    config = cls()
    about: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for names, text in _PARAMETER.findall(inspect.cleandoc(vars(base).get("__doc__") or "")):
            about |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    hidden = {*COMMON, *cls.not_remote()}
    shown = [field for field in dataclasses.fields(cls) if field.init and field.name not in hidden]
    places = [config.rows.place(row, 1) for row in range(-1, config.max_rows_per_prompt + 2)]
    return {
        "name": cls.mode,
        "about": inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0],
        "answers": cls.traits.rows_continue_prompts,  # whether each row is a choice
        "across": sorted({config.rows.name(place.index) for place in places if place.column is None}),
        "reads": config.rows.style.visibility != "never",
        "settings": [
            {
                "name": field.name,
                "type": str(field.type),
                "about": about.get(field.name, ""),
                "default": default if is_plain(default := getattr(config, field.name)) else None,
            }
            for field in shown
        ],
    }
