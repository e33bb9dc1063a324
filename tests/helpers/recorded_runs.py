"""Records what every mode returns, so that a rewrite of the step can be compared with the code before it.

`python tests/helpers/recorded_runs.py` writes `tests/recorded_runs.json` from the package of the working tree;
`--bits` records hashes of all bits, too, which hold for one type of processor and one version of torch.
`test_recorded_runs.py` compares. A commit that changes what a mode returns on purpose records again, and says why.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import BUILT_IN, small_call
from paths import ROOT

import hf_parallel
from hf_parallel.engine import Engine, KVBudgetError
from hf_parallel.generation import MODES

PATH = ROOT / "tests" / "recorded_runs.json"
TOKENIZER: Any = AsciiTokenizer()
ARCHITECTURES = ("llama", "gemma3_text", "qwen3_5_text", "deepseek_v2")
"""Plain, with sliding windows, with states, with latents."""
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    **{f"seed {seed}": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": seed} for seed in (1, 2, 3)},
}
STATS = ("decoded_tokens", "replayed_tokens")
"""Statistics that depend neither on time nor on what else the engine runs."""
DRAFT_STATS = ("drafted_tokens", "accepted_tokens")
"""In an engine they depend on the logits that other requests have cached by then."""
CALL_STATS = (
    *STATS,
    *DRAFT_STATS,
    "forward_passes",
    "prefilled_tokens",
    "reused_tokens",
    "cached_tokens",
    "kv_bytes",
    "state_bytes",
)
"""Statistics of a call that has the model to itself."""
DIGITS = 3
"""Decimals of recorded log-probabilities."""

Result = dict[str, Any]


class Run(NamedTuple):
    """One recorded run: a mode on an architecture, driven in some way, with a way to draw."""

    architecture: str
    how: str
    draw: str
    mode: str

    @property
    def key(self) -> str:
        """Name of the run in the file."""
        return "/".join(self)


def runs(architecture: str | None = None) -> Iterator[Run]:
    """Yield all runs, or those of an architecture."""
    for name in ARCHITECTURES if architecture is None else (architecture,):
        for how in WAYS:
            for draw in DRAWS:
                for mode in modes_of(name, how):
                    yield Run(name, how, draw, mode)


def modes_of(architecture: str, how: str) -> list[str]:
    """Return the modes that run on an architecture in some way."""
    modes = [mode for mode in BUILT_IN if MODES[mode].traits.keeps_states or not enabled(architecture)[1]]
    if how == "session":
        return [mode for mode in modes if mode in ("hogwild", "async_reasoning")]
    if how == "kept cache":
        return [mode for mode in modes if mode not in ("hogwild", "async_reasoning", "pdos", "fork_join")]
    return modes


@cache
def enabled(architecture: str) -> tuple[Any, bool]:
    """Return an enabled copy of a tiny model, and whether its layers keep states."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build(architecture)))
    return model, bool(model._parallel.capabilities.mixers)


def prompts() -> list[torch.Tensor]:
    """Return two prompts that share a prefix, int64 `[length]` each."""
    prefix, first, second = tiny.make_prompts([19, 7, 4], seed=5)
    return [torch.cat((prefix, first)), torch.cat((prefix, second))]


def arguments(run: Run) -> dict[str, Any]:
    """Return the arguments of `generate`, without the prompt."""
    given = {"tokenizer": TOKENIZER, **small_call(run.mode), **DRAWS[run.draw], "return_dict_in_generate": True}
    if run.mode == "resample":
        given["logits_cache"] = hf_parallel.LogitsCache()
    if not given["do_sample"]:  # several greedy answers would be equal
        given |= {name: 1 for name in ("num_candidates", "num_answers", "width") if name in given}
    return given


def result_of(output: Any, begin: int, stats: tuple[str, ...]) -> Result:
    """Return what is recorded of an output whose prompts have `begin` tokens."""
    tokens = output.sequences[:, begin:]
    log_probs = output.log_probs
    bits = hashlib.sha256(tokens.numpy().tobytes())
    bits.update(log_probs.float().numpy().tobytes())
    return {
        "tokens": tokens.tolist(),
        "log_probs": [[round(v, DIGITS) if v == v else None for v in row] for row in log_probs.tolist()],
        "stats": {name: getattr(output.stats, name) for name in stats},
        "bits": bits.hexdigest()[:16],
    }


