"""Settings of fork_join, as its run reads them. `ForkJoinConfig` describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_parallel.generation.dialects import DIALECTS, Dialect
from hf_parallel.generation.modes.branches.settings import BranchSettings
from hf_parallel.generation.modes.fork_join.output import ForkJoinOutput
from hf_parallel.generation.validation import check_choice, check_int


@dataclass
class ForkJoinSettings(BranchSettings[ForkJoinOutput]):
    """Settings of forks: see `ForkJoinConfig`."""

    dialect: str | Mapping[str, Any] | Dialect = "multiverse"
    paths: int = 2
    path_max_new_tokens: int | None = None
    max_paths: int = 32
    max_depth: int = 6

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        if isinstance(self.dialect, Dialect):
            self.dialect = asdict(self.dialect)  # as it is stored
        elif isinstance(self.dialect, str) and self.dialect.startswith("{"):  # of a command line
            try:
                self.dialect = json.loads(self.dialect)
            except ValueError as error:
                raise ValueError(f"dialect must be a name or JSON, got {self.dialect!r}: {error}") from error
        if not isinstance(self.dialect, Mapping):
            check_choice("dialect", self.dialect, sorted(DIALECTS))
        elif unknown := [name for name in self.dialect if name not in Dialect.__dataclass_fields__]:
            raise ValueError(f"dialect has no {unknown[0]!r}, only {sorted(Dialect.__dataclass_fields__)}")
        elif missing := [name for name in ("region", "branch") if name not in self.dialect]:
            raise ValueError(f"dialect must have region and branch, {missing[0]} is missing in {self.dialect!r}")
        if self.format.positions == "concatenated":
            raise ValueError("positions='concatenated' is for training: a path cannot start where another will end")
        for name in ("paths", "max_paths", "max_depth", "path_max_new_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)

    @property
    def format(self) -> Dialect:
        """The dialect."""
        if isinstance(self.dialect, Dialect):
            return self.dialect
        return DIALECTS[self.dialect] if isinstance(self.dialect, str) else Dialect(**self.dialect)

    @property
    def positions(self) -> str:
        """Positions of the dialect."""
        return self.format.positions

    @property
    def max_open_forks(self) -> int:
        """Maximum number of forks of an answer that are open at the same time."""
        return self.max_paths * self.max_depth if self.format.is_nested else 1

    @property
    def max_rows_per_prompt(self) -> int:
        """Maximum number of paths at the same time."""
        return self.max_paths
