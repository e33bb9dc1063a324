"""`hf-parallel serve`: an OpenAI-compatible server of one model over an `Engine`."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_parallel.cli.generate import add_model_options, check_model_options, check_writable, load
from hf_parallel.models.loading import check_model_folder, load_processor
from hf_parallel.models.loading.adapters import load_adapters
from hf_parallel.models.loading.embedded import MODEL_NAME

if TYPE_CHECKING:
    from hf_parallel.engine.server import Limits

KEY_VARIABLE = "HF_PARALLEL_API_KEY"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument_group("model").add_argument
    add_model_options(add)
    add("--served-model-name", metavar="NAME", help="name of the model for clients (default: from --model)")
    words = "LoRA adapter that clients may name as the model; may be repeated"
    add("--lora", action="append", default=[], metavar="NAME=PATH", help=words)
    add = parser.add_argument_group("address").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("--port", type=_port, default=8000, metavar="N", help="port to listen on (8000); 0: any that is free")
    words = f"API key that clients must send; may be given several times (default: {KEY_VARIABLE}, else none is needed)"
    add("--api-key", action="append", default=[], metavar="KEY", help=words)
    add = parser.add_argument_group("limits").add_argument
    words = "memory for keys and values, such as 2G (half of what is free)"
    add("--max-kv-bytes", type=parse_bytes, metavar="N", help=words)
    add("--max-rows", type=int, default=64, metavar="N", help="rows that generate at the same time (64)")
    add("--max-waiting", type=int, default=256, metavar="N", help="requests in the queue; beyond: status 429 (256)")
    add("--max-batch-tokens", type=int, metavar="N", help="tokens of a forward pass (512 on a CPU, else 4096)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum context length, prompt plus completion (default: the model's)",
    )
    add("--default-tokens", type=int, default=512, metavar="N", help="new tokens if a request gives no limit (512)")
    words = "size of a request (1M; 8M if the model reads images)"
    add("--max-body-bytes", type=parse_bytes, metavar="N", help=words)
    words = "log-probabilities of a response, tokens times alternatives (1M)"
    add("--max-log-probs", type=parse_bytes, default=2**20, metavar="N", help=words)
    words = "open connections (1024, or fewer if the process may open fewer files)"
    add("--max-connections", type=int, default=1024, metavar="N", help=words)
    words = "seconds after which an answer is canceled if its client reads nothing (60)"
    add("--unread-seconds", type=float, default=60.0, metavar="N", help=words)
    words = "seconds for which the prefix of a stored response stays cached for forks (600)"
    add("--lease-ttl", type=float, default=600.0, metavar="N", help=words)
    words = "responses of a key whose prefixes stay cached for forks (32)"
    add("--max-leases", type=int, default=32, metavar="N", help=words)
    words = "memory of these prefixes of a key, such as 1G (no limit but --max-kv-bytes)"
    add("--max-lease-bytes", type=parse_bytes, metavar="N", help=words)
    add("--max-images", type=int, default=16, metavar="N", help="images of a request (16); 0: none")
    add("--max-image-bytes", type=parse_bytes, default=2**22, metavar="N", help="size of an image's file (4M)")
    add("--max-image-pixels", type=parse_bytes, default=2**25, metavar="N", help="pixels of a request's images (32M)")
    words = "memory for cached logits, such as 2G, from which requests with `replay` draw (default: none are cached)"
    add("--logits-cache", type=parse_bytes, metavar="N", help=words)
    words = "file of the cached logits, which is read at the start and written at the end"
    add("--logits-cache-path", type=Path, metavar="FILE", help=words)
    words = "seconds in which running requests may finish after SIGTERM or Ctrl-C (60)"
    add("--drain-seconds", type=int, default=60, metavar="N", help=words)
    add = parser.add_argument_group("log").add_argument
    words = "print a line for each request: client, path, status, seconds and tokens, none of its text"
    add("--log-requests", action="store_true", help=words)
    parser.set_defaults(run=serve)


def parse_bytes(text: str) -> int:
    """Return a number of bytes from text such as `512M` or `2G`."""
    number = text
    unit = ""
    if text[-1:].isalpha():
        number = text[:-1]
        unit = text[-1].lower()
    if not number.isdigit() or unit not in _UNITS or not int(number):
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 1000000, 512M or 2G, got {text!r}")
    return int(number) * _UNITS[unit]


def check_cache_options(options: argparse.Namespace) -> None:
    """Raise `ValueError` for options of the logits cache that contradict each other, or name no writable file."""
    path = options.logits_cache_path
    if path is None:
        return
    if options.logits_cache is None:
        raise ValueError(f"--logits-cache-path {path} needs --logits-cache with the memory for it, such as 2G")
    check_writable("--logits-cache-path", path)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the host for each of its processes."""
    import psutil

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def kv_budget(options: argparse.Namespace, device: torch.device) -> int:
    """Return the bytes of `--max-kv-bytes`; by default half of the free memory."""
    return options.max_kv_bytes or free_memory(device) // 2


