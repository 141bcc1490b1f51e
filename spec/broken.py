"""For each rule the smallest state or step that breaks it and no other."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from spec.block_table import slot_mapping
from spec.choices import Choices, EvictionOrder, Publication
from spec.replay import step
from spec.vocabulary import (
    Abort,
    Add,
    AdmissionRule,
    Admit,
    Allocate,
    Append,
    Begin,
    BlockId,
    CacheKey,
    Complete,
    Config,
    Copy,
    Event,
    Evict,
    Finish,
    FinishReason,
    Flight,
    Fork,
    Hit,
    Observe,
    Policy,
    Preempt,
    Publish,
    Read,
    Recovery,
    Refuse,
    Release,
    Request,
    Reset,
    Rollback,
    Sample,
    Seq,
    SeqId,
    Slide,
    Start,
    State,
    Submit,
    SwapOut,
    Token,
    Write,
    initial_state,
)


@dataclass(frozen=True)
class BrokenState:
    """A state that breaks one state rule, and what went wrong."""

    rule_id: str
    story: str
    state: State


@dataclass(frozen=True)
class BrokenStep:
    """A step that breaks one step rule, and what went wrong. Nothing was wrong before it."""

    rule_id: str
    story: str
    before: State
    event: Event
    after: State


Broken: TypeAlias = BrokenState | BrokenStep


def follow(start: State, *events: Event) -> State:
    """Where the events lead, whether they are allowed or not."""
    for event in events:
        start = step(start, event)
    return start


def stored(seq: SeqId, tokens: tuple[Token, ...], blocks: tuple[BlockId, ...], block_size: int = 1) -> list[Event]:
    """A sequence without a scheduler, with its tokens in the cache."""
    slots = slot_mapping(blocks, 0, len(tokens), block_size)
    return [Start(seq, tokens), Allocate(seq, len(tokens), blocks), Write(seq, 0, slots)]


def served(request: Request, block: BlockId) -> list[Event]:
    """A request with one token in its prompt, while a step is being scheduled."""
    return [Admit(request.request_id), Allocate(request.seq_ids[0], 1, (block,))]


def computed(request: Request, block: BlockId) -> list[Event]:
    """The device's part of such a request's step."""
    return [Write(request.seq_ids[0], 0, (block,)), Read(request.seq_ids[0], (block,))]


def step_example(rule_id: str, story: str, start: State, *events: Event, leads_to: State | None = None) -> BrokenStep:
    """The last of the events breaks the rule. It leads where the model goes, unless an implementation claims
    otherwise."""
    before = follow(start, *events[:-1])
    return BrokenStep(rule_id, story, before, events[-1], step(before, events[-1]) if leads_to is None else leads_to)


# Small states to start from. Blocks have room for one token, unless the name says otherwise.

CONFIG = Config(
    num_blocks=3, block_size=1, max_num_seqs=2, max_num_batched_tokens=2, num_host_blocks=2, prefix_cache=True
)
EMPTY = initial_state(CONFIG)
EMPTY_PAIRS = initial_state(replace(CONFIG, block_size=2))
EMPTY_TRIPLES = initial_state(replace(CONFIG, block_size=3))
TWO_BLOCKS_BY_PRIORITY = initial_state(replace(CONFIG, num_blocks=2, policy=Policy.PRIORITY))
IN_ORDER = initial_state(CONFIG, Choices(eviction_order=EvictionOrder.LRU))
IN_SHARES = initial_state(replace(CONFIG, max_num_partial_prefills=2))
RESERVING = initial_state(CONFIG, Choices(num_reserved_blocks=1))
THREE_SEATS = initial_state(replace(CONFIG, num_blocks=6, max_num_seqs=3))
PROMISING = initial_state(replace(THREE_SEATS.config, admission_rule=AdmissionRule.NO_EVICT))

ALICE = Request(request_id=0, prompt=(5,), max_tokens=2, seq_ids=(0,))
BOB = Request(request_id=1, prompt=(6,), max_tokens=2, seq_ids=(1,))
TWINS = Request(request_id=0, prompt=(5,), max_tokens=2, seq_ids=(0, 2))

NEW = Seq(request_id=0, tokens=(5,), num_prompt_tokens=1)
SCHEDULED = replace(NEW, num_scheduled_tokens=1)
COMPUTED = replace(NEW, num_computed_tokens=1)

AT_SCHEDULE = follow(initial_state(CONFIG, Choices(publication=Publication.AT_SCHEDULE)), *(Add(ALICE), Begin(1)))
"""An engine that publishes blocks before they are written schedules Alice."""

ALONE = follow(EMPTY, *stored(0, (5,), (0,)))
EQUALS = follow(ALONE, *stored(1, (5,), (1,)))
FORKED = follow(EMPTY_PAIRS, *stored(0, (5,), (0,), block_size=2), Fork(0, 1))
TAKEN_BACK = follow(EMPTY_TRIPLES, *stored(0, (5, 6, 7), (0,), block_size=3), Rollback(0, 1), Append(0, (6, 7)))
"""Two tokens are to be computed again; their slots happen to hold the right thing still."""

PUBLISHED = follow(ALONE, Publish(0, 0))
UNUSED = follow(PUBLISHED, Release(0))
"""Block 0 is cached, and nobody holds it."""

SWAPPED = follow(EQUALS, SwapOut(0, (0,)), SwapOut(1, (1,)))
WAITING = follow(EMPTY, Add(ALICE), Add(BOB))
STEP_1 = follow(EMPTY, Add(ALICE), Begin(1), *served(ALICE, 0), Submit(1), *computed(ALICE, 0))
"""A step has computed the prompt, and samples now."""
STEP_2 = follow(STEP_1, Append(0, (7,)), Complete(1), Begin(2))
"""The next step is being scheduled."""
FULL = follow(
    follow(TWO_BLOCKS_BY_PRIORITY, Add(ALICE), Add(BOB), Begin(1), *served(ALICE, 0), *served(BOB, 1)),
    *(Submit(1), *computed(ALICE, 0), *computed(BOB, 1), Append(0, (7,)), Append(1, (7,)), Complete(1), Begin(2)),
)
"""Two running requests have one block each, want another, and there is none."""
SWAPPING = replace(FULL, config=replace(FULL.config, recovery=Recovery.SWAP))
"""The same in an engine that swaps."""
ALICE_WANTS_THE_LAST_BLOCK = follow(
    replace(
        TWO_BLOCKS_BY_PRIORITY,
        config=replace(TWO_BLOCKS_BY_PRIORITY.config, admission_rule=AdmissionRule.OPTIMISTIC),
    ),
    *(Add(replace(ALICE, priority=1)), Begin(1), *served(ALICE, 0), Submit(1), *computed(ALICE, 0), Append(0, (7,))),
    *(Complete(1), Add(BOB), Begin(2)),
)
"""Alice runs, and takes the last block in this step; Bob waits and is more urgent."""
BOB_IN_FLIGHT = follow(
    follow(TWO_BLOCKS_BY_PRIORITY, Add(ALICE), Add(BOB), Begin(1), *served(ALICE, 0), Submit(1), *computed(ALICE, 0)),
    *(Append(0, (7,)), Complete(1), Begin(2), *served(BOB, 1), Submit(2), Begin(3)),
)
"""A step computes Bob's prompt, and Alice wants a block in the next one."""
EXAMPLES: tuple[Broken, ...] = (
    # allocator
    BrokenState("ALLOC-1", "Block 0 is free twice.", replace(EMPTY, free=(0, 0, 1, 2))),
    BrokenState(
        "ALLOC-2",
        "A reference to block 0 was never given back.",
        replace(EMPTY, free=(1, 2), ref_count=(1, 0, 0)),
    ),
    BrokenState("ALLOC-3", "Block 0 was lost on the way to the free list.", replace(EMPTY, free=(1, 2))),
    step_example("ALLOC-4", "A block in use is handed out.", ALONE, Start(1, (6,)), Allocate(1, 1, (0,))),
    BrokenState(
        "ALLOC-5",
        "Block 0 became free while a step was writing to it.",
        replace(EMPTY, flights={1: Flight(blocks=frozenset({0}), submitted=True)}),
    ),
    BrokenState(
        "ALLOC-6",
        "A token is to go to the block that is kept for padding.",
        replace(RESERVING, seqs={0: SCHEDULED}, block_tables={0: (0,)}),
    ),
    # block_table
    BrokenState(
        "TABLE-1",
        "There is a block, and no token for it.",
        replace(EMPTY, seqs={0: NEW}, block_tables={0: (0,)}, free=(1, 2), ref_count=(1, 0, 0)),
    ),
    step_example(
        "TABLE-2",
        "The token of position 1 goes one slot too far.",
        TAKEN_BACK,
        Allocate(0, 1, ()),
        Write(0, 1, (2,)),
    ),
    step_example(
        "TABLE-3",
        "A step writes a slot again, after a rollback.",
        follow(EMPTY_PAIRS, Start(0, (5, 6)), Begin(1), Allocate(0, 2, (0,)), Submit(1), Write(0, 0, (0, 1))),
        Rollback(0, 1),
        Append(0, (7,)),
        Allocate(0, 1, ()),
        Write(0, 1, (1,)),
    ),
    BrokenState(
        "TABLE-4",
        "The sequence is gone, its table is not.",
        replace(EMPTY, block_tables={0: (0,)}, free=(1, 2), ref_count=(1, 0, 0)),
    ),
    BrokenState("TABLE-5", "The slot of token 5 holds token 6.", replace(ALONE, cells={0: (6,)})),
    BrokenState(
        "TABLE-6",
        "Two tokens are to go to block 0, one over the other.",
        replace(
            EMPTY,
            seqs={0: Seq(0, (5, 6), num_prompt_tokens=2, num_scheduled_tokens=2)},
            block_tables={0: (0, 0)},
            free=(1, 2),
            ref_count=(2, 0, 0),
        ),
    ),
    BrokenState("TABLE-7", "The pool has no block 9.", replace(EMPTY, seqs={0: SCHEDULED}, block_tables={0: (9,)})),
    step_example(
        "TABLE-8",
        "Two tables were exchanged; the tokens are equal, so nobody noticed.",
        EQUALS,
        Observe(),
        leads_to=replace(EQUALS, block_tables={0: (1,), 1: (0,)}),
    ),
    step_example(
        "TABLE-9",
        "One token is scheduled, two are written.",
        EMPTY_PAIRS,
        Start(0, (5, 6)),
        Allocate(0, 1, (0,)),
        Write(0, 0, (0, 1)),
    ),
    step_example(
        "TABLE-10",
        "Position 0 leaves the window, and the next token still sees it.",
        initial_state(replace(CONFIG, window=3)),
        *stored(0, (5, 6), (0, 1)),
        Slide(0, 1),
    ),
    step_example(
        "TABLE-11",
        "Position 0 is behind the window, and its block stays.",
        initial_state(replace(CONFIG, window=1, prefix_cache=False)),
        *(Add(replace(ALICE, prompt=(5, 6))), Begin(1), Admit(0), Allocate(0, 2, (0, 1)), Submit(1)),
        *(Write(0, 0, (0, 1)), Read(0, (0, 1)), Append(0, (7,))),
        Complete(1),
    ),
    # sharing
    step_example(
        "COW-2",
        "The child writes into the block that it shares with its parent.",
        FORKED,
        Append(1, (7,)),
        Allocate(1, 1, ()),
        Write(1, 1, (1,)),
    ),
    step_example("COW-3", "The sequence is alone, and its block is copied all the same.", ALONE, Copy(0, 0, 0, 1)),
    step_example(
        "COW-4",
        "A step writes a block, and then copies it.",
        follow(EMPTY_PAIRS, Start(0, (5,)), Begin(1), Allocate(0, 1, (0,)), Submit(1), Write(0, 0, (0,))),
        Fork(0, 1),
        Copy(1, 0, 0, 1),
    ),
    step_example("COW-5", "A copy is reported, and the table is as before.", FORKED, Copy(1, 0, 0, 1), leads_to=FORKED),
    step_example(
        "COW-6", "The child has the id of a sequence that waits for its tokens.", ALONE, Start(1, ()), Fork(0, 1)
    ),
    step_example("COW-7", "The rollback leaves nothing.", ALONE, Rollback(0, 0)),
    step_example(
        "COW-8",
        "Position 0 has left the table, and the token after it would see it.",
        initial_state(replace(CONFIG, window=2)),
        *(*stored(0, (5, 6, 7), (0, 1, 2)), Slide(0, 1)),
        Rollback(0, 1),
    ),
    # prefix_cache
    BrokenState(
        "CACHE-1",
        "The cache says token 5, the block holds token 6.",
        replace(EMPTY, cached={0: CacheKey((5,))}, cells={0: (6,)}),
    ),
    BrokenState(
        "CACHE-2",
        "Block 0 holds positions 1 and 2, which are no block of any sequence.",
        replace(EMPTY_PAIRS, cached={0: CacheKey((5, 6, 7))}, cells={0: (5, 6), 1: (5, 6, 7)}),
    ),
    step_example(
        "CACHE-3",
        "The block belongs to somebody with another salt.",
        replace(EMPTY, cached={0: CacheKey((5,), salt="other")}, cells={0: (5,)}),
        Start(1, (5, 6)),
        Hit(1, (0,)),
    ),
    step_example(
        "CACHE-4", "Everything is hit, so that nothing is left to compute.", UNUSED, Start(1, (5,)), Hit(1, (0,))
    ),
    step_example(
        "CACHE-5",
        "Two blocks could be hit, one is.",
        EMPTY,
        *(*stored(0, (5, 6), (0, 1)), Publish(0, 0), Publish(0, 1), Release(0)),
        Start(1, (5, 6, 7)),
        Hit(1, (0,)),
    ),
    step_example("CACHE-6", "Two of its tokens are to be computed again.", TAKEN_BACK, Publish(0, 0)),
    step_example("CACHE-7", "A cached block was forgotten.", UNUSED, Observe(), leads_to=replace(UNUSED, cached={})),
    step_example("CACHE-8", "Another block has the key already.", EQUALS, Publish(0, 0), Publish(1, 0)),
    step_example("CACHE-9", "The block is in use.", PUBLISHED, Evict(0)),
    step_example("CACHE-10", "A cached block is in use.", PUBLISHED, Reset()),
    step_example(
        "CACHE-11",
        "The first token became another one.",
        EMPTY,
        Start(0, (5,)),
        Append(0, (6,)),
        leads_to=follow(EMPTY, Start(0, (9, 6))),
    ),
    step_example(
        "CACHE-12",
        "The first block is cached, and the sequence computes it again.",
        PUBLISHED,
        Start(1, (5, 6)),
        Allocate(1, 2, (1, 2)),
    ),
    step_example("CACHE-13", "Nobody holds the cached block.", UNUSED, Refuse(Reset())),
    step_example(
        "CACHE-14",
        "The block is full, and the cache does not know it.",
        STEP_1,
        Append(0, (7,)),
        Complete(1),
    ),
    step_example(
        "CACHE-15", "The step fills a block, and the cache does not know it.", AT_SCHEDULE, *served(ALICE, 0), Submit(1)
    ),
    step_example(
        "CACHE-16",
        "The beginning of a prefix is evicted before its end.",
        follow(IN_ORDER, *stored(0, (5, 6), (0, 1)), Publish(0, 0), Publish(0, 1), Release(0)),
        *(Start(0, (6,)), Allocate(0, 1, (0,))),
    ),
    step_example(
        "CACHE-17",
        "The beginning of the table is to be evicted before its end.",
        IN_ORDER,
        *(*stored(0, (5, 6), (0, 1)), Publish(0, 0), Publish(0, 1), Release(0)),
        Observe(),
        leads_to=replace(
            follow(IN_ORDER, *stored(0, (5, 6), (0, 1)), Publish(0, 0), Publish(0, 1), Release(0)), free=(2, 0, 1)
        ),
    ),
    # preemption
    step_example("PREEMPT-1", "Bob came last, and Alice is the victim.", FULL, Preempt(0)),
    BrokenState(
        "PREEMPT-2",
        "The request waits and has a block.",
        replace(
            WAITING,
            seqs={**WAITING.seqs, 0: SCHEDULED},
            block_tables={0: (0,)},
            free=(1, 2),
            ref_count=(1, 0, 0),
        ),
    ),
    BrokenState("PREEMPT-3", "The token is computed, and stored nowhere.", replace(EMPTY, seqs={0: COMPUTED})),
    step_example(
        "PREEMPT-4",
        "The sampled token was lost.",
        STEP_2,
        Observe(),
        leads_to=replace(STEP_2, seqs={0: COMPUTED}),
    ),
    step_example("PREEMPT-5", "There are free blocks.", STEP_2, Preempt(0)),
    step_example(
        "PREEMPT-6", "Nobody was preempted.", STEP_2, Observe(), leads_to=replace(STEP_2, num_preemptions={0: 1})
    ),
    step_example("PREEMPT-7", "Bob's prompt is being computed.", BOB_IN_FLIGHT, Preempt(1)),
    BrokenState("SWAP-1", "Host block 0 was lost.", replace(EMPTY, host_free=(1,))),
    step_example(
        "SWAP-2",
        "A swapped sequence loses its host block to another one, and is to be computed again.",
        follow(EQUALS, SwapOut(0, (0,))),
        SwapOut(1, (0,)),
        leads_to=replace(
            follow(EQUALS, Release(0), SwapOut(1, (0,))), seqs={0: NEW, 1: replace(COMPUTED, request_id=1)}
        ),
    ),
    BrokenState("SWAP-3", "The host block holds another token.", replace(SWAPPED, host_cells={0: (5,), 1: (6,)})),
    BrokenState(
        "SWAP-4",
        "The sequence came back and left its host block behind.",
        replace(ALONE, host_tables={0: (0,)}, host_free=(1,), host_cells={0: (5,)}),
    ),
    step_example("SWAP-5", "There is nothing to swap.", EMPTY, Start(0, (5,)), SwapOut(0, ())),
    step_example(
        "SWAP-6",
        "Two host tables were exchanged; the tokens are equal, so nobody noticed.",
        SWAPPED,
        Observe(),
        leads_to=replace(SWAPPED, host_tables={0: (1,), 1: (0,)}),
    ),
    step_example(
        "SWAP-7",
        "The block is swapped out before it is written.",
        EMPTY,
        Start(0, (5,)),
        Allocate(0, 1, (0,)),
        SwapOut(0, (0,)),
    ),
    step_example(
        "SWAP-8", "Host memory has room for Bob's block, and he is to be computed again.", SWAPPING, Preempt(1)
    ),
    # scheduler
    BrokenState(
        "SCHED-1", "Three tokens, and the budget is two.", replace(EMPTY, flights={1: Flight(scheduled={0: 3})})
    ),
    BrokenState(
        "SCHED-2",
        "Three sequences run, and there are two seats.",
        follow(EMPTY, Add(TWINS), Add(BOB), Admit(0), Admit(1), Fork(0, 2)),
    ),
    BrokenState("SCHED-3", "A request is in no queue.", replace(WAITING, waiting=(0,))),
    BrokenState("SCHED-4", "Bob came later, and stands before Alice.", replace(WAITING, waiting=(1, 0))),
    step_example("SCHED-5", "There is no second token.", EMPTY_PAIRS, Start(0, (5,)), Allocate(0, 2, (0,))),
    step_example("SCHED-6", "The token after 7 is sampled before 7 is computed.", STEP_2, Append(0, (8,))),
    step_example("SCHED-7", "The prompt is computed, and no token sampled.", STEP_1, Publish(0, 0), Complete(1)),
    step_example(
        "SCHED-8", "The request needs four blocks, the pool has three.", EMPTY, Add(replace(ALICE, max_tokens=4))
    ),
    step_example(
        "SCHED-9",
        "The step preempts the only request, and has nothing left to do.",
        STEP_2,
        Preempt(0),
        Submit(2),
    ),
    step_example("SCHED-10", "Bob is admitted before Alice.", TWO_BLOCKS_BY_PRIORITY, Add(ALICE), Add(BOB), Admit(1)),
    step_example("SCHED-11", "Bob is admitted, and Alice takes the last block.", ALICE_WANTS_THE_LAST_BLOCK, Admit(1)),
    step_example(
        "SCHED-12", "There is room for Bob, and he is left waiting.", WAITING, Begin(1), *served(ALICE, 0), Submit(1)
    ),
    step_example(
        "SCHED-13",
        "Bob runs, and the step passes him over.",
        WAITING,
        Begin(1),
        *served(ALICE, 0),
        Admit(1),
        Submit(1),
    ),
    step_example(
        "SCHED-14",
        "The queues were exchanged.",
        WAITING,
        Observe(),
        leads_to=replace(WAITING, waiting=(), running=(0, 1)),
    ),
    step_example(
        "SCHED-15",
        "The token is computed, and counts as scheduled.",
        ALONE,
        Observe(),
        leads_to=replace(ALONE, seqs={0: SCHEDULED}),
    ),
    step_example("SCHED-16", "One token is still to come.", STEP_1, Append(0, (7,)), Finish(0, FinishReason.LENGTH)),
    step_example(
        "SCHED-17",
        "Two tokens were asked for, two were sampled, and the sequence lives on.",
        STEP_2,
        *(Allocate(0, 1, (1,)), Submit(2), Write(0, 1, (1,)), Read(0, (0, 1)), Append(0, (8,)), Publish(0, 1)),
        Complete(2),
    ),
    step_example(
        "SCHED-18",
        "The second sequence is not forked yet.",
        EMPTY,
        *(Add(TWINS), Begin(1), *served(TWINS, 0), Submit(1), *computed(TWINS, 0)),
        Append(0, (7,)),
    ),
    step_example(
        "SCHED-19",
        "The fork takes the seat of the twin that is still to come.",
        THREE_SEATS,
        *(Add(TWINS), Add(BOB), Admit(0), Admit(1)),
        Fork(1, 3),
    ),
    step_example("SCHED-20", "An empty engine could serve the request.", EMPTY, Refuse(Add(ALICE))),
    step_example(
        "SCHED-22",
        "Bob was promised three more blocks, Alice one, and four are free.",
        PROMISING,
        *(Add(ALICE), Add(replace(BOB, max_tokens=4)), Begin(1), *served(ALICE, 0), *served(BOB, 1), Submit(1)),
        *(*computed(ALICE, 0), *computed(BOB, 1), Append(0, (7,)), Append(1, (7,)), Complete(1)),
        Fork(0, 7),
    ),
    step_example(
        "SCHED-23",
        "Two sequences of two blocks each do not fit into three.",
        EMPTY,
        *(Add(ALICE), Begin(1), *served(ALICE, 0), Submit(1), *computed(ALICE, 0), Append(0, (7,)), Complete(1)),
        Fork(0, 7),
    ),
    step_example(
        "SCHED-24",
        "There is a seat for the child, and there are blocks.",
        THREE_SEATS,
        *(Add(ALICE), Begin(1), *served(ALICE, 0), Submit(1), *computed(ALICE, 0), Append(0, (7,)), Complete(1)),
        Refuse(Fork(0, 7)),
    ),
    step_example(
        "SCHED-25",
        "Bob has the whole budget, and Alice came before him.",
        follow(EMPTY, Add(ALICE), Add(replace(BOB, prompt=(6, 6))), Begin(1), Admit(0), Admit(1)),
        *(Allocate(1, 2, (0, 1)), Submit(1)),
    ),
    step_example("SCHED-26", "The sampled token is taken back.", STEP_2, Rollback(0, 1)),
    BrokenState(
        "SCHED-27",
        "Two prompts may be computed in parts, and one of them gets the budget for both.",
        follow(IN_SHARES, Add(replace(ALICE, prompt=(5, 6))), Begin(1), Admit(0), Allocate(0, 2, (0, 1))),
    ),
    step_example("SCHED-28", "Bob is preempted and admitted again.", FULL, Preempt(1), Abort(0), Admit(1)),
    # attention
    step_example("ATTN-1", "The slots come in the wrong order.", EMPTY, *stored(0, (5, 6), (0, 1)), Read(0, (1, 0))),
    step_example("ATTN-2", "The tokens are right, the block is another sequence's.", EQUALS, Read(0, (1,))),
    step_example(
        "ATTN-3",
        "The first position is left out.",
        EMPTY,
        *stored(0, (5, 6), (0, 1)),
        Read(0, (1,), start=1),
    ),
    step_example(
        "ATTN-4",
        "The token is written, and attention read nothing.",
        EMPTY,
        *(Add(ALICE), Begin(1), *served(ALICE, 0), Submit(1), Write(0, 0, (0,)), Append(0, (7,)), Publish(0, 0)),
        Complete(1),
    ),
    step_example("SAMPLE-1", "The token is drawn from the prefix without its end.", ALONE, Sample(0, (), 7)),
    step_example("SAMPLE-2", "The token 7 was drawn, and 8 is appended.", STEP_1, Sample(0, (5,), 7), Append(0, (8,))),
    # interface
    step_example(
        "API-1",
        "The request was refused, and waits all the same.",
        EMPTY,
        Refuse(Add(replace(ALICE, max_tokens=4))),
        leads_to=follow(EMPTY, Add(replace(ALICE, max_tokens=4))),
    ),
    step_example("API-2", "There is no sequence 9.", EMPTY, Release(9)),
    step_example(
        "API-3",
        "The step still holds a block that it has given back.",
        EMPTY,
        Begin(1),
        Observe(),
        leads_to=replace(EMPTY, free=(1, 2), ref_count=(1, 0, 0), flights={1: Flight(holds=(0,))}),
    ),
    step_example(
        "API-4",
        "The request asks for fewer tokens than it did.",
        WAITING,
        Observe(),
        leads_to=replace(WAITING, requests={0: replace(ALICE, max_tokens=1), 1: BOB}),
    ),
    step_example("API-5", "The step is over, and still there.", follow(EMPTY, Begin(1)), Observe(), leads_to=EMPTY),
)

BROKEN: Mapping[str, Broken] = {example.rule_id: example for example in EXAMPLES}
