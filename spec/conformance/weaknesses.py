"""What has gone wrong in servers of language models, by class, with the public advisories, and what must hold instead."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Weakness:
    """A class of mistakes: the sentence that holds without it, and where it was made."""

    sentence: str
    advisories: tuple[str, ...]


WEAKNESSES: Mapping[str, Weakness] = {
    "deserialization": Weakness(
        "Nothing that a caller sends is loaded as an object.",
        (
            "CVE-2024-11041",
            "CVE-2025-29783",
            "CVE-2025-32444",
            "CVE-2025-30165",
            "CVE-2025-47277",
            "CVE-2026-3059",
            "CVE-2026-3060",
            "CVE-2026-7304",
            "CVE-2026-86793",
            "CVE-2026-93034",
            "CVE-2026-14890",
            "GHSA-xxv9-73gc-96fm",
        ),
    ),
    "code": Weakness(
        "No template of a caller's is run as code, and none without an end.",
        ("CVE-2026-5760", "CVE-2025-61620", "CVE-2025-62426", "CVE-2026-115911", "CVE-2026-115918", "CVE-2025-9141"),
    ),
    "open-route": Weakness(
        "Without a key nobody learns anything but whether the server is there.",
        ("CVE-2026-48746", "CVE-2026-49468", "CVE-2026-48710", "CVE-2026-92972", "CVE-2026-7302"),
    ),
    "wrong-key": Weakness(
        "A key that is not one of the server's opens nothing, and breaks nothing.",
        ("CVE-2025-59425", "CVE-2026-23996"),
    ),
    "exhaustion": Weakness(
        "A request for more than a server can give is turned down before work is done for it.",
        ("CVE-2026-34756", "CVE-2026-73559", "CVE-2025-48956", "CVE-2024-8939", "CVE-2025-62727", "CVE-2025-54121"),
    ),
    "grammar": Weakness(
        "No expression, grammar or schema keeps a server busy or brings it down.",
        (
            "CVE-2026-55574",
            "CVE-2025-71379",
            "CVE-2025-29770",
            "CVE-2025-32381",
            "CVE-2025-57809",
            "CVE-2026-25048",
            "CVE-2025-48942",
            "CVE-2025-48943",
            "CVE-2025-48944",
            "CVE-2026-105757",
            "PYSEC-2025-54",
            "PYSEC-2026-3933",
        ),
    ),
    "label": Weakness("What a caller makes up does not become the name of a metric's series.", ("PYSEC-2026-4325",)),
    "foreign-address": Weakness(
        "A server asks no address that a caller names, and reads no file.",
        ("CVE-2026-34753", "CVE-2026-24779", "CVE-2026-25960", "CVE-2026-22773", "CVE-2026-22778", "PYSEC-2026-4184"),
    ),
    "deadly-request": Weakness(
        "No request brings the server down for the others.",
        (
            "CVE-2026-114051",
            "CVE-2026-116181",
            "CVE-2026-105756",
            "CVE-2026-116180",
            "CVE-2026-105922",
            "CVE-2025-62164",
            "CVE-2026-56340",
            "CVE-2026-105754",
            "CVE-2024-8768",
            "PYSEC-2026-145",
            "PYSEC-2026-2303",
            "PYSEC-2026-4350",
            "PYSEC-2026-4353",
        ),
    ),
    "neighbour": Weakness(
        "No request changes what another one is answered.",
        (
            "CVE-2026-114049",
            "CVE-2026-93840",
            "CVE-2026-93989",
            "GHSA-v97p-wpxp-px84",
            "GHSA-fpch-3xrf-7q96",
            "CVE-2026-105755",
            "CVE-2026-112266",
        ),
    ),
    "shared-cache": Weakness("No caller is told what others have in the cache.", ("CVE-2025-46570",)),
    "leak": Weakness(
        "An error says what was wrong with the request, and nothing of the server's inside.",
        ("CVE-2026-22778", "CVE-2026-54236"),
    ),
}
"""What can be seen from outside."""

UNSEEN: Mapping[str, str] = {
    "sockets between processes": "pickles there are not reached through the door; in our own tree a test looks for them",
    "code of a model": "a model is chosen by who starts the server; ours loads no code of any",
    "model files": "they are not uploaded; ours are read with bounds, and mutated in tests/models",
    "timing of a key": "a difference of nanoseconds is not seen through a network; ours compares digests",
    "hash collisions": "they are forced inside the process: CACHE-1 and the suite's levels L1 and L2",
    "caches without bound": "a process's memory is not seen from outside",
}
"""What is left out, and why."""
