"""A process with one engine, for `python -m benchmarks engines`. Settings and requests arrive as lines of JSON.

It runs in the environment of its engine, so the module imports only the standard library. All engines sample with
temperature 1 and top-k 50, or are greedy, and end no row before its last token.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOP_K = 50
Answers = list[Any]
"""New tokens or text of each row."""


def now() -> tuple[float, ...]:
    """Return wall and CPU seconds."""
    return time.perf_counter(), time.process_time()


class Clock:
    """Wall and CPU seconds of the start of a call, and of the tokens of each row."""

    def __init__(self, rows: int) -> None:
        self.began = now()
        self.rows: list[list[tuple[float, ...]]] = [[] for _ in range(rows)]

    def tick(self, *rows: int) -> None:
        """Record a token of each of these rows."""
        for row in rows:
            self.rows[row].append(now())

    def figures(self, new_tokens: int) -> dict[str, Any]:
        """Return seconds of the call, and medians over the rows: the first token, a row's mean step."""
        found: dict[str, Any] = {}
        for kind, (name, began, ended) in enumerate(zip(("wall", "cpu"), self.began, now(), strict=True)):
            rate = len(self.rows) * new_tokens / (ended - began)
            found[name] = {"seconds": ended - began, "tokens_per_second": rate}
            if times := [[at[kind] for at in row] for row in self.rows if row and len(row[0]) > kind]:
                found[name]["first_token"] = statistics.median(row[0] - began for row in times)
                found[name]["step"] = statistics.median((row[-1] - row[0]) / (new_tokens - 1) for row in times)
        return found


Call = Callable[[Any, Clock], Answers]
"""Answers a request: `prompts` (token ids), `rows` of each prompt, `new_tokens`, `greedy`."""


def sampling(request: Any) -> dict[str, Any]:
    """Return settings of `generate`."""
    return {"do_sample": False} if request.greedy else {"do_sample": True, "temperature": 1.0, "top_k": TOP_K}


def of_torch(settings: Any) -> Call:
    """Return `shared_prefix` (one prompt) and `Engine` (several), or a way of transformers."""
    import torch
    import transformers

    import hf_parallel
    from benchmarks import engine, measure
    from hf_parallel.models.loading import load_model

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings.threads)
    model: Any
    weights = settings.way if settings.way.startswith("packed") else None
    model, tokenizer = load_model(settings.model, preset=False, weights=weights)
    mode = {"generation_mode": "shared_prefix"} if weights or settings.way == "ours" else {}
    if mode:
        hf_parallel.enable(model)

    def generate(request: Any, clock: Clock) -> Answers:
        width = max(map(len, request.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in request.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in request.prompts])
        given = {"num_return_sequences": request.rows, "max_new_tokens": request.new_tokens, **engine.FIXED_LENGTH}
        given |= {"streamer": measure.StepClock(lambda _: clock.tick(*range(len(clock.rows)))), **sampling(request)}
        return model.generate(ids, attention_mask=mask, **given, **mode)[:, width:].tolist()

    def in_engine(request: Any, clock: Clock) -> Answers:
        given = {"max_new_tokens": request.new_tokens, **sampling(request), **engine.FIXED_LENGTH}
        with engine.Engine(model, tokenizer, max_rows=len(clock.rows)) as opened:
            handles = []
            for row, prompt in enumerate(request.prompts):
                streamer = measure.StepClock(partial(lambda row, _: clock.tick(row), row))
                handles.append(opened.submit(prompt, streamer=streamer, **given))
            return [handle.result().sequences[0, -request.new_tokens :].tolist() for handle in handles]

    def generate_batch(request: Any, clock: Clock) -> Answers:
        done = measure.generate_batch(model, request.prompts, request.new_tokens, request.rows, **sampling(request))
        clock.rows = [[(at,) for at in one.timestamps] for one in done]  # of the wall clock only
        return [one.generated_tokens for one in sorted(done, key=lambda one: request.prompts.index(one.prompt_ids))]

    if settings.way == "generate_batch":
        return generate_batch
    return lambda request, clock: (in_engine if mode and len(request.prompts) > 1 else generate)(request, clock)


