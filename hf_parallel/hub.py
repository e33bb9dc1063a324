"""The way to the Hub: a mode as a `custom_generate` repository of transformers, with or without a model.

`custom_generate/generate.py` in a repository takes the place of `generate`: of the model that is loaded from it, and of
any model that is told `custom_generate=`. Here that file only names the mode and its settings; what it calls is below.
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
MARK = '"""Written by hf_parallel.hub: '
"""How `generate.py` begins; a folder that holds another one is not written to."""
CARD_MARK = "<!-- Written by hf_parallel.hub: "
"""Stands in the README of an export; one without it is not overwritten on the Hub."""
TAG = "custom_generate"
"""By which the Hub finds such repositories."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
"""The files of a model's weights, whole or in shards."""
ANY_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model of an example where none is exported."""
_logger = logging.getLogger(__name__)

_CODE = '''{mark}generation_mode={mode!r} with the settings below."""

from hf_parallel.hub import generate_as

MODE = {mode!r}
SETTINGS = {settings}


def generate(*inputs, model, **arguments):
    """`model.generate` in this mode. What is given in the call goes before the settings here."""
    return generate_as(MODE, SETTINGS, model, inputs, arguments)
'''
_CARD = """---
library_name: transformers
tags:
- {tag}
---

{mark}a later push writes this file anew, unless this line is gone. -->

# `generate` in the mode `{mode}`

{does} {about}

With [transformers](https://github.com/huggingface/transformers) and `pip install hf_parallel`:

```python
{example}
```

Settings, which arguments of `generate` of the same name go before:

````json
{settings}
````
"""


def export(
    model_or_config: PreTrainedModel | ParallelConfig, folder: str | os.PathLike[str], *, tokenizer: Any = None
) -> Path:
    """Write a repository that gives `generate` a mode.

    A model loaded from it (`from_pretrained(folder, trust_remote_code=True)`) generates in the mode without any import
    of `hf_parallel`, and any other model does when told `custom_generate=folder, trust_remote_code=True`.

    Parameters
    ----------
    model_or_config : PreTrainedModel or ParallelConfig
        A model whose `generation_config` has a `generation_mode` (and perhaps a `parallel_config`): weights, config and
        generation config go along. Or the settings of a mode alone.
    folder : str or os.PathLike
        A new or empty folder, or one that an earlier export has written. All is written, or nothing.
    tokenizer : PreTrainedTokenizerBase, optional
        Goes along; the example of the README loads it.

    Returns
    -------
    pathlib.Path
        The folder.

    Raises
    ------
    TypeError
        If there is neither a model nor a config.
    FileExistsError
        If the folder holds files that no export has written there, or would not write now.
    ValueError
        If no mode is named, or for settings that cannot be stored.
    """
    config = _config_of(model_or_config)
    folder = Path(folder)
    _refuse_foreign(folder)
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=folder) as room:
            made = Path(room)
            _write(made, str(folder), model_or_config, config, tokenizer)
            _refuse_foreign(folder, made)
            made.chmod(folder.stat().st_mode)  # which `copytree` gives to the folder
            shutil.copytree(made, folder, copy_function=shutil.move, dirs_exist_ok=True)
    except BaseException:
        if not was_there:
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
    """Send to the Hub what `export` writes.

    A README that no export has written stays as it is and gets the tag `custom_generate`; so does one whose line with
    the mark of an export has been taken out. Where weights are sent, those of an earlier push that they do not replace
    are deleted.

    Parameters
    ----------
    model_or_config, tokenizer
        See `export`.
    repo_id : str
        `name` or `user/name`; made where there is none.
    private : bool, optional
        Whether a repository made here is private. Default: the account's own.
    token : str or bool, optional
        Default: that of `hf auth login`.
    commit_message : str

    Returns
    -------
    huggingface_hub.CommitInfo
        What the Hub answered.

    Raises
    ------
    TypeError, ValueError
        As `export`, before anything is sent.
    huggingface_hub.errors.HfHubHTTPError
        If the Hub refuses.
    """
    config = _config_of(model_or_config)
    api = HfApi(token=token)
    with TemporaryDirectory() as room:
        _write(Path(room), repo_id, model_or_config, config, tokenizer)
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        _write_card(Path(room), url.repo_id, model_or_config, config, tokenizer)  # with the user's name
        _keep_card(api, url.repo_id, Path(room) / CARD)
        weights = [path for pattern in WEIGHTS for path in Path(room).glob(pattern)]
        return api.upload_folder(
            repo_id=url.repo_id,
            folder_path=room,
            commit_message=commit_message,
            delete_patterns=list(WEIGHTS) if weights else None,
        )


def generate_as(
    mode: str, settings: Mapping[str, Any], model: Any, inputs: Sequence[Any], arguments: dict[str, Any]
) -> Any:
    """What the `generate` of a repository does: call `model.generate` in its mode.

    Parameters
    ----------
    mode : str
    settings : mapping
        The repository's; what the call gives goes before.
    model : PreTrainedModel
        The one that was loaded from the repository, then its `generation_config` says all from here on, or another.
    inputs, arguments
        Of `model.generate`.

    Raises
    ------
    ValueError
        If the call asks for another mode.
    """
    enable(model)
    if "generate" in vars(model):  # put there by from_pretrained, in front of the mode that the model now has itself
        del model.generate
        if getattr(model.generation_config, "generation_mode", None) is None:
            model.generation_config.generation_mode = mode
            model.generation_config.parallel_config = dict(settings)
        return model.generate(*inputs, **arguments)
    asked = arguments.pop("generation_mode", mode)
    if asked != mode:
        raise ValueError(f"generation_mode must be {mode!r}, which this custom_generate is for, got {asked!r}")
    config = make_config(mode, arguments.pop("parallel_config", None), settings)
    return model.generate(*inputs, parallel_config=config, **arguments)


def _config_of(given: Any) -> ParallelConfig:
    """The mode and the settings that are to be exported."""
    if isinstance(given, PreTrainedModel):
        config = take_parallel_config(given.generation_config, {})
        if config is None:
            raise ValueError(
                f"set model.generation_config.generation_mode to one of {sorted(MODES)}, and perhaps "
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
            raise ValueError(f"{name} cannot be stored, since it lives in this process: give it in each call instead")
    return config


def _refuse_foreign(folder: Path, made: Path | None = None) -> None:
    """Refuse a folder with files that are not an earlier export's, or that the new one in `made` would not replace."""
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; give a new or empty folder")
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} if folder.exists() else set()
    if made is not None:
        files = {path for path in files if made.name not in path.parts and not (made / path).exists()}
    elif Path(GENERATE) in files and (folder / GENERATE).read_text(encoding="utf-8", errors="replace").startswith(MARK):
        files = set()
    if files:
        names = sorted(path.as_posix() for path in files)
        raise FileExistsError(f"{folder} holds files of something else: {names}; give a new or empty folder")


def _write(folder: Path, name: str, given: Any, config: ParallelConfig, tokenizer: Any) -> None:
    """Write all files of a repository called `name`."""
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
    about = f"Any model runs in it with `model.generate(..., custom_generate={name!r}, trust_remote_code=True)`."
    if model is not None:
        about = f"The model here runs in it when it is loaded with `trust_remote_code=True`. {about}"
    if config.system_prompt() is not None:
        about += f" `hf_parallel.{config.mode}_prompt` wraps a task as the mode wants it."
    card = _CARD.format(
        tag=TAG,
        mark=CARD_MARK,
        mode=config.mode,
        does=(type(config).__doc__ or "").split("\n")[0],
        about=about,
        example=_example(name, model, config, tokenizer),
        settings=json.dumps(config.stored(), indent=2, ensure_ascii=False),
    )
    (folder / CARD).write_text(card, encoding="utf-8")


def _keep_card(api: HfApi, repo_id: str, card: Path) -> None:
    """Put a README that is on the Hub already, and no export's, in the place of the new one."""
    if not api.file_exists(repo_id, CARD):
        return
    there = Path(api.hf_hub_download(repo_id, CARD))
    if CARD_MARK.encode() in there.read_bytes():
        return
    shutil.copyfile(there, card)
    try:
        _tag(card)
    except (ValueError, YAMLError) as error:
        _logger.warning("the README of %s is left as it is, without the tag %r: %s", repo_id, TAG, error)
        card.unlink()


def _tag(card: Path) -> None:
    """Give a README the tag, if it has it not."""
    data = metadata_load(card) or {}
    tags = data.get("tags") or []
    if not isinstance(tags, list):
        raise ValueError(f"its tags must be a list, got {tags!r}")
    if TAG not in tags:
        metadata_save(card, {**data, "tags": [*tags, TAG]})


def _example(name: str, model: PreTrainedModel | None, config: ParallelConfig, tokenizer: Any) -> str:
    """Code that runs the mode."""
    weights = name if model is not None else ANY_MODEL
    words = name if tokenizer is not None else getattr(model, "name_or_path", "") or weights
    trust = ", trust_remote_code=True" if model is not None else ""
    task = '"Plan a day in Rome for six friends."'
    inputs = f'tokenizer({task}, return_tensors="pt")'
    helped = config.system_prompt() is not None
    if helped:
        settings = [f"{name}={value!r}" for name, value in config.stored().items()]
        inputs = f"hf_parallel.{config.mode}_prompt({', '.join([task, 'tokenizer', *settings])})"
    arguments = ["max_new_tokens=64", "tokenizer=tokenizer"]
    if getattr(config, "levels", None) is None:  # they hold the prompts
        arguments.insert(0, "**inputs")
    if config.mode == "self_consistency":
        arguments.append("do_sample=True")
    if config.mode == "resample":
        arguments.append("logits_cache=hf_parallel.LogitsCache()")
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
    return "\n".join(["import hf_parallel"] * (helped or config.mode == "resample") + lines)
