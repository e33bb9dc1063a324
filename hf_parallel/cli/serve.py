"""`hf-parallel serve`: an OpenAI-compatible server of one model over an `Engine`."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from hf_parallel.cli.generate import add_model_options, check_model_options, load
from hf_parallel.models.intercept.adapters import load_adapters
from hf_parallel.models.loading import check_model_folder, load_processor
from hf_parallel.models.loading.embedded import MODEL_NAME

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
    words = f"key that requests need; may be repeated (default: the variable {KEY_VARIABLE}, else none is needed)"
    add("--api-key", action="append", default=[], metavar="KEY", help=words)
    add = parser.add_argument_group("limits").add_argument
    words = "memory for keys and values, such as 2G (half of what is free)"
    add("--max-kv-bytes", type=parse_bytes, metavar="N", help=words)
    add("--max-rows", type=int, default=64, metavar="N", help="rows that generate at the same time (64)")
    add("--max-waiting", type=int, default=256, metavar="N", help="requests in the queue; beyond: status 429 (256)")
    add("--max-batch-tokens", type=int, metavar="N", help="tokens of a forward pass (512 on a CPU, else 4096)")
    add("--max-tokens", type=int, metavar="N", help="tokens of a prompt and its answer (the model's context length)")
    add("--default-tokens", type=int, default=512, metavar="N", help="new tokens if a request gives no limit (512)")
    words = "size of a request (1M; 8M if the model reads images)"
    add("--max-body-bytes", type=parse_bytes, metavar="N", help=words)
    words = "log-probabilities of a response, tokens times alternatives (1M)"
    add("--max-log-probs", type=parse_bytes, default=2**20, metavar="N", help=words)
    words = "open connections (1024, or fewer if the process may open fewer files)"
    add("--max-connections", type=int, default=1024, metavar="N", help=words)
    words = "seconds after which an answer ends of which the client reads nothing (60)"
    add("--unread-seconds", type=float, default=60.0, metavar="N", help=words)
    add("--max-images", type=int, default=16, metavar="N", help="images of a request (16); 0: none")
    add("--max-image-bytes", type=parse_bytes, default=2**22, metavar="N", help="size of an image's file (4M)")
    add("--max-image-pixels", type=parse_bytes, default=2**25, metavar="N", help="pixels of a request's images (32M)")
    words = "seconds in which running requests may finish after SIGTERM or Ctrl-C (60)"
    add("--drain-seconds", type=int, default=60, metavar="N", help=words)
    add = parser.add_argument_group("log").add_argument
    words = "print a line for each request: client, path, status, seconds and tokens, none of its text"
    add("--log-requests", action="store_true", help=words)
    parser.set_defaults(run=serve)


def parse_bytes(text: str) -> int:
    """Return a number of bytes from text such as `512M` or `2G`."""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in _UNITS or not int(number):
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 1000000, 512M or 2G, got {text!r}")
    return int(number) * _UNITS[unit]


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


def serve(options: argparse.Namespace) -> int:
    """Run the command until SIGTERM or Ctrl-C; running requests finish first. Return the exit status."""
    from hf_parallel.engine import Engine
    from hf_parallel.engine.server import DrainingServer, Limits, create_app

    check_model_options(options)
    name = options.served_model_name or _name(options.model)
    adapters = dict(one.partition("=")[::2] for one in options.lora)
    if len(adapters) < len(options.lora) or {"", name} & {*adapters} or "" in adapters.values():
        raise ValueError(f"--lora must be NAME=PATH, with names that differ, also from {name!r}, got {options.lora}")
    for adapter, path in adapters.items():
        check_model_folder(f"--lora {adapter}:", path, ["adapter_config.json"])
    keys = options.api_key or [*filter(None, map(str.strip, os.environ.get(KEY_VARIABLE, "").split(",")))]
    is_local = _is_local(options.host)
    if not keys and not is_local:
        words = f"{options.host} can be reached by others, and no --api-key is given"
        print(f"hf-parallel: warning: {words}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises the signal again when it has ended
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    port = options.port
    if options.device == "tp" and os.environ.get("RANK", "0") != "0":  # it follows the first process, and ends with it
        port = 0
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
    try:
        listening = socket.create_server((options.host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {options.host} port {port}: {error.strerror}") from error
    with listening:
        model, tokenizer = load(options)
        try:
            processor = load_processor(model, options.model)
        except (ImportError, OSError, ValueError) as error:
            processor = None
            print(f"hf-parallel: warning: images are not accepted, as there is no processor: {error}", file=sys.stderr)
        if adapters:
            model = load_adapters(model, adapters)
        names = ("rows", "tokens", "log_probs", "connections", "images", "image_bytes", "image_pixels")
        given = {name: getattr(options, f"max_{name}") for name in names}
        given |= {name: getattr(options, name) for name in ("default_tokens", "unread_seconds")}
        limits = Limits(options.max_body_bytes or (2**20 if processor is None else 2**23), **given)
        max_kv_bytes = options.max_kv_bytes or free_memory(model.device) // 2
        settings = {name: getattr(options, name) for name in ("max_rows", "max_waiting", "max_batch_tokens")}
        with Engine(model, tokenizer, max_kv_bytes, **settings) as engine:
            if not engine.leads:
                return 0  # when the engine has ended
            hosts = LOCAL_HOSTS if is_local and not keys else ()
            app = create_app(engine, name, limits, keys, max_kv_bytes, hosts, processor, adapters)
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"Serving {name} at http://{host}:{listening.getsockname()[1]}/v1", file=sys.stderr, flush=True)
            if options.log_requests:
                log_requests()
            DrainingServer(app, engine, options.drain_seconds, limits).run(sockets=[listening])
            return int(engine.error is not None)


def log_requests() -> None:
    """Print a line to stderr for each request of a server in this process."""
    from hf_parallel.engine.server.limits import request_logger

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    request_logger.addHandler(handler)
    request_logger.setLevel(logging.INFO)
    request_logger.propagate = False


def _name(model: str | None) -> str:
    return MODEL_NAME if model is None else Path(model).resolve().name if Path(model).is_dir() else model


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
