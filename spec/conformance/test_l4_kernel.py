"""Level L4: an attention kernel reads what the block tables name, all of it and nothing else, and gives what float64
gives."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings

from spec.conformance.kernel import NoRoom, as_kernel, beyond_the_bound, judge_numbers, run
from spec.conformance.kernel_case import Case, call_of
from spec.conformance.kernel_checks import BITS, COPIES, NUMBERS, READS, Check, cases
from spec.conformance.suite import Suite


def judge(checks: Mapping[str, Check], name: str, attention_kernel: Callable[..., object]) -> None:
    kernel, check = as_kernel(attention_kernel), checks[name]
    if (reason := check.missing(kernel)) is not None:
        pytest.skip(reason)
    try:
        check(kernel)
    except NoRoom as reason:
        pytest.skip(f"no address space for a huge pool: {reason}")


class Wrong(Exception):
    """A case with a wrong output. Which rule it breaks takes many calls to find out: that is done for the smallest."""

    def __init__(self, case: Case) -> None:
        super().__init__(f"wrong once, and right when it was called again: {case!r}")
        self.case = case


@pytest.mark.parametrize("name", READS)
def test_a_query_reads_its_own_keys(name: str, attention_kernel: Callable[..., object]) -> None:
    """ATTN-1, ATTN-2, ATTN-3, exactly: slot by slot."""
    judge(READS, name, attention_kernel)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_query_gets_dense_attention(name: str, attention_kernel: Callable[..., object]) -> None:
    """ATTN-1, ATTN-2, ATTN-3, within the kernel bound, with poison in every cell that nobody sees."""
    judge(NUMBERS, name, attention_kernel)


def test_any_table_gives_dense_attention(suite: Suite, attention_kernel: Callable[..., object]) -> None:
    """ATTN-1, ATTN-2, ATTN-3: the smallest table for which that is not so."""
    kernel = as_kernel(attention_kernel)
    tier = settings(
        max_examples=suite.max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    done = 0

    @tier
    @given(cases(kernel))
    def any_table(case: Case) -> None:
        nonlocal done
        suite.check_time(lambda: f"{done} tables")
        call = call_of(case)
        if beyond_the_bound(call, *run(kernel, call)) is not None:
            raise Wrong(case)
        done += 1

    try:
        any_table()
    except Wrong as smallest:
        judge_numbers(kernel, smallest.case)
        raise


@pytest.mark.parametrize("name", BITS)
def test_neighbours_and_block_ids_change_no_bit(name: str, attention_kernel: Callable[..., object]) -> None:
    """ATTN-1: what a sequence gets depends on what it reads."""
    judge(BITS, name, attention_kernel)


@pytest.mark.parametrize("name", COPIES)
def test_a_copied_block_is_as_its_source(name: str, attention_kernel: Callable[..., object]) -> None:
    """ATTN-1: of an fp8 cache the scales are copied too."""
    judge(COPIES, name, attention_kernel)
