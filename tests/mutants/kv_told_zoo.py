"""Sabotaged optimized engines that tell their own KV events wrongly."""

from tests.mutants.sabotage import Mutant


def _fault(name: str, old: str, new: str, rule: str, row: str) -> Mutant:
    return Mutant(name, "optimized", "kv_events.py", old, new, rule, row)


KV_TOLD_ZOO = [
    _fault(
        "a stored block says that it is its own parent",
        "else parent.digest.hex()",
        "else records[0].digest.hex()",
        "CACHE-1",
        "B-090",
    ),
    _fault(
        "a stored block leaves its last token out",
        "for token in record.tokens(self._block_size)]",
        "for token in record.tokens(self._block_size)][:-1]",
        "CACHE-2",
        "B-098",
    ),
]
