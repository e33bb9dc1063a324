"""Program: a decode step as a list of instructions that one C call runs (`cpu_program.c`).

Between the kernels of a step there is no Python. Addresses and sizes depend on the number of tokens, so one program
serves any number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_parallel.kernels import native
from hf_parallel.kernels.plan import AttentionPlan

ALIGNMENT = 64
"""Bytes to which the start of a buffer is aligned."""
MAX_OPERANDS = 20
_NO_MEMORY = 1  # result of `run_program`


class Operation(NamedTuple):
    """An operation of `cpu_program.c`.

    `roles` has a letter for each operand: `i` an integer, `f` a number in float64, `r` an address that is read, `w` one
    that is written.
    """

    name: str
    roles: str


_COMBINED = "rrw" + 16 * "i"
OPERATIONS = tuple(
    Operation(*operation)
    for operation in (
        ("linear", "irrirwiiii"),
        ("linear_int8", "irrirwiii"),
        ("unpack", "iriwii"),
        ("rms_norm", "rrwiiff"),
        ("activate", "irwi"),
        ("rotate_heads", "rwiiirwiiirriiii"),
        ("attend", "rriiwwwrrir"),
        ("append", "riiiiwr"),
        ("take_rows", "rrwiii"),
        ("copy", _COMBINED),
        ("add", _COMBINED),
        ("subtract", _COMBINED),
        ("multiply", _COMBINED),
        ("divide", _COMBINED),
    )
)
"""In the order of `cpu_program.c`."""
ROLES = {operation.name: operation.roles for operation in OPERATIONS}
_NUMBERS = {operation.name: number for number, operation in enumerate(OPERATIONS)}


class Operand(NamedTuple):
    """`values[table] + per_token * tokens + constant`; `table` -1: without the first."""

    table: int
    per_token: int
    constant: int


class Instruction(NamedTuple):
    """An operation with its operands, in the order of its roles."""

    operation: str
    operands: Sequence[Operand]


class _OperandStruct(ctypes.Structure):
    """`Operand` of `cpu_program.c`."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("table", "per_token", "constant"))


class _InstructionStruct(ctypes.Structure):
    """`Instruction` of `cpu_program.c`."""

    _fields_ = (("operation", ctypes.c_int64), ("operands", _OperandStruct * MAX_OPERANDS))


class _WritesStruct(ctypes.Structure):
    """`Writes` of `cpu_program.c`."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("query", "origin", "capacity", "index")),
    )


@dataclass(frozen=True, eq=False)
class StepWrites:
    """Where the new tokens of a step are stored, as a C struct; keeps the arrays."""

    struct: _WritesStruct
    plan: AttentionPlan

    @classmethod
    def of(cls, plan: AttentionPlan) -> StepWrites:
        """Return the writes of a plan, whose arrays are contiguous."""
        arrays = (plan.write_query, plan.write_origin, plan.write_capacity, plan.write_index)
        addresses = [array.ctypes.data for array in arrays]
        return cls(_WritesStruct(len(plan.write_query), *addresses), plan)

    @property
    def address(self) -> int:
        """Address of the struct."""
        return ctypes.addressof(self.struct)


class Program:
    """Instructions as C structs. `kept` are tensors and structs at whose addresses they read."""

    def __init__(self, instructions: Sequence[Instruction], kept: Sequence[object]) -> None:
        self._kept = tuple(kept)
        self._length = len(instructions)
        self._structs = (_InstructionStruct * len(instructions))()
        for struct, instruction in zip(self._structs, instructions, strict=True):
            struct.operation = _NUMBERS[instruction.operation]
            for number in range(MAX_OPERANDS):
                struct.operands[number].table = -1
            for number, operand in enumerate(instruction.operands):
                struct.operands[number] = _OperandStruct(*operand)

    def run(self, values: Sequence[int], tokens: int) -> bool:
        """Run the instructions for a number of tokens; return False if a token is not in a table.

        Raises `MemoryError` if a kernel's memory runs out.
        """
        table = (ctypes.c_int64 * len(values))(*values)
        result = native.run_program(self._structs, self._length, table, tokens, torch.get_num_threads())
        if result == _NO_MEMORY:
            raise MemoryError(f"a decode step of {tokens} tokens cannot allocate its memory")
        return result == 0


class BufferPlaces(NamedTuple):
    """Places of buffers in a workspace, in bytes per token, and its size."""

    starts: Mapping[Any, int]
    size: int


def lay_out(sizes: Mapping[Any, int], uses: Mapping[Any, tuple[int, int]]) -> BufferPlaces:
    """Place buffers of `sizes` bytes per token so that those in use at once do not overlap.

    `uses`: the first and the last instruction that uses each. A buffer gets the first gap that is large enough.
    """
    starts: dict[Any, int] = {}
    taken: list[tuple[int, int, int]] = []  # start, stop and last use of each buffer so far
    for buffer in sorted(sizes, key=lambda buffer: uses[buffer][0]):
        first, last = uses[buffer]
        needed = -(-sizes[buffer] // ALIGNMENT) * ALIGNMENT
        place = 0
        for start, stop, last_use in sorted(taken):
            if last_use < first:
                continue
            if start - place >= needed:
                break
            place = max(place, stop)
        starts[buffer] = place
        taken.append((place, place + needed, last))
    return BufferPlaces(starts, max((stop for _, stop, _ in taken), default=0))
