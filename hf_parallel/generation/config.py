"""The contract of a mode: a dataclass of its settings, its traits, and its run.

A mode is a dataclass that derives from `ParallelConfig`, sets `mode` and implements `make_run`. Defining it registers
it; the rest of the package uses the mode only through this class and the objects of its `traits`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeGuard, cast

import torch
from huggingface_hub import CommitInfo, HfApi
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput
from typing_extensions import Self, TypeVar

from hf_parallel.cache.images import count_images
from hf_parallel.files import write_atomically
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.decoding.words import Words
from hf_parallel.generation.dialects import AnyDialect
from hf_parallel.generation.presets import Preset
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.settings import NOT_REMOTE, Arguments, Settings
from hf_parallel.generation.validation import check_bool, is_int, names_hint, suggestion
from hf_parallel.kernels import quantized_dtype
from hf_parallel.transcript.sections import TranscriptStyle

OutputT = TypeVar("OutputT", default=Any, covariant=True)
"""The output of a mode."""
Generated: TypeAlias = torch.Tensor | ModelOutput
"""Return value of `generate`: int64 `[rows, length]`, or the mode's output with `return_dict_in_generate`."""
ConfigT = TypeVar("ConfigT", bound="ParallelConfig", default="ParallelConfig")
"""The config of a mode."""


class RowPlace(NamedTuple):
    """Position of a generated row.

    `prompt` is the index of its prompt in `input_ids`, `index` its own among the rows of that prompt, and `column` its
    column in a transcript (None: it spans all columns).
    """

    prompt: int
    index: int  # type: ignore[assignment] # shadows `tuple.index`
    column: int | None


class ModeRows(Generic[ConfigT]):
    """The rows of a mode: which prompt each belongs to, its name, and how transcripts show it. By default, answers."""

    style: TranscriptStyle = TranscriptStyle()
    """How a transcript shows the rows."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    def drawn_per_prompt(self) -> int:
        """Rows of a prompt before any of them forks, whether they are returned or not."""
        return self.config.rows_per_prompt

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """Return the position of a row, given the number of rows of `input_ids`.

        Rows are numbered prompt by prompt, and after them the forks; see `fork`.
        """
        num_drawn = num_prompts * self.drawn_per_prompt
        if row < num_drawn:
            prompt, index = divmod(row, self.drawn_per_prompt)
        else:
            number, prompt = divmod(row - num_drawn, num_prompts)
            index = self.drawn_per_prompt + number
        return RowPlace(prompt, index, index)

    def fork(self, prompt: int, number: int, num_prompts: int) -> int:
        """Return the row that is fork `number` of a prompt, counted from 0. A class that overrides `place` may, too."""
        return num_prompts * (self.drawn_per_prompt + number) + prompt

    def name(self, index: int) -> str:
        """Return the name of a prompt's row."""
        return f"Answer {index + 1}"

    def step_text(self, index: int, step: int, text: str) -> str:
        """Return the text of a row's step (counted from 1) without the prefix that repeats the row's name."""
        return text

    def step_name(self, index: int, step: int, text: str) -> str:
        """Return the name of a row's step (counted from 1) that begins with `text`; by default the row's name."""
        return self.name(index)

    @property
    def vote(self) -> bool:
        """Whether a prompt's rows are whole answers, and the most frequent final answer wins."""
        return False

    @property
    def ends_with_finisher(self) -> bool:
        """Whether the text that spans all rows is an early finisher, whose tokens do not count in a comparison."""
        return False


