"""A bar that shows how far many requests are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(total: int, wanted: bool) -> tqdm[Any]:
    """A bar over requests; silent when standard error is no terminal."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc="Generating",
        unit=" prompts",
        disable=None if wanted else True,
        leave=False,
        dynamic_ncols=True,
    )
