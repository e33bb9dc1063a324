"""Engines for a CPU beside ours: llama.cpp, OpenVINO GenAI, and two ways of transformers.

All complete the same prompts with the same weights: several times one prompt (sampled), and different questions over a
few system prompts (greedy). Other engines read the model's GGUF file, each in an environment of its own, which the
first run creates. Each case starts a process per engine, and its rounds interleave them. CPU seconds are those of the
process. With `--threads 1`, other work on the machine changes them little. `--shape` measures random weights in the
shape of another model, in the formats of the demo model's file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from os.path import commonprefix
from pathlib import Path
from select import select
from typing import Any

import torch

from hf_parallel.files import cache_folder
from hf_parallel.models.loading.demo_file import find_demo_file
from hf_parallel.models.loading.gguf_file import gguf_file, load_tokenizer, read_gguf
from hf_parallel.progress import progress_bar

from .engine import question, system_prompt
from .engine_parts.shapes import SHAPES, random_model
from .report import set_up

SIZES: dict[str, Any] = {"ways": "ours,packed,packed_int8,openvino,llama_cpp,generate_batch,generate"}
SIZES |= {"cases": "2048:1,4,16,64 512:1,16", "questions": 16, "systems": 4, "system_tokens": 512}
SIZES |= {"new_tokens": 32, "rounds": 3, "seconds": 960.0, "limit": 100.0, "gguf": "", "shape": ""}
"""`ways`: `packed` is ours with `weights="packed"`, `packed_int8` also with activations in 8 bits. `cases`: lengths of
prompts, and numbers of rows. `questions`: different ones over `systems` system prompts of `system_tokens` (0: none).
`rounds` of a case: fewer if its part of the `seconds` is over; nothing runs longer than the `seconds`. `limit`: seconds
that a call may be expected to take. `gguf`: file with the weights of `--model`, which may be one itself. `shape`: see
`HELP`."""
QUICK: dict[str, Any] = {"ways": "ours,generate,generate_batch", "cases": "24:1,3", "new_tokens": 4}
QUICK |= {"questions": 4, "systems": 2, "system_tokens": 24, "rounds": 1}
HELP = {"shape": f"random weights in the shape of another model, written once to the cache folder: {', '.join(SHAPES)}"}
PACKAGES = {"llama_cpp": "xllamacpp==2026.10.11549", "openvino": "openvino-genai==2026.4.1.0"}
"""Packages of the ways that run in an environment of their own."""
WARM_UP = 16
"""Tokens of the prompts of the first request, which is not counted."""
Known = dict[tuple[str, int], list[tuple[int, float]]]
"""Rows and seconds of earlier cases, by way and length of the prompt."""


class Worker:
    """Process of a way. Raises `RuntimeError` if it ends, or does not reply before `ends`, of the monotonic clock."""

    def __init__(self, settings: dict[str, Any], ends: float) -> None:
        root = str(Path(__file__).parent.parent)
        variables = {"OMP_NUM_THREADS": str(settings["threads"]), "PYTHONPATH": root}
        self._ends, self._errors = ends, tempfile.TemporaryFile()  # noqa: SIM115
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        command = [environment(settings["way"]), "-m", "benchmarks.engine_parts.worker"]
        self._process: Any = subprocess.Popen(command, cwd=root, env=os.environ | variables, **pipes)
        self.loaded = self.ask(settings)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the reply."""
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        began = time.monotonic()
        if not select([self._process.stdout], [], [], max(0.0, self._ends - began))[0]:
            self.close()
            raise RuntimeError(f"out of time: no reply in {time.monotonic() - began:.0f} s")
        if not (line := self._process.stdout.readline()):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            errors = [line for line in lines if re.match(r"\S*(Error|Exception)\b", line)] or lines
            raise RuntimeError(errors[-1][-300:] if errors else f"ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def environment(way: str) -> str:
    """Return the Python of a way, and create its environment first if there is none."""
    if way not in PACKAGES:
        return sys.executable
    folder = cache_folder() / "environments" / PACKAGES[way]
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        print(f"{way}: creating {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        install = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", PACKAGES[way]]
        for command in ([sys.executable, "-m", "venv", str(folder)], install):
            if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
                raise RuntimeError(f"cannot be installed: {done.stderr.strip()[-300:]}")
        (folder / "complete").touch()
    return python


def load(options: argparse.Namespace) -> tuple[None, Any]:
    """Return the tokenizer. Each process loads its model; here, the embedded one is converted, and a shape written."""
    if not options.shape:
        return None, set_up(options)[1]
    if options.model or options.gguf:
        raise ValueError("--shape is a model of its own: it takes no --model and no --gguf")
    if options.threads:
        torch.set_num_threads(options.threads)
    file = random_model(options.shape)
    options.model = str(file)
    return None, load_tokenizer(read_gguf(file))


def run(model: None, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    ends, ways = time.monotonic() + sizes.seconds, sizes.ways.split(",")
    cases = []
    for text in sizes.cases.split():
        length, _, rows = text.partition(":")
        cases += [{"prompt": int(length), "rows": int(count), "questions": 1} for count in rows.split(",")]
    if sizes.questions:
        cases.append({"prompt": sizes.system_tokens, "rows": 1, "questions": sizes.questions})
    known: Known = {}
    broken: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        seconds = (ends - time.monotonic()) / (len(cases) - number)
        found = measure(
            case, [way for way in ways if way not in broken], tokenizer, sizes, seconds, ends, known, broken
        )
        entries.append(case | {"ways": {way: found.get(way, {"not_measured": broken.get(way)}) for way in ways}})
    report = {"packages": {way: PACKAGES[way] for way in ways if way in PACKAGES}, "cases": entries}
    if sizes.shape:
        report["model"] = f"{sizes.shape}, random weights"
    return report


def measure(
    case: dict[str, int],
    ways: list[str],
    tokenizer: Any,
    sizes: Any,
    seconds: float,
    ends: float,
    known: Known,
    broken: dict[str, str],
) -> dict[str, Any]:
    """Return the figures of the ways, whose rounds go on for `seconds`; extend `known` and `broken`."""
    began, threads, rows = time.monotonic(), torch.get_num_threads(), case["rows"] * case["questions"]
    settings = {"model": sizes.model, "gguf": weights_file(sizes), "threads": threads, "rows": rows}
    workers: dict[str, Worker] = {}
    replies: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    found: dict[str, Any] = {}
    rounds = progress_bar(range(sizes.rounds), what=f"{rows} rows of {case['prompt']} tokens", unit="rounds")
    for number in rounds:
        if number and (time.monotonic() - began) * (number + 1) / number > seconds:
            break
        asked = request(case, number, tokenizer, sizes)
        short = {"prompts": [prompt[-WARM_UP:] for prompt in asked["prompts"]]}
        settings["tokens"] = sum(map(len, asked["prompts"])) + rows * (sizes.new_tokens + 1) + WARM_UP
        for way in [way for way in ways if way not in found]:
            print(f"{way}, {case['questions']} x {case['rows']} rows of {case['prompt']} tokens, round {number + 1}")
            try:
                if not number:
                    expected = extrapolated(known.get((way, case["prompt"]), []), rows)
                    if case["questions"] == 1 and expected > min(sizes.limit, ends - time.monotonic()):
                        raise RuntimeError(f"would take about {expected:.0f} s")
                    if time.monotonic() > ends:
                        raise RuntimeError("out of time")
                    workers[way] = started(way, settings, ends, broken)
                    workers[way].ask(asked | short)
                replies[way].append(workers[way].ask(asked))
            except (RuntimeError, OSError) as error:  # reported as a result
                if not replies[way]:
                    found[way] = {"not_measured": str(error)}
    for way in [way for way in ways if way not in found]:
        found[way] = summary(replies[way], ours := replies.get("ours", [])) | workers[way].loaded
        if case["questions"] == 1:
            took = found[way]["cpu"]["seconds"] / threads
            known.setdefault((way, case["prompt"]), []).append((rows, took))
        elif ours:
            found[way]["as_ours"] = agreement(tokenizer, replies[way][0]["answers"], ours[0]["answers"])
    for worker in workers.values():
        worker.close()
    return found


def weights_file(sizes: Any) -> str:
    """Return the GGUF file that other engines read, or an empty string."""
    if sizes.gguf:
        return str(sizes.gguf)
    file = gguf_file(sizes.model) if sizes.model else find_demo_file()[0]
    return str(file or "")


def started(way: str, settings: dict[str, Any], ends: float, broken: dict[str, str]) -> Worker:
    """Return a process with the loaded model. A way that cannot load it is `broken`: it is not started again."""
    try:
        if way in PACKAGES and not settings["gguf"]:
            raise RuntimeError("needs the weights in a GGUF file")
        return Worker(settings | {"way": way}, ends)
    except (RuntimeError, OSError) as error:
        if time.monotonic() < ends:
            broken[way] = str(error)
        raise


def extrapolated(points: list[tuple[int, float]], rows: int) -> float:
    """Return the seconds on the line through the last two points; 0: fewer are known."""
    if len(points) < 2:
        return 0.0
    (few, less), (many, more) = points[-2:]
    return more + (more - less) / (many - few) * (rows - many)


def request(case: dict[str, int], number: int, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the request of a round. Prompts are new in each round, because engines may cache earlier prompts."""
    systems = [system_prompt(tokenizer, 100 * number + place, case["prompt"]) for place in range(sizes.systems)]
    prompts = [systems[one % sizes.systems] + question(tokenizer, one) for one in range(case["questions"])]
    prompts = systems[:1] if case["questions"] == 1 else prompts
    settings = {"rows": case["rows"], "new_tokens": sizes.new_tokens, "greedy": case["questions"] > 1}
    return {"prompts": prompts, **settings}


def summary(replies: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the rounds, and the seconds of each; `by_ours` is a median of ratios."""
    found: dict[str, Any] = {"peak_bytes": replies[-1]["peak_bytes"]}
    for kind in ("wall", "cpu"):
        found[kind] = {name: statistics.median(one[kind][name] for one in replies) for name in replies[0][kind]}
        found[kind]["rounds"] = [one[kind]["seconds"] for one in replies]
        pairs = zip(found[kind]["rounds"], (one[kind]["seconds"] for one in ours), strict=False)
        found[kind] |= {"by_ours": statistics.median(a / b for a, b in pairs)} if ours else {}
    return found


def agreement(tokenizer: Any, answers: list[Any], ours: list[Any]) -> float:
    """Return the mean fraction of our answers before the first difference."""
    texts = [one if isinstance(one, str) else tokenizer.decode(one) for one in answers]
    pairs = list(zip(texts, tokenizer.batch_decode(ours), strict=True))
    return statistics.mean(len(commonprefix(pair)) / max(1, len(pair[1])) for pair in pairs)
