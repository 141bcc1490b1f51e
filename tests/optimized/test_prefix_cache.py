"""The prefix cache by itself: what is found is the same prefix under the same salt, whatever the digests say."""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from hashlib import sha256
from struct import pack

import pytest

import optimized
import reference
from optimized.engine import EngineCore
from optimized.placement import num_blocks_to_place
from optimized.prefix_cache import Hash, PrefixCache, Record
from optimized.symbolic_device import SymbolicDevice
from spec.engine import EngineFactory
from spec.vocabulary import CacheKey, Config, Event, Hit, Publish, Request, State, Token
from tests.optimized.driver import next_token


def published(cache: PrefixCache, tokens: list[Token], blocks: list[int], salt: str = "") -> list[Record]:
    chain = [cache.root(salt)]
    for index, block in enumerate(blocks):
        cache.publish(chain, tokens, index, [block])
    return chain


class Heard:
    """Keeps every event."""

    def __init__(self, events: list[Event]) -> None:
        self.event = events.append

    def settled(self, snapshot: Callable[[], State]) -> None:
        pass


class OneBit:
    """A hash that nearly always collides."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def digest(self) -> bytes:
        return bytes([sum(self.data) % 2])


def test_cache_5_the_longest_prefix_is_found() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    chain = published(cache, [1, 2, 3, 4, 5, 6], [4, 2, 7])
    assert cache.find([cache.root("")], [1, 2, 3, 4, 9, 9], limit=3) == [4, 2]
    assert [cache.find(chain, [1, 2, 3, 4, 5, 6], limit) for limit in (0, 1, 3)] == [[], [4], [4, 2, 7]]
    assert cache.key_of(2) == CacheKey((1, 2, 3, 4))


def test_another_salt_finds_nothing() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    published(cache, [1, 2], [4], salt="a")
    assert cache.find([cache.root("b")], [1, 2], limit=1) == []
    assert cache.find([cache.root("a")], [1, 2], limit=1) == [4]


def test_cache_8_a_second_block_with_the_same_key_is_not_published() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    published(cache, [1, 2], [4])
    assert cache.publish([cache.root("")], [1, 2], 0, [5]) == []


def test_a_child_stays_true_when_its_parent_is_evicted_and_comes_back_elsewhere() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    published(cache, [1, 2, 3, 4], [4, 5])
    cache.evict([4])
    assert cache.find([cache.root("")], [1, 2, 3, 4], limit=2) == []
    assert cache.key_of(5) == CacheKey((1, 2, 3, 4))
    chain = published(cache, [1, 2], [6])
    assert cache.find(chain, [1, 2, 3, 4], limit=2) == [6, 5]
    assert chain[2].parent is chain[1]


@pytest.mark.parametrize("seed", range(20))
def test_cache_3_a_collision_never_shows_foreign_tokens(seed: int) -> None:
    """With a digest of one bit, nearly everything collides: hits are missed, and none is wrong."""
    rng = random.Random(seed)
    cache = PrefixCache(num_blocks=16, block_size=2, root=b"", hash_of=OneBit)
    for block in range(16):
        if rng.random() < 0.3:
            cache.evict([rng.randrange(16)])
        tokens = [rng.randint(0, 2) for _ in range(6)]
        chain = [cache.root(rng.choice("ab"))]
        for index in range(3):
            if cache.publish(chain, tokens, index, [block]):
                break
        wanted = [rng.randint(0, 2) for _ in range(6)]
        salt = rng.choice("ab")
        for index, found in enumerate(cache.find([cache.root(salt)], wanted, limit=3)):
            assert cache.key_of(found) == CacheKey(tuple(wanted[: 2 * index + 2]), salt)


def test_tokens_of_any_size_are_kept() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    published(cache, [1, 1 << 40, 3, 4], [4, 5])
    assert cache.key_of(5) == CacheKey((1, 1 << 40, 3, 4))


def test_salts_that_nobody_uses_any_more_leave_nothing_behind() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    for salt in range(100):
        published(cache, [1, 2], [4], salt=str(salt))
        cache.evict([4])
    assert len(cache._roots) == 0


def test_two_processes_have_different_digests() -> None:
    assert PrefixCache(1, 2).root("").digest != PrefixCache(1, 2).root("").digest
    assert PrefixCache(1, 2, root=b"", model="a").root("").digest != PrefixCache(1, 2, root=b"").root("").digest


def test_an_engine_has_its_model_in_its_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda _: b"")
    cores = [EngineCore(Config(1, 2, prefix_cache=True), SymbolicDevice(2, next_token), model=m) for m in ("", "a")]
    caches = [PrefixCache(1, 2, root=b"", model=model) for model in ("", "a")]
    for core, cache in zip(cores, caches, strict=True):
        assert core.scheduler.cache is not None
        assert core.scheduler.cache.root("").digest == cache.root("").digest


@pytest.mark.parametrize("make", [optimized.make_engine, reference.make_engine])
def test_a_block_whose_parents_are_lost_is_published_with_them(make: EngineFactory) -> None:
    """Without its parents nobody would find it, and whoever follows the stream of KV events would not know them."""
    heard: list[Event] = []
    engine = make(Config(num_blocks=16, block_size=2, prefix_cache=True), Heard(heard))
    prompt = (1, 2, 3, 4, 5)
    for number in range(2):  # in one step: the second one's blocks are not published, since their keys are taken
        engine.add(Request(number, prompt, max_tokens=4, seq_ids=(number,)))
    engine.step(lambda seq, prefix: 6)
    engine.abort(0)
    assert engine.reset_cache()
    assert not engine.snapshot().cached
    engine.step(lambda seq, prefix: 6)
    published = [Publish(1, index) for index in range(3)]
    assert [event for event in heard if isinstance(event, Publish)][2:] == published
    engine.add(Request(2, (*prompt, 6, 9), max_tokens=1, seq_ids=(2,)))
    engine.step(lambda seq, prefix: 6)
    assert [len(event.blocks) for event in heard if isinstance(event, Hit)] == [3]


def test_statistics_count_each_admission_once() -> None:
    config = Config(num_blocks=16, block_size=2, prefix_cache=True, max_num_batched_tokens=4)
    core = EngineCore(config, SymbolicDevice(config.block_size, next_token))
    for request_id in range(3):
        core.add(Request(request_id, (1, 2, 3, 4, 5), max_tokens=2, seq_ids=(request_id,)))
        while core.has_work:
            core.step()
    stats = core.stats()
    assert (stats["num_cache_queries"], stats["num_cache_hits"]) == (3, 2)
    assert (stats["num_queried_tokens"], stats["num_hit_tokens"]) == (15, 8)


def test_a_later_turn_finds_the_answer_of_the_earlier_one() -> None:
    config = Config(num_blocks=16, block_size=2, prefix_cache=True)
    core = EngineCore(config, SymbolicDevice(config.block_size, lambda seq, prefix: 7))
    core.add(Request(0, (1, 2, 3), max_tokens=4, seq_ids=(0,)))
    while core.has_work:
        core.step()
    core.add(Request(1, (1, 2, 3, 7, 7, 7, 7, 5), max_tokens=1, seq_ids=(1,)))
    core.step()
    assert core.stats()["num_hit_tokens"] == 6
    assert core.reset_cache()
    assert core.stats()["num_cached_blocks"] == 0


def test_a_block_is_packed_the_same_whatever_stands_beside_it() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    assert cache.publish([cache.root("")], [1, 2, 1 << 40, 3], 0, [4, 5]) == [0, 1]
    assert cache.find([cache.root("")], [1, 2, 9, 9], limit=2) == [4]
    assert cache.find([cache.root("")], [1, 2, 1 << 40, 3], limit=2) == [4, 5]


def test_records_are_equal_token_by_token_up_to_their_roots() -> None:
    def line(*packs: bytes) -> Record:
        record = Record(None, b"same", packs[0])
        for packed in packs[1:]:
            record = Record(record, b"same", packed)
        return record

    assert line(b"salt", b"a", b"b") == line(b"salt", b"a", b"b")
    assert line(b"salt", b"a", b"b") != line(b"other", b"a", b"b")
    assert line(b"salt", b"a", b"b") != line(b"salt", b"c", b"b")
    assert line(b"a") != line(b"salt", b"a")
    assert line(b"salt", b"a") != line(b"a")
    assert line(b"salt") != "salt"


def test_a_look_up_that_finds_what_others_published_keeps_its_line() -> None:
    cache, tokens = PrefixCache(num_blocks=8, block_size=2), [1, 2, 3, 4, 5, 6]
    mine, other = [cache.root("")], [cache.root("")]
    cache.publish(mine, tokens, 0, [4])
    assert cache.find(mine, tokens, limit=2) == [4]
    cache.find(other, tokens, limit=1)
    cache.publish(other, tokens, 1, [5])
    assert cache.find(mine, tokens, limit=2) == [4, 5]
    assert mine == other
    assert [record.block for record in mine] == [None, 4, 5]


def test_a_copy_is_what_its_listener_knows() -> None:
    class Knows:
        def __init__(self, cache: PrefixCache) -> None:
            self.cache = cache

        def stored(self, records: Sequence[Record]) -> None: ...
        def removed(self, records: Sequence[Record]) -> None: ...
        def cleared(self) -> None: ...

    cache = PrefixCache(num_blocks=8, block_size=2)
    cache.listener = Knows(cache)
    copied = deepcopy(cache)
    assert isinstance(copied.listener, Knows)
    assert copied.listener.cache is copied


def test_a_block_is_lost_if_it_could_be_found_once_and_can_no_longer() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    assert not cache.is_lost([cache.root("")], 0)
    chain = published(cache, [1, 2], [4])
    assert not cache.is_lost(chain, 0)
    assert not cache.is_lost(chain, 1)
    cache.evict([4])
    assert cache.is_lost(chain, 0)
    with pytest.raises(KeyError, match="4"):
        cache.key_of(4)
    published(cache, [1, 2], [6])
    assert not cache.is_lost(chain, 0)


def test_a_copy_has_records_of_its_own() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    published(cache, [1, 2, 3, 4], [4, 5])
    copied = deepcopy(cache)
    copied.evict([4, 5])
    assert cache.find([cache.root("")], [1, 2, 3, 4], limit=2) == [4, 5]
    assert copied.publish([copied.root("")], [1, 2, 3, 4], 0, [6, 7]) == [0, 1]
    assert (cache.num_cached, copied.num_cached) == (2, 2)


def test_the_next_chunk_begins_behind_what_is_hit() -> None:
    config = Config(num_blocks=16, block_size=2, prefix_cache=True)
    core = EngineCore(config, SymbolicDevice(config.block_size, lambda seq, prefix: 7))
    core.add(Request(0, (1, 2, 3, 4, 5), max_tokens=1, seq_ids=(0,)))
    core.step()
    core.add(Request(1, (1, 2, 3, 4, 5, 6, 7, 8), max_tokens=1, seq_ids=(1,)))
    pool, seq = core.scheduler.pool, core.scheduler.seqs[1]
    assert [num_blocks_to_place(pool, seq, budget, config.block_size) for budget in (1, 2, 3, 4, 5)] == [3, 3, 4, 4, 4]


def test_a_digest_is_made_of_its_parents_and_its_tokens_length_first() -> None:
    """Whoever is given the same root and model gets the same digests."""

    def with_length(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    cache = PrefixCache(num_blocks=8, block_size=2, root=b"root")
    chain = published(cache, [1, 2, 3, 1 << 40], [4, 5], salt="salt")
    packs = [with_length(b"root") + with_length(b"") + with_length(b"salt")]
    packs += map(with_length, (pack("<2I", 1, 2), pack("<2q", 3, 1 << 40)))
    digest = b""
    for record, packed in zip(chain, packs, strict=True):
        digest = sha256(digest + packed).digest()
        assert record.digest == digest


def test_what_was_learnt_is_not_worked_out_again() -> None:
    hashed: list[bytes] = []

    def hash_of(data: bytes) -> Hash:
        hashed.append(data)
        return sha256(data)

    cache, tokens = PrefixCache(num_blocks=8, block_size=2, hash_of=hash_of), [1, 2, 3, 4]
    published(cache, tokens, [4, 5])
    assert len(hashed) == 3  # one for each block, and one for the root

    chain = [cache.root("")]
    assert cache.find(chain, tokens, limit=2) == [4, 5]
    assert len(hashed) == 3  # it goes where the prompt before it went
    assert cache.find(chain, (), limit=2) == [4, 5]  # the second look-up reads no token

    published(cache, [1, 2, 9, 9], [6, 7])
    assert len(hashed) == 4  # it parts from it after one block
    for _ in range(2):
        assert cache.find([cache.root("")], tokens, limit=2) == [4, 5]
        assert len(hashed) == 5  # the first who goes back pays for it

    copied = deepcopy(cache)
    assert copied.root("") is not cache.root("")
    assert len(hashed) == 5


def test_a_listener_hears_each_run_of_blocks_by_itself() -> None:
    runs: list[list[int | None]] = []

    class Hears:
        def stored(self, records: Sequence[Record]) -> None:
            runs.append([record.block for record in records])

        def removed(self, records: Sequence[Record]) -> None: ...
        def cleared(self) -> None: ...

    cache, tokens = PrefixCache(num_blocks=8, block_size=2), [1, 2, 3, 4, 5, 6]
    published(cache, tokens[:4], [4, 5])
    cache.evict([4])
    cache.listener = Hears()
    assert cache.publish([cache.root("")], tokens, 0, [6, 7, 3]) == [0, 2]
    assert runs == [[6], [3]]
