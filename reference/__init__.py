"""The reference engine: slow and obvious, in plain Python and NumPy float64.

``make_engine`` and ``make_pool`` give what ``spec.conformance`` and the explorer drive. ``generate`` serves requests with a real model and gives
``(seq_id, token)`` as they come; ``ReferenceModelEngine`` is the same, step by step.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference.engine import ReferenceEngine as ReferenceEngine
    from reference.engine import make_engine as make_engine
    from reference.model import Llama as Llama
    from reference.model import dense_logits as dense_logits
    from reference.model_engine import ReferenceModelEngine as ReferenceModelEngine
    from reference.model_engine import generate as generate
    from reference.sampling import Sampling as Sampling
    from reference.sequence_pool import SequencePool as SequencePool
    from reference.sequence_pool import make_pool as make_pool

_HOMES = {
    "Llama": "reference.model",
    "ReferenceEngine": "reference.engine",
    "ReferenceModelEngine": "reference.model_engine",
    "Sampling": "reference.sampling",
    "SequencePool": "reference.sequence_pool",
    "dense_logits": "reference.model",
    "generate": "reference.model_engine",
    "make_engine": "reference.engine",
    "make_pool": "reference.sequence_pool",
}

__all__ = [
    "Llama",
    "ReferenceEngine",
    "ReferenceModelEngine",
    "Sampling",
    "SequencePool",
    "dense_logits",
    "generate",
    "make_engine",
    "make_pool",
]


def __getattr__(name: str) -> object:
    """Import what is asked for, and NumPy only with what needs it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
