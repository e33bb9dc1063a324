"""Settings of the modes: one dataclass per mode, checked before anything runs.

A mode is a dataclass that derives from `ParallelConfig`, names itself in `mode` and implements `run`. Deriving
registers it; nothing else has to know of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from typing_extensions import Self

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.registry import MODES
from hf_parallel.transcript.sections import TranscriptStyle


class RowPlace(NamedTuple):
    """Where a generated row belongs.

    `prompt` is the row of `input_ids`, `index` the number of the row among those of the prompt, and `column` its column
    in a transcript (None: it spans all columns).
    """

    prompt: int
    index: int
    column: int | None


@dataclass(frozen=True)
class Preset:
    """Settings that suit one model: of the mode, of `generate`, and a template for the task."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: str = "{task}"


class ModeRun(Protocol):
    """One call of a mode."""

    def generate(self) -> Any:
        """Generate. Return what `model.generate` returns."""


@dataclass
class _RunMethod:  # until all modes have runs of their own
    config: Any
    call: GenerationCall

    def generate(self) -> Any:
        return self.config.run(self.call)


@dataclass
class ParallelConfig:
    """Settings that every mode has.

    Parameters
    ----------
    seed : int, torch.Generator or a list of either, optional
        Source of each row's randomness. One int gives every row noise of its own, made from the int and the row's
        number, so that a row's tokens do not depend on its batch, nor on the kind of device. A list gives one per row.
        Default: PyTorch's global generator, drawn from as `generate` does.
    cuda_graph : bool
        Whether decode steps on a GPU are captured as CUDA graphs: costs memory, saves the time between kernels.
    """

    mode: ClassVar[str] = ""
    not_stored: ClassVar[tuple[str, ...]] = ()
    """Settings that are objects of the running process."""
    needs_logits_cache: ClassVar[bool] = False
    """Whether a call without `logits_cache` raises."""
    streams_text: ClassVar[bool] = False
    """Whether rows stream text through `ParallelStreamer.write_row`."""
    streams_tokens: ClassVar[Literal["every_pass", "when_final", "at_end"]] = "every_pass"
    """When a streamer's `put` receives token ids."""
    merges_rows: ClassVar[bool] = False
    """Whether the rows of a prompt make one answer together, instead of one answer each."""
    rows_name: ClassVar[str] = ""
    """Field that holds the texts of a prompt's rows in records of an interrupted call; empty: there is none."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Settings by model; `embedded` is the model of `load_embedded_model`."""
    example_arguments: ClassVar[Mapping[str, str]] = {}
    """Source code of further arguments of `generate` that an example of the mode needs."""

    seed: Any = None
    cuda_graph: bool = True
    _given: set[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Remember which settings were given: one given at its default still goes before one that is stored."""
        self = super().__new__(cls)
        self._given = {*cls.fields()[: len(args)], *settings}
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.mode:
            MODES.register(cls.mode, cls)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every setting.

        Raises
        ------
        ValueError
            Naming the setting, what was given and what is allowed.
        """
        seeds = self.seed if isinstance(self.seed, list | tuple) else [] if self.seed is None else [self.seed]
        if not all(isinstance(seed, torch.Generator) or is_int(seed) for seed in seeds):
            raise ValueError(f"seed must be an int, a torch.Generator or a list of them, got {self.seed!r}")
        check_bool("cuda_graph", self.cuda_graph)

    def prepare(self, kwargs: dict[str, Any]) -> Any:
        """Check and rewrite the arguments of `generate` before it sees them. Return what `call.prepared` will hold."""

    def make_run(self, call: GenerationCall) -> ModeRun:
        """Return the run of one call, which holds all state that is not a setting."""
        return _RunMethod(self, call)

    # How rows map to prompts, and what they are called

    @property
    def rows_per_prompt(self) -> int:
        """Rows of the output per row of `input_ids`."""
        return 1

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """Return where a row belongs, given the number of rows of `input_ids`."""
        prompt, index = divmod(row, self.rows_per_prompt)
        return RowPlace(prompt, index, index)

    def row_name(self, index: int) -> str:
        """Name of a prompt's row with this index."""
        return f"Answer {index + 1}"

    def step_text(self, index: int, step: int, text: str) -> str:
        """Text of a row's step (counted from 1) without the prefix that repeats the row's name."""
        return text

    @property
    def transcript_style(self) -> TranscriptStyle:
        """How a transcript shows the rows."""
        return TranscriptStyle()

    def system_prompt(self) -> str | None:
        """Instructions that `build_prompt` puts before a task. Empty: none; None: the mode has no prompt builder."""
        return None

    @classmethod
    def fields(cls) -> list[str]:
        """Names of the settings."""
        return [f.name for f in dataclasses.fields(cls) if f.init]

    def given(self) -> dict[str, Any]:
        """Settings that were given or differ from the defaults."""
        defaults = type(self)()
        pairs = ((name, getattr(self, name)) for name in self.fields())
        return {name: v for name, v in pairs if name in self._given or v != getattr(defaults, name)}

    def to_dict(self) -> dict[str, Any]:
        """What is `given`, ready for `generation_config.json`: without what lives in this process alone."""
        return {name: value for name, value in self.given().items() if name not in self.not_stored}

    def stored(self) -> dict[str, Any]:
        """What is found again where `to_dict` was written to `generation_config.json`.

        Raises
        ------
        ValueError
            Naming a setting that JSON cannot hold, or would turn into another.
        """
        texts = {f.name for f in dataclasses.fields(self) if "Sequence[str]" in str(f.type)}  # a tuple or a list
        settings = {name: list(v) if name in texts and v is not None else v for name, v in self.to_dict().items()}
        for name, value in settings.items():
            if why := lost_in_json(value):
                raise ValueError(f"{name}={value!r} cannot be stored: {why}")
        return settings


SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 5,
}
"""Settings of `generate` for a small model, which repeats itself under greedy decoding."""


