"""What breaks if: changes of the model, each with the clause that has to fail, and the trial of one of them."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from spec.proofs import holders, transitions
from spec.proofs.finite import Instance, counterexample
from spec.proofs.obligations import obligations_of
from spec.proofs.solvers import check
from spec.proofs.transitions import Transition


@dataclass(frozen=True)
class Mutation:
    """One piece of the model's text replaced by another, seen through one transition and the clause it breaks."""

    name: str
    transition: str
    clause: str
    old: str
    new: str
    module: str = "transitions"


@dataclass(frozen=True)
class Trial:
    """What became of a mutated model: the clauses that are no longer proved, and a concrete counterexample."""

    mutation: Mutation
    unproved: tuple[str, ...]
    instance: Instance | None

    @property
    def is_refuted(self) -> bool:
        """The clause that one would name fails, and there is an instance to show for it."""
        return self.mutation.clause in self.unproved and self.instance is not None


class Unmatched(ValueError):
    """The text that a mutation replaces does not stand exactly once in the model."""

    def __init__(self, mutation: Mutation, matches: int) -> None:
        super().__init__(f"{mutation.name}: {mutation.old!r} stands {matches} times in {mutation.module}.py, not once")
        self.mutation = mutation
        self.matches = matches


def mutated(mutation: Mutation) -> Transition:
    """The transition of the changed model."""
    module = {"holders": holders, "transitions": transitions}[mutation.module]
    text = inspect.getsource(module)
    if (matches := text.count(mutation.old)) != 1:
        raise Unmatched(mutation, matches)
    changed = _execute(f"{module.__name__}_{mutation.name}", text.replace(mutation.old, mutation.new))
    if module is holders:
        moves, changed = changed, _execute(f"{transitions.__name__}_{mutation.name}", inspect.getsource(transitions))
        for name in vars(holders):
            if name in vars(changed) and inspect.isfunction(getattr(holders, name)):
                setattr(changed, name, getattr(moves, name))
    found: Transition = changed.TRANSITIONS[mutation.transition]
    return found


def _execute(name: str, text: str) -> ModuleType:
    """A module of its own with this text, which is that of a module of ours with one piece replaced."""
    module = ModuleType(name)
    exec(compile(text, f"<{name}>", "exec"), vars(module))  # noqa: S102
    return module


def attempt(mutation: Mutation) -> Trial:
    """Try to prove the changed transition, and look for an instance where the named clause fails."""
    transition = mutated(mutation)
    unproved = [o.clause for o in obligations_of(transition) if not check(o).is_proved]
    return Trial(mutation, tuple(unproved), counterexample(transition, mutation.clause))


def attempts() -> Iterator[Trial]:
    """Every mutation tried."""
    return map(attempt, MUTATIONS)


