"""Decode steps as programs: what the modules of a model compute in a step, in one call without Python.

The step of a small model spends more time between its kernels than in them. A step of two rows and one of three are
recorded (`recording.py`); what differs between them depends on the number of rows, so that one program serves any. It
has the same bits as the modules: this is tried with other rows when it is made, and in the first step of each call,
which both compute. A call begins with a comparison of all parts of the model with those that were recorded. Models
whose steps have operations that a program does not know keep their modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_parallel.cache import BlockCache, ForwardPass, Segment
from hf_parallel.cache.fingerprint import adapter_layers
from hf_parallel.cache.placement import all_modules
from hf_parallel.kernels import AttentionPlan, LayerStorage, native
from hf_parallel.kernels.program import ROLES, Instruction, Operand, Program, StepWrites, lay_out
from hf_parallel.kernels.torch_attention import native_plan
from hf_parallel.models.cpu.linear import kernel_pass, pass_library
from hf_parallel.models.decode.recording import UNKNOWN, Call, LayerCall, Place, RotaryCall, StepRecording
from hf_parallel.models.intercept.rotary import rotary_modules

STEPS_BEFORE = 16
"""Decode steps of a model before a program is made of them, which takes as long as some of these steps."""
MAX_DROPS = 3
"""Programs of a model that may become invalid before its modules compute all steps."""
MAX_ROWS = 256
"""Rows of a step beyond which the time between kernels does not matter."""
SLICES = 8
"""Steps of a call within which each part of the model is compared again. Comparing all takes up to a millisecond."""
_PROMPT = 5  # tokens of the rows that are recorded
_RECORDED = (2, 3)
_TRIED = ((1, 0), (4, 0), (3, 9))  # rows, and shift of their positions, with which the program is compared

RunModel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From token ids and positions, `int64 [T]` each, to logits `[T, vocabulary]`."""
_logger = logging.get_logger(__name__)


class NoProgramError(Exception):
    """A step that cannot become a program, with the reason."""


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A program with what it needs from each step.

    `names` lists the values of the program's table, in order. `parts` are the modules and weights that were recorded.
    """

    program: Program
    parts: _ModelParts
    names: list[Any]
    bytes_per_token: int
    rotary: list[RotaryCall]
    layer_calls: dict[int, LayerCall]  # by number of the plan among `names`
    stored: dict[int, tuple[Any, ...]]  # sizes and dtypes of what layers store, by index
    limits: set[tuple[int | None, int | None]]  # windows and chunks of layers
    vocabulary: int

    def run(
        self, cache: BlockCache, forward: ForwardPass, ids: torch.Tensor, workspace: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the logits `[T, vocabulary]` of the prepared step; None if it cannot be computed for these tokens.

        `workspace` has `bytes_per_token` for each of `ids`, `int64 [T]`. Raises `MemoryError` if a kernel lacks memory.
        """
        rows = len(ids)
        ids = ids.contiguous()
        position_ids = forward.position_ids.contiguous()
        logits = torch.empty(rows, self.vocabulary, dtype=torch.float32, device="cpu")
        writes = StepWrites.of(forward.plan)
        known: dict[Any, int] = {
            "workspace": workspace.data_ptr(),
            "ids": ids.data_ptr(),
            "positions": position_ids.data_ptr(),
            "logits": logits.data_ptr(),
            ("writes",): writes.address,
        }
        tables = []  # which live until the program has run
        for number, call in enumerate(self.rotary):
            for index, table in enumerate(_rotary_results(call, position_ids)):
                tables.append(table)
                known["rotary", number, index] = table.data_ptr()
        for number, layer_call in self.layer_calls.items():
            plan = native_plan(forward.plan, layer_call.dims, layer_call.params, torch.float32, ids.device)
            if plan is None:
                return None
            known["plan", number] = ctypes.addressof(plan.struct)
        layers = cache.pool.arena.layers
        values = []
        for name in self.names:
            value = known.get(name)
            if value is None:
                kind, layer = name
                value = (layers[layer].keys if kind == "keys" else layers[layer].values).data_ptr()
            values.append(value)
        return logits if self.program.run(values, rows) else None

    def stores_alike(self, cache: BlockCache) -> bool:
        """Return whether a cache has the layers to which the program appends, of the same sizes and dtypes."""
        layers = cache.pool.arena.layers
        return all(number in layers and _storage(layers[number]) == sizes for number, sizes in self.stored.items())

    def kind(self, plan: AttentionPlan) -> tuple[bool, ...]:
        """Return how layers read the keys of a step: whether queries are rotated, and whose windows hide keys."""
        return plan.rotates, *[plan.windowed(*limits) is not plan for limits in self.limits]


