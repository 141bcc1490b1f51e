"""Accelerators as their makers describe them: memory, dense bf16 rate, memory bandwidth, and the links to host and peers."""

from __future__ import annotations

from dataclasses import dataclass

from spec.vocabulary import InvalidConfig


@dataclass(frozen=True)
class Card:
    """Published rates, per second, in bytes and operations; decimal units, without sparsity.

    ``host_link`` is one direction of the bus, ``peer_link`` one direction to the other cards of a node together.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    host_link: float
    peer_link: float
    source: str


PCIE4, PCIE5 = 32e9, 64e9

CARDS = {
    card.name: card
    for card in (
        Card("a100-40gb", 40e9, 312e12, 1.555e12, PCIE4, 300e9, "NVIDIA A100 data sheet, SXM4 40 GB"),
        Card("a100-80gb", 80e9, 312e12, 2.039e12, PCIE4, 300e9, "NVIDIA A100 data sheet, SXM4 80 GB"),
        Card("h100", 80e9, 989e12, 3.35e12, PCIE5, 450e9, "NVIDIA H100 data sheet, SXM5"),
        Card("h200", 141e9, 989e12, 4.8e12, PCIE5, 450e9, "NVIDIA H200 data sheet, SXM"),
        Card("b200", 180e9, 2250e12, 8.0e12, PCIE5, 900e9, "NVIDIA DGX B200 data sheet, an eighth of it"),
        Card("mi300x", 192e9, 1307e12, 5.3e12, PCIE5, 448e9, "AMD Instinct MI300X data sheet"),
        Card("l4", 24e9, 121e12, 0.3e12, PCIE4, PCIE4, "NVIDIA L4 data sheet, half of the rate with sparsity"),
        Card("rtx-4090", 24e9, 165e12, 1.008e12, PCIE4, PCIE4, "NVIDIA Ada architecture whitepaper, fp32 accumulation"),
    )
}


def card_named(name: str) -> Card:
    """The card of this name. Raises ``InvalidConfig`` with all names."""
    if name.lower() not in CARDS:
        raise InvalidConfig("gpu", name, f"one of {', '.join(CARDS)}")
    return CARDS[name.lower()]
