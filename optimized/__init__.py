"""The engine that people import: block pool, scheduler, devices, models, sampler and server.

``import optimized`` loads neither torch nor numpy: every name is fetched when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimized.async_llm import AsyncLLM
    from optimized.beam_search import BeamSearchParams
    from optimized.engine import EngineCore, make_engine
    from optimized.engine_thread import EngineBusy, EngineStopped
    from optimized.llm import LLM
    from optimized.outputs import CompletionOutput, OutputKind, RequestOutput
    from optimized.sampling import SamplingParams
    from optimized.sequence_pool import make_pool
    from optimized.structured_outputs import StructuredOutputsParams
    from optimized.symbolic_device import SymbolicDevice

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineBusy",
    "EngineCore",
    "EngineStopped",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "SymbolicDevice",
    "make_engine",
    "make_pool",
]

_HOME = {
    "BeamSearchParams": "beam_search",
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EngineBusy": "engine_thread",
    "EngineCore": "engine",
    "EngineStopped": "engine_thread",
    "OutputKind": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling",
    "StructuredOutputsParams": "structured_outputs",
    "SymbolicDevice": "symbolic_device",
    "make_engine": "engine",
    "make_pool": "sequence_pool",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'optimized' has no attribute {name!r}")
    found: object = getattr(import_module(f"optimized.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
