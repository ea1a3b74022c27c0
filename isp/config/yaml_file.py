"""`read_yaml`: reads a YAML file with the line of each key, within limits of size and nesting."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from isp.utils.files import read_limited

__all__ = ["KeyPath", "YamlFile", "parse_value", "read_yaml"]

KeyPath = tuple[str, ...]
"""Type of a key as its parts, the outermost section first: ("parallel", "tensor", "size")."""

_MOST_BYTES = 2**20
"""Limit of a file's size in bytes: the Python parser reads about 0.3 MB per second."""
_MOST_CHARACTERS = 2**24
"""Limit of the size of all values with aliases expanded. Each level of aliases may multiply the
size, so a file of a few lines could fill the memory. Without aliases no file reaches this."""
_MOST_LEVELS = 100
"""Limit of nested lists and mappings: pydantic reads JSON of up to 200 levels."""


class YamlFile(NamedTuple):
    """The values in a YAML file, and where they are."""

    values: dict[str, Any]
    lines: dict[KeyPath, int]
    """Line of each key, counted from 1."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also reads `1e-4` as a number, as YAML 1.2 does."""

    def get_single_node(self) -> Node | None:
        """Return the root node; raise ConstructorError if aliases expand beyond the limit."""
        root: Node | None = super().get_single_node()
        if root is not None and (size := _expanded(root, {}).size) > _MOST_CHARACTERS:
            fault = f"aliases repeat values up to more than {_MOST_CHARACTERS:,} characters"
            if size == math.inf:
                fault = "an alias is inside of the value that it repeats"
            raise ConstructorError(None, None, fault, root.start_mark)
        return root

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Return the Python value of a YAML node.

        Raises ConstructorError, which has the line, where PyYAML raises ValueError, such as for an
        impossible date.
        """
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: str | Path) -> YamlFile:
    """Return the mapping in the YAML file at `path`, with the line of each key.

    Raises ValueError, with the file and the line, for a file that is missing, empty, not YAML, not
    a mapping, or that gives a key twice.
    """
    try:
        # `read_limited` refuses pipes. Allow one that the user has made, such as by <(..).
        is_own = str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
        data = Path(path).read_bytes() if is_own else read_limited(path, _MOST_BYTES)
        text = data.decode()
    except OSError as error:
        raise ValueError(f"{path}: cannot read it: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8, so not YAML") from error
    try:
        loader = _Loader(text)  # refuses characters that YAML does not allow
        root = loader.get_single_node()
        if root is None:
            raise ValueError(f"{path}: the file is empty: it must hold sections such as `model:`")
        if not isinstance(root, MappingNode):
            raise ValueError(f"{path}: holds no sections: write `section:` and keys below it")
        lines: dict[KeyPath, int] = {}
        _note_lines(root, (), lines, path)
        return YamlFile(loader.construct_document(root), lines)
    except yaml.YAMLError as error:
        raise ValueError(_syntax_fault(path, error)) from error
    except RecursionError as error:
        raise ValueError(f"{path}: lists and mappings are nested too deeply") from error


def parse_value(text: str) -> Any:
    """Return the value that `text` has as YAML; raise ValueError if it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not a YAML value: {_problem(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{text[:40]!r}... is nested too deeply") from error


class _Expanded(NamedTuple):
    """The size and height of a node with its aliases expanded."""

    size: float
    """Number of characters, including repetitions; infinite if the node contains itself."""
    height: int
    """Number of levels of nodes below the node."""


def _expanded(node: Node, known: dict[int, _Expanded], level: int = 0) -> _Expanded:
    """Return size and height of `node`, which is nested in `level` others.

    `known`: results by the id of a node, so that an alias is counted but not walked through again.
    Raises RecursionError for more than `_MOST_LEVELS` levels.
    """
    if id(node) not in known:
        # While a node is being counted its size is infinite: an alias inside it to itself finds
        # this, and so the size of a node that contains itself is infinite.
        known[id(node)] = _Expanded(math.inf, 0)
        nodes: list[Node] = []
        size: float = 16  # even an empty list takes memory
        if isinstance(node, ScalarNode):
            size += len(node.value)
        elif isinstance(node, SequenceNode):
            nodes = node.value
        elif isinstance(node, MappingNode):
            nodes = [part for pair in node.value for part in pair]
        parts = [_expanded(part, known, level + 1) for part in nodes]
        height = max((part.height + 1 for part in parts), default=0)
        known[id(node)] = _Expanded(size + sum(part.size for part in parts), height)
    found = known[id(node)]
    if level + found.height > _MOST_LEVELS:  # an alias may repeat a known node at a deeper level
        raise RecursionError  # the parser itself raises this for files that are nested even deeper
    return found


def _note_lines(
    node: MappingNode, prefix: KeyPath, lines: dict[KeyPath, int], file: str | Path
) -> None:
    """Put the line of each key below `node` into `lines`.  Raises ValueError for duplicate keys."""
    for key, value in node.value:
        if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        key.tag = "tag:yaml.org,2002:str"  # YAML 1.1 would read the key `on:` as true
        path, line = (*prefix, key.value), key.start_mark.line + 1
        if path in lines:
            raise ValueError(
                f"{file}, line {line}: {'.'.join(path)} is given twice, first on line "
                f"{lines[path]}: keep one"
            )
        lines[path] = line
        if isinstance(value, MappingNode):
            _note_lines(value, path, lines, file)


def _problem(error: yaml.YAMLError) -> str:
    """Return what is wrong according to PyYAML, as one line without the place."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem is not None:
        return error.problem
    return str(error).splitlines()[0]


def _syntax_fault(path: str | Path, error: yaml.YAMLError) -> str:
    """Return the text of an error about a file that is not YAML: file, line, column, fault."""
    place = str(path)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place += f", line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return f"{place}: not YAML: {_problem(error)}"
