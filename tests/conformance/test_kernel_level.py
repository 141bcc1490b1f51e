"""Level L4 lets our kernels pass, and catches each sabotaged kernel by the rule that is named beside it."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from spec.bugs import BUGS
from spec.conformance.adapters.kernels_attention import twin
from spec.conformance.adapters.reference_attention import reference
from spec.conformance.kernel import AttentionKernel, KernelFault, KernelViolation, Offer, as_kernel, judge_numbers
from spec.conformance.kernel_case import Case
from spec.conformance.kernel_checks import BITS, COPIES, NUMBERS, READS, cases
from tests.conformance import plain_kernel

ROOT = Path(__file__).parents[2]
SOURCE = Path(plain_kernel.__file__).read_text()


CHECKS = [*READS.values(), *NUMBERS.values(), *BITS.values(), *COPIES.values()]


def offered(module) -> AttentionKernel:
    return AttentionKernel(
        "plain",
        module.attend,
        offers=frozenset(Offer),
        head_sizes=(16,),
        block_sizes=(3, 8),
        groups=(1, 2),
        copy_blocks=module.copy_blocks,
    )


def first_violation(kernel: AttentionKernel) -> KernelViolation:
    for check in CHECKS:
        try:
            with np.errstate(all="ignore"):
                check(kernel)
        except KernelViolation as violation:
            return violation
    pytest.fail("nothing was found")


@pytest.mark.parametrize("check", CHECKS)
def test_a_plain_kernel_passes(check):
    check(offered(plain_kernel))


@dataclass(frozen=True)
class Sabotage:
    """The plain kernel with ``old``, which is there once, replaced by ``new``; the rule that must catch it. ``row`` is the
    bug of ``spec.bugs`` that it is like."""

    name: str
    rule: str
    old: str
    new: str
    row: str = ""


SABOTAGES = [
    Sabotage("causal one too few", "ATTN-3", "seen = tokens <= position", "seen = tokens < position"),
    Sabotage("causal one too many", "ATTN-3", "seen = tokens <= position", "seen = tokens <= position + 1"),
    Sabotage("window one too many", "ATTN-3", "tokens > position - window", "tokens >= position - window"),
    Sabotage("window one too few", "ATTN-3", "tokens > position - window", "tokens > position - window + 1"),
    Sabotage("somebody else's table", "ATTN-2", "table = block_tables[seq]", "table = block_tables[0]"),
    Sabotage(
        "heads interleaved",
        "ATTN-3",
        "gather(key_cache, table, tokens, head // group)",
        "gather(key_cache, table, tokens, head % num_kv_heads)",
    ),
    Sabotage(
        "values of another head",
        "ATTN-1",
        "gather(value_cache, table, tokens, head // group)",
        "gather(value_cache, table, tokens, 0)",
    ),
    Sabotage("places run backwards", "ATTN-1", "tokens % block_size, head", "-1 - tokens % block_size, head"),
    Sabotage(
        "values one key late",
        "ATTN-1",
        "gather(value_cache, table, tokens, head // group)",
        "gather(value_cache, table, np.maximum(tokens - 1, 0), head // group)",
    ),
    Sabotage(
        "dead cells times zero",
        "ATTN-3",
        "                        tokens = tokens[seen]\n",
        "                        table = np.resize(block_tables[seq][: -(-length // key_cache.shape[1]) or 1], 999)\n",
    ),
    Sabotage(
        "addresses of 32 bits",
        "ATTN-2",
        "cache[table[tokens // block_size], tokens",
        "cache[(table[tokens // block_size] * cache[0].size).astype(np.uint32) // cache[0].size, tokens",
    ),
    Sabotage("nothing over nothing", "ATTN-3", "(total[1] if total[1] else 1.0)", "total[1]"),
    Sabotage("log-sum-exp in base 2", "ATTN-1", "total[0] + np.log(total[1])", "total[0] + np.log2(total[1])"),
    Sabotage(
        "the first split does not fade", "ATTN-1", "a[1] * fade + b[1] * weight, a[2]", "a[1] + b[1] * weight, a[2]"
    ),
    Sabotage("the maximum stays on", "ATTN-1", "np.exp(score - most)", "np.exp(score)"),
    Sabotage(
        "cap before scale",
        "ATTN-1",
        "keys @ q * np.float32(scale)",
        "keys @ q * np.float32(scale if logit_cap is None else 1.0)",
    ),
    Sabotage("splits by the batch", "ATTN-1", "TILE_TOKENS):\n", "TILE_TOKENS // min(4, len(seq_lens))):\n"),
    Sabotage(
        "the cache is scratch",
        "TABLE-9",
        "keys = gather",
        "key_cache[table[0], 0] = 1.0\n                        keys = gather",
    ),
    Sabotage("scales left out", "ATTN-1", " * factors[..., None]", "", "B-213"),
    Sabotage(
        "K's scale is V's",
        "ATTN-1",
        "widened(key_cache, kv_scales[..., 0])",
        "widened(key_cache, kv_scales[..., 1])",
        "B-214",
    ),
    Sabotage(
        "scale of the neighbouring slot",
        "ATTN-1",
        "factors[..., None]",
        "np.roll(factors, 1, axis=1)[..., None]",
        "B-215",
    ),
    Sabotage("scale of the block's first token", "ATTN-1", "factors[..., None]", "factors[:, :1, :, None]", "B-215"),
    Sabotage(
        "a 1 before the point of small numbers", "ATTN-1", "np.where(exponent == 0, small, normal)", "normal", "B-215"
    ),
    Sabotage(
        "blocks copied without their scales",
        "ATTN-1",
        "else (key_cache, value_cache, kv_scales)",
        "else (key_cache, value_cache)",
        "B-110",
    ),
    Sabotage(
        "values not copied", "ATTN-1", "(key_cache, value_cache) if kv_scales", "(key_cache,) if kv_scales", "B-069"
    ),
]


def test_a_row_is_a_public_bug():
    assert {each.row for each in SABOTAGES} - {""} <= set(BUGS)


def sabotaged(sabotage: Sabotage, folder: Path):
    assert SOURCE.count(sabotage.old) == 1
    path = folder / "sabotaged_kernel.py"
    path.write_text(SOURCE.replace(sabotage.old, sabotage.new))
    made = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("sabotaged_kernel", path))
    spec.loader.exec_module(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda each: each.name)
def test_a_sabotaged_kernel_is_caught_by_the_rule(sabotage, tmp_path):
    violation = first_violation(offered(sabotaged(sabotage, tmp_path)))
    assert violation.rule.id == sabotage.rule, violation


def test_a_report_shows_the_case_again(tmp_path):
    """What it says to paste raises the same violation."""
    kernel = offered(sabotaged(SABOTAGES[0], tmp_path))
    report = str(first_violation(kernel))
    assert report.startswith("ATTN-3 does not hold: ")
    assert "block_tables" in report
    assert "block   0" in report  # the memory map
    pasted: dict[str, object] = {}
    exec(report[report.index("from spec.conformance") :], pasted)  # noqa: S102  the report is ours
    with pytest.raises(KernelViolation) as again:
        pasted["test_attn_3_again"](kernel)
    assert str(again.value) == report


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (lambda *_, **__: 1 / 0, "broken raised ZeroDivisionError"),
        (lambda query, *_, **__: query, "broken gave 1 arrays, it declares 2"),
        (lambda query, *_, **__: (query[0], query), r"the output has the shape \(1, 16\), needs \(1, 1, 16\)"),
        (lambda query, *_, **__: (query, "no"), "the log-sum-exp is a str that numpy can not read"),
    ],
)
def test_a_kernel_that_gives_no_answer_breaks_no_rule(attend, words):
    kernel = AttentionKernel("broken", attend, offers=frozenset({Offer.LSE}))
    with pytest.raises(KernelFault, match=words):
        judge_numbers(kernel, Case(head_size=16))


def test_a_plain_function_is_a_kernel_that_declares_nothing():
    kernel = as_kernel(plain_kernel.attend)
    assert kernel.name == "attend"
    assert kernel.offers == frozenset()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kernel", [twin, reference], ids=lambda kernel: kernel.name)
def test_our_kernels_pass(kernel, check):
    if check.missing(kernel) is None:
        check(kernel)
    else:
        assert kernel is reference
        assert {Offer.LOGIT_CAP, Offer.COPY}.intersection(check.offers)


@settings(max_examples=settings.default.max_examples // 3)
@given(cases(reference))
def test_the_reference_gives_dense_attention_for_any_table(case):
    judge_numbers(reference, case)


def suite(engine: str, *more: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Level L4 from the command line, in a folder of its user's."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "spec.conformance.plugin", "-p", "no:cacheprovider"]
    where = [ROOT / "spec/conformance/test_l4_kernel.py", "--rootdir", folder, "-c", os.devnull]
    return subprocess.run(
        [*command, *where, "--engine", engine, *more],
        cwd=folder,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_our_triton_kernel_passes_in_the_interpreter():
    count = "200" if os.environ.get("KVPROOF_TIER") == "soak" else "8"
    done = suite("spec.conformance.adapters.kernels_attention:triton_interpreted", "--conformance-max-examples", count)
    assert done.returncode == 0, done.stdout
    assert "30 passed" in done.stdout


@pytest.mark.slow
def test_a_plain_function_is_judged_from_the_command_line(tmp_path):
    """What it does not declare is skipped, and the table for which it fails is the smallest."""
    (tmp_path / "late.py").write_text(
        SOURCE.replace("seen = tokens <= position", "seen = tokens < position").replace("return out, lse", "return out")
    )
    done = suite("late:attend", "-k", "any_table or views", "--conformance-max-examples", "5", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 skipped" in done.stdout
    assert "judge_reads(as_kernel(attention_kernel), Case(seq_lens=(1,), block_size=1))" in done.stdout
