"""Files of settings, in TOML or YAML: each key once, and for each the values as they would stand on the command line."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 64 << 10
MAX_DEPTH = 4
"""What is inside each other: the file, a list and its values, and one more, to say which setting is none."""
MAX_DOTS = 100
"""Dots of a line of TOML, whose parser takes the square of a key's parts; no setting has any."""
MAX_REASON = 300
YAML_SUFFIXES = (".yaml", ".yml")
PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))
"""What one value of YAML may be. Its text is taken, so ``off`` and ``1_000`` mean what they mean behind a flag."""


class BadConfigFile(ValueError):
    """A file of settings is refused; the sentence has its name, the line where there is one, and the reason."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        # What stands in a file may be long, and steer a terminal.
        reason = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in reason[:MAX_REASON])
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {reason}")


@dataclass(frozen=True)
class Entry:
    """A key of the file with its values, of which a list may have several. TOML's parser does not say the line."""

    key: str
    texts: tuple[str, ...]
    is_list: bool = False
    line: int | None = None


def entries_of(path: Path) -> list[Entry]:
    """What stands in the file. Raises ``BadConfigFile``."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise BadConfigFile(path, None, f"it has more than {MAX_BYTES:,} bytes")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise BadConfigFile(path, None, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise BadConfigFile(path, None, "it is not UTF-8 text") from None
    found = list((_in_yaml if path.suffix.lower() in YAML_SUFFIXES else _in_toml)(path, text))
    seen: dict[str, Entry] = {}
    for each in found:
        name = each.key.replace("_", "-")
        if name in seen:
            where = "" if seen[name].line is None else f", also in line {seen[name].line}"
            raise BadConfigFile(path, each.line, f"{each.key} stands there twice{where}")
        seen[name] = each
        if any("\ud800" <= character <= "\udfff" for text in each.texts for character in text):
            raise BadConfigFile(path, each.line, f"{each.key} has half a character, which is no text")
    return found


def _in_toml(path: Path, text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > MAX_DOTS and not line.lstrip().startswith("#"):
            raise BadConfigFile(path, number, f"it has more than {MAX_DOTS} dots")
    try:
        said = tomllib.loads(text)
        texts = {key: tuple(map(str, value if isinstance(value, list) else [value])) for key, value in said.items()}
    except RecursionError:
        raise BadConfigFile(path, None, "it is not TOML of settings: too much is inside each other") from None
    except ValueError as error:  # of the syntax, and of numbers that are too long to be read or written
        raise BadConfigFile(path, None, f"it is not TOML: {error}") from None
    for key, value in said.items():
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, dict | list) for part in parts):
            raise BadConfigFile(path, None, f"{key} is {value!r}, not one value")
        yield Entry(key, texts[key], isinstance(value, list))


def _in_yaml(path: Path, text: str) -> Iterator[Entry]:
    """The file's nodes, which have lines and nothing else: no value is made by YAML, so none can be an object."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise BadConfigFile(path, None, "YAML needs pyyaml, pip install 'kvproof[server]'; or write TOML") from None
    depth = 0

    def compose_node(parent: Any, index: Any) -> Any:  # Any: nodes of YAML, which has no types
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise BadConfigFile(
                path, loader.line + 1, "too much is inside each other: write 'name: value' in each line"
            )
        node = composed(parent, index)
        depth -= 1
        return node

    try:
        loader: Any = yaml.SafeLoader(text)  # refuses what is no character of YAML
        composed, loader.compose_node = (
            loader.compose_node,
            compose_node,
        )  # it recurses, and looks far ahead at each depth
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise BadConfigFile(path, mark and mark.line + 1, f"it is not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise BadConfigFile(path, None, f"it is not YAML: {str(error).splitlines()[0]}") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise BadConfigFile(path, _line(root), "it has no keys: write 'name: value' in each line")
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise BadConfigFile(path, _line(key), "a key is the name of a setting")
        is_list = isinstance(value, yaml.SequenceNode) and value.tag == "tag:yaml.org,2002:seq"
        parts = value.value if is_list else [value]
        if any(not isinstance(part, yaml.ScalarNode) or part.tag not in PLAIN_TAGS for part in parts):
            raise BadConfigFile(path, _line(key), f"{key.value} is not one value; leave it out to have its default")
        yield Entry(key.value, tuple(part.value for part in parts), is_list, _line(key))


def _line(node: Any) -> int:  # Any: a node of YAML, which has no types
    return int(node.start_mark.line) + 1
