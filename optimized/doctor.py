"""What is installed here, what an engine would use, and why: facts for a person who wonders, or for a bug report."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from optimized.cpu_path import cpu_path, num_threads, why_not_narrow
from optimized.model_store import DEFAULT_BYTES, default_path, has_pip, home
from spec.vocabulary import InvalidConfig

BASE = ("numpy", "typer", "rich", "tqdm")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "engine": ("torch", "triton", "tokenizers", "safetensors", "gguf", "minijinja", "numba"),
    "server": ("fastapi", "starlette", "uvicorn", "h11", "pydantic", "msgspec", "prometheus-client", "pyyaml"),
    "grammar": ("llguidance",),
    "hub": ("huggingface_hub",),
    "conformance": ("pytest", "hypothesis"),
    "formal": ("z3-solver", "cvc5", "crosshair-tool"),
    "docs": ("sphinx", "furo", "myst-parser"),
}
"""The distributions of each extra, as the project file declares them."""

MODULES: Mapping[str, str] = {
    "z3-solver": "z3",
    "crosshair-tool": "crosshair",
    "myst-parser": "myst_parser",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
}
"""What a distribution is imported as, where that is another name."""

SECRET = frozenset({"KVPROOF_API_KEY"})
"""Variables that are said to be there, and not shown: a bug report is public."""

OTHERS_THAT_COUNT = (
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
)
"""Variables of others that change what is done here."""


@dataclass(frozen=True)
class Findings:
    """All that was found. ``problems`` are what must be repaired before anything can be trusted."""

    kvproof: str | None
    source: str
    python: str
    platform: str
    installed: Mapping[str, str]
    missing: Mapping[str, list[str]]
    device: str | None
    device_reason: str
    dtype: str | None
    kernels: str | None
    int8_weights: str | None
    gguf_weights: str | None
    num_threads: int | None
    num_processors: int
    model_folder: str
    default_model: str
    environment: Mapping[str, str]
    problems: list[str]

    def as_json(self) -> dict[str, object]:
        """The findings as plain data."""
        return asdict(self)

    def text(self) -> str:
        """The findings as a person reads them."""
        lines = {
            "kvproof": f"{self.kvproof or 'not installed, it runs from a folder'}, source {self.source}",
            "Python": f"{self.python} on {self.platform}",
            "packages": ", ".join(f"{name} {version}" for name, version in self.installed.items()),
            "missing": "; ".join(f"{', '.join(names)} (kvproof[{extra}])" for extra, names in self.missing.items())
            or "nothing",
            "device": f"{self.device or 'none'}: {self.device_reason}",
            "numbers": f"weights and KV cache in {self.dtype}" if self.dtype else "",
            "kernels": self.kernels or "",
            "int8": self.int8_weights or "",
            "gguf": self.gguf_weights or "",
            "threads": f"{self.num_threads} of {self.num_processors} processors" if self.num_threads else "",
            "models": self.model_folder,
            "default": self.default_model,
            "environment": ", ".join(f"{name}={value}" for name, value in self.environment.items())
            or "no variable of kvproof is set",
        }
        facts = [f"{name:12}{value}" for name, value in lines.items() if value]
        return "\n".join([*facts, *(f"{'PROBLEM':12}{problem}" for problem in self.problems)])


def examine() -> Findings:
    """Look at this machine and this environment."""
    installed = {name: version for name in (*BASE, *sum(EXTRAS.values(), ())) if (version := version_of(name))}
    missing = {extra: [name for name in names if name not in installed] for extra, names in EXTRAS.items()}
    device, reason, problems = _device()
    dtype = kernels = None
    if device is not None:
        try:
            dtype, kernels = _kernels(device == "cuda")
        except InvalidConfig as error:
            problems = [*problems, str(error)]
    return Findings(
        kvproof=version_of("kvproof"),
        source=source_digest(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        installed=installed,
        missing={extra: names for extra, names in missing.items() if names},
        device=device,
        device_reason=reason,
        dtype=dtype,
        kernels=kernels,
        int8_weights=None if device is None else _narrow_weights(device == "cuda", "int8", "in int8"),
        gguf_weights=None if device is None else _narrow_weights(device == "cuda", "gguf", "in a file's own 4 bits"),
        num_threads=None if device is None else num_threads(None),
        num_processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        model_folder=str(home()),
        default_model=_default_model(),
        environment={
            name: "set, and not shown" if name in SECRET else value
            for name, value in sorted(os.environ.items())
            if _concerns_us(name)
        },
        problems=[*foreign_kernels(), *problems],
    )


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, if there is one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


PACKAGES = ("spec", "optimized", "kernels")


def source_digest() -> str:
    """What an engine is made of, in twelve digits: the first of SHA-256 over its Python files, by their names."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def foreign_kernels() -> list[str]:
    """Other distributions that bring a package ``kernels``: theirs and ours overwrite each other's files."""
    found = importlib.metadata.packages_distributions().get("kernels", [])
    return [
        f"{name} {version_of(name)} is installed too and brings a package with the name of ours, kernels: "
        f"keep the two in different environments (pip uninstall {name}, then reinstall kvproof)"
        for name in sorted(set(found) - {"kvproof"})
    ]


def _device() -> tuple[str | None, str, list[str]]:
    """The device that an engine would take, why, and what is wrong with torch."""
    if version_of("torch") is None:
        return None, "torch is not installed: pip install 'kvproof[engine]'", []
    try:
        from optimized.model_core import chosen_device

        return *chosen_device(), []
    except Exception as error:  # noqa: BLE001  whatever a broken installation of torch raises
        reason = f"torch is installed and cannot be used ({type(error).__name__}: {error})"
        return None, reason, [reason]


def _kernels(on_gpu: bool) -> tuple[str, str]:
    """The type of the numbers, and the kernels with the reason for them."""
    if on_gpu:
        return "bfloat16", "Triton kernels, since tensors on a GPU take them"
    path = cpu_path(None, "auto", block_size=16)
    return path.dtype, path.sentence


def _narrow_weights(on_gpu: bool, quantization: str, what: str) -> str:
    """Whether there is this ``--quantization`` here, or why not."""
    why = "a GPU is taken" if on_gpu else why_not_narrow(quantization)
    return f"weights can be {what} (--quantization {quantization})" if why is None else f"no weights {what}: {why}"


def _default_model() -> str:
    """Whether the default model is there."""
    path = default_path()
    if not path.is_file():
        how = "it is fetched when first needed" if has_pip() else f"{sys.executable} has no pip to fetch it with"
        return f"{path.name} is not there, {how}"
    size = path.stat().st_size
    if size != DEFAULT_BYTES:
        return f"{path.name} is damaged ({size:,} bytes, expected {DEFAULT_BYTES:,}): delete it"
    return f"{path.name} is there"


def _concerns_us(name: str) -> bool:
    return name.startswith("KVPROOF_") or name in OTHERS_THAT_COUNT
