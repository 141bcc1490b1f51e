"""The kernels compile for four GPUs that are not here, and the judge of their machine code has teeth."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from kernels import machine_code
from kernels.compiled import CHIPS, compile_report, copies_ahead, resident_warps
from kernels.configuration import ATTENTION, LAYER, MOVES, covering_set, small_set

ROOT = Path(kernels.__file__).parent.parent


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: where the interpreter is on, nothing compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", CHIPS)
def test_both_shapes_pass_on_every_target(target):
    done = compiled("-m", "kernels.compiled", "--json", "--target", target)
    reports = json.loads(done.stdout)
    assert [each["problems"] for each in reports] == [[], []], done.stdout
    assert done.returncode == 0
    assert [each["configuration"]["kernel"] for each in reports] == ["decode", "prefill"]
    assert all(each["spills"] == 0 for each in reports)
    assert all(each["load_bytes"] == 16 for each in reports)
    assert all(each["tensor_core"] for each in reports)


AT_THE_BORDER = """
import json
from kernels.compiled import compile_report
from kernels.configuration import Configuration
wanted = [
    Configuration("sm_80", "decode", head_size=80, block_size=256, group=7, lse=True),
    Configuration("sm_90", "decode", block_size=5, group=3, window=True, logit_cap=True, lse=True),
    Configuration("sm_90", "decode", fp8=True),
    Configuration("sm_100", "decode", group=7),
    Configuration("sm_100", "decode", head_size=256, group=2),
]
print(json.dumps([each.problems for each in compile_report(wanted)]))
"""


@pytest.mark.slow
def test_decodes_that_the_assembler_would_spill_have_the_registers_they_need():
    assert json.loads(compiled("-c", AT_THE_BORDER).stdout) == [[], [], [], [], []]


SABOTAGE = """
import importlib.util, inspect, json, pathlib, tempfile
import triton
from dataclasses import replace
from kernels import compiled, configuration
from kernels.configuration import Configuration
from kernels import attention_kernel
from kernels.tile_shape import TileShape

def judged(wanted, shape=None, old="", new=""):
    source = inspect.getsource(attention_kernel)
    assert not old or source.count(old) == 1, old
    path = pathlib.Path(tempfile.mkdtemp()) / "attention_kernel.py"
    path.write_text(source.replace(old, new) if old else source)
    spec = importlib.util.spec_from_file_location("sabotaged", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    configuration.attention_kernel = made
    return compiled.judge(wanted, shape).problems

def fails():
    def judge(configuration):
        raise triton.runtime.errors.PTXASError("no such instruction")
    original, compiled.judge = compiled.judge, judge
    found = compiled.compile_report([decode])[0].problems
    compiled.judge = original
    return found

decode = Configuration("sm_90", "decode")
late = "blocks = tl.load(table_ptr + tokens // block_size, mask=live_tokens, other=0).to(tl.int64)"
print(json.dumps({
    "spill": judged(decode, TileShape(16, 128, 1024, 1, 3)),
    "shared": judged(Configuration("sm_80", "prefill", head_size=256), TileShape(64, 64, 0, 8, 3)),
    "late": judged(decode, TileShape(16, 32, 1024, 4, 3), "blocks = next_blocks.to(tl.int64)", late),
    "error": fails(),
    "narrow": judged(replace(decode, head_size=72), TileShape(16, 32, 1024, 4, 3), "", ""),
}))
"""


@pytest.mark.slow
def test_a_spill_a_late_table_a_narrow_load_and_a_full_memory_are_found():
    done = compiled("-c", SABOTAGE)
    problems = json.loads(done.stdout)
    assert any("spills" in each for each in problems["spill"])
    assert any("shared memory" in each for each in problems["shared"])
    assert problems["late"] == ["no copy in flight while the loop computes"]
    assert any("16-byte loads bring" in each for each in problems["narrow"])
    assert problems["error"] == ["does not compile: PTXASError"]


def test_with_the_interpreter_on_it_says_what_to_do():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_report([])


def test_the_covering_set_has_each_choice_on_each_target():
    made = covering_set()
    assert len(made) == len(set(made)) <= 150
    for target in CHIPS:
        here = [each for each in made if each.target == target]
        assert {each.kernel for each in here} == {"merge", *ATTENTION, *MOVES, *LAYER}
        for kernel in ATTENTION:
            mine = [each for each in here if each.kernel == kernel]
            assert {each.dtype for each in mine} == {"bfloat16", "float16", "float32"}
            assert {32, 64, 80, 96, 112, 128, 192, 256} <= {each.head_size for each in mine}
            assert {each.fp8 for each in mine} == {True, False}
            assert {each.window for each in mine} == {each.logit_cap for each in mine} == {True, False}
    assert len(small_set()) == 8


LOOP = """\
	mov a
.L_1:
	LDGSTS.E.BYPASS.128 [R1]
	@P0 BRA `(.L_3)
	HMMA.16816.F32.BF16 R1
.L_2:
	@P1 BRA `(.L_1)
	EXIT
.L_3:
	LDG.E.64 R4
	BRA `(.L_2)
"""


def test_a_loop_is_found_with_the_part_that_the_assembler_moved_away():
    import re

    lines = [line.strip() for line in LOOP.splitlines()]
    loop = machine_code.main_loop(
        lines, re.compile(r"(\.L\w+):"), machine_code._nvidia_branch, re.compile("EXIT"), machine_code.NVIDIA_MATRIX
    )
    assert [line.split()[0] for line in loop] == [
        "LDGSTS.E.BYPASS.128",
        "@P0",
        "HMMA.16816.F32.BF16",
        "@P1",
        "LDG.E.64",
        "BRA",
    ]


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("LDGSTS.E.BYPASS.128", 16),
        ("LDG.E", 4),
        ("LDG.E.64", 8),
        ("LDG.E.U16", 2),
        ("LDG.E.U8", 1),
        ("global_load_dwordx4", 16),
        ("buffer_load_dword", 4),
        ("global_load_ushort", 2),
        ("buffer_load_ubyte", 1),
    ],
)
def test_the_width_of_a_load_is_read_off_its_name(name, width):
    assert machine_code.load_width(name) == width


def test_the_wait_in_the_loop_counts():
    assert copies_ahead("%1 = ttg.async_wait %a, %b {num = 2 : i32}\n%2 = ttg.async_wait {num = 0 : i32}") == 2
    assert copies_ahead("no copies at all") == 0


def test_occupancy_is_bound_by_what_runs_out_first():
    chip = CHIPS["sm_80"]
    assert resident_warps(chip, registers=32, shared=0, num_warps=4) == 64  # warp slots
    assert resident_warps(chip, registers=128, shared=0, num_warps=4) == 16  # registers
    assert resident_warps(chip, registers=32, shared=80 << 10, num_warps=4) == 8  # shared memory
    assert resident_warps(CHIPS["gfx942"], registers=128, shared=0, num_warps=4) == 16