class ModePrompt(Generic[ConfigT]):
    """The prompts of a mode. By default, a mode has no instructions, and tasks are used unchanged."""

    thinking: ClassVar[bool | None] = None
    """How `build_prompt` treats a reasoning model.

    True opens `<think>` if the chat template knows it, but the prompt ends neither with it nor with `</think>`. False
    sets the template's variable `enable_thinking` to False by default. None leaves both to the template.
    """
    rules_last: bool = False
    """Whether the rules are appended to the last message of the user, not to the system message."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def rules(self) -> str | None:
        """Return the instructions that `build_prompt` adds to a task; empty: none. None: it is no mode for chats."""
        return None

    def task_text(self, task: str) -> str:
        """Return a task as `build_prompt` inserts it into the prompt."""
        return task


@dataclass(frozen=True)
class ModeTraits:
    """Properties of a mode that the rest of the package reads, apart from the settings of a call."""

    rows: type[ModeRows[Any]] = ModeRows
    """Places and names of the rows."""
    prompt: type[ModePrompt[Any]] = ModePrompt
    """Instructions for `build_prompt`."""
    streams_text: bool = False
    """Whether the mode writes text (`DecodeLoop.show`), and needs a tokenizer. Else text is decoded from its tokens."""
    streams_tokens: Literal["every_pass", "when_final", "at_end"] = "every_pass"
    """When a streamer's `put` receives token ids."""
    keeps_states: bool = False
    """Whether each row sees one sequence in order, as layers that keep a state instead of keys need."""
    rows_continue_prompts: bool = False
    """Whether `sequences` alone say how each row was computed: its prompt, then its own tokens, as in `generate`."""
    searches_beams: bool = False
    """Whether calls may have `num_beams`."""
    merges_rows: bool = False
    """Whether a prompt's rows form one answer instead of one each.

    The mode's output then has `texts`, one per row, and `transcripts`, one per prompt.
    """
    rows_setting: str = ""
    """Setting that limits how many rows of an answer generate at the same time; servers lower its default to theirs."""
    rows_field: str = ""
    """Record field for the texts of a prompt's rows, in modes that merge them."""
    needs_logits_cache: bool = False
    """Whether a call without `logits_cache` raises."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    """Values of the setting `preset`: defaults of a paper, or for a model that is marked with the name."""
    dialect: Callable[[Any], AnyDialect] | None = None
    """The format of the text of a config of the mode, as training data. None: the mode writes no annotated text."""
    example_arguments: Mapping[str, str] = field(default_factory=dict)
    """Source code of further arguments of `generate` that an example of the mode needs."""


class ModeRun(Protocol):
    """One call of a mode. Holds all state of the call that is not a setting."""

    def generate(self) -> Steps[Generated]:
        """Generate: yield what the run wants, and return what `model.generate` returns."""


@dataclass
class ParallelConfig(Settings, Generic[OutputT]):
    """Settings that every mode has. A mode with its own output class derives from `ParallelConfig[ItsOutput]`.

    Parameters
    ----------
    seed : int or list of int, optional
        Seed of sampling. An int gives every row its own random numbers, keyed by the int and the row's index, so a
        row's tokens depend neither on its batch nor on the kind of device. A list has one seed per row. Default:
        PyTorch's global generator, as in `generate`.
    cuda_graph : bool
        Whether decode steps on a GPU are captured as CUDA graphs. This costs memory and saves the time between kernels.
    compile : bool, optional
        Whether decode steps run decoder layers compiled by `torch.compile`, which fuses their small kernels. The first
        such call takes several seconds longer. Logits differ in rounding. Default: on a GPU, if this and earlier calls
        have enough steps for compilation to be likely to save time. A model that cannot be compiled runs uncompiled,
        and the reason is logged.
    cache_dtype : str, optional
        "int8" or "fp8": dtype in which completed KV-cache blocks, such as prompts, are stored. They take about half the
        bytes of half precision; tokens can differ (docs/performance.md). Default: the model's dtype. A cache or an
        engine has one dtype for all of its calls.
    preset : str, optional
        Name of a set of defaults for the other settings and for `generate`'s, such as "paper" for the prompts and
        settings of the mode's paper (docs/modes/index.md). Default: the preset stored with the model, if any.
    """

    mode: ClassVar[str] = ""
    traits: ClassVar[ModeTraits] = ModeTraits()

    seed: int | Sequence[int] | None = None
    cuda_graph: bool = True
    compile: bool | None = None
    cache_dtype: str | None = field(default=None, metadata=NOT_REMOTE)
    preset: str | None = None
    is_implicit: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether the caller has named no mode, as in a plain request of an engine. Errors do not name it then."""

    def validate(self) -> None:
        """Check every setting; raise a `ValueError` that names the setting, the value and what is allowed."""
        seeds: Sequence[object] = [self.seed]
        if isinstance(self.seed, list | tuple):
            seeds = self.seed
        if self.seed is not None and not all(map(is_int, seeds)):
            raise ValueError(f"seed must be an int or a list of ints, got {self.seed!r}")
        check_bool("cuda_graph", self.cuda_graph)
        if self.compile is not None:
            check_bool("compile", self.compile)
        quantized_dtype(self.cache_dtype)

    def prepare(self, kwargs: Arguments) -> None:
        """Check and modify `kwargs`, the arguments of `generate`, in place, before transformers reads them."""

    def check_beams(self) -> None:
        """Check settings in a call with `num_beams`, of a mode that has `searches_beams`; raise `ValueError`."""

    def make_run(self, call: GenerationCall) -> ModeRun:
        """Return the run of one call."""
        raise NotImplementedError(f"{type(self).__name__} has no make_run")

    @property
    def rows_per_prompt(self) -> int:
        """Rows of the output per row of `input_ids`."""
        return 1

    @property
    def max_rows_per_prompt(self) -> int:
        """Maximum number of rows per prompt that generate at the same time, those without an output included."""
        return self.rows_per_prompt

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """Return the maximum number of tokens whose keys and values a call holds at the same time.

        By default the tokens of the prompts, and of all rows at their maximum length. An engine with a budget rejects
        calls that may need more than it has. A mode that inserts text, or computes text again, overrides this.
        """
        return call.prompt_tokens + call.num_rows * self.max_rows_per_prompt * call.max_new_tokens

    def listens_to(self, call: GenerationCall, text: object, to: object) -> tuple[Words, int]:
        """Return a text for the rows of a call that runs, and how many tokens it may add to `max_kv_tokens`.

        `to`: "all", or the name or the number of a row. A mode whose rows read such texts overrides this, and asks its
        host for them (`Host.take_words`). Raises `ValueError` for a row that does not exist, a text that cannot be
        encoded, and in other modes.
        """
        raise ValueError(f"generation_mode must be one whose rows read texts while they write, got {self.mode!r}")

    def max_states(self, call: GenerationCall) -> int:
        """Return the maximum number of states that a call holds at the same time, if layers keep states.

        By default one per row, and three per prompt: where it forks, before its last token, and at its end; and one
        after each image. A mode whose rows continue other texts than the prompts overrides this.
        """
        prompts = {prompt.tobytes(): prompt for prompt in call.prompts}.values()
        images = sum(count_images(prompt) for prompt in prompts)
        return call.num_rows * self.max_rows_per_prompt + 3 * len(prompts) + images

    # What follows is for callers of a mode. A mode overrides none of it.

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], revision: str = "main", token: str | None = None) -> Self:
        """Load the config of a mode from the `generation_config.json` of a folder or of a repository on the Hub.

        No code of the repository runs. Raises `OSError` if there is no such file, and `ValueError` if it names no mode,
        a mode of another class than `cls`, or invalid settings.
        """
        stored = GenerationConfig.from_pretrained(name, revision=revision, token=token)
        mode = getattr(stored, "generation_mode", None)
        if not isinstance(mode, str) or not issubclass(MODES.get(mode, cls), cls):
            raise ValueError(f"{name} must store a generation_mode of {cls.__name__}, got {mode!r}")
        return cast(Self, make_config(mode, getattr(stored, "parallel_config", None)))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the mode and its settings to `generation_config.json` in a folder, and keep its other values.

        Raises `ValueError` for settings that cannot be stored, and for a config without a mode.
        """
        make_config(self.mode, self).check_storable()  # values may have been assigned since the checks of `__init__`
        path = Path(folder, GENERATION_CONFIG_NAME)
        values = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        values |= {"generation_mode": self.mode, "parallel_config": self.stored()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values, indent=2) + "\n")

    def push_to_hub(self, repo_id: str, private: bool | None = None, token: str | None = None) -> CommitInfo:
        """Do what `save_pretrained` does in a repository on the Hub, which is created if it does not exist."""
        api = HfApi(token=token)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)  # raises before anything is created
            name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if api.file_exists(name, GENERATION_CONFIG_NAME):
                self.save_pretrained(Path(api.hf_hub_download(name, GENERATION_CONFIG_NAME, local_dir=folder)).parent)
            return api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Settings of {self.mode}")

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.mode:
            MODES[cls.mode] = cls

    def __post_init__(self) -> None:
        for name, value in self.chosen_preset.settings.items():
            if name not in self._given:
                setattr(self, name, value)
        self.validate()

    def defaults(self) -> Self:
        """See `Settings.defaults`."""
        return type(self)(preset=self.preset)

    @property
    def chosen_preset(self) -> Preset:
        """The preset that is named by the setting; raises `ValueError` if the mode has none of this name."""
        presets = self.traits.presets
        if self.preset is None:
            return Preset()
        if self.preset not in [*presets]:
            owners = [mode for mode, cls in MODES.items() if self.preset in [*cls.traits.presets]]
            hint = f"; {', '.join(owners)} have it" if owners else ""
            allowed = " or ".join(map(repr, [*presets, None]))
            raise ValueError(f"preset must be {allowed} for {self.mode!r}, got {self.preset!r}{hint}")
        return presets[self.preset]

    @property
    def rows(self) -> ModeRows:
        """Places and names of the rows."""
        return self.traits.rows(self)

    @property
    def prompt(self) -> ModePrompt:
        """Instructions and other properties of the prompts."""
        return self.traits.prompt(self)

    @property
    def format_texts(self) -> str:
        """Texts of the settings and of the dialect. Special tokens in them are part of the text of the rows."""
        dialect = None if self.traits.dialect is None else self.traits.dialect(self)
        return "\n".join(_texts_in([[getattr(self, name) for name in self.fields()], dialect]))

    @property
    def title(self) -> str:
        """Name of the mode, or of the engine, in error messages."""
        return "an engine" if self.is_implicit else f"generation_mode={self.mode!r}"


def _texts_in(value: object) -> Iterator[str]:
    """Yield the strings in a value, such as a setting."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, Mapping):
        yield from _texts_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _texts_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def make_config(mode: str, *sources: Mapping[str, object] | ParallelConfig | None) -> ParallelConfig:
    """Return the config of a mode from mappings or configs; an earlier source overrides later ones.

    Raises `ValueError` for an unknown mode or setting, or an invalid value.
    """
    if isinstance(mode, ParallelConfig):
        raise ValueError(f"generation_mode must be a name, got a {type(mode).__name__}: pass it as parallel_config=")
    if _is_config_class(mode):
        raise ValueError(f"generation_mode must be a name, got the class {mode.__name__}; did you mean {mode.mode!r}?")
    if not isinstance(mode, str) or mode not in MODES:
        hint = suggestion(mode, MODES)
        raise ValueError(f"generation_mode must be one of {sorted(MODES)} (or None), got {mode!r}{hint}")
    cls = MODES[mode]
    merged: Arguments = {}
    for source in reversed(sources):
        if source is None:
            continue
        kind = type(source).__name__
        if isinstance(source, ParallelConfig):
            if source.mode != mode:
                raise ValueError(f"parallel_config must be a {cls.__name__} for {mode!r}, got a {kind}")
            source = source.given()
        elif not isinstance(source, Mapping):
            check_instance(source)
            raise ValueError(f"parallel_config must be a {cls.__name__} or a mapping, got {kind}")
        check_setting_names(cls, source)
        merged.update(source)
    return cls(**merged)


