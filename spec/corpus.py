"""The corpus of public bugs of serving engines, as the invariants that it implies: what covers each of them here."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import spec.replay  # noqa: F401  it loads the chapters, which enter their rules
from spec.rules import RULES


class Way(Enum):
    """How an invariant is covered: it is rules, it follows from rules, tests outside the rules check it, or not."""

    RULES = "rules"
    LEMMA = "lemma"
    TESTS = "tests"
    OUT = "out"


@dataclass(frozen=True)
class Coverage:
    """What covers an invariant. ``tests`` are named ``path::function``; the remark says what the rules leave open,
    or why it follows from them, or why it is out."""

    id: str
    sentence: str
    way: Way
    rules: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    remark: str = ""


NOT_USED = ("A8", "R8", "X10")
"""Numbers that the corpus does not have."""

SENTENCES: Mapping[str, str] = {
    line.partition(" ")[0]: line.partition(" ")[2]
    for line in """
A1 Free and referenced blocks together are all blocks, each counted once.
A2 A reference count is the number of holders, recounted from scratch.
A3 A block is at most once in the free list, and only a free block is handed out.
A4 A block is in the free list exactly when nobody references it.
A5 Every way to end gives each held reference back once, and an idle engine holds nothing.
A6 A failed allocation or admission leaves the state as it was.
A7 If admission says yes, the allocation succeeds; hits in the free list do not also count as free.
A9 No block goes to another holder while a submitted step or copy may read or write it.
A10 Hits are pinned before new blocks are drawn, and the end of a chain is evicted before its beginning.
A11 Eviction frees what was asked for, or all there is, and stops.
T1 A table has the blocks that the tokens up to this step need.
T2 The slot of a position is its block's first slot plus its offset; write slots are distinct.
T3 The last block of a sequence that is not empty holds between one token and a whole block.
T4 Padding neither reads nor writes anything that influences a live request.
T5 What the worker computes with is the scheduler's table.
T6 Every table entry that is read lies inside the table.
T7 What stands behind the end of a table can be anything.
T8 Results do not depend on which blocks a sequence has.
C1 A block that is written has one holder and no published key.
C2 Nobody sees what a sibling writes.
C3 There is one reference for each holder and block, taken and given back alike.
C4 Each copy is made once, before its source is released and before its target is written.
C5 A request has exactly as many answers as were asked for; each ends on its own, an abort ends all.
C6 Siblings have distinct and reproducible random streams.
C7 A fork that fails changes nothing.
P1 A cached block holds exactly the K and V of its key's whole prefix.
P2 Everything that influences K and V is in the key, and a collision misses.
P3 The maps from keys to blocks and back agree.
P4 Hits are on computed blocks only, and on each as soon as it is computed.
P5 Only full blocks are keyed.
P6 At least one token is always computed.
P7 From look-up to use a hit cannot be evicted.
P8 Hits form a prefix.
P9 One query and at most one hit are counted for each admitted request, and the longest prefix is hit.
P10 Different salts never share, equal salts do.
P11 Answers are equal with the cache on and off.
P12 Free, evictable, protected and used blocks together are all blocks, each counted once.
P13 A key is reported as removed only when its block is gone.
P14 Positions and write slots begin exactly behind what is cached.
R1 Any schedule of preemptions gives the same tokens as none.
R2 Prompt and generated tokens are kept, with the border between them.
R3 What a caller has seen is a growing beginning of the final answer.
R4 A preempted request holds no block, and nothing is left of the step it was in.
R5 The first request in the order of service is never the victim of a later one; preemptions are bounded.
R6 A victim that was scheduled earlier in this step is scheduled no more.
R7 Swapping restores what was there; host blocks keep the rules of blocks.
R9 What comes from a step before the preemption is used or dropped exactly once.
R10 What a victim gives is counted in blocks that really came back.
S1 A step keeps to the most tokens and the most sequences.
S2 What can not fit into an empty engine is refused, and nothing else.
S3 If there is work and nothing is in flight, a step changes the state.
S4 A waiting request holds no blocks.
S5 Each live request is in exactly one queue, and only running ones are scheduled.
S6 An abort is legal at any moment and may come twice.
S7 The door and the engine use the same limits.
S8 The order of service is the stated one.
S9 The smallest and largest prompts and answers are served or refused as the limits say.
S10 Flags and counters that are kept equal what they summarize.
S11 A token is sampled exactly when all known tokens are computed.
K1 Attention equals dense attention of high precision.
K2 Poison in every cell that is not seen changes nothing.
K3 Attention over nothing is 0 with log-sum-exp -inf, and neutral when merged.
K4 Neither the number of splits nor their order matters.
K5 The highest blocks of a huge pool are addressed rightly.
K6 A window is as wide as documented.
K7 An unusual shape is right or refused.
K8 Scales of quantized K and V travel with their blocks.
K9 Views that are not contiguous are right.
K10 Nothing outside the given buffers is touched.
X1 A bad request, or an error about one, ends that request only.
X2 Every field of a request is checked at the door.
X3 Text is cut at the first stop string in it, and nothing that may belong to one is sent.
X4 The pieces of a streamed text are the text that is decoded at once.
X5 Text, ids and log-probabilities have the same positions after the cut.
X6 Prompt tokens are counted once, completion tokens over all answers, streamed or not.
X7 A seeded answer depends on its own request only.
X8 A caller who goes away frees what the request held within a bounded number of steps.
X9 Log-probabilities depend on neither cache, chunks nor batch.
X11 Probabilities are finite and sum to one.
X12 No request's parameters change another row.
""".strip().splitlines()
}
"""The invariants in our words, by the ids that the rules name as their ``corpus``."""

_LLM, _OUTPUTS, _TOKENIZER = "tests/llm/test_llm.py", "tests/llm/test_outputs.py", "tests/models/test_tokenizer.py"
_SAMPLING, _TEXT = "tests/models/test_sampling.py", "tests/spec/test_text.py"
_ATTENTION, _BITS = "tests/kernels/test_attention.py", "tests/kernels/test_attention_bits.py"
_READS, _CACHE = "tests/kernels/test_attention_reads.py", "tests/kernels/test_cache.py"
_FP8, _PARAMS = "tests/kernels/test_fp8.py", "tests/llm/test_sampling_params.py"
_LEDGER = "tests/spec/test_ledger.py"
_KERNEL, _SERVED = "tests/conformance/test_kernel_level.py", "tests/conformance/test_served_level.py"

LEMMAS: Mapping[str, tuple[str, ...]] = {
    "P12": ("ALLOC-1", "ALLOC-3"),
    "X7": ("SAMPLE-1",),
    "X8": ("ALLOC-3", "API-4", "TABLE-4"),
}
"""Invariants that follow from these rules."""

REMARKS: Mapping[str, str] = {
    "A3": "A null block is one that the engine keeps for itself, which its profile declares.",
    "A10": "The order of eviction is the engine's choice, which its profile declares: CACHE-16 and CACHE-17 judge LRU.",
    "A11": "Nothing is evicted ahead of time: a cached block that nobody holds is free, and forgotten when it is taken.",
    "T4": "A matter of kernels and of the device, which the tests fill with poison.",
    "C4": "The rules know one cache; that every layer is copied is for the tests of the device.",
    "C6": "The stream is keyed by seed, sequence and position: a definition, whose tests compare the engines' draws.",
    "P2": "Tokens, salt and everything before are in the key, and compared in full. An engine serves one model, and neither "
    "adapters nor media; the digests of optimized name the model.",
    "P7": "Between look-up and use there is no event: the blocks of a hit get their holder at once.",
    "P9": "The rules know what is hit; that it is counted once is tested.",
    "P12": "Every block is either free or referenced, and either cached or not: four kinds, of which each block is one.",
    "R3": "The rules keep the tokens; that the text only grows is tested.",
    "S9": "The explorer's scopes and the state machine use blocks of one to four tokens, so that they meet every border.",
    "K8": "A matter of kernels: the rules know slots and whole prefixes, and no numbers.",
    "X1": "The rules know calls that are refused; that an error in the middle concerns one request is tested.",
    "X2": "The rules know ids and sizes; the fields of sampling are checked when they are made.",
    "X5": "The ids of an answer are all that were drawn, also those cut off the text, and each has its log-probability. Level L5 "
    "holds a server's text, tokens and log-probabilities together.",
    "X7": "What is drawn depends on the sequence's tokens, its seed, its number and the position, and on nothing else.",
    "X8": "Whoever holds a block has a live sequence, and an aborted request has none. Level L5 asks a server whose callers leave.",
    "X9": "A definition, with which what optimized hands out is compared, from a cold and from a warm cache and in chunks. Level L5 "
    "asks a server alone and in company, cold and warm.",
}

TESTS: Mapping[str, tuple[str, ...]] = {
    "A7": ("tests/spec/test_lemmas.py::test_who_is_admitted_is_served_and_nobody_is_preempted_behind_it",),
    "A10": ("tests/optimized/test_pool.py::test_the_queue_is_sorted_whoever_leaves",),
    "T4": (
        f"{_CACHE}::test_a_token_goes_to_its_slot_and_padding_nowhere",
        f"{_CACHE}::test_a_padding_slot_does_not_reach_the_last_cell",
        f"{_ATTENTION}::test_rows_past_the_last_sequence_are_padding",
        f"{_BITS}::test_padding_tiles_do_nothing",
    ),
    "T7": ("tests/kernels/test_arguments.py::test_entries_that_no_query_sees_may_hold_anything",),
    "T8": (f"{_BITS}::test_block_ids_do_not_matter",),
    "C6": (
        f"{_SAMPLING}::test_seeds_sequences_and_positions_do_not_stand_in_for_each_other",
        f"{_LLM}::test_a_seed_fixes_the_samples",
        f"{_TEXT}::test_c6_siblings_draw_from_streams_of_their_own",
    ),
    "P2": (
        "tests/optimized/test_prefix_cache.py::test_cache_3_a_collision_never_shows_foreign_tokens",
        "tests/optimized/test_prefix_cache.py::test_a_digest_is_made_of_its_parents_and_its_tokens_length_first",
        "tests/optimized/test_prefix_cache.py::test_two_processes_have_different_digests",
    ),
    "P9": ("tests/optimized/test_prefix_cache.py::test_statistics_count_each_admission_once",),
    "P10": ("tests/optimized/test_prefix_cache.py::test_another_salt_finds_nothing",),
    "P11": (f"{_LLM}::test_a_prefix_cache_changes_nothing",),
    "P12": (f"{_LEDGER}::test_p12_every_block_is_of_one_of_four_kinds",),
    "P13": (
        "tests/optimized/test_kv_events.py::test_a_stream_of_anything_keeps_the_rules_and_ends_with_what_is_cached",
        "tests/spec/test_kv_events.py::test_a_hash_may_be_in_two_blocks_and_is_removed_twice",
    ),
    "R1": (f"{_LLM}::test_a_tiny_cache_preempts_and_changes_nothing",),
    "R3": (f"{_LLM}::test_what_is_streamed_grows_to_the_final_text",),
    "S6": (f"{_LLM}::test_an_abort_ends_one_request_and_no_other",),
    "K1": (
        f"{_KERNEL}::test_a_sabotaged_kernel_is_caught_by_the_rule",
        f"{_ATTENTION}::test_the_kernel_gives_dense_attention_for_any_table",
        "tests/reference/test_attention.py::test_dense_attention_is_what_the_specification_says",
    ),
    "K2": (
        f"{_READS}::test_k2_cells_are_read_exactly_where_some_query_sees",
        f"{_READS}::test_k2_table_entries_are_read_exactly_where_some_query_sees",
    ),
    "K3": (
        f"{_ATTENTION}::test_k3_an_empty_set_gives_zero_and_minus_infinity",
        "tests/spec/test_attention.py::test_the_empty_set_is_neutral",
    ),
    "K4": (
        f"{_BITS}::test_k4_splits_of_their_own_are_as_splits_in_a_row",
        "tests/spec/test_attention.py::test_a_split_does_not_matter",
    ),
    "K5": (
        f"{_READS}::test_k5_blocks_beyond_two_to_the_31_elements_are_found",
        f"{_CACHE}::test_k5_a_slot_beyond_two_to_the_31_elements_is_found",
    ),
    "K6": (f"{_ATTENTION}::test_k6_a_query_sees_window_keys_itself_included",),
    "K7": (
        f"{_ATTENTION}::test_head_sizes_that_are_no_power_of_two",
        "tests/kernels/test_arguments.py::test_k7_the_kernel_refuses_head_sizes_without_wide_loads",
    ),
    "K8": (
        f"{_FP8}::test_k8_attention_is_dense_attention_over_what_the_cache_holds",
        f"{_FP8}::test_how_a_prompt_is_cut_into_steps_does_not_matter",
        f"{_FP8}::test_a_copy_on_write_takes_the_scales_along_and_then_they_are_apart",
        f"{_FP8}::test_blocks_that_leave_come_back_with_their_scales",
        f"{_KERNEL}::test_our_kernels_pass",
    ),
    "K9": (f"{_ATTENTION}::test_k9_queries_and_output_may_be_strided_views",),
    "K10": (
        f"{_READS}::test_k10_only_the_output_is_written_and_each_row_once",
        f"{_CACHE}::test_k10_the_kernels_touch_only_what_they_move",
    ),
    "X1": (f"{_LLM}::test_a_request_without_numbers_ends_alone", f"{_LLM}::test_one_bad_prompt_adds_nothing"),
    "X2": (f"{_SAMPLING}::test_what_makes_no_sense_is_refused_with_its_limit",),
    "X3": (
        f"{_TEXT}::test_x3_text_is_cut_before_the_first_stop_string",
        f"{_TEXT}::test_x3_nothing_that_may_belong_to_a_stop_string_is_shown",
        f"{_OUTPUTS}::test_the_first_occurrence_in_the_whole_text_counts",
    ),
    "X4": (
        f"{_TEXT}::test_x4_the_pieces_are_the_text_that_is_decoded_at_once",
        f"{_TOKENIZER}::test_growing_text_is_the_text_of_all_bytes",
    ),
    "X5": (
        f"{_TEXT}::test_x5_the_text_is_that_of_the_ids",
        "tests/server/test_answers.py::test_a_stream_is_the_whole_in_pieces",
        f"{_SERVED}::test_a_sabotaged_server_is_caught",
    ),
    "X6": (
        f"{_TEXT}::test_x6_usage_counts_the_prompt_once_and_every_answer",
        f"{_SERVED}::test_a_sabotaged_server_is_caught",
    ),
    "X7": (f"{_TEXT}::test_x7_a_draw_depends_on_its_own_request_only", f"{_SAMPLING}::test_neighbours_do_not_matter"),
    "X8": (
        f"{_LEDGER}::test_x8_an_aborted_request_holds_nothing",
        f"{_LLM}::test_an_interrupted_answer_leaves_nothing_behind",
        f"{_SERVED}::test_a_sabotaged_server_is_caught",
    ),
    "X9": (
        f"{_TEXT}::test_x9_a_log_probability_is_that_of_its_row",
        f"{_PARAMS}::test_log_probabilities_are_those_of_the_model_before_anything_else",
        f"{_PARAMS}::test_prompt_log_probabilities_are_whole_even_where_the_prefix_is_cached",
        f"{_PARAMS}::test_x9_zero_log_probabilities_are_the_chosen_ones_and_none_are_none",
        f"{_SERVED}::test_a_sabotaged_server_is_caught",
    ),
    "X11": (
        f"{_SAMPLING}::test_probabilities_sum_to_one",
        f"{_SAMPLING}::test_logits_that_are_no_numbers_concern_their_own_row_only",
        f"{_TEXT}::test_x11_probabilities_are_finite_and_sum_to_one",
    ),
    "X12": (
        f"{_SAMPLING}::test_neighbours_do_not_matter",
        "tests/kernels/test_sampling.py::test_rows_without_a_token_say_so_and_others_are_as_alone",
    ),
}
"""Tests that check what no rule says, or what the rules leave open."""


def coverage(invariant: str) -> Coverage:
    """What covers one invariant: the rules that cite it, the rules that it follows from, and tests."""
    cited = tuple(rule.id for rule in RULES.values() if invariant in rule.corpus)
    lemma, tests = LEMMAS.get(invariant, ()), TESTS.get(invariant, ())
    way = Way.RULES if cited else Way.LEMMA if lemma else Way.TESTS if tests else Way.OUT
    return Coverage(invariant, SENTENCES[invariant], way, cited or lemma, tests, REMARKS.get(invariant, ""))


CORPUS: Mapping[str, Coverage] = {invariant: coverage(invariant) for invariant in SENTENCES}