def call(run: Run) -> Result:
    """Run one call with both prompts."""
    ids, mask = tiny.left_pad(prompts())
    output = enabled(run.architecture)[0].generate(ids, attention_mask=mask, **arguments(run))
    return result_of(output, ids.shape[1], CALL_STATS)


def kept_cache(run: Run) -> Result:
    """Run a second call over the cache of a first one, with longer prompts."""
    model, kept = enabled(run.architecture)[0], hf_parallel.SharedPrefixCache()
    for extra in ([], [40, 41, 42]):
        ids, mask = tiny.left_pad([torch.cat((prompt, torch.tensor(extra).long())) for prompt in prompts()])
        output = model.generate(ids, attention_mask=mask, past_key_values=kept, **arguments(run))
    return result_of(output, ids.shape[1], CALL_STATS)


def session(run: Run) -> Result:
    """Run a session to its end, with a text injected after four passes."""
    model, (prompt, _) = enabled(run.architecture)[0], prompts()
    settings = {
        name: value for name, value in arguments(run).items() if name not in ("tokenizer", "num_return_sequences")
    }
    settings.pop("return_dict_in_generate")
    with hf_parallel.HogwildSession(model, TOKENIZER, prompt[None], **settings) as opened:
        opened.run(4)
        if opened.writing:
            opened.inject(opened.writing[0], "And so.")
        opened.run()
        output = opened.finish()
    return result_of(output, len(prompt), CALL_STATS)


def engine(run: Run) -> Result:
    """Run the requests of all modes in one engine; return that of the run's mode."""
    return in_engine(run.architecture, run.draw, False)[run.mode]


def preempting_engine(run: Run) -> Result:
    """Do what `engine` does with a budget that makes it preempt requests."""
    return in_engine(run.architecture, run.draw, True)[run.mode]


@cache
def in_engine(architecture: str, draw: str, has_budget: bool) -> dict[str, Result]:
    """Submit a request of each mode at once; return their results by mode."""
    model, (_, prompt) = enabled(architecture)[0], prompts()
    found: dict[str, Result] = {}
    max_kv_bytes = budget_bytes(architecture, draw) if has_budget else None
    with Engine(model, TOKENIZER, max_kv_bytes=max_kv_bytes) as opened:
        handles = {}
        for salt in ("a", "b", "c") if has_budget else ("a",):  # copies that share nothing
            for mode in modes_of(architecture, "engine"):
                given = arguments(Run(architecture, "engine", draw, mode))
                name = given.pop("generation_mode")
                handles[mode] = opened.submit(prompt[None], name, cache_salt=salt, **submitted(given))
        for mode, handle in handles.items():
            found[mode] = result_of(handle.result(600), len(prompt), STATS)
        if has_budget:
            # Requests over states need so much that few run at the same time.
            assert opened.stats.preemptions or enabled(architecture)[1], f"{architecture}, {draw}: nobody is preempted"
    return found


def submitted(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate` as those of `submit`."""
    return {name: value for name, value in given.items() if name not in ("tokenizer", "return_dict_in_generate")}


@cache
def budget_bytes(architecture: str, draw: str) -> int:
    """Return the least budget with which the engine accepts all requests."""
    model, (_, prompt) = enabled(architecture)[0], prompts()
    least = 1
    for mode in modes_of(architecture, "engine"):
        given = arguments(Run(architecture, "engine", draw, mode))
        name = given.pop("generation_mode")
        while True:
            try:
                with Engine(model, TOKENIZER, max_kv_bytes=least) as opened:
                    opened.submit(prompt[None], name, **submitted(given)).cancel()
                break
            except KVBudgetError as error:
                least = int(re.search(r"may need (\d+)", str(error))[1])  # type: ignore[index]
            except ValueError as error:  # less than one token and its state
                least = sum(map(int, re.findall(r"(?:needs:|state) (\d+)", str(error))))
    return least


WAYS: dict[str, Callable[[Run], Result]] = {
    "call": call,
    "kept cache": kept_cache,
    "session": session,
    "engine": engine,
    "preempting engine": preempting_engine,
}


def result(run: Run) -> Result:
    """Return what a run returns now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WAYS[run.how](run)


def place() -> dict[str, str]:
    """Return what the bits of a run depend on apart from the code."""
    return {"processor": _processor(), "torch": torch.__version__}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--bits", type=Path, metavar="FILE", help="also write hashes of all bits, for this processor")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {run.key: result(run) for run in runs()}
    hashes = {key: value.pop("bits") for key, value in found.items()}
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in found.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if options.bits is not None:
        options.bits.write_text(json.dumps(place() | {"bits": hashes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
