"""The reference engine with a real model: K and V in a float64 cache that is written and read through block tables."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from reference.attention import Floats, paged_attention, visible
from reference.device import device_events, read_of, write_of
from reference.engine import ReferenceEngine
from reference.model import Llama, ModelConfig, Weights
from reference.plan import Outcome, Plan
from reference.sampling import Sampling, sample
from spec.engine import Admission, InvalidField, Observer, StepReport
from spec.vocabulary import Config, Request, RequestId, SeqId, State, SwapOut, Token


class ModelDevice:
    """Runs plans with a model.

    ``key_cache`` and ``value_cache`` are ``[num_layers, num_blocks, block_size, num_kv_heads, head_size]``. What was never
    written is NaN, so that reading it shows.
    """

    def __init__(self, model: Llama, config: Config) -> None:
        self.model = model
        self.config = config
        heads = (model.config.num_kv_heads, model.config.head_size)
        shape = (model.config.num_layers, config.num_blocks, config.block_size, *heads)
        host_shape = (model.config.num_layers, config.num_host_blocks, config.block_size, *heads)
        self.key_cache, self.value_cache = np.full(shape, np.nan), np.full(shape, np.nan)
        self.host_key_cache, self.host_value_cache = np.full(host_shape, np.nan), np.full(host_shape, np.nan)
        self.sampling: dict[SeqId, tuple[Sampling, int]] = {}
        self.last_logits: dict[SeqId, Floats] = {}

    def run(self, plan: Plan) -> Outcome:
        """Move blocks, compute all tokens of the step at once, and draw from the logits of the last ones."""
        self._move_blocks(plan)
        if not plan.scheduled:
            return Outcome(tuple(device_events(plan)), {})
        tokens = [token for each in plan.scheduled for token in each.tokens]
        positions = [position for each in plan.scheduled for position in range(each.start, each.stop)]

        def attend(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
            self._write(plan, layer, key, value)
            return self._read(plan, layer, query)

        hidden_states = self.model.hidden_states(tokens, positions, attend)
        return Outcome(tuple(device_events(plan)), self._sample(plan, hidden_states))

    def _move_blocks(self, plan: Plan) -> None:
        """Swaps, then copies, each block whole and in every layer."""
        for swap in plan.swaps:
            sources, targets = list(swap.sources), list(swap.event.blocks)
            if isinstance(swap.event, SwapOut):
                self.host_key_cache[:, targets] = self.key_cache[:, sources]
                self.host_value_cache[:, targets] = self.value_cache[:, sources]
            else:
                self.key_cache[:, targets] = self.host_key_cache[:, sources]
                self.value_cache[:, targets] = self.host_value_cache[:, sources]
        for copy in plan.copies:
            self.key_cache[:, copy.target] = self.key_cache[:, copy.source]
            self.value_cache[:, copy.target] = self.value_cache[:, copy.source]

    def _slots_of_layer(self, cache: Floats, layer: int) -> Floats:
        """One layer's cache with a slot a row: ``[num_slots, num_kv_heads, head_size]``, a view."""
        rows: Floats = cache[layer].reshape(self.config.num_slots, *cache.shape[3:])
        return rows

    def _write(self, plan: Plan, layer: int, key: Floats, value: Floats) -> None:
        """The K and V of every token of the step go to the slots of the slot mapping."""
        slots = [slot for each in plan.scheduled for slot in write_of(each).slots]
        self._slots_of_layer(self.key_cache, layer)[slots] = key
        self._slots_of_layer(self.value_cache, layer)[slots] = value

    def _read(self, plan: Plan, layer: int, query: Floats) -> Floats:
        """Each sequence attends to what its block table leads to."""
        keys = self._slots_of_layer(self.key_cache, layer)
        values = self._slots_of_layer(self.value_cache, layer)
        scale, results, row = self.model.config.head_size**-0.5, [], 0
        for each in plan.scheduled:
            read = read_of(each, plan.block_size, plan.window)
            sees = visible(range(each.start, each.stop), range(read.start, each.stop), plan.window)
            own = query[row : row + len(each.tokens)]
            results.append(paged_attention(own, keys, values, read.slots, sees, scale)[0])
            row += len(each.tokens)
        return np.concatenate(results)

    def _sample(self, plan: Plan, hidden_states: Floats) -> dict[SeqId, Token]:
        """A token for every sample, from the last row of the sequence that it comes from."""
        last_row, row = {}, 0
        for each in plan.scheduled:
            row += len(each.tokens)
            last_row[each.seq] = row - 1
        tokens = {}
        for drawn in plan.samples:
            logits = self.model.logits(hidden_states[last_row[drawn.source]])
            sampling, sequence = self.sampling[drawn.seq]
            tokens[drawn.seq] = sample(logits, sampling, sequence=sequence, position=len(drawn.tokens))
            self.last_logits[drawn.seq] = logits
        return tokens


class ReferenceModelEngine:
    """``add`` requests with their sampling, ``step``, and take the tokens from the reports."""

    def __init__(
        self, weights: Weights, model_config: ModelConfig, config: Config, observer: Observer | None = None
    ) -> None:
        self.model_config = model_config
        self.engine = ReferenceEngine(config, observer)
        self.device = ModelDevice(Llama(weights, model_config), config)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.engine.has_work

    def add(self, request: Request, sampling: Sampling | None = None) -> None:
        """Let a request wait. Sampling is greedy unless said otherwise; sample i is ``seq_ids[i]``."""
        for token in request.prompt:
            if not 0 <= token < self.model_config.vocab_size:
                raise InvalidField("prompt", token, f"token ids from 0 to {self.model_config.vocab_size - 1}")
        self.engine.add(request)
        for sequence, seq_id in enumerate(request.seq_ids):
            self.device.sampling[seq_id] = (sampling or Sampling(), sequence)

    def fork(self, parent: SeqId, child: SeqId, sequence: int) -> Admission:
        """Split a running sequence; the child draws as the request's sample number ``sequence``."""
        answer = self.engine.fork(parent, child)
        if answer is Admission.NOW:
            self.device.sampling[child] = (self.device.sampling[parent][0], sequence)
        return answer

    def step(self) -> StepReport:
        """One step of the model; ``emitted`` has the new tokens."""
        return self.engine.step_on(self.device)

    def abort(self, request_id: RequestId) -> None:
        """Give a request up. An unknown or finished id is ignored."""
        self.engine.abort(request_id)

    def release(self, seq_id: SeqId) -> None:
        """End one sequence. An unknown id is ignored."""
        self.engine.release(seq_id)

    def snapshot(self) -> State:
        return self.engine.snapshot()


def generate(
    weights: Weights,
    model_config: ModelConfig,
    config: Config,
    requests: Iterable[Request],
    sampling: Mapping[RequestId, Sampling] | None = None,
) -> Iterator[tuple[SeqId, Token]]:
    """Serve the requests together, and give each token with its sequence as it comes. Sampling is greedy by default."""
    engine = ReferenceModelEngine(weights, model_config, config)
    for request in requests:
        engine.add(request, (sampling or {}).get(request.request_id))
    while engine.has_work:
        for event in engine.step().emitted:
            for token in event.tokens:
                yield event.seq, token
