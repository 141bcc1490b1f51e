"""Lemmas: what follows from rules, so that no engine can be the first to break it. Tests show that they do follow."""

from spec.preemption import blocks_for_step
from spec.prefix_cache import sure_hits
from spec.vocabulary import AdmissionRule, Admit, Fork, State


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
    return s.config.admission_rule is not AdmissionRule.NO_EVICT or blocks_for_step(s, sure_hits) <= len(s.free)


def who_is_admitted_is_served(before: State, event: Admit, after: State) -> bool:
    """When a request is admitted, what is free suffices for everybody who then runs, as far as this step goes.

    So the estimate of every admission rule is sound, and nobody who ran before is preempted behind an admission: SCHED-11
    counts what the running ones still take in this step and what the newcomer wants, which is no less than what they then
    take, and PREEMPT-5 lets nobody be preempted while they lack nothing. Hence victims who ran before the step come before
    its admissions, whatever order an engine decides in, and a report need not say which it was.

    The newcomer itself may give way, if it has several sequences: one of them takes a cached block that another would have
    begun with, and that one then hits nothing behind it either. It has been preempted before, so it is the last one served.
    """
    return blocks_for_step(after) <= len(after.free)
