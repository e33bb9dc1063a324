"""OpenAI-compatible HTTP server over an `Engine` (extra `serve`)."""

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"the server needs further packages: pip install fastapi uvicorn prometheus_client ({error})"
    ) from error

from hf_parallel.engine.server.app import create_app
from hf_parallel.engine.server.limits import Limits
from hf_parallel.engine.server.shutdown import DrainingServer

__all__ = ["DrainingServer", "Limits", "create_app"]
