"""What the reference engine and its pool declare: all there is."""

import reference
from spec.engine import ENGINE_CAPABILITIES, POOL_CAPABILITIES, Capability
from spec.vocabulary import Config

CONFIG = Config(num_blocks=4)


def test_every_capability_is_on_in_reference() -> None:
    assert reference.make_engine(CONFIG).profile.capabilities == ENGINE_CAPABILITIES
    assert reference.make_pool(CONFIG).profile.capabilities == POOL_CAPABILITIES


def test_every_capability_is_an_engines_or_a_pools() -> None:
    assert ENGINE_CAPABILITIES | POOL_CAPABILITIES == set(Capability)
