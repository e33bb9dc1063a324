"""Hub export: a mode as a `custom_generate` repository of transformers, alone or with a model or a PEFT adapter.

`custom_generate/generate.py` in a repository replaces `generate` of the model that is loaded from it, and of any model
called with `custom_generate=`. The exported file only names the mode and its settings, and calls `generate_as`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from pprint import pformat
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi, metadata_save
from jinja2 import Environment
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.generation import MODES, ParallelConfig, enable
from hf_parallel.generation.config import make_config
from hf_parallel.generation.mixin import keep_mode, take_parallel_config, unwrap

if TYPE_CHECKING:
    from peft import PeftModel

GENERATE = "custom_generate/generate.py"
REQUIREMENTS = "custom_generate/requirements.txt"
CARD = "README.md"
CARD_TEMPLATE = Path(__file__).with_name("hub_card.md")
MARK = '"""Written by hf_parallel.hub: '  # begins an exported `generate.py`; other ones are not overwritten
CARD_MARK = "<!-- Written by hf_parallel.hub: "  # in an exported README; other ones on the Hub are not overwritten
TAG = "custom_generate"  # of such repositories on the Hub
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"),
    *("adapter_config.json", "adapter_model.safetensors"),
)
INSTALL = "hf_parallel is not on PyPI: build its wheel in a clone of its repository, as docs/install.md there describes"
EXAMPLE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
CODE_TEMPLATE = Path(__file__).with_name("hub_generate.txt")


