"""Hub export: a mode as a `custom_generate` repository of transformers, with or without a model.

`custom_generate/generate.py` in a repository replaces `generate` of the model that is loaded from it, and of any model
called with `custom_generate=`. The exported file only names the mode and its settings, and calls `generate_as`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from pprint import pformat
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi, metadata_load, metadata_save
from transformers import PreTrainedModel
from yaml import YAMLError  # type: ignore[import-untyped]

from hf_parallel.generation import MODES, ParallelConfig, enable
from hf_parallel.generation.config import make_config
from hf_parallel.generation.mixin import keep_mode, take_parallel_config

GENERATE = "custom_generate/generate.py"
REQUIREMENTS = "custom_generate/requirements.txt"
CARD = "README.md"
MARK = '"""Written by hf_parallel.hub: '  # begins an exported `generate.py`; other ones are not overwritten
CARD_MARK = "<!-- Written by hf_parallel.hub: "  # in an exported README; other ones on the Hub are not overwritten
TAG = "custom_generate"  # of such repositories on the Hub
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
EXAMPLE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_logger = logging.getLogger(__name__)
_CODE = '''{mark}generation_mode={mode!r} with the settings below."""

from hf_parallel.hub import generate_as

MODE = {mode!r}
SETTINGS = {settings}


def generate(*inputs, model, **arguments):
    """`model.generate` in this mode. Arguments of the call override the settings above."""
    return generate_as(MODE, SETTINGS, model, inputs, arguments)
'''
_CARD = """---
library_name: transformers
tags:
- custom_generate
---

{mark}the next push overwrites this file unless this line is removed. -->

# `generate` in the mode `{mode}`

{summary} {usage}

With [transformers](https://github.com/huggingface/transformers) and `pip install hf_parallel`:

```python
{example}
```

Settings, which arguments of `generate` with the same name override:

````json
{settings}
````
"""


def export(
    model_or_config: PreTrainedModel | ParallelConfig, folder: str | os.PathLike[str], *, tokenizer: Any = None
) -> Path:
    """Write a `custom_generate` repository of a mode, and return its folder.

    A model loaded from it (`from_pretrained(folder, trust_remote_code=True)`) generates in the mode without an import
    of `hf_parallel`. Any other model does with `custom_generate=folder, trust_remote_code=True`.

    Parameters
    ----------
    model_or_config : PreTrainedModel or ParallelConfig
        A model whose `generation_config` has a `generation_mode` (and optionally a `parallel_config`), exported with
        weights, config and generation config; or the settings of a mode alone.
    folder : str or os.PathLike
        A new or empty folder, or one that an earlier export has written. Everything is written, or nothing.
    tokenizer : PreTrainedTokenizerBase, optional
        Exported too; the example of the README loads it.

    Raises
    ------
    TypeError, ValueError
        If `model_or_config` is neither a model nor a config, names no mode, or has settings that cannot be stored; if
        `tokenizer` is no tokenizer.
    FileExistsError
        If the folder contains files that no export has written, or that this one would not overwrite.
    """
    config = _config_of(model_or_config)
    _check_tokenizer(tokenizer)
    folder = Path(folder)
    existed = folder.exists()
    _check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=folder) as temporary:
            new = Path(temporary)
            _write(new, str(folder), model_or_config, config, tokenizer)
            _check_folder(folder, new)
            new.chmod(folder.stat().st_mode)  # `copytree` copies the mode to the folder
            shutil.copytree(new, folder, copy_function=shutil.move, dirs_exist_ok=True)
    except BaseException:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def push_to_hub(
    model_or_config: PreTrainedModel | ParallelConfig,
    repo_id: str,
    *,
    tokenizer: Any = None,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Export of hf_parallel",
) -> CommitInfo:
    """Upload to the Hub what `export` writes.

    Keeps an existing README that does not contain the comment `Written by hf_parallel.hub`, and adds the tag
    `custom_generate`. If weights are uploaded, deletes earlier safetensors weights that they do not overwrite.

    Parameters
    ----------
    model_or_config, tokenizer
        See `export`.
    repo_id : str
        `name` or `user/name`; created if it does not exist.
    private : bool, optional
        Whether a newly created repository is private. Default: the account's setting.
    token : str or bool, optional
        Default: that of `hf auth login`.
    commit_message : str

    Raises
    ------
    TypeError, ValueError
        See `export`; nothing is uploaded then.
    """
    config = _config_of(model_or_config)
    _check_tokenizer(tokenizer)
    api = HfApi(token=token)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write(folder, repo_id, model_or_config, config, tokenizer)
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        _write_card(folder, url.repo_id, model_or_config, config, tokenizer)  # with the full id
        _keep_card(api, url.repo_id, folder / CARD)
        stale = list(WEIGHTS) if any(path for pattern in WEIGHTS for path in folder.glob(pattern)) else None
        return api.upload_folder(
            repo_id=url.repo_id, folder_path=temporary, commit_message=commit_message, delete_patterns=stale
        )


def generate_as(
    mode: str, settings: Mapping[str, Any], model: Any, inputs: Sequence[Any], arguments: dict[str, Any]
) -> Any:
    """Call `model.generate` in the mode of a repository; exported code calls this.

    Arguments of the call override `settings`. A model loaded from the repository uses its `generation_config`, which
    receives mode and settings if it has no mode. For other models, raises `ValueError` if the call names another mode.
    """
    enable(model)
    if "generate" in vars(model):  # set by from_pretrained; it would hide the `generate` of the enabled class
        del model.generate
        if getattr(model.generation_config, "generation_mode", None) is None:
            model.generation_config.generation_mode = mode
            model.generation_config.parallel_config = dict(settings)
        return model.generate(*inputs, **arguments)
    given = arguments.pop("generation_mode", mode)
    if given != mode:
        raise ValueError(f"generation_mode must be {mode!r}, the mode of this custom_generate, got {given!r}")
    config = make_config(mode, arguments.pop("parallel_config", None), settings)
    return model.generate(*inputs, parallel_config=config, **arguments)


