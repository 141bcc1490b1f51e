"""What all tests share: threads, Triton's interpreter, and the three Hypothesis tiers."""

import os

# Before anything imports numpy, torch or triton.
os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it once; on a GPU run with TRITON_INTERPRET=0
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # our products are small: threads cost more than they bring
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one worker a core already

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Some examples are made of numbers that stand in the modules that are loaded, and so would depend on which tests a worker
# had before: a mutant died by another rule then, or survived.
providers._get_local_constants = providers.Constants

# dev: while you work, with the database of examples that failed. ci: the same examples in every run.
# soak: for hours. An example that once failed becomes a transcript or an @example, never a rerun.
EVERY_TIER = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
TIERS = {
    "dev": settings(EVERY_TIER, max_examples=60),
    "ci": settings(EVERY_TIER, max_examples=100, derandomize=True, database=None),
    "soak": settings(EVERY_TIER, max_examples=20_000),
}
for name, tier in TIERS.items():
    settings.register_profile(name, tier)


def tier_name() -> str:
    """The tier that KVPROOF_TIER names, or ``ci`` where CI is set, or ``dev``."""
    return os.environ.get("KVPROOF_TIER") or ("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    if tier_name() not in TIERS:
        raise pytest.UsageError(f"KVPROOF_TIER is {tier_name()!r}, it must be one of {', '.join(TIERS)}")
    settings.load_profile(tier_name())


def pytest_report_header() -> str:
    return f"kvproof: Hypothesis tier {tier_name()}"
