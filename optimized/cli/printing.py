"""What several commands have in common: two options, what they print, and how they show that they are at work."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="A GGUF file, a Hugging Face directory, or ORG/NAME[@REVISION][:FILE.gguf] of the hub.",
        show_default="SmolLM2-135M-Instruct",
    ),
]
GenerationConfigOption = Annotated[
    str,
    typer.Option(
        help="Defaults of sampling: auto, the model's own generation_config.json; vllm, none; or such a file or its folder."
    ),
]
OverrideOption = Annotated[
    str | None,
    typer.Option(help="A JSON object of temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens instead."),
]


def print_json(value: object) -> None:
    """One JSON value, in letters that the terminal can show, each list of numbers on a line."""
    plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    text = json.dumps(value, indent=2, ensure_ascii=plain)
    # A line break is never part of a string in JSON, so this finds nothing inside one.
    typer.echo(re.sub(r"\[\n[\s\d,-]+\]", lambda found: json.dumps(json.loads(found[0])), text))


def with_status(doing: str, work: Callable[[Callable[[str], None]], T]) -> T:
    """The result of some work, with a sign of life on standard error if that is a terminal."""
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(doing) as status:
        return work(lambda part: status.update(f"{doing} {escape(part)}"))


def with_bar(doing: str, work: Iterable[T], total: int) -> list[T]:
    """All results of some work, with a bar on standard error if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return list(track(work, doing, total, console=console, transient=True, disable=not console.is_terminal))
