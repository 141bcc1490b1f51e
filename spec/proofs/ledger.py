"""Which rules of the specification are known by proof, and which are conditions that the proof starts from."""

from collections.abc import Mapping

RULE_OF_CLAUSE: Mapping[str, tuple[str, ...]] = {
    "one_place": ("SWAP-4",),
    "counters_in_range": (),
    "computed_are_known": (),
    "computed_have_slots": ("TABLE-1",),
    "no_spare_block": ("TABLE-1",),
    "window_is_kept": ("TABLE-10", "COW-8"),
    "no_block_twice": ("TABLE-6",),
    "host_no_block_twice": ("SWAP-1",),
    "entries_are_counted": ("ALLOC-2",),
    "host_entries_are_counted": ("SWAP-1",),
    "counts_are_entries": ("ALLOC-2",),
    "host_counts_are_entries": ("SWAP-1",),
    "holds_are_counted": ("ALLOC-2",),
    "counts_are_holds": ("ALLOC-2",),
    "count_is_holders": ("ALLOC-2",),
    "host_count_is_holders": ("SWAP-1",),
    "free_means_unreferenced": ("ALLOC-3",),
    "host_free_means_unreferenced": ("SWAP-1",),
    "content": ("TABLE-5", "ATTN-1"),
    "host_content": ("SWAP-3",),
    "reads_stay_filled": ("ATTN-1",),
    "host_reads_stay_filled": ("SWAP-3",),
    "blocks_are_not_overfilled": (),
    "host_blocks_are_not_overfilled": (),
    "cached_are_full": ("CACHE-2",),
    "cached_content": ("CACHE-1",),
    "reach_is_filled": (),
    "steps_see_what_they_were_given": ("ATTN-1",),
    "unwritten_are_due": (),
    "shared_blocks_are_never_written": ("COW-2",),
    "readers_keep_reading": ("TABLE-5",),
    "held_blocks_keep_their_owner": ("ALLOC-5",),
    "holds_end_with_their_step": ("ALLOC-5",),
}
"""For each clause the rules that it is, or is a part of: these hold in every state and of every step of the core."""

RULE_OF_LAW: Mapping[str, tuple[str, ...]] = {
    "table_entries_are_not_free": ("ALLOC-3",),
    "held_blocks_are_not_free": ("ALLOC-5",),
    "slots_are_distinct": ("TABLE-2", "TABLE-3"),
    "slots_are_in_the_pool": ("TABLE-7",),
    "positions_are_in_the_table": ("TABLE-2",),
    "less_than_a_block_is_wasted": ("TABLE-1",),
    "paged_equals_contiguous_at_the_start": ("ATTN-1",),
    "paged_equals_contiguous_by_one_more": ("ATTN-1",),
    "the_rank_of_the_first_request_falls": ("SCHED-4", "SCHED-9", "PREEMPT-1"),
    "the_first_request_is_never_preempted": ("PREEMPT-1",),
}
"""For each lemma and law the rules that lean on it."""

RULE_OF_GUARD: Mapping[str, tuple[str, ...]] = {
    "append": ("CACHE-11",),
    "rollback": ("COW-7", "COW-8"),
    "fork": ("COW-6",),
    "slide": ("TABLE-10",),
    "allocate": ("ALLOC-4", "SCHED-5"),
    "hit": ("CACHE-3", "CACHE-4"),
    "copy": ("ALLOC-4", "COW-3", "COW-5"),
    "write": ("COW-2", "TABLE-2", "TABLE-9"),
    "publish": ("CACHE-6",),
    "evict": ("CACHE-9",),
    "swap_out": ("SWAP-2", "SWAP-5", "SWAP-7"),
    "swap_in": ("ALLOC-4", "SWAP-5"),
    "complete": ("ATTN-4",),
}
"""For each transition the rules that its guard stands for. The proof does not show that an engine keeps them: it shows
that they suffice, and ``mutations.py`` that they are needed."""
