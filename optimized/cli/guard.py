"""What goes wrong in a command, in one sentence and an exit status instead of a traceback."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

P = ParamSpec("P")

OK, FAILED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def plain_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with a sentence and an exit status where it would end in a traceback for what is no bug of ours."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            forget_stdout()
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            said = _sentence(error)
            if said is None:
                raise
            sentence, status = said
            typer.echo("\n".join([sentence, *getattr(error, "__notes__", ())]), err=True)
            raise typer.Exit(status) from None

    return guarded


def _sentence(error: Exception) -> tuple[str, int] | None:
    """What to say, and the exit status; None for a bug of ours."""
    from optimized.checkpoint import ConfigError
    from optimized.model_store import BadModelFile, ModelUnavailable
    from spec.engine import InvalidRequest
    from spec.kv_events import StreamViolation
    from spec.rules import RuleViolation
    from spec.trace import TraceError
    from spec.vocabulary import InvalidConfig

    if isinstance(error, RuleViolation | StreamViolation):
        return str(error), FAILED
    if type(error) is ArithmeticError:  # the reference engine's word for logits that are no numbers
        return str(error), FAILED
    if isinstance(error, InvalidRequest | InvalidConfig | ConfigError | ModelUnavailable | BadModelFile | TraceError):
        return str(error), BAD_INPUT
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part), BAD_INPUT
    if isinstance(error, MemoryError):
        return "there is not enough memory", BAD_INPUT
    return None


def _missing(error: ModuleNotFoundError) -> tuple[str, int] | None:
    """The extra that brings a module."""
    from optimized.doctor import EXTRAS, MODULES

    module = (error.name or "").partition(".")[0]
    for extra, names in EXTRAS.items():
        for name in names:
            if module == MODULES.get(name, name):
                return f"this needs {name}, which is not installed: pip install 'kvproof[{extra}]'", BAD_INPUT
    return None


def forget_stdout() -> None:
    """Whoever read us is gone; what is still in the buffer must not raise when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
