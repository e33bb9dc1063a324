"""Hub export: a mode as a `custom_generate` repository of transformers, alone or with a model or a PEFT adapter.

`custom_generate/generate.py` in a repository replaces `generate` of the model that is loaded from it, and of any model
called with `custom_generate=`. The exported file only names the mode and its settings, and calls `generate_as`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pprint import pformat
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi, metadata_save
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.generation import MODES, ParallelConfig, enable
from hf_parallel.generation.config import make_config
from hf_parallel.generation.mixin import keep_mode, take_parallel_config, unwrap

if TYPE_CHECKING:
    from peft import PeftModel

GENERATE = "custom_generate/generate.py"
REQUIREMENTS = "custom_generate/requirements.txt"
CARD = "README.md"
MARK = '"""Written by hf_parallel.hub: '  # begins an exported `generate.py`; other ones are not overwritten
CARD_MARK = "<!-- Written by hf_parallel.hub: "  # in an exported README; other ones on the Hub are not overwritten
TAG = "custom_generate"  # of such repositories on the Hub
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors", *ADAPTER)
EXAMPLE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_CODE = '''{mark}generation_mode={mode!r} with the settings below."""

from hf_parallel.hub import generate_as

MODE = {mode!r}
SETTINGS = {settings}


def generate(*inputs, model, **arguments):
    """`model.generate` in this mode. Arguments of the call override the settings above."""
    return generate_as(MODE, SETTINGS, model, inputs, arguments)
'''
_CARD = """{mark}the next push overwrites this file unless this line is removed. -->

# `generate` in the mode `{mode}`

{summary} {usage}

With [transformers](https://github.com/huggingface/transformers) and `pip install {packages}`:

```python
{example}
```

Settings, which arguments of `generate` with the same name override:

````json
{settings}
````
"""


