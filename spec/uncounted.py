"""The rules that a monitor leaves to a replay, since counters are not enough for them."""

from collections.abc import Mapping

from spec.rules import RULES, Rule

CONTENTS, AHEAD = "it needs the contents of every slot", "it looks ahead over every running request"
UNCOUNTED: Mapping[str, str] = {
    **dict.fromkeys(("TABLE-5", "CACHE-1", "SWAP-3", "ATTN-1"), CONTENTS),
    **dict.fromkeys(("PREEMPT-5", "SCHED-11", "SCHED-12"), AHEAD),
}
"""The rules that a monitor leaves to a replay, and why."""


def counted_rules() -> list[Rule]:
    """The rules that a monitor judges."""
    return [rule for rule in RULES.values() if rule.id not in UNCOUNTED]
