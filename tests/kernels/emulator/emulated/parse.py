"""Parses a kernel's PTX into a list of instructions in which registers and branch targets are resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

WIDTHS = {"pred": 1, "8": 8, "16": 16, "32": 32, "64": 64}
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([A-Za-z_$][\w$]*):")
_NAMES = re.compile(r"(%?[A-Za-z_$][\w$]*)(?:<(\d+)>)?")
_PARTS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


@dataclass(frozen=True, slots=True)
class Register:
    """A register of each thread. index: in the program's list of registers. width: in bits, 1 for a predicate."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class Address:
    """An operand in brackets: a register or the name of a parameter, plus an offset in bytes."""

    base: Register | str
    offset: int


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """An operand in brackets with braces: a tensor map, and the coordinates of a box of its tensor, the innermost one first."""

    base: Register
    coordinates: tuple[Operand, ...]


Operand = Register | Address | TensorAddress | int | str | tuple["Operand", ...]  # str: a special register such as %tid.x, or a label


@dataclass(slots=True)
class Instruction:
    """One instruction.

    predicate: the register that enables it, and whether that is negated. target: the index of the instruction that a branch continues at;
    targets: those of an indexed branch. depends_on_others: whether other warps or CTAs may change the result. They get a turn before the
    instruction runs.
    """

    name: str
    operands: tuple[Operand, ...]
    predicate: tuple[Register, bool] | None
    text: str
    target: int = -1
    targets: tuple[int, ...] = ()
    depends_on_others: bool = False

    def __post_init__(self) -> None:
        self.depends_on_others = self.name.startswith(("ld.acquire", "ld.relaxed", "ld.volatile", "atom", "mbarrier.try_wait"))


@dataclass(slots=True)
class Kernel:
    instructions: list[Instruction] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)  # in bits, of each register
    params: list[str] = field(default_factory=list)
    threads: int = 0  # per CTA

    def granule(self, space: str) -> int:
        """The size in bytes of the smallest store to a state space ("global" or "shared"), at most 16."""
        return min((size for each in self.instructions if (size := _stored_bytes(each, space))), default=16)

    @property
    def is_warp_specialized(self) -> bool:
        """Whether some warps wait for others at barriers of their own."""
        return any(each.name == "bar.arrive" or each.name.startswith("setmaxnreg") for each in self.instructions)

    @property
    def has_async_proxy(self) -> bool:
        return any(each.name.startswith(("wgmma.mma", "cp.async.bulk")) for each in self.instructions)


@dataclass(slots=True)
class _Scope:
    """The declarations between a pair of braces."""

    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)


def _stored_bytes(instruction: Instruction, space: str) -> int:
    """The bytes, at most 16, that a thread stores to `space` with the instruction; 0 if it stores nothing there."""
    parts = instruction.name.split(".")
    if parts[0] in ("st", "atom") and space in parts:
        vector = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
        return min(16, vector * int(parts[-1].lstrip("bufs")) // 8)
    if space == "shared" and instruction.name.startswith("stmatrix"):
        return 2
    if space == "shared" and instruction.name.startswith("mbarrier.init"):
        return 8
    if space == "shared" and instruction.name.startswith("cp.async.c") and len(instruction.operands) > 2:
        size = instruction.operands[2]
        assert isinstance(size, int)
        return size
    return 0


def parse(ptx: str) -> Kernel:
    """The kernel of a module with one entry point."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
    ptx = re.sub(r"^\s*\.(loc|pragma)\b[^\n]*$", "", ptx, flags=re.M)
    signature, _, rest = ptx.partition(".entry")[2].partition(")")
    tuning, _, body = rest.partition("{")
    kernel = Kernel(params=re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", signature.partition("(")[2].strip()))
    kernel.threads = int(re.search(r"\.(?:req|max)ntid\s+(\d+)", tuning).group(1))  # type: ignore[union-attr]
    branches: list[tuple[Instruction, str, tuple[_Scope, ...]]] = []
    tables: dict[int, list[str]] = {}  # lists of branch targets, by the index of the instruction after them
    scopes, at = [_Scope()], 0
    while scopes:
        start = _SPACE.match(body, at).end()  # type: ignore[union-attr]
        at = start + 1
        if body[start] == "{":
            scopes.append(_Scope())
        elif body[start] == "}":
            scopes.pop()
        elif match := _LABEL.match(body, start):
            scopes[-1].labels[match.group(1)] = len(kernel.instructions)
            at = match.end()
        else:
            end = body.index(";", start)
            at = end + 1
            text = " ".join(body[start:end].split())
            if text.startswith(".reg"):
                _declare(text, scopes[-1], kernel)
            elif text.startswith(".branchtargets"):
                tables[len(kernel.instructions)] = [name.strip() for name in text.removeprefix(".branchtargets").split(",")]
            elif text:
                instruction = _instruction(text, scopes)
                kernel.instructions.append(instruction)
                if instruction.name.startswith(("bra", "brx")):
                    branches.append((instruction, str(instruction.operands[-1]), tuple(scopes)))
    for instruction, label, around in branches:
        place = lambda name, around=around: next(scope.labels[name] for scope in reversed(around) if name in scope.labels)  # noqa: E731
        instruction.target = place(label)
        if instruction.name.startswith("brx"):
            instruction.targets = tuple(place(name) for name in tables[instruction.target])
    return kernel


def _declare(text: str, scope: _Scope, kernel: Kernel) -> None:
    kind, _, names = text.removeprefix(".reg").strip().partition(" ")
    width = WIDTHS[kind[1:] if kind == ".pred" else kind[2:]]
    for name, count in _NAMES.findall(names):
        for register_name in [name] if not count else [f"{name}{i}" for i in range(int(count))]:
            scope.registers[register_name] = Register(len(kernel.widths), width)
            kernel.widths.append(width)


def _instruction(text: str, scopes: list[_Scope]) -> Instruction:
    predicate, rest = None, text
    if rest.startswith("@"):
        predicate_name, _, rest = rest[1:].partition(" ")
        register = _operand(predicate_name.lstrip("!"), scopes)
        assert isinstance(register, Register) and register.width == 1, text
        predicate = register, predicate_name.startswith("!")
    name, _, rest = rest.strip().partition(" ")
    return Instruction(name, tuple(_operand(part.strip(), scopes) for part in _PARTS.findall(rest)), predicate, text)


def _operand(text: str, scopes: list[_Scope]) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part.strip(), scopes) for part in text[1:-1].split(","))
    if text.startswith("["):
        base, _, coordinates = text[1:-1].partition(",")
        if coordinates:
            tensor_map, numbers = _operand(base.strip(), scopes), _operand(coordinates.strip(), scopes)
            assert isinstance(tensor_map, Register) and isinstance(numbers, tuple), text
            return TensorAddress(tensor_map, numbers)
        base, _, offset = text[1:-1].partition("+")
        match = _operand(base.strip(), scopes)
        assert isinstance(match, Register | str), text
        return Address(match, int(offset or 0))
    if "|" in text:
        return tuple(_operand(part, scopes) for part in text.split("|"))
    if text[:2] in ("0f", "0F"):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return next((scope.registers[text] for scope in reversed(scopes) if text in scope.registers), text)