def _config_of(given: Any) -> ParallelConfig:
    if isinstance(given, PreTrainedModel):
        config = take_parallel_config(given.generation_config, {})
        if config is None:
            raise ValueError(
                f"set model.generation_config.generation_mode to one of {sorted(MODES)}, and optionally "
                f"model.generation_config.parallel_config: this {type(given).__name__} names no mode to export"
            )
    elif isinstance(given, ParallelConfig):
        config = given
        if MODES.get(config.mode) is not type(config):
            raise ValueError(f"the config must be of one of the modes {sorted(MODES)}, got {config!r}")
    else:
        raise TypeError(f"model_or_config must be a PreTrainedModel or a ParallelConfig, got {type(given).__name__}")
    for name in config.not_stored:
        if getattr(config, name) is not None:
            raise ValueError(f"{name} cannot be stored, it is an object of this process: pass it in each call instead")
    return config


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is not None and (isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained")):
        raise TypeError(f"tokenizer must be a tokenizer with save_pretrained(), not its name, got {tokenizer!r}")


def _check_folder(folder: Path, new: Path | None = None) -> None:
    """Raise `FileExistsError` if no export wrote the folder's files; with `new`, if `new` lacks some of them."""
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; pass a new or empty folder")
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} if folder.exists() else set()
    if new is not None:
        files = {path for path in files if new.name not in path.parts and not (new / path).exists()}
    elif Path(GENERATE) in files and (folder / GENERATE).read_text(encoding="utf-8", errors="replace").startswith(MARK):
        files = set()
    if files:
        names = sorted(path.as_posix() for path in files)
        raise FileExistsError(f"{folder} holds files of something else: {names}; pass a new or empty folder")


def _write(folder: Path, name: str, given: Any, config: ParallelConfig, tokenizer: Any) -> None:
    if isinstance(given, PreTrainedModel):
        keep_mode(given.generation_config)
        given.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / GENERATE).parent.mkdir()
    settings = pformat(config.stored(), width=110, sort_dicts=False)
    code = _CODE.format(mark=MARK, mode=config.mode, settings=settings)
    (folder / GENERATE).write_text(code, encoding="utf-8")
    (folder / REQUIREMENTS).write_text(f"hf_parallel>={version('hf_parallel')}\n", encoding="utf-8")
    _write_card(folder, name, given, config, tokenizer)


def _write_card(folder: Path, name: str, given: Any, config: ParallelConfig, tokenizer: Any) -> None:
    model = given if isinstance(given, PreTrainedModel) else None
    usage = f"Any model uses it with `model.generate(..., custom_generate={name!r}, trust_remote_code=True)`."
    if model is not None:
        usage = f"The model here uses it when it is loaded with `trust_remote_code=True`. {usage}"
    summary = (type(config).__doc__ or "").split("\n")[0]
    example = _example(name, model, config, tokenizer)
    settings = json.dumps(config.stored(), indent=2, ensure_ascii=False)
    card = _CARD.format(
        mark=CARD_MARK, mode=config.mode, summary=summary, usage=usage, example=example, settings=settings
    )
    (folder / CARD).write_text(card, encoding="utf-8")


def _keep_card(api: HfApi, repo_id: str, card: Path) -> None:
    """Replace the new README with the one on the Hub, tagged, unless that one was written by an export."""
    if not api.file_exists(repo_id, CARD):
        return
    existing = Path(api.hf_hub_download(repo_id, CARD))
    if CARD_MARK.encode() in existing.read_bytes():
        return
    shutil.copyfile(existing, card)
    try:
        data = metadata_load(card) or {}
        tags = data.get("tags") or []
        if not isinstance(tags, list):
            raise ValueError(f"its tags must be a list, got {tags!r}")
        if TAG not in tags:
            metadata_save(card, {**data, "tags": [*tags, TAG]})
    except (ValueError, YAMLError) as error:
        _logger.warning("the README of %s is left as it is, without the tag %r: %s", repo_id, TAG, error)
        card.unlink()


def _example(name: str, model: PreTrainedModel | None, config: ParallelConfig, tokenizer: Any) -> str:
    weights = name if model is not None else EXAMPLE_MODEL
    words = name if tokenizer is not None else getattr(model, "name_or_path", "") or weights
    trust = ", trust_remote_code=True" if model is not None else ""
    task = '"Plan a day in Rome for six friends."'
    inputs = f'tokenizer({task}, return_tensors="pt")'
    if config.system_prompt() is not None:
        settings = [f"{setting}={value!r}" for setting, value in config.stored().items()]
        inputs = f"hf_parallel.build_prompt({', '.join([json.dumps(config.mode), task, 'tokenizer', *settings])})"
    arguments = [*([] if config.replaces_input_ids else ["**inputs"]), "max_new_tokens=64", "tokenizer=tokenizer"]
    arguments += [f"{argument}={code}" for argument, code in config.example_arguments.items()]
    if model is None:
        arguments += [f"custom_generate={json.dumps(name)}", "trust_remote_code=True"]
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({json.dumps(weights)}{trust})",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(words)})",
        f"inputs = {inputs}",
        "output = model.generate(",
        *(f"    {argument}," for argument in arguments),
        ")",
        "for row in output:",
        "    print(tokenizer.decode(row, skip_special_tokens=True))",
    ]
    uses_package = any("hf_parallel." in line for line in lines)
    return "\n".join(["import hf_parallel"] * uses_package + lines)
