"""Who comes in: the sums of admission in the specification and in the engines."""

import optimized.admission
import optimized.door
import reference.door
import reference.pool
from optimized.pool import BlockPool
from optimized.sequences import LiveRequest
from reference.roster import Roster
from spec.allocator import blocks_needed
from spec.engine import InvalidRequest
from spec.scheduler import blocks_owed, is_servable
from spec.vocabulary import AdmissionRule, Config, Request, Seq, State


def the_optimized_door_is_the_same(num_blocks: int, num_prompt_tokens: int, max_tokens: int, num_seqs: int) -> bool:
    """
    pre: 1 <= num_blocks <= 3 and 0 <= num_prompt_tokens <= 2 and 0 <= max_tokens <= 8 and 0 <= num_seqs <= 2
    post: _
    """
    config = Config(num_blocks, block_size=2, max_num_seqs=1, max_model_len=7)
    request = Request(0, (7,) * num_prompt_tokens, max_tokens, tuple(range(num_seqs)))
    try:
        optimized.door.check_request(config, request, (), lambda seq_id: True)
        let_in = True
    except InvalidRequest:
        let_in = False
    return let_in == is_servable(config, request)


def the_reference_door_is_the_same(num_blocks: int, num_prompt_tokens: int, max_tokens: int, num_seqs: int) -> bool:
    """
    pre: 1 <= num_blocks <= 3 and 0 <= num_prompt_tokens <= 2 and 0 <= max_tokens <= 8 and 0 <= num_seqs <= 2
    post: _
    """
    config = Config(num_blocks, block_size=2, max_num_seqs=1, max_model_len=7)
    request = Request(0, (7,) * num_prompt_tokens, max_tokens, tuple(range(num_seqs)))
    try:
        reference.door.check_request(config, Roster(config), reference.pool.BlockPool(config), request)
        let_in = True
    except InvalidRequest:
        let_in = False
    return let_in == is_servable(config, request)


def as_many_blocks_are_owed(num_computed: int, num_scheduled: int, max_tokens: int) -> bool:
    """
    pre: 0 <= num_computed <= 3 and 0 <= num_scheduled <= 3 - num_computed and 1 <= max_tokens <= 8
    post: _
    """
    config = Config(num_blocks=8, block_size=2, admission_rule=AdmissionRule.NO_EVICT)
    request = Request(0, (7, 7, 7), max_tokens, (0,))
    pool = BlockPool(8)
    live = LiveRequest(request, (0, 0), [])
    [twin] = live.seqs
    twin.table = pool.take_many(blocks_needed(num_computed + num_scheduled, 2))
    twin.num_computed, twin.num_scheduled = num_computed, num_scheduled
    seq = Seq(0, (7, 7, 7), 3, num_computed, num_scheduled)
    state = State(config, (), (1,) * 8, {0: twin.table}, {0: seq}, {0: request}, running=(0,))
    return optimized.admission.blocks_owed(config, pool, [live]) == blocks_owed(state, 0)