def make_config(mode: str, *sources: Mapping[str, Any] | ParallelConfig | None) -> ParallelConfig:
    """Join settings, the first source that has one winning.

    Parameters
    ----------
    mode : str
        Name of the mode.
    *sources
        Mappings of settings, or a config of the mode.

    Raises
    ------
    ValueError
        For an unknown mode or setting, or a bad value.
    """
    if isinstance(mode, ParallelConfig):
        raise ValueError(f"generation_mode must be a name, got a {type(mode).__name__}: pass it as parallel_config=")
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"generation_mode must be one of {sorted(MODES)} (or None), got {mode!r}")
    cls = MODES[mode]
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        if source is None:
            continue
        if isinstance(source, ParallelConfig):
            if not isinstance(source, cls):
                raise ValueError(
                    f"parallel_config must be a {cls.__name__} for {mode!r}, got a {type(source).__name__}"
                )
            source = source.given()
        elif not isinstance(source, Mapping):
            raise ValueError(f"parallel_config must be a {cls.__name__} or a mapping, got {type(source).__name__}")
        for name, value in source.items():
            if name not in cls.fields():
                raise unknown_setting(cls, name, value)
        merged.update(source)
    return cls(**merged)


def unknown_setting(cls: type[ParallelConfig], name: Any, value: Any, others: Iterable[str] = ()) -> ValueError:
    """The error for a setting that a mode does not have; `others` are names that were possible too."""
    owners = [mode for mode, other in MODES.items() if name in other.fields()]
    near = difflib.get_close_matches(str(name), [*cls.fields(), *others], n=1)
    hint = f"did you mean {near[0]!r}? It" if near else "it"
    if owners:
        hint = f"it is one of {' and '.join(owners)}. {cls.mode}"
    return ValueError(f"{cls.mode!r} has no setting {name!r} (got {value!r}); {hint} has {cls.fields()}")


def lost_in_json(value: Any) -> str:
    """Why JSON does not give a value back as it is; empty if it does."""
    try:
        found = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        return str(error)
    return "" if found == value else f"JSON turns it into {found!r}"


def is_int(value: Any) -> bool:
    """Whether a value is an integer, NumPy's included, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name: str, value: Any, at_least: int) -> None:
    """Raise a `ValueError` unless `value` is an int of at least `at_least`."""
    if not is_int(value) or value < at_least:
        raise ValueError(f"{name} must be an int of at least {at_least}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise a `ValueError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise a `ValueError` unless `value` is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")


def check_text(name: str, value: Any, optional: bool = False) -> None:
    """Raise a `ValueError` unless `value` is a string (or None where that is allowed)."""
    if not isinstance(value, str) and not (optional and value is None):
        raise ValueError(f"{name} must be a string{' or None' if optional else ''}, got {value!r}")


def check_texts(name: str, value: Any) -> None:
    """Raise a `ValueError` unless `value` is a list or tuple of non-empty strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name} must be a list of non-empty strings, got {value!r}")


def check_template(name: str, template: Any, /, **values: Any) -> None:
    """Raise a `ValueError` unless `template` is a string that `str.format` can fill with `values`."""
    check_text(name, template)
    try:
        template.format(**values)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        places = " and ".join(f"{{{place}}}" for place in values)
        raise ValueError(f"{name} may hold {places} and no other field, got {template!r} ({error!r})") from error
