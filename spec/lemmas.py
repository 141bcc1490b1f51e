"""Lemmas: what follows from rules, so that no engine can be the first to break it. Tests show that they do follow."""

from spec.preemption import blocks_for_step
from spec.vocabulary import AdmissionRule, Fork, State


def fork_shares_everything(before: State, event: Fork, after: State) -> bool:
    """A fork shares every block and every token of its parent, and takes no block.

    It was the rule COW-1. The executable model forks like that; an engine that shows other tables breaks TABLE-8, with
    other tokens PREEMPT-4, and with other free blocks API-3.
    """
    return (
        after.block_tables[event.child] == before.block_tables[event.parent] == after.block_tables[event.parent]
        and after.seqs[event.child].tokens == before.seqs[event.parent].tokens
        and set(after.free) == set(before.free)
    )


def no_evict_means_no_eviction(s: State) -> bool:
    """Under the admission rule NO_EVICT the running requests never lack a block, so that nobody is preempted.

    It was the rule SCHED-21. Who is admitted (SCHED-11) and who is forked (SCHED-22) leaves free what the running ones may
    still ask for; whoever is preempted while they lack nothing breaks PREEMPT-5.
    """
    return s.config.admission_rule is not AdmissionRule.NO_EVICT or blocks_for_step(s) <= len(s.free)