def serve(options: argparse.Namespace) -> int:
    """Run the command until SIGTERM or Ctrl-C; running requests finish first. Return the exit status."""
    from hf_parallel.engine import Engine
    from hf_parallel.engine.server import DrainingServer, create_app
    from hf_parallel.engine.server.logits_cache import open_cache, save_cache

    check_model_options(options)
    check_cache_options(options)
    name = options.served_model_name or _name(options.model)
    adapters = _adapter_paths(options.lora, name)
    keys = options.api_key or _keys_of_environment()
    is_local = _is_local(options.host)
    if not keys and not is_local:
        words = f"{options.host} can be reached by others, and no --api-key is given"
        print(f"hf-parallel: warning: {words}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises the signal again when it has ended
    port = options.port
    logits_cache = None
    if options.device == "tp" and os.environ.get("RANK", "0") != "0":  # it follows the first process, and ends with it
        port = 0
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    elif options.logits_cache is not None:
        logits_cache = open_cache(options.logits_cache, options.logits_cache_path)
    with ExitStack() as at_end, _listen(options.host, port) as listening:
        model, tokenizer = load(options)
        try:
            processor = load_processor(model, options.model)
        except (ImportError, OSError, ValueError) as error:
            processor = None
            print(f"hf-parallel: warning: images are not accepted, as there is no processor: {error}", file=sys.stderr)
        if adapters:
            model = load_adapters(model, adapters)
        limits = _limits(options, reads_images=processor is not None)
        max_kv_bytes = kv_budget(options, model.device)
        with Engine(
            model,
            tokenizer,
            max_kv_bytes,
            max_rows=options.max_rows,
            max_waiting=options.max_waiting,
            max_batch_tokens=options.max_batch_tokens,
        ) as engine:
            if not engine.leads:
                return 0  # when the engine has ended
            hosts = LOCAL_HOSTS if is_local and not keys else ()
            app = create_app(engine, name, limits, keys, max_kv_bytes, hosts, processor, adapters, logits_cache)
            if logits_cache is not None and options.logits_cache_path is not None:
                at_end.callback(save_cache, logits_cache, options.logits_cache_path)  # once the engine has ended
            host = f"[{options.host}]" if ":" in options.host else options.host
            _, listening_port, *_ = listening.getsockname()
            print(f"Serving {name} at http://{host}:{listening_port}/v1", file=sys.stderr, flush=True)
            if options.log_requests:
                log_requests()
            DrainingServer(app, engine, options.drain_seconds, limits).run(sockets=[listening])
            return int(engine.error is not None)


def _adapter_paths(options: Sequence[str], model_name: str) -> dict[str, str]:
    """Return the paths of adapters by name, from the values of `--lora`."""
    paths = {}
    for option in options:
        name, _, path = option.partition("=")
        paths[name] = path
    is_unique = len(paths) == len(options) and model_name not in paths
    if not is_unique or "" in paths or "" in paths.values():
        raise ValueError(f"--lora must be NAME=PATH, with names that differ, also from {model_name!r}, got {options}")
    for name, path in paths.items():
        check_model_folder(f"--lora {name}:", path, ["adapter_config.json"])
    return paths


def _keys_of_environment() -> list[str]:
    """Return the API keys of the environment variable, which separates them by commas."""
    keys = [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",")]
    return [key for key in keys if key]


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from error


def _limits(options: argparse.Namespace, reads_images: bool) -> Limits:
    """Return the limits of the server; the bodies of requests with images are larger."""
    from hf_parallel.engine.server import Limits

    default_body_bytes = 2**23 if reads_images else 2**20
    return Limits(
        body_bytes=options.max_body_bytes or default_body_bytes,
        connections=options.max_connections,
        unread_seconds=options.unread_seconds,
        rows=options.max_rows,
        tokens=options.max_tokens,
        default_tokens=options.default_tokens,
        log_probs=options.max_log_probs,
        lease_ttl=options.lease_ttl,
        max_leases=options.max_leases,
        max_lease_bytes=options.max_lease_bytes,
        images=options.max_images,
        image_bytes=options.max_image_bytes,
        image_pixels=options.max_image_pixels,
    )


def log_requests() -> None:
    """Print a line to stderr for each request of a server in this process."""
    from hf_parallel.engine.server.limits import request_logger

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    request_logger.addHandler(handler)
    request_logger.setLevel(logging.INFO)
    request_logger.propagate = False


def _name(model: str | None) -> str:
    """Return the name of a model: the name of its folder, or the demo model's."""
    if model is None:
        return MODEL_NAME
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
