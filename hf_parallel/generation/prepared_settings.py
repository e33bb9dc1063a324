"""PreparedSettings: generation configs that Transformers has prepared, so that equal settings are prepared once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_parallel.generation.arguments import setting_names
from hf_parallel.generation.settings import Arguments

MOST = 64
"""Number of configs that are kept."""
_SCALARS = frozenset((type(None), bool, int, float, str))

Prepare = Callable[..., tuple[GenerationConfig, dict[str, Any]]]
"""`_prepare_generation_config` of Transformers: given a config or None, and settings."""


class PreparedSettings:
    """The generation configs of the last calls of a model, by their settings.

    Transformers copies two configs, field by field, for each call: a millisecond, in which a request with a prompt of
    some tokens could be computed. Here, a call gets a copy of what an earlier one with equal settings got.
    """

    def __init__(self) -> None:
        self._configs: dict[Hashable, GenerationConfig] = {}  # the latest last
        self._defaults: tuple[Arguments, Arguments] = {}, {}
        """Copies of the model's `generation_config` and `config` as they were when these were prepared."""

    def prepare(
        self, model: PreTrainedModel, given: GenerationConfig | None, arguments: Arguments, prepare: Prepare
    ) -> tuple[GenerationConfig, Arguments]:
        """Return the config of a call, and its arguments that are no settings, as `prepare` would.

        `given` is the `generation_config` that the call was given.
        """
        defaults = vars(model.generation_config)
        fields = {} if given is None else vars(given)
        names = setting_names() | defaults.keys() | fields.keys()
        settings = {name: value for name, value in arguments.items() if name in names}
        of_given = _key(fields)
        of_settings = _key(settings)
        if of_given is None or of_settings is None:
            return prepare(given, **arguments)
        key = type(given), of_given, of_settings
        if not self._are_current(model):
            self._configs = {}
            self._defaults = copy.deepcopy(defaults), dict(vars(model.config))
        configs = self._configs
        config = configs.pop(key, None)
        if config is None:
            config, more = prepare(given, **settings)
            if more:  # settings that the model's `forward` receives
                return prepare(given, **arguments)
        configs[key] = config
        for oldest in [*configs][:-MOST]:  # another thread may have removed it
            configs.pop(oldest, None)
        return _copy(config), {name: value for name, value in arguments.items() if name not in settings}

    def _are_current(self, model: PreTrainedModel) -> bool:
        """Return whether the model's own configs are those of the last call."""
        generation_defaults, model_defaults = self._defaults
        try:
            return vars(model.generation_config) == generation_defaults and vars(model.config) == model_defaults
        except RuntimeError:  # tensors of several elements have no truth
            return False


def _key(settings: Arguments) -> Hashable | None:
    """Return what is equal for equal settings; None: they hold other objects than scalars and lists of these."""
    key = []
    for name, value in sorted(settings.items()):
        values = value if type(value) is list else [value]
        kinds = tuple(map(type, values))
        if not _SCALARS.issuperset(kinds):
            return None
        key.append((name, type(value), kinds, tuple(values)))
    return tuple(key)


def _copy(config: GenerationConfig) -> GenerationConfig:
    """Return a copy of a config, whose lists and objects are its own."""
    copied = copy.copy(config)
    for name, value in vars(config).items():
        if type(value) not in _SCALARS:
            setattr(copied, name, copy.deepcopy(value))
    return copied
