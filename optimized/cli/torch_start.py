"""torch imported without what only its compilers use, which is a fifth of an import's time and more."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

KNOWN = ("2.13.0+cpu",)
"""Builds of torch of which the rest is known to work without these parts; others are imported as they are."""

LEFT_OUT = ("torch._meta_registrations", "torch.export")
"""Operations on tensors without numbers, written in Python, and programs as graphs: nothing here has either."""


def import_torch() -> None:
    """Import torch, if this is a known build; whoever imports the parts that were left out later has them."""
    if "torch" in sys.modules or _installed() not in KNOWN:
        return
    placeholders = {name: ModuleType(name) for name in LEFT_OUT}
    sys.modules.update(placeholders)
    # torch notes in which line some operations are registered. It needs no text of that line, for which every module is looked at.
    whole = inspect.getframeinfo
    inspect.getframeinfo = partial(whole, context=0)
    try:
        import torch
    finally:
        inspect.getframeinfo = whole
        for name in LEFT_OUT:
            del sys.modules[name]
    for name, placeholder in placeholders.items():
        part = name.rpartition(".")[2]
        if getattr(torch, part, None) is placeholder:
            delattr(torch, part)


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """What is imported and made in here stays: the garbage collector does not look at it, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _installed() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
