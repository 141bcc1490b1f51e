"""The device that computes: a model, its paged cache as tensors, and the sampler."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import FP8, AttentionPlan, bytes_of, copy_blocks, plan_attention
from optimized.batch_tensors import BatchTensors, StepTensors
from optimized.beam_search import BeamSearch
from optimized.device import Failure, PassFailed, Sampled
from optimized.fault_points import FaultPoint, reach
from optimized.grammar import Progress
from optimized.kernel_draws import can_draw, drawn
from optimized.llama import LlamaModel
from optimized.plan import Plan, Swap
from optimized.poison import spoil, unwritten_blocks
from optimized.sampling import Draw, Logprob, NoToken, SamplingParams, likeliest_tokens, logprobs, sample_rows
from spec.vocabulary import BlockId, Config, InvalidConfig, SeqId, Token

if TYPE_CHECKING:
    from optimized.vector_model import VectorModel

Logprobs: TypeAlias = dict[Token, Logprob]
"""The chosen token first, then the likeliest ones."""

ROWS_AT_ONCE = 256
"""Rows of a prompt whose logits are in memory at once."""


@dataclass(frozen=True)
class SeqSampling:
    """How the tokens of one sequence are drawn; ``ordinal`` counts the samples of its request.

    ``end_token_ids`` are all that end it, ``bad_words`` those of the parameters as token ids, and ``progress`` its way
    through their grammar.
    """

    params: SamplingParams
    seed: int
    ordinal: int
    num_prompt_tokens: int = 0
    end_token_ids: tuple[Token, ...] = ()
    bad_words: tuple[tuple[Token, ...], ...] = ()
    progress: Progress | None = None

    @cached_property
    def is_plain(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        params = self.params
        return params.is_plain and params.logprobs is None and params.prompt_logprobs is None


GREEDY = SeqSampling(SamplingParams(temperature=0.0), seed=0, ordinal=0)
_IS_PLAIN: Callable[[SeqSampling], bool] = attrgetter("is_plain")


class TorchDevice:
    """Runs plans on the model's device: Triton kernels on a GPU, their twins on a CPU.

    ``sampling`` says how each sequence is sampled; whoever adds and ends sequences keeps it. A sequence that is not
    there is greedy. ``tokens_of`` gives the tokens of a live sequence. ``logits`` are those of the last plan,
    ``[num_samples, vocab_size]``, and so are ``logprobs``, and ``prompt_logprobs`` by position, where they are asked for.
    What a model with a sliding window sees, the cache must keep: raises ``InvalidConfig`` if the engine's window is
    narrower than the model's. With ``poisons`` cells that nobody has written are NaN.
    """

    def __init__(
        self,
        model: LlamaModel | VectorModel,
        config: Config,
        tokens_of: Callable[[SeqId], Sequence[Token]] = lambda _: (),
        *,
        poisons: bool = False,
    ) -> None:
        seen = model.config.sliding_window or config.max_model_len
        if config.window is not None and config.window < min(seen, config.max_model_len):
            raise InvalidConfig("window", config.window, f"at least what the model sees, {seen}, or None")
        self.model = model
        self.config = config
        self.tokens_of = tokens_of
        self.sampling: dict[SeqId, SeqSampling] = {}
        self.beams: dict[SeqId, BeamSearch] = {}
        """The searches, by each sequence of theirs."""
        # On a CPU NumPy's sampler is the faster one: it makes noise only for the tokens that the filters leave.
        self.draws_by_kernel = model.device.type == "cuda"
        self.logits: Tensor | None = None
        self.logprobs: dict[SeqId, Logprobs] = {}
        self.prompt_logprobs: dict[SeqId, dict[int, Logprobs]] = {}
        # A block more is what nobody's entries name.
        self.kv_caches = model.new_kv_caches(config.num_blocks + poisons, config.block_size)
        self._poisoned = [bytes_of(each) for layer in self.kv_caches for each in layer] if poisons else []
        self._lost = set(range(config.num_blocks))
        spoil(self._poisoned, [config.num_blocks])
        self._host_caches = [
            tuple(_host_like(bytes_of(each), config.num_host_blocks) for each in layer) for layer in self.kv_caches
        ]
        blocks_per_seq = min(config.num_blocks, -(-config.max_model_len // config.block_size))
        # Two, since two steps can be in flight, and then take turns.
        self._batches = [
            BatchTensors(
                config.max_num_seqs,
                blocks_per_seq,
                config.block_size,
                model.device,
                config.num_blocks if poisons else None,
            )
            for _ in range(2)
        ]

    def run(self, plan: Plan) -> Sequence[Sampled]:
        reach(FaultPoint.MOVE_BLOCKS)
        self._move_blocks(plan)
        if self.poisons:
            self._lost.difference_update(*plan.block_tables)
            spoil(self._poisoned, unwritten_blocks(plan, self.config.block_size))
        try:
            return self.compute(plan)
        except MemoryError:
            raise
        except Exception as error:
            raise PassFailed(str(error)) from error

    def compute(self, plan: Plan) -> Sequence[Sampled]:
        """All of a plan but its moves. What it writes it writes again, the same, if it is asked again."""
        self.logprobs, self.prompt_logprobs = {}, {}
        if not plan.seq_ids:
            return ()
        reach(FaultPoint.DEVICE_MEMORY)
        if not self._batches[0].is_next(plan):
            self._batches.reverse()
        tensors = self._batches[0].filled(plan)
        reach(FaultPoint.FORWARD)
        hidden_states, rows = self._forward(plan, tensors), tensors.sample_rows
        is_plain = self._is_plain(plan)
        if not (is_plain and plan.sample_seq_ids == plan.seq_ids):
            self._read_prompts(plan, hidden_states)
        self.logits = self.model.logits(hidden_states if rows is None else hidden_states[rows])
        reach(FaultPoint.SAMPLE)
        if is_plain and not self.draws_by_kernel:
            tokens = self._all_likeliest(self.logits)
            if tokens is not None:
                return tokens
        return self._sample(plan, self.logits)

    @property
    def poisons(self) -> bool:
        """Whether cells that nobody has written are NaN."""
        return bool(self._poisoned)

    def lose(self, blocks: set[BlockId]) -> None:
        """What is in these blocks is lost, and no step reads it any more: those that were not lost before are NaN now."""
        spoil(self._poisoned, sorted(blocks - self._lost))
        self._lost = blocks

    def demand_alive(self) -> None:
        """Compute something that no request has a part in. Raises what the device raises."""
        reach(FaultPoint.DEVICE_ALIVE)
        hidden = torch.zeros((1, self.model.config.hidden_size), dtype=self.model.dtype, device=self.model.device)
        self.model.logits(hidden).cpu()

    def _move_blocks(self, plan: Plan) -> None:
        """Swaps and copies, before anything is written."""
        for swap in plan.swaps:
            self._swap(swap)
        if plan.copies:
            pairs = [(copy.source, copy.target) for copy in plan.copies]
            copies = torch.tensor(pairs, dtype=torch.int64, device=self.model.device)
            for key_cache, value_cache, *kv_scales in self.kv_caches:
                copy_blocks(key_cache, value_cache, copies, *kv_scales)

    def _swap(self, swap: Swap) -> None:
        """A table's contents in all layers, to host memory or back."""
        blocks = torch.tensor(swap.blocks, device=self.model.device)
        host_blocks = torch.tensor(swap.host_blocks)
        for layer, host_layer in zip(self.kv_caches, self._host_caches, strict=True):
            for cache, host_cache in zip(map(bytes_of, layer), host_layer, strict=True):
                if swap.out:
                    host_cache[host_blocks] = cache[blocks].cpu()
                else:
                    cache[blocks] = host_cache[host_blocks].to(cache.device)

    def _forward(self, plan: Plan, tensors: StepTensors) -> Tensor:
        return self.model.forward(
            tensors.token_ids,
            tensors.positions,
            self.kv_caches,
            tensors.slot_mapping,
            tensors.block_tables,
            tensors.seq_lens,
            tensors.query_start,
            self._attention_plan(plan),
        )

    def _attention_plan(self, plan: Plan) -> AttentionPlan | None:
        """One plan for all layers, made from lengths that are known here, so that nobody waits for a GPU."""
        if self.model.device.type != "cuda":
            return None
        return plan_attention(
            [stop - start for start, stop in pairwise(plan.query_start)],
            plan.seq_lens,
            num_query_heads=self.model.config.num_query_heads,
            num_kv_heads=self.model.config.num_kv_heads,
            head_size=self.model.config.head_size,
            window=self.model.config.sliding_window,
            dtype=self.model.dtype,
            device=self.model.device,
            is_fp8=self.kv_caches[0][0].dtype == FP8,
        )

    def _is_plain(self, plan: Plan) -> bool:
        """Whether the likeliest tokens are all that anybody asks for."""
        return not self.beams and all(map(_IS_PLAIN, map(self.sampling.get, plan.sample_seq_ids, repeat(GREEDY))))

    def _all_likeliest(self, logits: Tensor) -> Sequence[Sampled] | None:
        """The likeliest token of each row, as one array; None if a row has none."""
        found = self.model.likeliest
        if found is None:
            found = likeliest_tokens(logits.numpy())
        tokens: list[Token] = found.tolist()
        if -1 in tokens:
            return None
        self._batches[0].drew(tokens, found)
        return tokens

    def _sample(self, plan: Plan, logits: Tensor) -> list[Sampled]:
        """A token for each sample. A row without numbers to choose from is a failure of its own request only."""
        draws = [
            self._draw(plan, row, seq_id) for row, seq_id in zip(plan.sample_rows, plan.sample_seq_ids, strict=True)
        ]
        sampled = self._drawn_by_kernel(plan, draws, logits) if self.draws_by_kernel else [None] * len(draws)
        left = [index for index, token in enumerate(sampled) if token is None]
        answers: list[Sampled] = [0 if token is None else token for token in sampled]
        if not left:
            return answers
        rows = (logits if len(left) == len(draws) else logits[left]).cpu().numpy()
        tokens = self._drawn_by_host(rows, left, [draws[index] for index in left])
        for index, logits_of_row, token in zip(left, rows, tokens, strict=True):
            answers[index] = Failure(str(token)) if isinstance(token, NoToken) else token
            num_top = draws[index].params.logprobs
            if num_top is not None and not isinstance(token, NoToken):
                self.logprobs[plan.sample_seq_ids[index]] = logprobs(logits_of_row, token, num_top)
        if self.beams:
            self._choose_beams(plan, dict(zip(left, rows, strict=True)), answers)
        return answers

    def _draw(self, plan: Plan, row: int, seq_id: SeqId) -> Draw:
        """How the token of a sequence is drawn from this row of a plan."""
        how = self.sampling.get(seq_id, GREEDY)
        position = plan.positions[row] + 1
        if how.params.is_plain:
            return Draw(how.params, how.seed, how.ordinal, position)
        # A sequence about to be forked has its parent's tokens.
        tokens = self.tokens_of(plan.seq_ids[bisect_right(plan.query_start, row) - 1])
        return Draw(
            how.params,
            how.seed,
            how.ordinal,
            position,
            tokens,
            how.num_prompt_tokens,
            how.end_token_ids,
            how.bad_words,
            how.progress,
        )

    def _drawn_by_kernel(self, plan: Plan, draws: Sequence[Draw], logits: Tensor) -> list[Token | None]:
        """The tokens of those samples that need nothing but their logits; None for the others, and where there is none."""
        tokens: list[Token | None] = [None] * len(draws)
        seq_ids = plan.sample_seq_ids
        mine = [i for i, draw in enumerate(draws) if can_draw(draw) and seq_ids[i] not in self.beams]
        if mine:
            rows = logits if len(mine) == len(draws) else logits[mine]
            for index, token in zip(mine, drawn(rows, [draws[index] for index in mine]), strict=True):
                tokens[index] = token
        return tokens

    def _drawn_by_host(
        self, rows: npt.NDArray[np.float32], left: Sequence[int], draws: Sequence[Draw]
    ) -> list[int | NoToken]:
        """The tokens of the samples ``left``, whose logits are these rows."""
        is_open = [row for row, draw in enumerate(draws) if draw.params.is_open]
        asked = [(left[row], draws[row].key, draws[row].params.temperature) for row in is_open]
        contenders = self.model.contenders(asked) if asked else ()
        return sample_rows(rows, draws, self.model.likeliest, dict(zip(is_open, contenders, strict=True)))

    def _choose_beams(self, plan: Plan, rows: Mapping[int, npt.NDArray[np.float32]], answers: list[Sampled]) -> None:
        """The answers of sequences that are beams, each search for all of its own; new beams are known from here on."""
        of_search: dict[int, dict[SeqId, int]] = {}
        for index, seq_id in enumerate(plan.sample_seq_ids):
            if seq_id in self.beams:
                of_search.setdefault(id(self.beams[seq_id]), {})[seq_id] = index
        for indices in of_search.values():
            search = self.beams[next(iter(indices))]
            for seq_id, answer in search.choose({i: rows[index] for i, index in indices.items()}).items():
                answers[indices[seq_id]] = answer
                del self.beams[seq_id]
            if search.is_open:
                self.beams.update(dict.fromkeys(search.beams, search))

    def _read_prompts(self, plan: Plan, hidden_states: Tensor) -> None:
        """What the model thinks of the prompts that ask for it: of each token, given those before it."""
        for seq_id, (start, stop) in zip(plan.seq_ids, pairwise(plan.query_start), strict=True):
            how = self.sampling.get(seq_id, GREEDY)
            num_top = how.params.prompt_logprobs
            if num_top is None:
                continue
            stop = min(stop, start + how.num_prompt_tokens - 1 - plan.positions[start])
            if stop <= start:
                continue
            tokens, found = self.tokens_of(seq_id), {}
            for first in range(start, stop, ROWS_AT_ONCE):
                some = range(first, min(stop, first + ROWS_AT_ONCE))
                logits = self.model.logits(hidden_states[some.start : some.stop]).cpu().numpy()
                for row, logits_of_row in zip(some, logits, strict=True):
                    position = plan.positions[row] + 1
                    found[position] = logprobs(logits_of_row, tokens[position], num_top)
            self.prompt_logprobs[seq_id] = found


def _host_like(cache: Tensor, num_blocks: int) -> Tensor:
    """Host memory for blocks of a cache, pinned if a GPU is to copy from it."""
    return torch.zeros((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda and num_blocks > 0)