def export(
    model_or_config: PreTrainedModel | PeftModel | ParallelConfig,
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write a `custom_generate` repository of a mode, and return its folder.

    A model loaded from it (`from_pretrained(folder, trust_remote_code=True)`) generates in the mode without an import
    of `hf_parallel`. Any other model does with `custom_generate=folder, trust_remote_code=True`.

    Parameters
    ----------
    model_or_config : PreTrainedModel, PeftModel or ParallelConfig
        A model whose `generation_config` has a `generation_mode` (and optionally a `parallel_config`), exported with
        weights, config and generation config; of a model with a PEFT adapter, only the adapter and the generation
        config; or the settings of a mode alone.
    folder : str or os.PathLike
        A new or empty folder, or an earlier export, whose files are overwritten. Nothing is written on an error.
    tokenizer : PreTrainedTokenizerBase, optional
        Exported too; the example of the README loads it.

    Raises
    ------
    TypeError, ValueError
        If `model_or_config` is neither a model nor a config, names no mode, has settings that cannot be stored, or
        adapters other than one named `default`; if `tokenizer` is not a tokenizer.
    FileExistsError
        If the folder contains files and is not an earlier export.
    """
    config, model, folder = *_mode_and_model(model_or_config, tokenizer), Path(folder)
    _check_folder(folder)
    with TemporaryDirectory() as temporary:
        new = Path(temporary) / "export"
        new.mkdir()
        _write(new, str(folder), config, model, tokenizer)
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
        See `export`; nothing is uploaded then.
    """
    (config, model) = _mode_and_model(model_or_config, tokenizer)
    api = HfApi(token=token)
    with TemporaryDirectory() as temporary:
        full_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        _write(Path(temporary), full_id, config, model, tokenizer)
        card: bytes | None = None
        if api.file_exists(full_id, CARD):
            card = Path(api.hf_hub_download(full_id, CARD)).read_bytes()
        if card is not None and CARD_MARK.encode() not in card:
            Path(temporary, CARD).unlink()
        stale = None if model is None else list(WEIGHTS)
        return api.upload_folder(
            repo_id=full_id, folder_path=temporary, commit_message=commit_message, delete_patterns=stale
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
    hub_arguments = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    stored = GenerationConfig.from_pretrained(name, **hub_arguments)  # transformers would read the base model's file
    kwargs.setdefault("generation_config", stored)
    model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    return enable(model)


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
    called_mode = arguments.pop("generation_mode", mode)
    if called_mode != mode:
        raise ValueError(f"generation_mode must be {mode!r}, the mode of this custom_generate, got {called_mode!r}")
    config = make_config(mode, arguments.pop("parallel_config", None), settings)
    return model.generate(*inputs, parallel_config=config, **arguments)


def _mode_and_model(given: Any, tokenizer: Any) -> tuple[ParallelConfig, Any]:
    """Return the mode's config and the model to export, if any; check them."""
    if tokenizer is not None and (isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained")):
        raise TypeError(f"tokenizer must be a tokenizer with save_pretrained(), not its name, got {tokenizer!r}")
    if isinstance(unwrap(given), PreTrainedModel):
        config = take_parallel_config(given.generation_config, {})
        model = given
        if config is None:
            raise ValueError(
                f"set model.generation_config.generation_mode to one of {sorted(MODES)}, and optionally "
                f"model.generation_config.parallel_config: this {type(given).__name__} names no mode to export"
            )
        adapters = _adapters(model)
        if adapters not in ([], ["default"]):
            raise ValueError(f"the model must have no adapter or one that is named 'default', got {adapters}")
    elif isinstance(given, ParallelConfig):
        config = given
        model = None
        if MODES.get(given.mode) is not type(given):
            raise ValueError(f"the config must be of one of the modes {sorted(MODES)}, got {given!r}")
    else:
        kind = type(given).__name__
        raise TypeError(f"model_or_config must be a PreTrainedModel or a ParallelConfig, got {kind}")
    config.check_storable()
    return config, model


def _write(folder: Path, name: str, config: ParallelConfig, model: Any, tokenizer: Any) -> None:
    """Write all files to an empty folder."""
    settings = pformat(config.stored(), width=110, sort_dicts=False)
    if model is not None:
        keep_mode(model.generation_config)
        model.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)  # which PEFT does not save
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / GENERATE).parent.mkdir()
    code = CODE_TEMPLATE.read_text(encoding="utf-8").format(mark=MARK, mode=config.mode, settings=settings)
    (folder / GENERATE).write_text(code, encoding="utf-8")
    requirements = f"# {INSTALL}\nhf_parallel>={version('hf_parallel')}\n"  # transformers passes over the comment
    (folder / REQUIREMENTS).write_text(requirements, encoding="utf-8")
    # The code of the README takes a model or tokenizer that is not exported from elsewhere.
    arguments = config.traits.example_arguments
    if model is None:
        arguments = {**arguments, "custom_generate": json.dumps(name), "trust_remote_code": "True"}
    template = Environment(trim_blocks=True, keep_trailing_newline=True).from_string(CARD_TEMPLATE.read_text("utf-8"))
    card = template.render(
        mark=CARD_MARK,
        install=INSTALL,
        name=json.dumps(name),
        config=config,
        summary=(type(config).__doc__ or "").split("\n")[0],
        is_model=model is not None,
        is_adapter=bool(_adapters(model)),
        example_model=EXAMPLE_MODEL,
        tokenizer=json.dumps(name if tokenizer is not None else getattr(model, "name_or_path", "") or EXAMPLE_MODEL),
        settings="".join(f", {setting}={value!r}" for setting, value in config.stored().items()),
        arguments="".join(f", {argument}={code}" for argument, code in arguments.items()),
        stored=json.dumps(config.stored(), indent=2, ensure_ascii=False),
    )
    (folder / CARD).write_text(card, encoding="utf-8")
    metadata_save(folder / CARD, {"library_name": "transformers", "tags": [TAG]})


def _adapters(model: Any) -> list[str]:
    return list(getattr(model, "peft_config", None) or ())


def _check_folder(folder: Path) -> None:
    """Raise `FileExistsError` unless a folder is new, empty, or was written by an export."""
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; pass a new or empty folder")
    code = folder / GENERATE
    if code.is_file() and code.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        return
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if names:
        raise FileExistsError(f"{folder} holds files of something else: {names}; pass a new or empty folder")
