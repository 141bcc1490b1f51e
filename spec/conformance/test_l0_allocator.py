"""Level L0: blocks come and go, and nobody has a block that somebody else has."""

from collections.abc import Callable

from spec.scope import PLAIN, Scope
from spec.vocabulary import Config

ALONE = PLAIN - {"fork"}


def test_every_state_of_a_small_pool(walk_scope: Callable[[Scope], None]) -> None:
    walk_scope(Scope(Config(num_blocks=3, block_size=2), max_seqs=3, max_tokens=5, max_append=2, operations=ALONE))


def test_long_stories_of_a_pool(drive_pool: Callable[..., None]) -> None:
    drive_pool()
