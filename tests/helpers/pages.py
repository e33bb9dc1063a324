"""Helpers that run the code of pages, examples and notebooks on the embedded model, with few tokens."""

from __future__ import annotations

import copy
import functools
import json
import linecache
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import small_tokenizers
import torch
import transformers
from paths import ROOT

import hf_parallel
from hf_parallel.generation import MODES, ParallelGenerationMixin, mixin
from hf_parallel.generation.decoding.replay.policies import POLICIES
from hf_parallel.models.loading.embedded import PRESET, PRESET_MARK

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_TOOLS = ROOT / "docs" / "other_tools.md"
"""Its code needs further libraries; `test_other_tools.py` runs it."""
SERVE = ROOT / "docs" / "serve.md"
"""Its code needs a server; `test_server.py` runs it."""
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_MODES = [name for name, cls in MODES.items() if cls.__module__.startswith("hf_parallel.")]
"""Modes of the package, not those that tests define."""
NEW_TOKENS = 4
"""Maximum number of new tokens after an opening."""
FALSE_WARNINGS = ("error:nothing was generated in parallel:UserWarning", "error:no text of the workers:UserWarning")
"""Filters for tests that run such code: it does not warn. Votes may, as few tokens hold no answer."""
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A chat template."""
READ_TOKENS = 20
"""The same where a test reads the text."""


def name_of(page: Path) -> str:
    """Return the path of a page as a test id."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in the given languages."""
    return blocks_of(page.read_text(), *languages)