def check_instance(config: Any) -> None:
    """Raise `ValueError` for the class of a config in place of a config."""
    if _is_config_class(config):
        name = config.__name__
        raise ValueError(f"parallel_config must be a config, got the class {name}; did you mean {name}()?")


def _is_config_class(value: Any) -> TypeGuard[type[ParallelConfig]]:
    return isinstance(value, type) and issubclass(value, ParallelConfig)


def check_has_mode(config: object) -> None:
    """Raise `ValueError` for a `parallel_config` that was given without a mode, unless it is None."""
    if config is None:
        return
    check_instance(config)
    hint = ""
    if isinstance(config, Mapping) and config:
        owners = [mode for mode, cls in MODES.items() if config.keys() <= set(cls.fields())]
        mode = config.get("generation_mode", config.get("mode"))
        if owners:
            hint = f": {', '.join(config)} can be of {' or '.join(owners)}, so pass generation_mode={owners[0]!r}, too"
        elif isinstance(mode, str):
            hint = f": pass generation_mode={mode!r} as an argument of its own"
        else:
            names = {name for cls in MODES.values() for name in cls.fields()}
            unknown = next((name for name in config if name not in names), "")
            hint = suggestion(unknown, names)
    raise ValueError(f"parallel_config was given without a generation_mode, got {config!r}{hint}")


def check_setting_names(
    cls: type[ParallelConfig] | None, settings: Mapping[str, object], others: Iterable[str] = ()
) -> None:
    """Raise `ValueError` for a name that is neither a setting of the mode (None: `generate`) nor one of `others`."""
    fields = [] if cls is None else cls.fields()
    for name, value in settings.items():
        if name in fields or name in others:
            continue
        owners = [mode for mode, other in MODES.items() if name in other.fields()]
        hint = f"; it is one of {' and '.join(owners)}" if owners else names_hint(name, fields, others)
        if owners and cls is not None:
            hint += f". {cls.mode} has {fields}"
        got = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        owner = "generate" if cls is None else repr(cls.mode)
        raise ValueError(f"{owner} has no setting {name!r} (got {got}){hint}")