def export(
    model_or_config: PreTrainedModel | PeftModel | ParallelConfig,
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write a `custom_generate` repository of a mode, and return its folder.

    A model loaded from it (`from_pretrained(folder, trust_remote_code=True)`) generates in the mode without an import
    of `hf_parallel`. Any other model does with `custom_generate=folder, trust_remote_code=True`. `load` returns models
    and adapters.

    Parameters
    ----------
    model_or_config : PreTrainedModel, PeftModel or ParallelConfig
        A model whose `generation_config` has a `generation_mode` (and optionally a `parallel_config`), exported with
        weights, config and generation config; of a `PeftModel`, only its active adapter and the generation config; or
        the settings of a mode alone.
    folder : str or os.PathLike
        A new or empty folder, or an earlier export, whose files are overwritten. Nothing is written on an error.
    tokenizer : PreTrainedTokenizerBase, optional
        Exported too; the example of the README loads it.

    Raises
    ------
    TypeError, ValueError
        If `model_or_config` is neither a model nor a config, names no mode, or has settings that cannot be stored; if
        its adapter cannot be loaded again, as its base model has no name; if `tokenizer` is no tokenizer.
    FileExistsError
        If the folder contains files and is no earlier export.
    """
    exported, folder = _Export.of(model_or_config, tokenizer), Path(folder)
    _check_folder(folder)
    with TemporaryDirectory() as temporary:
        new = Path(temporary) / "export"
        new.mkdir()
        exported.write(new, str(folder))
        shutil.copytree(new, folder, dirs_exist_ok=True)
    return folder


def push_to_hub(
    model_or_config: PreTrainedModel | PeftModel | ParallelConfig,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Export of hf_parallel",
) -> CommitInfo:
    """Upload to the Hub what `export` writes.

    Keeps an existing README that does not contain the comment `Written by hf_parallel.hub`. If weights are uploaded,
    deletes earlier safetensors weights that they do not overwrite.

    Parameters
    ----------
    model_or_config, tokenizer
        See `export`.
    repo_id : str
        `name` or `user/name`; created if it does not exist.
    private : bool, optional
        Whether a newly created repository is private. Default: the account's setting.
    token : str or bool, optional
        Default: the token stored by `hf auth login`.
    commit_message : str

    Raises
    ------
    TypeError, ValueError
        See `export`, or if the base model of an adapter is a local folder; nothing is uploaded then.
    """
    exported, api = _Export.of(model_or_config, tokenizer, on_hub=True), HfApi(token=token)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        exported.write(folder, repo_id)
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        exported.write_card(folder, url.repo_id)  # with the full id
        if api.file_exists(url.repo_id, CARD):
            existing = Path(api.hf_hub_download(url.repo_id, CARD))
            if CARD_MARK.encode() not in existing.read_bytes():
                (folder / CARD).unlink()
        stale = list(WEIGHTS) if any(path for pattern in WEIGHTS for path in folder.glob(pattern)) else None
        return api.upload_folder(
            repo_id=url.repo_id, folder_path=temporary, commit_message=commit_message, delete_patterns=stale
        )


def load(name: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """Load an exported model or adapter, and enable it: its `generate` uses the mode.

    An adapter is loaded into its base model. No code of the repository runs.

    Parameters
    ----------
    name : str or os.PathLike
        A folder, or an id on the Hub.
    **kwargs
        Arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises
    ------
    OSError
        If there is no `generation_config.json`, or no model.
    """
    known = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    stored = GenerationConfig.from_pretrained(name, **known)  # transformers would read the base model's file
    return enable(AutoModelForCausalLM.from_pretrained(name, **{"generation_config": stored, **kwargs}))


def generate_as(
    mode: str, settings: Mapping[str, object], model: Any, inputs: Sequence[object], arguments: dict[str, Any]
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


@dataclass(frozen=True)
class _Export:
    """What is exported: a mode, and optionally a model, its adapter and a tokenizer."""

    config: ParallelConfig
    model: Any = None
    adapter: str | None = None  # its name, if only the adapter of the model is saved
    base_model: str | None = None  # of the adapter
    tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def of(cls, given: Any, tokenizer: Any, on_hub: bool = False) -> _Export:
        """Check what a caller wants to export."""
        if tokenizer is not None and (isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained")):
            raise TypeError(f"tokenizer must be a tokenizer with save_pretrained(), not its name, got {tokenizer!r}")
        if isinstance(unwrap(given), PreTrainedModel):
            config = take_parallel_config(given.generation_config, {})
            if config is None:
                raise ValueError(
                    f"set model.generation_config.generation_mode to one of {sorted(MODES)}, and optionally "
                    f"model.generation_config.parallel_config: this {type(given).__name__} names no mode to export"
                )
            exported = cls(config, given, *_adapter_of(given, on_hub), tokenizer)
        elif isinstance(given, ParallelConfig):
            if MODES.get(given.mode) is not type(given):
                raise ValueError(f"the config must be of one of the modes {sorted(MODES)}, got {given!r}")
            exported = cls(given, tokenizer=tokenizer)
        else:
            kind = type(given).__name__
            raise TypeError(f"model_or_config must be a PreTrainedModel or a ParallelConfig, got {kind}")
        for name in exported.config.not_stored():
            if getattr(exported.config, name) is not None:
                raise ValueError(
                    f"{name} cannot be stored, it is an object of this process: pass it in each call instead"
                )
        return exported

    def write(self, folder: Path, name: str) -> None:
        """Write all files to an empty folder."""
        if self.model is not None:
            keep_mode(self.model.generation_config)
            self._save_model(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        (folder / GENERATE).parent.mkdir()
        settings = pformat(self.config.stored(), width=110, sort_dicts=False)
        code = _CODE.format(mark=MARK, mode=self.config.mode, settings=settings)
        (folder / GENERATE).write_text(code, encoding="utf-8")
        (folder / REQUIREMENTS).write_text(f"hf_parallel>={version('hf_parallel')}\n", encoding="utf-8")
        self.write_card(folder, name)

    def _save_model(self, folder: Path) -> None:
        """Save the model, or its adapter, with its generation config."""
        if self.adapter is None or isinstance(self.model, PreTrainedModel):
            self.model.save_pretrained(folder)
            return
        self.model.save_pretrained(folder, selected_adapters=[self.adapter])
        self.model.generation_config.save_pretrained(folder)
        if (folder / self.adapter).is_dir():  # PEFT saves only the adapter "default" to the folder itself
            shutil.copytree(folder / self.adapter, folder, copy_function=shutil.move, dirs_exist_ok=True)
            shutil.rmtree(folder / self.adapter)

    def write_card(self, folder: Path, name: str) -> None:
        """Write the README."""
        data: dict[str, object] = {"library_name": "transformers", "tags": [TAG]}
        usage = f"Any model uses it with `model.generate(..., custom_generate={name!r}, trust_remote_code=True)`."
        if self.adapter is not None:
            data = {"base_model": self.base_model, "library_name": "peft", "tags": [TAG]}
            usage = f"The adapter here uses it when `hf_parallel.hub.load({name!r})` has loaded it. {usage}"
        elif self.model is not None:
            usage = f"The model here uses it when it is loaded with `trust_remote_code=True`. {usage}"
        card = _CARD.format(
            mark=CARD_MARK,
            mode=self.config.mode,
            summary=(type(self.config).__doc__ or "").split("\n")[0],
            usage=usage,
            packages="hf_parallel" if self.adapter is None else "hf_parallel peft",
            example=self._example(name),
            settings=json.dumps(self.config.stored(), indent=2, ensure_ascii=False),
        )
        (folder / CARD).write_text(card, encoding="utf-8")
        metadata_save(folder / CARD, data)

    def _example(self, name: str) -> str:
        config, has_model = self.config, self.model is not None
        weights = name if has_model else EXAMPLE_MODEL
        words = name if self.tokenizer is not None else getattr(self.model, "name_or_path", "") or weights
        trust = ", trust_remote_code=True" if has_model else ""
        loaded = f"AutoModelForCausalLM.from_pretrained({json.dumps(weights)}{trust})"
        if self.adapter is not None:
            loaded = f"hf_parallel.hub.load({json.dumps(name)})"
        task = '"Plan a day in Rome for six friends."'
        inputs = f'tokenizer({task}, return_tensors="pt")'
        if config.prompt.rules() is not None:
            settings = [f"{setting}={value!r}" for setting, value in config.stored().items()]
            inputs = f"hf_parallel.build_prompt({', '.join([json.dumps(config.mode), task, 'tokenizer', *settings])})"
        arguments = [] if config.prompt.replaces_input_ids else ["**inputs"]
        arguments += ["max_new_tokens=64", "tokenizer=tokenizer"]
        arguments += [f"{argument}={code}" for argument, code in config.traits.example_arguments.items()]
        if not has_model:
            arguments += [f"custom_generate={json.dumps(name)}", "trust_remote_code=True"]
        lines = [
            f"from transformers import {'' if self.adapter else 'AutoModelForCausalLM, '}AutoTokenizer",
            "",
            f"model = {loaded}",
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


def _adapter_of(model: Any, on_hub: bool) -> tuple[str | None, str | None]:
    """Return the names of a model's adapter and its base model; None if the whole model is saved."""
    if isinstance(model, PreTrainedModel):
        names = model.active_adapters() if getattr(model, "_hf_peft_config_loaded", False) else None
    else:
        names = getattr(model, "active_adapters", None)
    if names is None:
        return None, None
    if len(names) != 1:
        raise ValueError(f"one adapter must be active, got {list(names)}")
    (name,) = names
    base = model.peft_config[name].base_model_name_or_path or unwrap(model).name_or_path  # as PEFT saves it
    if not base or (on_hub and Path(base).exists()):
        where = "the Hub id of the model" if on_hub else "a folder or the Hub id of the model"
        raise ValueError(
            f"base_model_name_or_path of the adapter must be {where} that it changes, got {base!r}: set "
            f"model.peft_config[{name!r}].base_model_name_or_path"
        )
    return name, base


def _check_folder(folder: Path) -> None:
    """Raise `FileExistsError` unless a folder is new, empty, or was written by an export."""
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; pass a new or empty folder")
    code = folder / GENERATE
    if code.is_file() and code.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        return
    if names := sorted(path.name for path in folder.iterdir()) if folder.exists() else []:
        raise FileExistsError(f"{folder} holds files of something else: {names}; pass a new or empty folder")
