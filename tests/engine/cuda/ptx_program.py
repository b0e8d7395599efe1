"""Reads a kernel's PTX, the text of NVIDIA's virtual instruction set, into instructions for ptx_machine/machine.cpp.

Instructions keep PTX's names without flags that change nothing there; some become two or three of simpler names. What is
not known raises PtxError, and so do instructions whose result the PTX ISA leaves to the hardware (``.approx``, ``.ftz``,
sums and products that may be fused).
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

#: Instruction in machine.cpp
INSTRUCTION = np.dtype(
    [
        *(
            ("operation", "<u4"),
            ("line", "<u4"),
            ("guard", "<i4"),
            ("negated", "<u4"),
            ("to", "<i4", 4),
            ("from", "<i4", 4),
        ),
        *(("address", "<i4"), ("space", "<u4"), ("offset", "<i8"), ("nbytes", "<u4"), ("count", "<u4")),
        *(("mode", "<u4"), ("flags", "<u4")),
    ]
)
SPACES = {"generic": 0, "global": 1, "const": 1, "shared": 2, "param": 3}
SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x", "%laneid")
#: of the other dimensions, which grids of qccl do not have
_CONSTANT_SPECIAL = {
    f"%{name}.{axis}": int("n" in name) for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "yz"
}
_SHARED_WINDOW, _SHARED_BEGIN, _PARAMETER_WINDOW = 0x7F00 << 48, 256, 0x7E00 << 48
_SIGNED, _CONSTANT = 1, 2

_SHUFFLES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
_REDUCTIONS = {name: i for i, name in enumerate(("add", "min", "max", "and", "or", "xor", "exch", "cas"))}
_SAME_FOR_ALL_SIGNS = {
    "mov",
    "add",
    "sub",
    "neg",
    "and",
    "or",
    "xor",
    "not",
    "shl",
    "selp",
    "popc",
    "clz",
    "bfi",
}

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^%_]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*$")
_VARIABLE = re.compile(
    r"\.(shared|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)((?:\[\d+\])*)(?:\s*=\s*(\{[^}]*\}|\S+))?"
)
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)([\w%$]+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_ADDRESS = re.compile(r"\[\s*([\w%$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_NUMBER = re.compile(r"(?:-?(?:0[xX][0-9a-fA-F]+|\d+)U?|0[fFdD][0-9a-fA-F]+)$")


class PtxError(ValueError):
    """PTX that this reader does not know."""


def size_of(kind: str) -> int:
    """Bytes of a type, e.g. 4 for ``u32``; 1 for predicates."""
    if kind == "pred":
        return 1
    digits = re.search(r"(\d+)(x2)?$", kind)
    if digits is None:
        raise PtxError(f"the type .{kind}")
    return int(digits[1]) // 8 * (2 if digits[2] else 1)


def _number(text: str) -> int:
    """An integer, or the bits of a float such as 0f3F800000."""
    return int(text[2:], 16) if text[:2].lower() in ("0f", "0d") else int(text.rstrip("U"), 0)


@dataclass(frozen=True)
class Entry:
    """The text of a kernel: its parameters and its body, with the number of the body's first line."""

    parameters: str
    body: str
    line: int


@dataclass
class Module:
    """The text of a module: its kernels, and its variables."""

    text: str
    entries: dict[str, Entry] = field(default_factory=dict)
    variables: dict[str, tuple[str, int, int, bytes]] = field(default_factory=dict)  # space, align, bytes, content

    def __post_init__(self) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), self.text, flags=re.DOTALL)
        outside, position = [], 0
        for match in _ENTRY.finditer(text):
            end = _closing_brace(text, match.end())
            line = text.count("\n", 0, match.end() + 1) + 1
            self.entries[match[1]] = Entry(match[2], text[match.end() + 1 : end], line)
            outside.append(text[position : match.start()])
            position = end + 1
        self._declare("".join(outside) + text[position:])

    def _declare(self, text: str) -> None:
        for space, align, kind, name, dimensions, values in _VARIABLE.findall(text):
            size = size_of(kind)
            numbers = [_number(each) for each in re.findall(r"-?\w+", values)]
            content = b"".join((number % (1 << 8 * size)).to_bytes(size, "little") for number in numbers)
            count = int(np.prod([int(each) for each in re.findall(r"\d+", dimensions)], initial=1))
            self.variables[name] = space, int(align or size), size * count, content.ljust(size * count, b"\0")

    def declare(self, text: str) -> None:
        """Add a variable that a kernel's body declares."""
        self._declare(text)