MUTATIONS: tuple[Mutation, ...] = (
    # Holders: the counts and the free list
    Mutation(
        "fork_does_not_count",
        "fork",
        "count_is_holders",
        "ref_count=lambda b: P.ref_count(b) + A.If(got(b), 1, 0)",
        "ref_count=P.ref_count",
        "holders",
    ),
    Mutation(
        "taken_block_stays_free",
        "allocate",
        "free_means_unreferenced",
        "free=lambda b: A.And(A.Not(got(b)), P.free(b))",
        "free=P.free",
        "holders",
    ),
    Mutation(
        "hit_leaves_the_block_free",
        "hit",
        "free_means_unreferenced",
        "free=lambda b: A.And(A.Not(got(b)), P.free(b))",
        "free=P.free",
        "holders",
    ),
    Mutation(
        "new_holder_gets_the_next_but_one_number",
        "fork",
        "entries_are_counted",
        "rank=lambda t, i: A.If(here(t, i), P.entries(pick(i)), P.rank(t, i))",
        "rank=lambda t, i: A.If(here(t, i), P.entries(pick(i)) + 1, P.rank(t, i))",
        "holders",
    ),
    Mutation(
        "one_block_for_two_entries",
        "allocate",
        "no_block_twice",
        "different = A.upto(stop, lambda i: A.Implies(start <= i, place(pick(i)) == i))",
        "different = A.upto(stop, lambda i: A.Implies(start <= i, place(pick(i)) <= i))",
        "holders",
    ),
    Mutation(
        "release_does_not_count",
        "release",
        "count_is_holders",
        "ref_count=lambda b: P.ref_count(b) - A.If(gone(b), 1, 0)",
        "ref_count=P.ref_count",
        "holders",
    ),
    Mutation(
        "release_leaks_the_last_reference",
        "release",
        "free_means_unreferenced",
        "free=lambda b: A.Or(P.free(b), A.And(gone(b), P.ref_count(b) == 1))",
        "free=P.free",
        "holders",
    ),
    Mutation(
        "release_frees_a_shared_block",
        "release",
        "free_means_unreferenced",
        "A.And(gone(b), P.ref_count(b) == 1)",
        "A.And(gone(b), P.ref_count(b) <= 2)",
        "holders",
    ),
    Mutation(
        "release_forgets_steps_in_flight",
        "release",
        "held_blocks_keep_their_owner",
        "A.And(gone(b), P.ref_count(b) == 1)",
        "A.And(gone(b), P.entries(b) == 1)",
        "holders",
    ),
    Mutation(
        "release_leaves_a_gap_in_the_numbers",
        "release",
        "entries_are_counted",
        "rank=lambda t, i: A.If(moved(P.table(t, i), P.rank(t, i)), number(P.table(t, i)), P.rank(t, i))",
        "rank=P.rank",
        "holders",
    ),
    Mutation(
        "window_frees_a_shared_block",
        "slide",
        "free_means_unreferenced",
        "A.And(gone(b), P.ref_count(b) == 1)",
        "gone(b)",
        "holders",
    ),
    # Steps in flight
    Mutation(
        "submit_does_not_count",
        "submit",
        "count_is_holders",
        "ref_count=lambda b: P.ref_count(b) + A.If(some(b), 1, 0)",
        "ref_count=P.ref_count",
        "holders",
    ),
    Mutation(
        "submit_forgets_what_it_saw",
        "submit",
        "steps_see_what_they_were_given",
        "seen=lambda m, b, o: A.If(A.And(m == k, some(b)), P.kv(b, o), S.seen(m, b, o))",
        "seen=S.seen",
        "holders",
    ),
    Mutation(
        "complete_frees_what_a_table_names",
        "complete",
        "free_means_unreferenced",
        "A.And(S.holds(k, b), P.ref_count(b) == 1)",
        "S.holds(k, b)",
        "holders",
    ),
    Mutation(
        "complete_leaks",
        "complete",
        "free_means_unreferenced",
        "free=lambda b: A.Or(P.free(b), A.And(S.holds(k, b), P.ref_count(b) == 1))",
        "free=P.free",
        "holders",
    ),
    Mutation(
        "complete_leaves_a_gap_in_the_numbers",
        "complete",
        "holds_are_counted",
        "A.And(S.holds(k, b), S.hold_rank(m, b) == last(b)), S.hold_rank(k, b)",
        "A.And(S.holds(k, b), S.hold_rank(m, b) == last(b)), last(b)",
        "holders",
    ),
    Mutation(
        "submit_holds_free_blocks",
        "submit",
        "free_means_unreferenced",
        "A.Not(S.device.free(b)), A.Not(S.holds(k, b))",
        "A.Not(S.holds(k, b))",
    ),
    Mutation(
        "submit_holds_twice",
        "submit",
        "counts_are_holds",
        "A.Not(S.device.free(b)), A.Not(S.holds(k, b))",
        "A.Not(S.device.free(b))",
    ),
    Mutation(
        "submit_reads_beyond_what_is_there",
        "submit",
        "reach_is_filled",
        "0 <= reach(b), reach(b) <= S.device.filled(b)",
        "0 <= reach(b)",
    ),
    Mutation(
        "complete_before_everything_is_written",
        "complete",
        "unwritten_are_due",
        "return A.And(S.in_flight(k), done), replace(T",
        "return S.in_flight(k), replace(T",
    ),
    Mutation(
        "step_gives_back_before_it_is_over",
        "complete",
        "holds_end_with_their_step",
        "in_flight=lambda m: A.And(m != k, S.in_flight(m)))",
        "in_flight=S.in_flight)",
    ),
    Mutation(
        "schedule_without_a_hold",
        "schedule",
        "unwritten_are_due",
        "A.And(guard, S.in_flight(k), S.holds(k, b))",
        "A.And(guard, S.in_flight(k))",
    ),
    Mutation(
        "schedule_outside_its_reach",
        "schedule",
        "unwritten_are_due",
        "reach=lambda m, x: A.If(A.And(m == k, x == b), end, S.reach(m, x))",
        "reach=S.reach",
    ),
    Mutation(
        "write_below_a_step_in_flight",
        "write",
        "held_blocks_keep_their_owner",
        "        A.Not(S.cached(b)),\n        unread,\n",
        "        A.Not(S.cached(b)),\n",
    ),
    Mutation(
        "late_write_of_a_wrong_value",
        "land",
        "content",
        "A.If(at(x, p), S.seen(k, b, o), S.device.kv(x, p))",
        "A.If(at(x, p), S.seen(k, b, 0), S.device.kv(x, p))",
    ),
    # Sequences and tokens
    Mutation("start_of_a_swapped_sequence", "start", "one_place", "A.Not(used(A, S, s))", "A.Not(S.running(s))"),
    Mutation(
        "append_over_earlier_tokens",
        "append",
        "content",
        "i == end.blocks, o == end.rest)",
        "i == end.blocks, o <= end.rest)",
    ),
    Mutation(
        "rollback_keeps_computed_tokens",
        "rollback",
        "computed_are_known",
        "at_most(A, computed, smaller(A, S.num_computed_tokens(s), num_tokens))",
        "at_most(A, computed, S.num_computed_tokens(s))",
    ),
    Mutation(
        "rollback_computes_more",
        "rollback",
        "content",
        "at_most(A, computed, smaller(A, S.num_computed_tokens(s), num_tokens))",
        "at_most(A, computed, num_tokens)",
    ),
    Mutation(
        "rollback_behind_the_window",
        "rollback",
        "window_is_kept",
        "A.Or(S.first(s) == 0, S.first(s) <= first_block_read(A, computed)),",
        "",
    ),
    Mutation(
        "rollback_drops_computed_blocks",
        "rollback",
        "computed_have_slots",
        "blocks_needed(A, computed) <= kept,",
        "",
    ),
    Mutation(
        "rollback_keeps_empty_blocks",
        "rollback",
        "no_spare_block",
        "kept <= blocks_needed(A, num_tokens),",
        "",
    ),
    Mutation(
        "rollback_forgets_to_give_back",
        "rollback",
        "counts_are_entries",
        "device=drop(A, S.device, s, kept, S.num_blocks(s)),",
        "",
    ),
    Mutation(
        "fork_into_a_live_sequence",
        "fork",
        "counts_are_entries",
        "return A.And(S.running(parent), A.Not(used(A, S, child)))",
        "return A.And(S.running(parent), A.Not(S.swapped(child)), parent != child)",
    ),
    Mutation(
        "fork_forgets_the_window",
        "fork",
        "entries_are_counted",
        "first=inherit(S.first),",
        "first=lambda t: A.If(t == child, 0, S.first(t)),",
    ),
    Mutation("fork_forgets_the_tokens", "fork", "content", "token=inherit(S.token),", ""),
    Mutation(
        "release_leaves_the_table",
        "release",
        "entries_are_counted",
        'running=lambda t: A.And(t != s, S.running(t)),\n    )\n\n\n@transition("Seq", "Int")\ndef slide',
        ')\n\n\n@transition("Seq", "Int")\ndef slide',
    ),
    Mutation(
        "window_passes_one_block_too_many",
        "slide",
        "window_is_kept",
        "first <= first_block_read(A, S.num_computed_tokens(s)))\n    return guard, replace(\n        S,\n        device=drop",
        "first <= first_block_read(A, S.num_computed_tokens(s)) + 1)\n    return guard, replace(\n        S,\n        device=drop",
    ),
    Mutation(
        "window_forgets_to_give_back",
        "slide",
        "counts_are_entries",
        "device=drop(A, S.device, s, S.first(s), first),",
        "",
    ),
    # Blocks and what is in them
    Mutation(
        "allocate_more_than_is_needed",
        "allocate",
        "no_spare_block",
        "stop <= blocks_needed(A, S.num_tokens(s)),",
        "",
    ),
    Mutation(
        "allocate_a_block_in_use",
        "allocate",
        "reads_stay_filled",
        "lambda i: S.device.free(pick(i))),",
        "lambda i: A.Not(S.cached(pick(i)))),",
    ),
    Mutation(
        "allocated_block_stays_cached",
        "allocate",
        "cached_are_full",
        "cached=lambda b: A.And(A.Not(fresh(b)), S.cached(b)),",
        "",
    ),
    Mutation(
        "copy_onto_a_block_in_use",
        "copy",
        "readers_keep_reading",
        "S.device.free(target),",
        "target != source,",
    ),
    Mutation(
        "copy_nothing",
        "copy",
        "content",
        "A.And(b == target, o < size), A.If(",
        "A.And(b == target, o < 0), A.If(",
    ),
    Mutation(
        "copy_one_token_short",
        "copy",
        "content",
        "A.And(b == target, o < size), A.If(",
        "A.And(b == target, o < size - 1), A.If(",
    ),
    Mutation(
        "copy_before_the_source_is_written",
        "copy",
        "content",
        "A.upto(size, lambda o: S.written(source, o)),",
        "",
    ),
    Mutation(
        "copied_block_stays_cached",
        "copy",
        "cached_content",
        "cached=lambda b: A.And(b != target, S.cached(b)),\n        written",
        "written",
    ),
    Mutation(
        "write_into_a_shared_block",
        "write",
        "shared_blocks_are_never_written",
        "P.entries(b) == 1,",
        "",
    ),
    Mutation(
        "write_into_a_block_of_two",
        "write",
        "readers_keep_reading",
        "P.entries(b) == 1,",
        "P.entries(b) <= 2,",
    ),
    Mutation(
        "write_into_a_cached_block",
        "write",
        "cached_content",
        "        A.Not(S.cached(b)),\n        unread,\n",
        "        unread,\n",
    ),
    Mutation("write_beyond_the_block", "write", "blocks_are_not_overfilled", "end <= A.block_size,", ""),
    Mutation(
        "write_unknown_tokens",
        "write",
        "computed_are_known",
        "at_most(A, after, S.num_tokens(s)),\n        in_table(A, S, s, i),",
        "in_table(A, S, s, i),",
    ),
    Mutation(
        "write_the_first_token_everywhere",
        "write",
        "content",
        "A.If(at(x, o), S.token(s, i, o), P.kv(x, o))",
        "A.If(at(x, o), S.token(s, i, begin), P.kv(x, o))",
    ),
    Mutation(
        "write_one_slot_late",
        "write",
        "content",
        "return A.And(x == b, begin <= o, o < end)",
        "return A.And(x == b, begin < o, o <= end)",
    ),
    Mutation(
        "write_without_a_block",
        "write",
        "computed_have_slots",
        "        in_table(A, S, s, i),\n        P.entries(b) == 1,",
        "        P.entries(b) == 1,",
    ),
    # The prefix cache
    Mutation(
        "hit_under_a_wrong_key",
        "hit",
        "content",
        "A.And(S.cached(pick(i)), S.key(pick(i)) == key(i))",
        "S.cached(pick(i))",
    ),
    Mutation(
        "hit_a_block_that_is_not_cached",
        "hit",
        "content",
        "A.And(S.cached(pick(i)), S.key(pick(i)) == key(i))",
        "S.key(pick(i)) == key(i)",
    ),
    Mutation(
        "hit_without_comparing_tokens",
        "hit",
        "content",
        "A.upto(n, lambda i: A.upto(A.block_size, lambda o: S.token(s, i, o) == A.cached_value(key(i), o))),",
        "",
    ),
    Mutation(
        "hit_more_than_is_known",
        "hit",
        "computed_are_known",
        "at_most(A, Count(n, 0), S.num_tokens(s)),",
        "",
    ),
    Mutation(
        "hit_counts_one_block_more",
        "hit",
        "computed_have_slots",
        "_count(A, S, s, Count(n, 0), S.num_tokens(s))",
        "_count(A, S, s, Count(n + 1, 0), S.num_tokens(s))",
    ),
    Mutation(
        "hit_skips_what_the_window_needs",
        "hit",
        "window_is_kept",
        "A.Or(skip == 0, skip <= first_block_read(A, Count(n, 0))),",
        "",
    ),
    Mutation("publish_a_part_of_a_block", "publish", "cached_are_full", "extent(A, S, s, i) == A.block_size,", ""),
    Mutation(
        "publish_under_a_wrong_key",
        "publish",
        "cached_content",
        "A.upto(A.block_size, lambda o: A.cached_value(key, o) == S.token(s, i, o)),",
        "",
    ),
    # The host
    Mutation("swap_out_before_it_is_written", "swap_out", "host_content", "_written_so_far(A, S, s),", ""),
    Mutation(
        "swap_out_leaves_computed_tokens_behind",
        "swap_out",
        "computed_have_slots",
        "blocks_needed(A, S.num_computed_tokens(s)) <= n,",
        "",
    ),
    Mutation(
        "swap_out_onto_foreign_contents",
        "swap_out",
        "host_content",
        "Q.kv(pick(i), o) == P.kv(P.table(s, i), o))",
        "A.And())",
    ),
    Mutation(
        "swap_out_onto_a_shorter_copy",
        "swap_out",
        "host_reads_stay_filled",
        "return A.Or(Q.free(pick(i)), extent(A, S, s, i) <= Q.filled(pick(i)))",
        "return A.And()",
    ),
    Mutation(
        "swap_out_stays_running",
        "swap_out",
        "one_place",
        "running=lambda t: A.And(t != s, S.running(t)),\n        swapped=lambda t: A.Or(t == s, S.swapped(t)),",
        "swapped=lambda t: A.Or(t == s, S.swapped(t)),",
    ),
    Mutation(
        "swap_out_keeps_the_device_blocks",
        "swap_out",
        "counts_are_entries",
        "left = drop(A, P, s, S.first(s), S.num_blocks(s))",
        "left = P",
    ),
    Mutation(
        "swap_in_keeps_the_host_blocks",
        "swap_in",
        "host_counts_are_entries",
        "left = drop(A, P, s, S.first(s), S.num_blocks(s))",
        "left = P",
    ),
    Mutation(
        "swap_in_leaves_a_stale_name",
        "swap_in",
        "cached_content",
        "cached=lambda b: A.And(A.Not(new(b)), S.cached(b)),",
        "",
    ),
    Mutation(
        "swap_in_copies_nothing",
        "swap_in",
        "content",
        "kv=lambda b, o: A.If(fresh(b), found(P.table(s, place(b)), o), Q.kv(b, o)),",
        "",
    ),
    Mutation(
        "swapped_sequence_leaks_its_blocks",
        "release_swapped",
        "host_counts_are_entries",
        "host=drop(A, S.host, s, S.first(s), S.num_blocks(s)),",
        "",
    ),
)
"""The changes that are tried. Each is a bug that real engines have had, or the loss of one condition of a guard."""
