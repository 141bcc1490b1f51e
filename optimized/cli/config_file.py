"""Files of settings, in TOML or YAML: each key once, and for each the values as they would stand on the command line."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 64 << 10
YAML_SUFFIXES = (".yaml", ".yml")
PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))
"""What one value of YAML may be. Its text is taken, so ``off`` and ``1_000`` mean what they mean behind a flag."""


class BadConfigFile(ValueError):
    """A file of settings is refused; the sentence has its name, the line where there is one, and the reason."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
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
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise BadConfigFile(path, None, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise BadConfigFile(path, None, "it is not UTF-8 text") from None
    if len(content) > MAX_BYTES:
        raise BadConfigFile(path, None, f"it has more than {MAX_BYTES:,} bytes")
    found = list((_in_yaml if path.suffix.lower() in YAML_SUFFIXES else _in_toml)(path, text))
    seen: dict[str, Entry] = {}
    for each in found:
        name = each.key.replace("_", "-")
        if name in seen:
            where = "" if seen[name].line is None else f", also in line {seen[name].line}"
            raise BadConfigFile(path, each.line, f"{each.key} stands there twice{where}")
        seen[name] = each
    return found


def _in_toml(path: Path, text: str) -> Iterator[Entry]:
    try:
        said = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadConfigFile(path, None, f"it is not TOML: {error}") from None
    for key, value in said.items():
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, dict | list) for part in parts):
            raise BadConfigFile(path, None, f"{key} is {value!r}, not one value")
        yield Entry(key, tuple(map(str, parts)), isinstance(value, list))


def _in_yaml(path: Path, text: str) -> Iterator[Entry]:
    """The file's nodes, which have lines and nothing else: no value is made by YAML, so none can be an object."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise BadConfigFile(path, None, "YAML needs pyyaml, pip install 'kvproof[server]'; or write TOML") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
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
