"""The text of a kernel in PTX, as a list of instructions whose names are resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

WIDTHS = {"pred": 1, "8": 8, "16": 16, "32": 32, "64": 64}
_LABEL = re.compile(r"([A-Za-z_$][\w$]*):")
_NAMES = re.compile(r"(%?[A-Za-z_$][\w$]*)(?:<(\d+)>)?")
_PARTS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


@dataclass(frozen=True, slots=True)
class Register:
    """One of a program's, of each thread. width: bits, 1 for a predicate."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class Place:
    """An address: a register or a parameter's name, and bytes after it."""

    base: Register | str
    offset: int


Operand = Register | Place | int | str | tuple["Operand", ...]  # str: a name that is no register's, such as %tid.x


@dataclass(slots=True)
class Instruction:
    """guard: the predicate it depends on, and whether it is negated. target: of a branch, the number of an instruction."""

    name: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    text: str
    target: int = -1

    @property
    def depends_on_others(self) -> bool:
        """Whether other warps or CTAs may change its result, so that they should run before it."""
        return self.name.startswith(("ld.acquire", "ld.relaxed", "ld.volatile", "atom", "mbarrier.try_wait"))


@dataclass(slots=True)
class Kernel:
    instructions: list[Instruction] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)  # of the registers
    params: list[str] = field(default_factory=list)
    threads: int = 0

    def granule(self, space: str) -> int:
        """The bytes of the smallest store to global or shared memory, at most 16."""
        return min((size for one in self.instructions if (size := _stored_bytes(one, space))), default=16)

    @property
    def has_async_proxy(self) -> bool:
        return any(one.name.startswith(("wgmma.mma", "cp.async.bulk")) for one in self.instructions)


@dataclass(slots=True)
class _Scope:
    """What is declared between two braces."""

    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)


def _stored_bytes(one: Instruction, space: str) -> int:
    """What a thread stores with one instruction in global or shared memory, at most 16 bytes; 0: nothing."""
    parts = one.name.split(".")
    if parts[0] in ("st", "atom") and space in parts:
        vector = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
        return min(16, vector * int(parts[-1].lstrip("bufs")) // 8)
    if space == "shared" and one.name.startswith("stmatrix"):
        return 2
    if space == "shared" and one.name.startswith("mbarrier.init"):
        return 8
    if space == "shared" and one.name.startswith("cp.async.c") and len(one.operands) > 2:
        size = one.operands[2]
        assert isinstance(size, int)
        return size
    return 0


def parse(ptx: str) -> Kernel:
    """The entry of a module that has one."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
    ptx = re.sub(r"^\s*\.(loc|pragma)\b[^\n]*$", "", ptx, flags=re.M)
    signature, _, rest = ptx.partition(".entry")[2].partition(")")
    tuning, _, body = rest.partition("{")
    kernel = Kernel(params=re.findall(r"(\w+)\s*(?:,|$)", signature.partition("(")[2].strip()))
    kernel.threads = int(re.search(r"\.(?:req|max)ntid\s+(\d+)", tuning).group(1))  # type: ignore[union-attr]
    branches: list[tuple[Instruction, str, tuple[_Scope, ...]]] = []
    scopes, at = [_Scope()], 0
    while scopes:
        body = body[at:].lstrip()
        at = 1
        if body.startswith("{"):
            scopes.append(_Scope())
        elif body.startswith("}"):
            scopes.pop()
        elif found := _LABEL.match(body):
            scopes[-1].labels[found.group(1)] = len(kernel.instructions)
            at = found.end()
        else:
            statement, _, _ = body.partition(";")
            at = len(statement) + 1
            text = " ".join(statement.split())
            if text.startswith(".reg"):
                _declare(text, scopes[-1], kernel)
            elif text:
                made = _instruction(text, scopes)
                kernel.instructions.append(made)
                if made.name.startswith("bra"):
                    branches.append((made, str(made.operands[0]), tuple(scopes)))
    for made, label, around in branches:
        made.target = next(scope.labels[label] for scope in reversed(around) if label in scope.labels)
    return kernel


def _declare(text: str, scope: _Scope, kernel: Kernel) -> None:
    kind, _, names = text.removeprefix(".reg").strip().partition(" ")
    width = WIDTHS[kind[1:] if kind == ".pred" else kind[2:]]
    for name, count in _NAMES.findall(names):
        for one in [name] if not count else [f"{name}{i}" for i in range(int(count))]:
            scope.registers[one] = Register(len(kernel.widths), width)
            kernel.widths.append(width)


def _instruction(text: str, scopes: list[_Scope]) -> Instruction:
    guard, rest = None, text
    if rest.startswith("@"):
        word, _, rest = rest[1:].partition(" ")
        predicate = _operand(word.lstrip("!"), scopes)
        assert isinstance(predicate, Register) and predicate.width == 1, text
        guard = predicate, word.startswith("!")
    name, _, rest = rest.strip().partition(" ")
    return Instruction(name, tuple(_operand(part.strip(), scopes) for part in _PARTS.findall(rest)), guard, text)


def _operand(text: str, scopes: list[_Scope]) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part.strip(), scopes) for part in text[1:-1].split(","))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        found = _operand(base.strip(), scopes)
        assert isinstance(found, Register | str), text
        return Place(found, int(offset or 0))
    if text[:2] in ("0f", "0F"):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return next((scope.registers[text] for scope in reversed(scopes) if text in scope.registers), text)