def _rotary_results(call: RotaryCall, position_ids: torch.Tensor) -> list[torch.Tensor]:
    """Call the module of a recorded call again, with these positions."""

    def replaced(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return position_ids[None] if value.dtype == torch.int64 else value[:, :1]

    args, kwargs = call.arguments
    results = call.module(*map(replaced, args), **{name: replaced(value) for name, value in kwargs.items()})
    return [result.contiguous() for result in results]


class _ModelParts:
    """Modules, parameters and buffers of a model, with the addresses that a program has of them."""

    def __init__(self, model: nn.Module) -> None:
        tables: list[dict[str, Any]] = []
        for module in all_modules(model):
            tables += [module._modules, module._parameters, module._buffers]
        filled = [table for table in tables if table]
        self._slices = [_PartsSlice(filled[first::SLICES]) for first in range(SLICES)]

    def are_unchanged(self, step: int) -> bool:
        """Return whether these are still the parts of the model, at the same addresses.

        Step 0 looks at all of them, and each further step at one of `SLICES` slices.
        """
        if step:
            return self._slices[step % SLICES].is_unchanged()
        return all(part.is_unchanged() for part in self._slices)

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of parameters and buffers, which live as long as these are held."""
        return [tensor.untyped_storage() for part in self._slices for tensor in part.tensors]


class _PartsSlice:
    """Some tables of modules, parameters and buffers."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self._tables = tables
        self._values = [value for table in tables for value in table.values()]
        self.tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def is_unchanged(self) -> bool:
        """Return whether the tables hold the same objects, and tensors have the same addresses."""
        # These are loops in C, over hundreds of objects.
        if sum(map(len, self._tables)) != len(self._values):
            return False
        values = chain.from_iterable(map(dict.values, self._tables))
        if not all(map(is_, values, self._values)):
            return False
        return list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses


@dataclass(eq=False)
class _ModelState:
    """The program of a model, and how many of its steps could have used one."""

    steps: int = 0  # since there is none
    program: StepProgram | None = None
    drops: int = 0  # of programs that did not fit the model any more
    reason: str = ""  # why there is none

    def drop(self) -> None:
        """Forget the program, as the model has changed."""
        self.program = None
        self.steps = 0
        self.drops += 1
        if self.drops == MAX_DROPS:
            self.reason = "its modules, weights or settings are replaced too often"


_states: WeakKeyDictionary[nn.Module, _ModelState] = WeakKeyDictionary()


def why_no_program(model: PreTrainedModel) -> str:
    """Return why the modules of a model compute its decode steps; empty if a program does, or will do so."""
    state = _states.get(model)
    return "" if state is None else state.reason


def forget_program(model: PreTrainedModel) -> None:
    """Free the program of a model, which has weights of before it was moved or converted."""
    _states.pop(model, None)


class DecodePrograms:
    """The program of a model's decode steps, for one cache."""

    def __init__(self, model: PreTrainedModel, cache: BlockCache, record: Callable[[], StepProgram]) -> None:
        self._model = model
        self._cache = cache
        self._record = record
        self._state = _states.setdefault(model, _ModelState())
        self._tried: set[tuple[bool, ...]] = set()  # kinds of steps that modules and program have both computed
        self._steps = 0  # since all parts of the model were compared with those of the program
        self._held: list[torch.UntypedStorage] = []  # what steps read until a change is noticed
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")

    @cached_property
    def _hooks(self) -> list[Mapping[int, Any]]:
        """Hooks of all modules. They are empty as long as a program may run."""
        hooks: list[Mapping[int, Any]] = [_global_forward_hooks, _global_forward_pre_hooks]
        for module in all_modules(self._model):
            hooks += (module._forward_hooks, module._forward_pre_hooks)
        return hooks

    def expect_changes(self) -> None:
        """Compare all parts of the model in the next step."""
        self._steps = 0

    def logits(self, run_model: RunModel, step: ForwardPass, ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits `[T, vocabulary]` of the prepared decode step for `ids`, `int64 [T]`."""
        program = self._program(step, len(ids))
        if program is None:
            return run_model(ids, step.position_ids)
        kind = (self._model.training, *program.kind(step.plan))
        if kind not in self._tried:
            return self._try(program, kind, run_model, step, ids)
        logits = self._run(program, step, ids)
        return run_model(ids, step.position_ids) if logits is None else logits

    def _program(self, step: ForwardPass, rows: int) -> StepProgram | None:
        """Return the program for a step; None if the modules compute it."""
        state = self._state
        if state.reason or not self._can_run(step, rows):
            return None
        if state.program is None:
            state.steps += 1
            self._steps = 0
            if state.steps >= STEPS_BEFORE:
                self._make()
            return state.program
        parts = state.program.parts
        if not parts.are_unchanged(self._steps):
            state.drop()
            return None
        if self._steps == 0:
            self._held = parts.storages()
        self._steps += 1
        return state.program

    def _try(
        self, program: StepProgram, kind: tuple[bool, ...], run_model: RunModel, step: ForwardPass, ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute a step by the program and by the modules, whose result counts."""
        if not program.stores_alike(self._cache):
            self._state.drop()
            return run_model(ids, step.position_ids)
        logits = self._run(program, step, ids)
        expected = run_model(ids, step.position_ids)  # last: what it stores stays
        if logits is None:
            return expected
        if _are_same(logits, expected):
            self._tried.add(kind)
        else:
            self._state.drop()
            self._tried.clear()
        return expected

    def _run(self, program: StepProgram, step: ForwardPass, ids: torch.Tensor) -> torch.Tensor | None:
        needed = program.bytes_per_token * len(ids)
        if len(self._workspace) < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8, device="cpu")
        return program.run(self._cache, step, ids, self._workspace)

    def _can_run(self, step: ForwardPass, rows: int) -> bool:
        if rows > MAX_ROWS or step.position_ids.dim() != 1 or any(self._hooks):
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        arena = self._cache.pool.arena
        return bool(arena.layers) and arena.quantized is None  # without layers: the first pass makes their storage

    def _make(self) -> None:
        state = self._state
        try:
            if adapter_layers(self._model):
                raise NoProgramError("which adapters compute a pass may change")
            state.program = self._record()
        except (NoProgramError, RuntimeError, MemoryError, AssertionError, LookupError, TypeError, ValueError) as error:
            state.program = None
            state.reason = str(error) or type(error).__name__
            _logger.debug(f"decode steps of {type(self._model).__name__} are computed by its modules: {state.reason}")


def _are_same(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether all logits have the same bits. A NaN equals another one with the same bits."""
    if logits.shape != expected.shape or expected.dtype != torch.float32:
        return False
    return torch.equal(logits.view(torch.int32), expected.contiguous().view(torch.int32))


def _storage(layer: LayerStorage) -> tuple[Any, ...]:
    """Return the sizes and the dtype of what a layer stores."""
    return layer.num_kv_heads, layer.keys.shape[1], layer.values.shape[1], layer.keys.dtype


def record_step(model: PreTrainedModel, cached_model: Any) -> StepProgram:
    """Return the program of a model's decode steps; `cached_model` runs it over a new cache, without programs.

    Raises `NoProgramError` with the reason if there is none.
    """
    steps = RandomSteps(model, cached_model)
    recordings = [steps.recorded(rows) for rows in _RECORDED]
    program = _joined(_ModelParts(model), *recordings)
    can_rotate = steps.cache.rotary is not None
    for rows, shift in _TRIED:
        forward, ids, expected = steps.step(rows, shift if can_rotate else 0)
        workspace = torch.empty(program.bytes_per_token * rows, dtype=torch.uint8, device="cpu")
        logits = program.run(steps.cache, forward, ids, workspace)
        if logits is None or not _are_same(logits, expected):
            raise NoProgramError(f"a program of its operations has other results for {rows} rows")
    return program


@dataclass(eq=False)
class RandomSteps:
    """Decode steps over rows of random tokens."""

    model: PreTrainedModel
    cached_model: Any
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        self.cache: BlockCache = self.cached_model.cache
        (self.prompt,) = self.cache.pool.new_blocks(1, _PROMPT)
        forward = self.cache.prepare([Segment([self.prompt], _PROMPT)])
        self.cached_model.logits(forward, self._ids(_PROMPT), None)
        self.cache.commit()

    def _ids(self, count: int) -> torch.Tensor:
        size = self.model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(size, (count,), generator=self.generator)

    def step(self, rows: int, shift: int = 0) -> tuple[ForwardPass, torch.Tensor, torch.Tensor]:
        """Compute a step by the modules. Return it, its tokens and logits.

        With a `shift`, rows see the prompt at another position than its own, and have further tokens of their own.
        """
        blocks = self.cache.pool.new_blocks(rows, 8, base=_PROMPT + shift)
        for number, block in enumerate(blocks):
            for _ in range(number % 3 if shift else 0):
                forward = self.cache.prepare([Segment([self.prompt, block], 1)])
                self.cached_model.logits(forward, self._ids(1), None)
                self.cache.commit()
        forward = self.cache.prepare([Segment([self.prompt, block], 1) for block in blocks])
        ids = self._ids(rows)
        logits = self.cached_model.logits(forward, ids, None)
        self.cache.commit()
        return forward, ids, logits

    def recorded(self, rows: int) -> _Recorded:
        """Record a step."""
        blocks = self.cache.pool.new_blocks(rows, 4, base=_PROMPT)
        forward = self.cache.prepare([Segment([self.prompt, block], 1) for block in blocks])
        ids = self._ids(rows)
        recording = StepRecording(self.model, self.cache)
        with recording.recorded(rotary_modules(self.model)):
            logits = self.cached_model.logits(forward, ids, None)
        self.cache.commit()
        names: list[tuple[Any, torch.Tensor]] = [("ids", ids), ("positions", forward.position_ids), ("logits", logits)]
        for number, call in enumerate(recording.rotary):
            names += [(("rotary", number, index), result) for index, result in enumerate(call.results)]
        for number, layer in self.cache.pool.arena.layers.items():
            names += [(("keys", number), layer.keys), (("values", number), layer.values)]
        if not logits.is_contiguous() or logits.storage_offset() or logits.dtype != torch.float32:
            raise NoProgramError("its logits are not computed in float32")
        try:
            calls, buffers = recording.located(names)
        except LookupError as error:
            raise NoProgramError(str(error)) from error
        if recording.reads_numbers:
            raise NoProgramError(f"Python reads the result of {recording.reads_numbers}")
        return _Recorded(rows, recording, calls, buffers, logits, dict(self.cache.pool.arena.layers))


@dataclass(frozen=True, eq=False)
class _Recorded:
    rows: int
    recording: StepRecording
    calls: list[Call]
    buffers: dict[Any, torch.UntypedStorage]
    logits: torch.Tensor
    layers: dict[int, LayerStorage]


def _joined(parts: _ModelParts, first: _Recorded, second: _Recorded) -> StepProgram:
    """Return the program that computes both steps."""
    live = _needed(first.calls)
    others = _needed(second.calls)
    if [call.operation for call in live] != [call.operation for call in others]:
        raise NoProgramError("its operations depend on the number of rows")
    written = {place.of for call in live for place in call.addresses("w") if place is not None}
    uses: dict[Any, tuple[int, int]] = {}
    for number, call in enumerate(live):
        for place in (*call.addresses("r"), *call.addresses("w")):
            if place is not None and place.of in written and place.of in first.buffers:
                uses[place.of] = (uses.get(place.of, (number,))[0], number)
    sizes = {}
    for buffer in uses:
        size = _symbolic(first.buffers[buffer].nbytes(), second.buffers[buffer].nbytes(), first.rows, second.rows)
        if size[1]:
            raise NoProgramError("a buffer does not grow with the number of rows")
        sizes[buffer] = size[0]
    layout = lay_out(sizes, uses)
    builder = _ProgramBuilder(first, second, layout.starts)
    instructions = [builder.instruction(*calls) for calls in zip(live, others, strict=True)]
    return StepProgram(
        Program(instructions, [*builder.kept, *first.recording.layer_calls]),
        parts,
        builder.names,
        max(layout.size, 1),
        _rotary_calls(first.recording.rotary),
        {number: first.recording.layer_calls[number] for number in builder.plans},
        {number: _storage(layer) for number, layer in first.layers.items()},
        {(call.params.window, call.params.chunk) for call in first.recording.layer_calls} - {(None, None)},
        first.logits.shape[1],
    )


def _rotary_calls(calls: Sequence[RotaryCall]) -> list[RotaryCall]:
    for call in calls:
        for value in (*call.arguments[0], *call.arguments[1].values()):
            if isinstance(value, torch.Tensor) and value.dim() < 2:
                raise NoProgramError("its rotary embedding has arguments that are not known")
    return [RotaryCall(call.module, call.arguments) for call in calls]


def _needed(calls: Sequence[Call]) -> list[Call]:
    """Return the calls on which logits or stored keys depend. Raises `NoProgramError` if one is unknown."""
    needed: set[Any] = {"logits"}
    found = []
    for call in reversed(calls):
        writes = [place.of for place in call.addresses("w") if place is not None]
        if call.operation != "append" and needed.isdisjoint(writes):
            continue
        if call.operation == UNKNOWN:
            raise NoProgramError(f"{call.what} cannot be part of a program")
        found.append(call)
        needed.update(place.of for place in call.addresses("r") if place is not None)
    return found[::-1]


def _symbolic(a: int, b: int, first: int, second: int) -> tuple[int, int]:
    """Return (per token, constant) of a number that is `a` for `first` tokens and `b` for `second`."""
    per_token, rest = divmod(b - a, second - first)
    constant = a - per_token * first
    if rest or (per_token and constant):
        raise NoProgramError("a size does not grow with the number of rows")
    return per_token, constant


@dataclass(eq=False)
class _ProgramBuilder:
    """Makes instructions of two recorded calls each."""

    first: _Recorded
    second: _Recorded
    starts: Mapping[Any, int]  # of buffers in the workspace, in bytes per token
    names: list[Any] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)  # objects at whose addresses the instructions read
    plans: list[int] = field(default_factory=list)

    def instruction(self, call: Call, other: Call) -> Instruction:
        """Return the instruction of a call."""
        operands = []
        for role, a, b in zip(ROLES[call.operation], call.operands, other.operands, strict=True):
            if role in "rw":
                operands.append(self._address(a, b))
            else:
                per_token, constant = (0, a) if a == b else self._number(a, b)
                operands.append(Operand(-1, per_token, constant))
        return Instruction(call.operation, operands)

    def _number(self, a: int, b: int) -> tuple[int, int]:
        return _symbolic(a, b, self.first.rows, self.second.rows)

    def _address(self, a: Place | None, b: Place | None) -> Operand:
        if a is None or b is None:
            if a is not b:
                raise NoProgramError("an operand is absent for some numbers of rows")
            return Operand(-1, 0, 0)
        if a.of != b.of:
            raise NoProgramError("operands change with the number of rows")
        per_token, constant = (0, a.offset) if a.offset == b.offset else self._number(a.offset, b.offset)
        if a.of in self.starts:
            return Operand(self._value("workspace"), self.starts[a.of] + per_token, constant)
        if a.of in self.first.buffers:  # which nothing writes
            storage = self.first.buffers[a.of]
            _check_equal(storage, self.second.buffers[a.of])
            self.kept.append(storage)
            return Operand(-1, per_token, constant + storage.data_ptr())
        if a.of[0] == "template":
            template = self.first.recording.templates[a.of[1]]
            _check_templates(template, self.second.recording.templates[a.of[1]])
            self.kept.append(template)
            return Operand(-1, 0, ctypes.addressof(template))
        return Operand(self._value(self._named(a.of)), per_token, constant)

    def _named(self, name: Any) -> Any:
        """Return the name of a value; layers that read alike share a plan."""
        if name[0] != "plan":
            return name
        layer_calls = self.first.recording.layer_calls
        mine = layer_calls[name[1]]
        for number in self.plans:
            if _read_alike(layer_calls[number], mine):
                return "plan", number
        self.plans.append(name[1])
        return name

    def _value(self, name: Any) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


def _check_equal(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Raise `NoProgramError` unless what no operation writes is the same for any number of rows."""
    if one.data_ptr() == other.data_ptr():
        return
    if one.nbytes() != other.nbytes() or one.tolist() != other.tolist():
        raise NoProgramError("a tensor that is made anew in each step depends on the number of rows")


def _read_alike(one: LayerCall, other: LayerCall) -> bool:
    """Whether two layers have the same plan."""
    settings = [(call.dims, call.params.window, call.params.chunk, id(call.params.rotary)) for call in (one, other)]
    return settings[0] == settings[1]


def _check_templates(one: Any, other: Any) -> None:
    """Raise `NoProgramError` unless two calls of the attention kernel differ in their number of rows alone."""
    for name in ("heads", "kv_heads", "lead", "dim", "scale", "softcap", "sinks"):
        if getattr(one, name) != getattr(other, name):
            raise NoProgramError(f"attention's {name} depends on the number of rows")
    if one.lead or one.storage.format or one.quantized.keys:
        raise NoProgramError("keys are not stored in float32")


def supports(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether programs of a model's decode steps are worth trying: on a CPU with the C kernels."""
    if device.type != "cpu" or not native.is_available() or model.dtype != torch.float32:
        return False
    with kernel_pass():
        return pass_library.get() == "native"
