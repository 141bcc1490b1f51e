"""torch imported without what only its compilers use, which is a fifth of an import's time and more."""

from __future__ import annotations

import sys
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
    try:
        import torch
    finally:
        for name in LEFT_OUT:
            del sys.modules[name]
    for name, placeholder in placeholders.items():
        part = name.rpartition(".")[2]
        if getattr(torch, part, None) is placeholder:
            delattr(torch, part)


def _installed() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