def _closing_brace(text: str, begin: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError("a brace is not closed")


class Program:
    """The kernel ``name`` of a module.

    Attributes:
        code: its instructions.
        constants: the values of the registers behind the last.
        registers: their number.
        shared_nbytes, parameter_nbytes: sizes in bytes.
        tables: the content of the module's variables that it reads.
    """

    def __init__(self, module: Module, name: str, operations: Mapping[str, int]) -> None:
        self._module, self._operations = module, operations
        self._registers: dict[str, tuple[int, int]] = {}  # number and bytes
        self._count = 0
        for special in SPECIAL:
            self._register(special, 4)
        self._known: dict[int, int] = {}  # constants that have a register
        self._shared: dict[str, int] = {}
        self.shared_nbytes = 0
        self.tables: dict[str, np.ndarray] = {}
        entry = module.entries[name]
        self._body, self._first_line = entry.body, entry.line
        self._parameters, self.parameter_nbytes = _parameters(entry.parameters)
        self._rows: list[tuple[object, ...]] = []
        self._labels: dict[str, int] = {}
        self._branches: list[tuple[int, str]] = []
        self._line, self._guard, self._negated = 0, -1, False
        for line, statement in self._statements(entry.body, entry.line):
            self._line = line
            self._translate(statement)
        self.registers = self._count
        self._finish()

    def _statements(self, body: str, line: int) -> list[tuple[int, str]]:
        """The instructions with their lines; declarations and labels are taken note of. A label is a statement, too."""
        found = []
        for chunk in body.split(";"):
            rest = chunk
            while True:
                stripped = rest.lstrip()
                line += rest[: len(rest) - len(stripped)].count("\n")
                label = _LABEL.match(stripped)
                if stripped[:1] in ("{", "}"):  # a scope
                    rest = stripped[1:]
                elif label:
                    found.append((line, label[0]))
                    rest = stripped[label.end() :]
                else:
                    break
            if stripped.startswith(".reg"):
                self._declare_registers(stripped)
            elif stripped.startswith(".shared"):
                self._module.declare(stripped)
            elif stripped and not stripped.startswith((".pragma", ".loc")):
                found.append((line, stripped.rstrip()))
            line += stripped.count("\n")
        return found

    def _declare_registers(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        size = size_of(kind[1:])
        for name in re.split(r"\s*,\s*", names.strip()):
            several = re.fullmatch(r"([\w%$]+)<(\d+)>", name)
            for each in [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]:
                if each not in self._registers:
                    self._register(each, size)

    def _register(self, name: str, size: int) -> int:
        self._registers[name] = self._count, size
        self._count += 1
        return self._count - 1

    def _finish(self) -> None:
        self.constants = np.array(list(self._known), np.uint64)
        code = np.array(self._rows, INSTRUCTION)
        for name in ("to", "from", "address"):
            values = code[name]
            code[name] = np.where(values < -1, self.registers - 2 - values, values)  # see _constant()
        for at, label in self._branches:
            if label not in self._labels:
                raise PtxError(f"the label {label} is not defined")
            code["offset"][at] = self._labels[label]
        self.code = code

    # ---- operands

    def _constant(self, value: int) -> int:
        """A number below -1 that stands for the register of a constant until the last register is known."""
        return self._known.setdefault(value % (1 << 64), -2 - len(self._known))

    def _source(self, operand: str) -> int:
        if operand in self._registers:
            return self._registers[operand][0]
        if operand in _CONSTANT_SPECIAL:
            return self._constant(_CONSTANT_SPECIAL[operand])
        if _NUMBER.match(operand):
            return self._constant(_number(operand))
        if operand in self._parameters:
            return self._constant(_PARAMETER_WINDOW + self._parameters[operand])
        if operand in self._module.variables:
            return self._constant(self._address_of(operand))
        if operand.startswith("!"):
            negated = self._temporary()
            self._emit("not.pred", [negated], [self._source(operand[1:])])
            return negated
        raise PtxError(f"line {self._line}: the operand {operand}")

    def _address_of(self, name: str) -> int:
        space, align, nbytes, content = self._module.variables[name]
        if space != "shared":
            if name not in self.tables:
                room = np.zeros(nbytes + align, np.uint8)
                begin = -room.ctypes.data % align
                self.tables[name] = room[begin : begin + nbytes]
                self.tables[name][:] = np.frombuffer(content, np.uint8)
            return self.tables[name].ctypes.data
        if name not in self._shared:
            self._shared[name] = -(-self.shared_nbytes // align) * align
            self.shared_nbytes = self._shared[name] + nbytes
        return _SHARED_BEGIN + self._shared[name]

    def _target(self, operand: str) -> int:
        if operand == "_":
            return -1
        if operand not in self._registers:
            raise PtxError(f"line {self._line}: the register {operand}")
        return self._registers[operand][0]

    def _targets(self, operand: str) -> list[int]:
        return [self._target(each) for each in _OPERANDS.findall(operand.strip("{}"))]

    def _sources(self, operand: str) -> list[int]:
        return [self._source(each) for each in _OPERANDS.findall(operand.strip("{}"))]

    def _address(self, operand: str) -> tuple[int, int]:
        found = _ADDRESS.fullmatch(operand)
        if not found:
            raise PtxError(f"line {self._line}: the address {operand}")
        return self._source(found[1]), int(found[2] or "0", 0)

    def _temporary(self) -> int:
        return self._register(f"temporary {self._count}", 8)

    # ---- instructions

    def _emit(
        self, name: str, to: Sequence[int] = (), sources: Sequence[int] = (), *, address: int = -1, space: int = 0,
        offset: int = 0, nbytes: int = 0, count: int = 0, mode: int = 0, flags: int = 0,
    ) -> None:  # fmt: skip
        if name not in self._operations:
            raise PtxError(f"line {self._line}: the instruction {name}")
        self._rows.append(
            (
                *(self._operations[name], self._line, self._guard, self._negated),
                *((*to, *(-1,) * (4 - len(to))), (*sources, *(-1,) * (4 - len(sources)))),
                *(address, space, offset, nbytes, count, mode, flags),
            )
        )

    def _translate(self, statement: str) -> None:
        label = _LABEL.fullmatch(statement)
        if label:
            self._labels[label[1]] = len(self._rows)
            return
        found = _STATEMENT.fullmatch(statement)
        if not found or statement.startswith("."):
            raise PtxError(f"line {self._line}: {statement}")
        negated, guard, name, operands = found.groups()
        self._guard, self._negated = (-1, False) if guard is None else (self._source(guard), bool(negated))
        parts = name.split(".")
        if {"ftz", "approx", "full"} & set(parts):
            raise PtxError(f"line {self._line}: the result of {name} depends on the hardware")
        _HANDLERS.get(parts[0], Program._simple)(self, parts, _OPERANDS.findall(operands))

    def _simple(self, parts: list[str], operands: list[str]) -> None:
        """One instruction of the machine."""
        root, kind = parts[0], parts[-1]
        if (root in ("mul", "mad") and parts[1] == "lo") or (
            root in _SAME_FOR_ALL_SIGNS and kind != "pred" and not (kind == "f32" and root in ("add", "sub", "neg"))
        ):
            kind = f"b{8 * size_of(kind)}"
        middle = [part for part in parts[1:-1] if part not in ("uni", "xorsign")]
        sources = [source for operand in operands[1:] for source in self._sources(operand)]
        self._emit(".".join([root, *middle, kind]), self._targets(operands[0]), sources)

    def _nothing(self, parts: list[str], operands: list[str]) -> None:
        """Fences and prefetches change no result."""

    def _branch(self, parts: list[str], operands: list[str]) -> None:
        self._branches.append((len(self._rows), operands[-1]))
        self._emit("bra")

    def _exit(self, parts: list[str], operands: list[str]) -> None:
        self._emit("trap" if parts[0] == "trap" else "exit")

    def _barrier(self, parts: list[str], operands: list[str]) -> None:
        if parts[1] == "warp":
            self._emit("bar.warp.sync", (), (-1, -1, -1, self._source(operands[0])))
        elif "sync" in parts and operands == ["0"]:
            self._emit("bar.sync")
        else:
            raise PtxError(f"line {self._line}: the barrier {'.'.join(parts)} {operands}")

    def _move(self, parts: list[str], operands: list[str]) -> None:
        bits = 8 * size_of(parts[-1])
        if operands[0].startswith("{"):
            to, source = self._targets(operands[0]), self._source(operands[1])
            for i, each in enumerate(to):
                if each >= 0:
                    self._emit(
                        f"shr.u{bits}" if bits > 8 else "mov.b8", [each], [source, self._constant(bits // len(to) * i)]
                    )
                    self._narrow(each, bits // len(to))
        elif operands[1].startswith("{"):
            sources = self._sources(operands[1])
            self._emit(f"pack{'' if len(sources) == 2 else len(sources)}.b{bits}", [self._target(operands[0])], sources)
        else:
            self._simple(parts, operands)

    def _narrow(self, register: int, bits: int) -> None:
        """Zeros in a register above its lower bits."""
        self._emit(f"extend.u{bits}.b64", [register], [register])

    def _to_other_space(self, parts: list[str], operands: list[str]) -> None:
        to, source = self._target(operands[0]), self._source(operands[1])
        if "shared" not in parts:
            self._emit("mov.b64", [to], [source])
        else:
            self._emit("sub.b64" if "to" in parts else "add.b64", [to], [source, self._constant(_SHARED_WINDOW)])

    def _memory(self, parts: list[str]) -> tuple[int, int]:
        """Space and bytes of an access."""
        spaces = [part.split("::")[0] for part in parts[1:]]
        if "local" in spaces:
            raise PtxError(f"line {self._line}: local memory")
        return next((SPACES[each] for each in spaces if each in SPACES), 0), size_of(parts[-1])

    def _load(self, parts: list[str], operands: list[str]) -> None:
        space, nbytes = self._memory(parts)
        address, offset = self._address(operands[1])
        to = self._targets(operands[0])
        signed = parts[-1].startswith("s")
        width = self._registers[_OPERANDS.findall(operands[0].strip("{}"))[0]][1] if signed else 0
        flags = _SIGNED * signed | (_CONSTANT if "nc" in parts else 0)
        self._emit(
            "ld", to, address=address, space=space, offset=offset, nbytes=nbytes, count=len(to), mode=width, flags=flags
        )

    def _store(self, parts: list[str], operands: list[str]) -> None:
        space, nbytes = self._memory(parts)
        address, offset = self._address(operands[0])
        sources = self._sources(operands[1])
        self._emit("st", (), sources, address=address, space=space, offset=offset, nbytes=nbytes, count=len(sources))

    def _atomic(self, parts: list[str], operands: list[str]) -> None:
        space, nbytes = self._memory(parts)
        to = [self._target(operands.pop(0))] if parts[0] == "atom" else []
        address, offset = self._address(operands[0])
        how = next(part for part in parts if part in _REDUCTIONS)
        if parts[-1].startswith("f") or nbytes not in (4, 8):
            raise PtxError(f"line {self._line}: the atomic operation {'.'.join(parts)}")
        sources = [self._source(each) for each in operands[1:]]
        self._emit(
            "atom", to, sources, address=address, space=space, offset=offset, nbytes=nbytes, count=1,
            mode=_REDUCTIONS[how], flags=_SIGNED * parts[-1].startswith("s"),
        )  # fmt: skip

    def _compare(self, parts: list[str], operands: list[str]) -> None:
        """``setp.lt.and.s32 p|q, a, b, c``: p = (a < b) and c, q = not (a < b) and c."""
        kind, combine = parts[-1], parts[2] if parts[2] in ("and", "or", "xor") else None
        test = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(parts[1], parts[1])
        if kind[0] != "f" and (test in ("eq", "ne") or kind[0] == "b"):
            kind = f"b{8 * size_of(kind)}"
        to = [self._target(each) for each in operands[0].split("|")]
        compared = [self._source(each) for each in operands[1:3]]
        if combine is None and len(to) == 1:
            self._emit(f"setp.{test}.{kind}", to, compared)
            return
        result = self._temporary()
        self._emit(f"setp.{test}.{kind}", [result], compared)
        other = self._source(operands[3]) if combine else -1
        for i, target in enumerate(to):
            if i == 1:
                opposite = self._temporary()
                self._emit("not.pred", [opposite], [result])
                result = opposite
            if target >= 0:
                self._emit(
                    f"{combine}.pred" if combine else "mov.pred", [target], [result, *([other] if combine else [])]
                )

    def _shuffle(self, parts: list[str], operands: list[str]) -> None:
        to = [self._target(each) for each in operands[0].split("|")]
        self._emit("shfl", to, [self._source(each) for each in operands[1:5]], mode=_SHUFFLES[parts[2]])

    def _reduce(self, parts: list[str], operands: list[str]) -> None:
        sources = [self._source(operands[1]), -1, -1, self._source(operands[2])]
        signed = parts[-1].startswith("s")
        self._emit("redux", [self._target(operands[0])], sources, mode=_REDUCTIONS[parts[2]], flags=_SIGNED * signed)

    def _convert(self, parts: list[str], operands: list[str]) -> None:
        target, source = parts[-2:]
        to, sources = self._target(operands[0]), [self._source(each) for each in operands[1:]]
        if target[0] == "f" or source[0] == "f" or "f16" in target + source:
            saturates = target[0] in "su"  # from a float: always
            self._emit(".".join(part for part in parts if part != "sat" or not saturates), [to], sources)
            kept = target
        elif len(parts) > 3:
            raise PtxError(f"line {self._line}: the conversion {'.'.join(parts)}")
        else:
            kept = target if size_of(target) <= size_of(source) else source
        if "f" in kept:
            return
        width = self._registers[operands[0]][1]
        if kept == source and source != target:  # zeros above the target's bits
            width = size_of(target)
        if source[0] == "f":
            if width == size_of(target):
                return
            sources = [to]
        self._emit(f"extend.{kept.replace('b', 'u')}.b{8 * max(2, width)}", [to], sources)

    def text_of(self, line: int) -> str:
        """A line of the module, in the kernel."""
        return self._body.split("\n")[line - self._first_line].strip()


def _parameters(text: str) -> tuple[dict[str, int], int]:
    """The offsets of parameters in bytes, and the size of all."""
    offsets, end = {}, 0
    for each in filter(None, (part.strip() for part in text.split(","))):
        found = _PARAMETER.match(each)
        if not found:
            raise PtxError(f"the parameter {each}")
        size = size_of(found[2])
        align = int(found[1] or size)
        offsets[found[3]] = -(-end // align) * align
        end = offsets[found[3]] + size * int(found[4] or 1)
    return offsets, end


_HANDLERS: dict[str, Callable[[Program, list[str], list[str]], None]] = {
    **dict.fromkeys(("prefetch", "prefetchu", "membar", "fence", "griddepcontrol", "nanosleep"), Program._nothing),
    **dict.fromkeys(("ret", "exit", "trap"), Program._exit),
    **dict.fromkeys(("bar", "barrier"), Program._barrier),
    **dict.fromkeys(("atom", "red"), Program._atomic),
    **{"bra": Program._branch, "mov": Program._move, "cvta": Program._to_other_space},
    **{"ld": Program._load, "ldu": Program._load, "st": Program._store, "setp": Program._compare},
    **{"shfl": Program._shuffle, "redux": Program._reduce, "cvt": Program._convert},
}
