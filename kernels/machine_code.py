"""Machine code that triton made, read back: registers, spills, and what its innermost loop loads and multiplies with.

NVIDIA code is read through ``cuobjdump`` and ``nvdisasm``, which triton brings along; AMD code is assembler text.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from triton import knobs

Lines = list[str]
Branch = Callable[[str], tuple[str, bool] | None]  # the label a line jumps to, and whether it may fall through

NVIDIA_MATRIX = re.compile(r"\b(HMMA|HGMMA|QGMMA|QMMA|IMMA|UTCHMMA|UTCQMMA|UTCMMA)[.\w]*")
AMD_MATRIX = re.compile(r"\bv_mfma_\w+")


@dataclass(frozen=True)
class MachineCode:
    """What the assembler and the disassembler say about one kernel."""

    registers: int
    spills: int  # instructions on local memory, or its bytes if more (NVIDIA); spilled vector registers (AMD)
    loop: tuple[str, ...]  # instructions of the innermost loop with matrix instructions
    loads: Mapping[str, int]  # load instructions in that loop, by their name
    matrix: tuple[str, ...]  # tensor-core instructions in that loop

    def bytes_loaded(self, threads: int, *, at_least: int = 0) -> int:
        """Bytes that the loop's loads of so many bytes a thread bring in one pass over its text."""
        widths = ((load_width(name), count) for name, count in self.loads.items())
        return sum(count * width * threads for width, count in widths if width >= at_least)


def load_width(name: str) -> int:
    """Bytes that one thread gets from a load instruction."""
    marks: tuple[tuple[str, int], ...]
    if name.startswith(("LDG", "UTMALDG")):
        marks = ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1))
    else:
        marks = (("x4", 16), ("x3", 12), ("x2", 8), ("short", 2), ("byte", 1))
    return next((width for mark, width in marks if mark in name), 4)


def read_nvidia(cubin: bytes) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        code = _tool(knobs.nvidia.nvdisasm.path, "-c", file.name)  # labels instead of addresses
    lines = [re.sub(r"/\*[0-9a-f]{4,}\*/", "", line).strip() for line in code.splitlines()]
    lines = [line for line in lines if re.match(r"\.L\w+:", line) or line.endswith(";")]
    is_end = re.compile(r"(EXIT|RET)\b")
    loop = main_loop(lines, re.compile(r"(\.L\w+):"), _nvidia_branch, is_end, NVIDIA_MATRIX)
    loads = Counter(found[0] for line in loop if (found := re.search(r"\b(LDGSTS|LDG|UTMALDG)\b((?:\.\w+)*)", line)))
    return MachineCode(
        registers=_number(r"REG:(\d+)", usage),
        spills=_number(r"LOCAL:(\d+)", usage) + sum("LDL" in line or "STL" in line for line in lines),
        loop=tuple(loop),
        loads=loads,
        matrix=_found(NVIDIA_MATRIX, loop),
    )


def read_amd(text: str) -> MachineCode:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not re.match(r"[;.](?!LBB)", line)]
    loop = main_loop(lines, re.compile(r"(\.LBB\w+):"), _amd_branch, re.compile("s_endpgm"), AMD_MATRIX)
    loads = Counter(found[1] for line in loop if (found := re.match(r"((?:global|buffer|flat)_load_\w+)", line)))
    spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", text) + _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return MachineCode(
        registers=_number(r"\.vgpr_count:\s+(\d+)", text),
        spills=spilled,
        loop=tuple(loop),
        loads=loads,
        matrix=_found(AMD_MATRIX, loop),
    )


def main_loop(
    lines: Sequence[str], label: re.Pattern[str], branch: Branch, is_end: re.Pattern[str], matrix: re.Pattern[str]
) -> Lines:
    """The innermost loop with tensor-core instructions; without any, the longest; without a loop, everything."""
    blocks, successors = _basic_blocks(lines, label, branch, is_end)
    loops = list(_natural_loops(successors))
    has_matrix = {index for index, block in enumerate(blocks) if any(matrix.search(line) for line in block)}
    innermost = [each for each in loops if not any(other < each and other & has_matrix for other in loops)]
    bodies = [[line for index in sorted(each) for line in blocks[index]] for each in innermost]
    return max(
        bodies, key=lambda body: (sum(bool(matrix.search(line)) for line in body), len(body)), default=list(lines)
    )


def _basic_blocks(
    lines: Sequence[str], label: re.Pattern[str], branch: Branch, is_end: re.Pattern[str]
) -> tuple[list[Lines], list[list[int]]]:
    blocks: list[Lines] = [[]]
    where: dict[str, int] = {}
    for line in lines:
        if found := label.match(line):
            if blocks[-1]:
                blocks.append([])
            where[found[1]] = len(blocks) - 1
            continue
        blocks[-1].append(line)
        if branch(line) or is_end.match(line):
            blocks.append([])
    successors = []
    for index, block in enumerate(blocks):
        jump = branch(block[-1]) if block else None
        falls_through = not (block and is_end.match(block[-1])) and (jump is None or jump[1])
        after = [index + 1] if falls_through and index + 1 < len(blocks) else []
        if jump and jump[0] in where:
            after.append(where[jump[0]])
        successors.append(after)
    return blocks, successors


def _natural_loops(successors: Sequence[Sequence[int]]) -> Iterator[set[int]]:
    """The blocks of each loop: for an edge back to a block that dominates its source.

    Backward jumps alone would be wrong: assemblers move cold parts of a loop to the end of the code.
    """
    reachable: set[int] = set()
    todo = [0]
    while todo:
        block = todo.pop()
        if block not in reachable:
            reachable.add(block)
            todo += successors[block]
    before = {block: [each for each in reachable if block in successors[each]] for block in reachable}
    dominators = _dominators(reachable, before)
    for source in reachable:
        for head in successors[source]:
            if head in dominators[source]:
                body, todo = {head}, [source]
                while todo:
                    block = todo.pop()
                    if block not in body:
                        body.add(block)
                        todo += before[block]
                yield body


def _dominators(reachable: set[int], before: Mapping[int, Sequence[int]]) -> dict[int, set[int]]:
    dominators = {block: set(reachable) for block in reachable} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in sorted(reachable - {0}):
            new = {block} | set.intersection(*(dominators[each] for each in before[block]))
            changed |= new != dominators[block]
            dominators[block] = new
    return dominators


def _nvidia_branch(line: str) -> tuple[str, bool] | None:
    found = re.match(r"(@!?U?P\w+\s+)?(BRA(?:\.\w+)*)\s+(.*?)`\((\.L\w+)\)", line)
    if found is None:
        return None
    return found[4], bool(found[1]) or "P" in found[3]  # BRA.U UP0, `(target) carries its condition inside


def _amd_branch(line: str) -> tuple[str, bool] | None:
    found = re.match(r"(s_c?branch\w*)\s+(\.LBB\w+)", line)
    return None if found is None else (found[2], found[1] != "s_branch")


def _found(pattern: re.Pattern[str], lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({found[0] for line in lines if (found := pattern.search(line))}))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembler's report has no {pattern!r}")
    return int(found[1])


def _tool(path: str, *arguments: str) -> str:
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
