"""Where the settings of a command come from: the command line, else the environment, else a file, else a default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from optimized.cli.config_file import BadConfigFile, entries_of
from optimized.server.limits import Limits

ORIGINS = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file", "DEFAULT": "default"}
"""Our words for typer's."""

SECRET = frozenset({"api_key"})
"""Settings that are said to be there, and not shown."""


@dataclass(frozen=True)
class Setting:
    """A setting of a command, and where it comes from."""

    name: str
    value: str
    origin: str


def with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with a flag and an environment variable for each field of the ``limits`` that it takes."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.name != "limits"]
    flags = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=Annotated[
                int,
                typer.Option(envvar=variable_of(each.name), help=each.metadata["help"], rich_help_panel="Limits"),
            ],
        )
        for each in fields(Limits)
    ]

    @functools.wraps(command)
    def limited(**given: Any) -> None:  # Any: what the flags of the command are
        limits = Limits(**{each.name: given.pop(each.name) for each in fields(Limits)})
        command(**given, limits=limits)

    made: Any = limited  # a function has no such attribute for mypy
    made.__signature__ = signature.replace(parameters=[*own, *flags])
    limited.__annotations__ = {each.name: each.annotation for each in (*own, *flags)}
    return limited


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"KVPROOF_{name.upper()}"


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take what a file says for defaults. Its keys are names of flags. Raises ``typer.BadParameter``."""
    if path is None:
        return None
    known = {_flag(each): each for each in context.command.params if each.name not in ("config", "help")}
    defaults: dict[str, Any] = {}  # Any: a text or a list of texts
    try:
        for entry in entries_of(path):
            parameter = known.get(entry.key.replace("_", "-"))
            if parameter is None:
                raise BadConfigFile(path, entry.line, f"{entry.key} is no setting of {context.command.name}")
            if entry.is_list and not parameter.multiple:
                raise BadConfigFile(path, entry.line, f"{entry.key} is {list(entry.texts)}, not one value")
            defaults[str(parameter.name)] = list(entry.texts) if parameter.multiple else entry.texts[0]
    except BadConfigFile as error:
        raise typer.BadParameter(str(error)) from None
    context.default_map = defaults
    return path


def _flag(parameter: Any) -> str:  # Any: typer does not export its parameters
    """The name of a parameter's flag, without what it begins with."""
    return str(parameter.opts[0]).lstrip("-").replace("_", "-")


def settings_of(app: typer.Typer, name: str, arguments: Sequence[str]) -> list[Setting]:
    """What each setting of a command is, with these arguments, in this environment. Raises ``typer.BadParameter``."""
    found = []
    command = typer.main.get_group(app).commands[name]
    with command.make_context(command.name, list(arguments)) as context:
        for parameter in command.params:
            name = parameter.name or ""
            if name == "help":
                continue
            value, source = context.params.get(name), context.get_parameter_source(name)
            origin = ORIGINS["DEFAULT" if source is None else source.name]
            shown = "not set" if value in (None, ()) else "set, and not shown" if name in SECRET else _text(value)
            found.append(Setting(_flag(parameter), shown, origin))
    return found


def _text(value: object) -> str:
    """A value as somebody would write it on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
