"""Look for registers that are spilled in the inner loops of the kernels, in the code that was built.

A multiply-add loop whose sums or constants do not fit into the registers moves them to the stack and
back in every step, and nothing but the speed shows it. So this disassembles the extension (or an object
file), takes the innermost loops with vector multiply-adds, and prints for every function the one with
most of them. A loop with vectors on the stack is a fault, unless ``ALLOWED`` has a reason for it.

    python tools/spills.py [file ...]      (needs objdump; $OBJDUMP names that of another processor)
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Allowed(NamedTuple):
    """Loops that may touch the stack: patterns of what they are and of what they hold, and why."""

    isa: str
    function: str
    holds: str
    reason: str
    most: float = math.inf  # vector moves to or from the stack


SHIFT_BY_EXPONENT = r"vpsll[dq] \$0x(17|34),|shl v"
STORE = r"vmovup[sd] %[xyz]mm\d+,\S*\(%r(?!sp)|st(r|p|ur) q\d+,.* \[x(?!29)"

#: The products of prefill, the loops that count most, neither store, nor shift, nor call.
ALLOWED = [
    Allowed(
        r".*",
        r"f(32|64)_prefill_\d",
        STORE,
        "The weights of a tile: constants of exp2 and maxima of several chains side by side are more than "
        "the registers; they are read from the stack as operands. Also outputs of a tile without keys.",
    ),
    Allowed(
        r".*",
        r"f(32|64)_decode_(block|weights)",
        SHIFT_BY_EXPONENT,
        "The weights of a block of keys, as in prefill.",
    ),
    Allowed(
        r".*",
        r"f(32|64)_decode_block",
        r"call |bl |str x\d+, \[sp",
        "Numbers of a row that fill no vector are copied to a buffer by memcpy, which may use all registers.",
    ),
    Allowed(
        r"neon",
        r"f32_prefill_[56]",
        r"(?s)\A(?:(?:(?!ldr q\d+, \[x\d+, x).)*ldr q\d+, \[x\d+, x){2}(?!.*ldr q\d+, \[x\d+, x)",
        "The two keys left over from a tile, with a mask: GCC 12 turns sums around among the registers.",
        most=6,
    ),
    Allowed(
        r"avx2",
        r"f32_decode_block",
        r"(?s)vpand .*vcvtph2ps",
        "Four keys of float8_e4m3fn by two rows: masks of the conversion do not fit beside eight sums.",
        most=6,
    ),
    Allowed(
        r"avx2",
        r"f32_decode_block",
        r"(?s)vpunpcklbw .*vpmovsxbd",
        "Keys of int4: masks of the conversion do not fit beside eight sums (GCC 13).",
        most=6,
    ),
    Allowed(
        r".*",
        r"f(32|64)_(finish_rows|probabilities|row_terms|vector_terms)",
        r"",
        "Once a row or a score, beside some hundred multiply-adds; conversions go through a buffer.",
    ),
]


class Processor(NamedTuple):
    """How the instructions that count look in the disassembly of one architecture."""

    multiply_add: re.Pattern[str]
    broadcast: re.Pattern[str]
    load: re.Pattern[str]
    branch: re.Pattern[str]  # its group is the address
    leave: re.Pattern[str]  # never goes on to the next instruction
    vector: re.Pattern[str]
    stack: re.Pattern[str]
    frame: re.Pattern[str]  # the instruction that makes an address of the stack of a second register,
    frame_stack: re.Pattern[str]  # which is an ordinary one in functions without it


PROCESSORS = {
    "elf64-x86-64": Processor(
        multiply_add=re.compile(r"vfn?m(add|sub)\w*p[sd] |tdp\w+ "),
        broadcast=re.compile(r"vp?broadcast\w+ "),
        load=re.compile(r"(vmov\w+|vpmov\w+|vcvt\w+|tileloadd\w*) [^%]*\(\S*\),%"),
        branch=re.compile(r"j\w+ ([0-9a-f]+) <"),
        leave=re.compile(r"(jmp|ret|ud2)"),
        vector=re.compile(r"%([xyz]|t)mm"),
        stack=re.compile(r"\(%rsp[,)]"),
        frame=re.compile(r"mov %rsp,%rbp$"),
        frame_stack=re.compile(r"\(%rbp[,)]"),
    ),
    "elf64-littleaarch64": Processor(
        multiply_add=re.compile(r"fml[as] v"),
        broadcast=re.compile(r"(ld1r|dup) "),
        load=re.compile(r"ld(r|p|ur|1) [{qvd]"),
        branch=re.compile(r"(?:b|b\.\w+|cbn?z \w+,|tbn?z \w+, #\d+,) ([0-9a-f]+) <"),
        leave=re.compile(r"(b|br|ret|udf|brk)( |$)"),
        vector=re.compile(r"\b[vqds]\d+\b"),
        stack=re.compile(r"\[sp[,\]]"),
        frame=re.compile(r"(mov|add) x29, sp"),
        frame_stack=re.compile(r"\[x29[,\]]"),
    ),
}


class Instruction(NamedTuple):
    """One line of the disassembly."""

    address: int
    text: str


class Function(NamedTuple):
    """The machine code of a function."""

    source: str  # the name of its file without suffix; that of kernels ends in the instruction set
    name: str
    body: list[Instruction]
    processor: Processor


class Loop(NamedTuple):
    """An innermost loop with vector multiply-adds."""

    function: Function
    body: list[Instruction]
    places: list[re.Pattern[str]]  # how an address on the stack looks in this function

    @property
    def isa(self) -> str:
        """The instruction set that a kernel was compiled for."""
        return self.function.source.removeprefix("isa_")

    @property
    def multiply_adds(self) -> int:
        """What the loop is there for."""
        return self.count(self.function.processor.multiply_add)

    @property
    def spills(self) -> list[Instruction]:
        """The instructions with both a vector and an address on the stack."""
        return [
            line
            for line in self.body
            if self.function.processor.vector.search(line.text)
            and any(place.search(line.text) for place in self.places)
        ]

    @property
    def allowed(self) -> Allowed | None:
        """What permits this loop to spill; a function's name may end in the compiler's mark of a clone."""
        name, text = self.function.name.partition(".")[0], "\n".join(line.text for line in self.body)
        for row in ALLOWED:
            of_it = re.fullmatch(row.isa, self.isa) and re.fullmatch(row.function, name)
            if of_it and re.search(row.holds, text) and len(self.spills) <= row.most:
                return row
        return None

    def count(self, pattern: re.Pattern[str]) -> int:
        """Return how many instructions begin like this."""
        return sum(pattern.match(line.text) is not None for line in self.body)

    def describe(self) -> str:
        """Say where the loop is and what it spills."""
        lines = [f"{line.address:x}: {line.text}" for line in self.spills]
        head = f"{self.isa}: {self.function.name}: loop at {self.body[0].address:x}"
        return "\n    ".join([f"{head}: {len(lines)} vector moves to or from the stack", *lines])


def disassemble(path: Path) -> list[Function]:
    """Return the functions of an ELF file; FileNotFoundError where objdump is not installed."""
    command = [*shlex.split(os.environ.get("OBJDUMP", "objdump")), "--syms", "--disassemble"]
    run = subprocess.run([*command, "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
    kind = re.search(r"file format (\S+)", run.stdout)
    processor = PROCESSORS[kind[1] if kind else "no file format"]
    # Functions of several instruction sets have one name, but a symbol stands behind its file's.
    sources: dict[tuple[int, str], str] = {}
    source, functions = "", []
    for line in run.stdout.splitlines():
        if found := re.match(r"[0-9a-f]+ .* df \*ABS\*\t[0-9a-f]+ *(\S*)$", line):
            source = found[1].rpartition(".")[0]
        elif found := re.match(r"([0-9a-f]+) .* F \.text\S*\t[0-9a-f]+ +(?:\.\w+ )?(\S+)$", line):
            sources[int(found[1], 16), found[2]] = source
        elif found := re.match(r"([0-9a-f]+) <(\S+)>:$", line):
            source = sources.get((int(found[1], 16), found[2]), "")
            functions.append(Function(source, found[2], [], processor))
        elif found := re.match(r" *([0-9a-f]+):\t(.*?)\s*((//|# ).*)?$", line):
            # a comment on AArch64 is "//", and "#" starts a constant
            functions[-1].body.append(Instruction(int(found[1], 16), " ".join(found[2].split())))
    return functions


def cycles(successors: dict[int, list[int]]) -> list[set[int]]:
    """Return the strongly connected parts of a graph that hold a cycle, by Tarjan's algorithm."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    open_nodes: list[int] = []
    found = []
    for root in successors:
        path = [] if root in order else [(root, iter(successors[root]))]
        while path:
            node, edges = path[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                open_nodes.append(node)
            for following in edges:
                if following not in order:
                    path.append((following, iter(successors[following])))
                    break
                if following in low:
                    low[node] = min(low[node], low[following])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    part = set(open_nodes[open_nodes.index(node) :])
                    del open_nodes[-len(part) :]
                    for member in part:
                        del low[member]
                    if len(part) > 1 or node in successors[node]:
                        found.append(part)
    return found


def innermost_loops(function: Function) -> list[Loop]:
    """Return the loops with vector multiply-adds and without a loop in them."""
    body, processor = function.body, function.processor
    if not any(processor.multiply_add.match(line.text) for line in body):
        return []
    places = [processor.stack]
    if any(processor.frame.match(line.text) for line in body):
        places.append(processor.frame_stack)
    place = {line.address: i for i, line in enumerate(body)}
    graph: dict[int, list[int]] = {}  # by instructions: parts of a loop may lie apart
    for i, line in enumerate(body):
        jump = processor.branch.match(line.text)
        graph[i] = [i + 1] if i + 1 < len(body) and not processor.leave.match(line.text) else []
        if jump and int(jump[1], 16) in place:
            graph[i].append(place[int(jump[1], 16)])
    loops, outer = [], [graph]
    while outer:
        graph = outer.pop()
        for part in cycles(graph):
            # What is a cycle without the first instruction, where the loop is entered, is a loop in it.
            entered = {to for node in graph if node not in part for to in graph[node] if to in part}
            first = min(entered or part)
            rest = {node: [to for to in graph[node] if to in part and to != first] for node in part - {first}}
            if cycles(rest):
                outer.append(rest)
                continue
            loop = Loop(function, [body[i] for i in sorted(part)], places)
            if loop.multiply_adds:
                loops.append(loop)
    return sorted(loops, key=lambda loop: loop.body[0].address)


def loops_of(path: Path) -> list[Loop]:
    """Return the innermost multiply-add loops of a file, in the order of their addresses."""
    return [loop for function in disassemble(path) for loop in innermost_loops(function)]


def table(loops: list[Loop]) -> str:
    """Return the hottest loop of every function, one line each."""
    hottest: dict[tuple[str, str], Loop] = {}
    for loop in loops:
        key = loop.isa, loop.function.name
        if key not in hottest or loop.multiply_adds > hottest[key].multiply_adds:
            hottest[key] = loop
    head = ("isa", "function", "FMAs", "loads", "broadcasts", "others", "stack", "instructions per FMA")
    lines = ["{:8}{:32}{:>6}{:>7}{:>12}{:>8}{:>7}{:>22}".format(*head)]
    for (isa, name), loop in hottest.items():
        fmas, stack = loop.multiply_adds, len(loop.spills)
        broadcasts = loop.count(loop.function.processor.broadcast)
        loads = loop.count(loop.function.processor.load)
        others = len(loop.body) - fmas - broadcasts - loads
        per_fma = len(loop.body) / fmas
        lines.append(f"{isa:8}{name:32}{fmas:6}{loads:7}{broadcasts:12}{others:8}{stack:7}{per_fma:22.2f}")
    return "\n".join(lines)


def faults(loops: list[Loop]) -> list[str]:
    """Return what spills and may not."""
    return [loop.describe() for loop in loops if loop.spills and not loop.allowed]


def main(paths: list[str]) -> int:
    """Print the table, how many loops spill with a reason, and the faults; 1 if there are any."""
    if not paths:
        from pyflash import _pyflash_c

        paths = [_pyflash_c.__file__]
    loops = [loop for path in paths for loop in loops_of(Path(path))]
    print(table(loops))
    for row in ALLOWED:
        permitted = [loop for loop in loops if loop.spills and loop.allowed is row]
        print(f"allowed: {len(permitted)} loops of {row.function}: {row.reason}")
    print(*faults(loops), sep="\n")
    return bool(faults(loops))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
