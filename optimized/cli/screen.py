"""What ``kvproof generate`` shows: several texts that grow at once, printed one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from optimized.outputs import RequestOutput

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""A model's text must not steer the terminal that shows it."""


class Screen:
    """Prints the outputs of requests in order; the first that is unfinished appears as it grows."""

    def __init__(self, prompts: Sequence[str], num_samples: int, out: TextIO | None = None) -> None:
        self._prompts = prompts
        self._num_samples = num_samples
        self._out = sys.stdout if out is None else out
        self._latest: list[RequestOutput | None] = [None] * len(prompts)
        self._place = 0  # of the output that is being printed: prompt * num_samples + index
        self._num_printed = 0
        self._begun = False

    def show(self, index: int, request: RequestOutput) -> None:
        """The request of prompt number ``index`` as it stands now."""
        self._latest[index] = request
        while self._place < len(self._prompts) * self._num_samples and self._print_more():
            self._place += 1
            self._num_printed, self._begun = 0, False
        self._out.flush()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been printed yet."""
        return self._place == 0 and not self._begun

    def _print_more(self) -> bool:
        """Print what is new of the output whose turn it is. Whether that is all of it."""
        prompt, index = divmod(self._place, self._num_samples)
        request = self._latest[prompt]
        if request is None:
            return False
        output = request.outputs[index]
        if not self._begun and (output.text or output.finished()):
            self._out.write(self._heading(prompt, index))
            self._begun = True
        self._out.write(printable(output.text[self._num_printed :]))
        self._num_printed = len(output.text)
        if output.finished():
            self._out.write("\n")
        return output.finished()

    def _heading(self, prompt: int, index: int) -> str:
        """What tells outputs apart; a single one needs nothing."""
        lines = []
        if len(self._prompts) > 1 and index == 0:
            lines.append(f"=== {one_line(self._prompts[prompt])}")
        if self._num_samples > 1:
            lines.append(f"--- {index + 1} of {self._num_samples}")
        gap = "\n" if self._place and lines else ""
        return gap + "".join(f"{line}\n" for line in lines)


def printable(text: str) -> str:
    """The text with control characters spelled out.

    >>> printable("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return text.translate(CONTROLS)


def one_line(text: str, width: int = 100) -> str:
    """The beginning of a text, on one line.

    >>> one_line("def f():\\n    return 1", width=12)
    'def f(): ...'
    """
    words = " ".join(printable(text).split())
    return words if len(words) <= width else words[: width - 4].rstrip() + " ..."