def blocks_of(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a text in the given languages."""
    return [block for language, block in FENCED.findall(text) if language in languages]


WITH_CODE = [page for page in PAGES if blocks(page, "python") and page not in (OTHER_TOOLS, SERVE)]
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem in OWN_MODES]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
EXECUTABLE = [*WITH_CODE, *EXAMPLES, *NOTEBOOKS]
"""Pages, examples and notebooks whose code runs on a small model."""


@contextmanager
def small_scale(embedded: tuple[Any, Any], new_tokens: int = NEW_TOKENS) -> Iterator[None]:
    """Load the embedded model for every Hub id and end texts after `new_tokens`.

    The model is probed once, not at every `enable`. On exit the model is restored, and modes and policies that the code
    has registered are removed.
    """
    model, tokenizer = embedded
    models, tokenizers = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    config, modes, policies = copy.deepcopy(model.generation_config), dict(MODES), dict(POLICIES)
    try:
        with ExitStack() as stack:
            for patched in (
                patch.object(hf_parallel, "load_embedded_model", lambda **_: embedded),
                patch.object(mixin, "probe_capabilities", _probe_once),
                patch.object(
                    hf_parallel.HogwildSession, "run", _few_passes(hf_parallel.HogwildSession.run, new_tokens)
                ),
                patch.object(models, "from_pretrained", _unless_local(models.from_pretrained, model)),
                patch.object(tokenizers, "from_pretrained", _unless_local(tokenizers.from_pretrained, tokenizer)),
                *(
                    patch.object(cls, "generate", _short(cls.generate, tokenizer, new_tokens))
                    for cls in (ParallelGenerationMixin, transformers.GenerationMixin)
                ),
            ):
                stack.enter_context(patched)
            yield
    finally:
        hf_parallel.disable(model)
        model.generation_config = config
        for registry, before in ((MODES, modes), (POLICIES, policies)):
            for name in registry.keys() - before.keys():
                del registry[name]


def stand_in(embedded: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a small random model with tokenizer and presets of the embedded one, for code whose text is unchecked."""
    model, tokenizer = embedded
    config = copy.deepcopy(model.config)
    config.update({"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})
    small = type(model)(config).eval()
    small.generation_config = copy.deepcopy(model.generation_config)
    return small, tokenizer


def random_stand_in(folder: Path, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """Return a small random model, saved to a folder, and a tokenizer, without the embedded model."""
    tokenizer = copy.deepcopy(small_tokenizers.make("byte_level"))
    tokenizer.chat_template, tokenizer.padding_side = CHAT, "left"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ends)
    model = transformers.LlamaForCausalLM(config).eval()
    tokenizer.init_kwargs[PRESET_MARK] = model.generation_config.parallel_preset = PRESET
    model.save_pretrained(folder)
    model.name_or_path = model.config._name_or_path = str(folder)  # adapters name it
    return model.to(device), tokenizer  # type: ignore[arg-type]


def run_on(path: Path, pair: tuple[Any, Any]) -> None:
    """Run the code of a page, example or notebook on a model, whose text is unchecked; `IPython` is replaced."""
    modules = {name: ModuleType(name) for name in ("IPython", "IPython.display")}
    modules["IPython.display"].HTML = str  # type: ignore[attr-defined]
    sys.modules |= modules
    try:
        with small_scale(pair, NEW_TOKENS + 1):
            run(code_of(path), name_of(path))
    finally:
        for name in modules:
            del sys.modules[name]


def code_of(path: Path) -> list[str]:
    """Return the blocks of code of a page, an example or a notebook."""
    if path.suffix == ".md":
        return blocks(path, "python")
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [path.read_text()]


_probe_once = functools.cache(mixin.probe_capabilities)


def run(blocks: list[str], name: str) -> dict[str, Any]:
    """Run blocks of code in one namespace and return it."""
    module = ModuleType("page_of_the_tests")  # dataclasses look their module up
    sys.modules[module.__name__] = module  # `patch.dict` would forget what the code imports; datasets loads only once
    try:
        for number, block in enumerate(blocks, start=1):
            file = f"{name}, block {number}"
            linecache.cache[file] = len(block), None, block.splitlines(keepends=True), file  # as a notebook does
            exec(compile(block, file, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def _unless_local(load: Any, stand_in: Any) -> Any:
    """Load from a local folder, and return `stand_in` for other names."""
    return staticmethod(lambda name, *args, **kwargs: load(name, *args, **kwargs) if Path(name).is_dir() else stand_in)


def garbled(printed: str) -> list[str]:
    """Return lines that a looping model prints: headings, and lines with the words of an earlier one."""
    headings = re.findall(r"(?m)^.*#{2,} .*$", printed)
    texts = [" ".join(re.findall(r"[^\W\d]+", line)) for line in printed.splitlines()]
    return headings + [text for text, count in Counter(texts).items() if count > 1 and len(text.split()) > 3]


def _few_passes(run: Any, most: int) -> Any:
    """Return a session's `run` with few passes."""
    return functools.wraps(run)(lambda session, passes=most: run(session, min(passes, most)))


def _short(generate: Any, tokenizer: Any, new_tokens: int) -> Any:
    """Return a `generate` with few new tokens after an opening and titles."""
    plain = transformers.GenerationMixin.generate

    @functools.wraps(generate)
    def short(model: Any, *args: Any, **kwargs: Any) -> Any:
        again = generate is plain and isinstance(model, ParallelGenerationMixin)  # a call that the mixin forwards
        if kwargs.get("generation_config") is None and not again:
            titles = "".join(f"####{title}:......\n" for title in kwargs.get("titles", ()))
            beginning = kwargs.get("opening", "") + titles + kwargs.get("terminator", "")
            most = new_tokens + len(tokenizer(beginning).input_ids)
            if kwargs.get("generation_mode") == "fork_join":  # inserts tags of two paths
                most += 2 * len(tokenizer("<Path>\n1:</Path>\n<Conclusion>\n").input_ids) + 110 * kwargs.get("force", 0)
                most += 200 * hasattr(kwargs.get("dialect"), "call")  # prompts of paths, and what they return
            kwargs["max_new_tokens"] = min(kwargs.get("max_new_tokens", most), most)
        return generate(model, *args, **kwargs)

    return short