def llama_cpp(settings: Any) -> Call:
    """Return llama.cpp's server in this process: a slot per row, a unified KV cache; the rows of a prompt share it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = settings.gguf, settings.tokens
    params.n_parallel, params.kv_unified, params.cache_ram_mib = settings.rows, True, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    server = xllamacpp.Server(params)

    def complete(request: Any, clock: Clock, number: int) -> Answers:
        texts, counts, first = [""] * request.rows, [0] * request.rows, number * request.rows

        def receive(chunk: Any) -> bool:
            for piece in chunk if isinstance(chunk, list) else [chunk]:
                (choice,) = piece["choices"]
                texts[choice["index"]] += choice["text"]
                if "usage" in piece:
                    counts[choice["index"]] = piece["usage"]["completion_tokens"]
                else:
                    clock.tick(first + choice["index"])
            return False

        drawn = {"temperature": 0.0} if request.greedy else {"samplers": ["top_k", "temperature"], "top_k": TOP_K}
        given = {"temperature": 1.0, "n": request.rows, "n_predict": request.new_tokens, "ignore_eos": True, **drawn}
        server.handle_completions({"prompt": request.prompts[number], "stream": True, **given}, receive)
        return checked(request, counts, texts)

    def call(request: Any, clock: Clock) -> Answers:
        numbers = range(len(request.prompts))
        with ThreadPoolExecutor(len(numbers)) as pool:
            return [text for texts in pool.map(partial(complete, request, clock), numbers) for text in texts]

    return call


def openvino(settings: Any) -> Call:
    """Return OpenVINO GenAI's continuous batching with prefix caching."""
    import numpy
    import openvino_genai
    from openvino import Tensor

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    threads = {"INFERENCE_NUM_THREADS": settings.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings.gguf, scheduler, "CPU", threads)

    def call(request: Any, clock: Clock) -> Answers:
        given = {"num_return_sequences": request.rows, "max_new_tokens": request.new_tokens, "ignore_eos": True}
        config = openvino_genai.GenerationConfig(**given, **sampling(request))
        ids = [Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in request.prompts]
        handles = [pipeline.add_request(number, one, config) for number, one in enumerate(ids)]
        answers: dict[tuple[int, int], list[int]] = {}
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for number, handle in enumerate(handles):
                outputs = handle.read() if handle.can_read() else {}
                for row, output in outputs.items():
                    answers.setdefault((number, row), []).extend(output.generated_ids)
                if outputs or request.rows > 1:  # the tokens of its rows can be read at the end only
                    clock.tick(*range(number * request.rows, (number + 1) * request.rows))
        clock.rows = [times[-request.new_tokens :] for times in clock.rows]  # earlier steps computed the prompt
        found = [answers[place] for place in sorted(answers)]
        return checked(request, list(map(len, found)), found)

    return call


def checked(request: Any, counts: list[int], answers: Answers) -> Answers:
    """Return the answers if each has as many tokens as were requested."""
    if len(counts) % request.rows or any(count != request.new_tokens for count in counts):
        raise RuntimeError(f"{request.rows} rows of {request.new_tokens} tokens were requested, got {counts}")
    return answers


def peak_bytes(reset: bool = False) -> int | None:
    """Return the highest resident memory of this process since the last reset, on Linux."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+)", status.read_text()) if status.exists() else None
    if found and reset:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(found[1]) if found else None


def main() -> None:
    """Load the engine of the first line, and answer the requests of the other lines."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to the standard output, too
    settings = SimpleNamespace(**json.loads(sys.stdin.readline()))
    began = time.perf_counter()
    call = globals().get(settings.way, of_torch)(settings)
    loaded = {"load_seconds": time.perf_counter() - began, "load_peak_bytes": peak_bytes(reset=True)}
    print(json.dumps(loaded), file=replies, flush=True)
    for line in sys.stdin:
        request = SimpleNamespace(**json.loads(line))
        clock = Clock(len(request.prompts) * request.rows)
        answers = call(request, clock)
        found = clock.figures(request.new_tokens) | {"peak_bytes": peak_bytes(), "answers": answers}
        print(json.dumps(found), file=replies, flush=True)


if __name__ == "__main__":
    main()
