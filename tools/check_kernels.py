"""Compare ISP's calls of kernel packages with the function signatures in the packages' sources.

    python tools/check_kernels.py                  # the newest packages, by `pip download --pre`
    python tools/check_kernels.py --from FOLDER    # archives and folders NAME-VERSION in FOLDER
    python tools/check_kernels.py --write          # write the result to kernels.json as well

Prints a line for each call of ISP in each version of a package. The verdict is `match`, what does
not fit, or `not in the sources`. Exits with 1 unless all match.

Nothing is imported and no GPU is needed: calls and signatures are read by `ast`. For sdists, pip
runs setup.py to read their metadata, which needs torch and builds nothing. FlashAttention-3 is read
from the folder hopper of flash-attn, also of a checkout, such as FOLDER/flash_attn-main/hopper.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

ISP = Path(__file__).parents[1] / "isp"
RESULT = Path(__file__).with_name("kernels.json")

_PACKAGES = {
    "flash_attn": ("flash-attn", ""),
    "flash_attn_interface": ("flash-attn", "hopper"),
    "flash_attn.cute": ("flash-attn-4", ""),
    "fla": ("fla-core", ""),
    "mamba_ssm": ("mamba-ssm", ""),
    "causal_conv1d": ("causal-conv1d", ""),
}
"""For each module: its package, and the folder of the package's sources that contains it."""

_OUR_NAMES = {"u": "x", "delta": "dt", "chunk_size": "_CHUNK"}
"""Names of a kernel's parameters that have another name in ISP's code, with that name."""

_NO_BUILD = dict.fromkeys(
    ("FLASH_ATTENTION_SKIP_CUDA_BUILD", "MAMBA_SKIP_CUDA_BUILD", "CAUSAL_CONV1D_SKIP_CUDA_BUILD"),
    "TRUE",
)
"""Environment variables without which a setup.py would look for a CUDA compiler."""


class Call(NamedTuple):
    """A call of a package's function in the source of isp."""

    module: str
    function: str
    where: str
    positional: tuple[str, ...]
    """For each positional argument, the variable at the start of its expression."""
    keywords: tuple[str, ...]
    """Names of the keyword arguments."""
    results: int | None
    """How many returned values isp expects; None: unknown from the source."""

    def __str__(self) -> str:
        arguments = ", ".join((*self.positional, *(f"{name}=" for name in self.keywords)))
        unpacked = f" -> {self.results} values" * ((self.results or 0) > 1)
        return f"{self.where}: ({arguments}){unpacked}"


class Signature(NamedTuple):
    """The parameters of a function in a package, and how many values it returns."""

    parameters: str
    """The parameters as in its `def`, without annotations."""
    results: list[int]
    """The number of values in each of its return statements, without duplicates."""


class Row(NamedTuple):
    """A function in one version of its package, compared with all calls of it."""

    package: str
    version: str
    function: str
    signature: Signature | None
    """None if the sources do not have the function."""
    calls: dict[str, str]
    """The verdict on each call: `match`, or what does not fit."""


def calls_of(folder: Path) -> list[Call]:
    """Return the calls of kernels in the source of `folder`.

    A kernel is a variable that is assigned the result of a call with a module and a function name,
    as in `found = load(MODULE, FUNCTION, ..)` or `self.found = load(..)`; `load` may have any name.
    Raises ValueError if the source names a module of a package, and no call of it is found.
    """
    texts = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    # Parse only files that mention a package: to parse all would take 10 times as long.
    mentions = re.compile(rf"\b({'|'.join(_PACKAGES)})(_|\b)")
    trees = {path: ast.parse(text) for path, text in texts.items() if mentions.search(text)}
    named = {name for tree in trees.values() for name in _modules_named(tree)}
    arguments: dict[str, list[list[ast.expr]]] = {}
    for call in (x for tree in trees.values() for x in ast.walk(tree) if isinstance(x, ast.Call)):
        # Find the arguments of each class C, in `C(..)` and in `partial(C, ..)`.
        for place, called in enumerate([call.func, *call.args][:2]):
            if isinstance(called, ast.Name):
                arguments.setdefault(called.id, []).append(call.args[place:])
    calls: list[Call] = []
    for path, tree in trees.items():
        where = str(path.relative_to(folder.parent))
        for node in ast.walk(tree):
            owner = node if isinstance(node, ast.ClassDef) else None
            for function in ast.iter_child_nodes(node):
                if isinstance(function, ast.FunctionDef):
                    calls += _calls_of_loaded(_Scope(function, owner, arguments), where)
    if unseen := named - {call.module for call in calls}:
        raise ValueError(
            f"isp names {', '.join(sorted(unseen))}, but this program found no call of it: let"
            " `calls_of` find the call, or load the kernel in a way that it knows"
        )
    return sorted(calls)


class _Scope:
    """A function of isp, with the expressions that its variables may have as values."""

    def __init__(
        self,
        node: ast.FunctionDef,
        owner: ast.ClassDef | None,
        arguments: dict[str, list[list[ast.expr]]],
    ) -> None:
        self.node = node
        self.owner = owner
        self._arguments = arguments
        """For each name that is called anywhere in isp, the positional arguments of each call."""

    def assignments(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        """Yield target and value of each assignment in the function."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                yield node.target, node.value

    def values(self, name: str) -> list[ast.expr]:
        """Return the expressions assigned to a variable or passed for a parameter of `__init__`."""
        found = [value for target, value in self.assignments() if ast.unparse(target) == name]
        names = [x.arg for x in self.node.args.args]
        if self.owner is not None and name in names:
            place = names.index(name) - 1
            calls = self._arguments.get(self.owner.name, [])
            found += [x for given in calls for x in given[place : place + 1]]
        return found

    def strings(self, node: ast.expr) -> list[str]:
        """Return the strings that an expression may be: one, or those assigned to a variable."""
        values = self.values(node.id) if isinstance(node, ast.Name) else [node]
        found = (x.value for x in values if isinstance(x, ast.Constant))
        return [text for text in found if isinstance(text, str)]

    def positional(self, call: ast.Call) -> list[list[ast.expr]]:
        """Return each possible list of a call's positional arguments; empty if unknown.

        There are several lists if `*x` is passed and x may be one of several tuples.
        """
        lists: list[list[ast.expr]] = [[]]
        for arg in call.args:
            ways = [[arg]]
            if isinstance(arg, ast.Starred):
                value = arg.value
                if isinstance(value, ast.GeneratorExp):
                    value = value.generators[0].iter
                values = self.values(value.id) if isinstance(value, ast.Name) else [value]
                ways = [x.elts for x in values if isinstance(x, ast.Tuple)]
            lists = [[*before, *way] for before in lists for way in ways]
        return lists

    def keywords(self, node: ast.expr) -> list[str]:
        """Return the keys of a dict that is passed by `**`."""
        found: list[str] = []
        if isinstance(node, ast.Name):
            for target, value in self.assignments():
                if ast.unparse(target) == node.id:
                    found += self.keywords(value)
                elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == node.id:
                    found += self.strings(target.slice)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                found += self.keywords(value) if key is None else self.strings(key)
        if not found:
            raise ValueError(
                f"{self.node.name}: cannot find the keys of `{ast.unparse(node)}`: pass a dict that"
                " is written in this function"
            )
        return found


def _calls_of_loaded(scope: _Scope, where: str) -> Iterator[Call]:
    """Yield the calls of kernels that a function of isp loads."""
    for target, value in scope.assignments():
        if not isinstance(value, ast.Call):
            continue
        loaded = [
            (module, function)
            for first, second, *_ in (x for x in scope.positional(value) if len(x) > 1)
            for module in scope.strings(first)
            for function in scope.strings(second)
            if _package_of(module)
        ]
        found = [*_calls_by(scope, ast.unparse(target), where)] if loaded else []
        if loaded and not found:
            raise ValueError(
                f"{where}: loads {ast.unparse(target)} ({loaded}), but no call of it was found:"
                " call that variable or attribute in the same function or class"
            )
        yield from (Call(*kernel, *call) for kernel in loaded for call in found)


def _calls_by(scope: _Scope, name: str, where: str) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple for each call of the variable or attribute `name`.

    It has the place, the positional arguments, the keywords and the number of expected results.
    """
    among = [scope.node]
    if name.startswith("self.") and scope.owner is not None:
        among = [x for x in scope.owner.body if isinstance(x, ast.FunctionDef)]
    for function in among:
        inside = _Scope(function, None, {})
        for parent in ast.walk(function):
            for call in ast.iter_child_nodes(parent):
                if not (isinstance(call, ast.Call) and ast.unparse(call.func) == name):
                    continue
                if not (lists := inside.positional(call)):
                    raise ValueError(
                        f"{where}: cannot find the arguments of `{ast.unparse(call)}`: pass"
                        " tuples that are written in this function after `*`"
                    )
                keywords: list[str] = []
                for keyword in call.keywords:
                    given = keyword.arg
                    keywords += inside.keywords(keyword.value) if given is None else [given]
                positional = tuple(_variable(x) for x in lists[0])
                yield f"{where} {function.name}", positional, tuple(keywords), _unpacked(parent)


def _variable(node: ast.expr) -> str:
    """Return the variable at the start of an expression: g of `g.to(wide).unsqueeze(0)`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node)


def _unpacked(parent: ast.AST) -> int | None:
    """Return how many values the code around a call expects; None: unknown from the source."""
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Tuple):
        return len(parent.targets[0].elts)
    # `kernel(..)[0]` expects one value, the batch, whose first sequence it takes: ISP never indexes
    # a tuple of results, but unpacks it into names.
    return 1 if isinstance(parent, ast.AnnAssign | ast.Subscript | ast.Attribute) else None


def _modules_named(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of kernel packages that a file imports, or names in a string."""
    for node in ast.walk(tree):
        names: list[Any] = []
        if isinstance(node, ast.Constant):
            names = [node.value]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        names = [x for x in names if isinstance(x, str) and re.fullmatch(r"\w+(\.\w+)*", x)]
        yield from (x for x in names if _package_of(x))


def _package_of(module: str) -> tuple[str, str] | None:
    """Return the entry of `_PACKAGES` for a module, or None."""
    inside = [x for x in _PACKAGES if module == x or module.startswith(f"{x}.")]
    return _PACKAGES[max(inside, key=len)] if inside else None


def download(into: Path) -> None:
    """Let pip download the newest archives of all packages."""
    packages = sorted({package for package, _ in _PACKAGES.values()})
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--pre", "--no-build-isolation", "--dest", str(into), *packages]
    subprocess.run(command, check=True, env=os.environ | _NO_BUILD)


def sources_in(folder: Path, into: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield package, version and unpacked sources of each archive or folder NAME-VERSION."""
    for entry in sorted(folder.iterdir()):
        name, _, version = entry.name.removesuffix(".tar.gz").partition("-")
        root = entry
        if entry.suffix == ".whl":
            version, root = version.split("-")[0], into / entry.stem
            shutil.unpack_archive(entry, root, "zip")
        elif entry.name.endswith(".tar.gz"):
            root = into / entry.name.removesuffix(".tar.gz")
            shutil.unpack_archive(entry, into, filter="data")
        if version and root.is_dir():
            yield re.sub(r"[-_.]+", "-", name).lower(), version, root


def signature_of(root: Path, module: str, function: str) -> Signature | None:
    """Return the signature of `module.function` in sources, if they have it.

    A function that a module only imports is read in the module that defines it.
    """
    file = _file_of(root, module)
    if file is None:
        return None
    tree = ast.parse(file.read_text())
    found = _defined(tree, function)
    if isinstance(found, ast.FunctionDef):
        results = sorted(_results_of(found, tree))
        for node in ast.walk(found.args):
            if isinstance(node, ast.arg):
                node.annotation = None
        return Signature(ast.unparse(found.args), results)
    for node in (x for x in _own_nodes(tree) if isinstance(x, ast.ImportFrom)):
        for alias in node.names:
            if function == (alias.asname or alias.name):
                package = module.split(".")[: None if file.name == "__init__.py" else -1]
                above = package[: len(package) + 1 - node.level] if node.level else []
                at = ".".join((*above, *filter(None, [node.module])))
                return signature_of(root, at, alias.name)
    return None


def _file_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node`.

    What is inside of a function or class below it is left out.
    """
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from _own_nodes(child)


def _defined(node: ast.AST, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = (x for x in _own_nodes(node) if isinstance(x, kinds) and x.name == name)
    return next(found, None)


def _results_of(function: ast.FunctionDef, tree: ast.Module) -> set[int]:
    """Return the possible numbers of values that a function returns.

    Follows calls of other functions of its module, and of `apply` of an autograd function.
    """

    def results(node: ast.expr | None) -> set[int]:
        match node:
            case ast.Tuple():
                return {len(node.elts)}
            case ast.IfExp():
                return results(node.body) | results(node.orelse)
            case ast.Call(func=ast.Name(id=name)):
                called = _defined(tree, name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="apply")):
                owner = _defined(tree, name)
                called = _defined(owner, "forward") if owner else None
            case ast.Name(id=name):
                values = [
                    x.value
                    for x in _own_nodes(function)
                    if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == name
                ]
                tuples = (ast.Call, ast.Tuple)
                return set().union(*(results(x) for x in values if isinstance(x, tuples))) or {1}
            case _:
                return {1}
        return _results_of(called, tree) if isinstance(called, ast.FunctionDef) else {1}

    found = [results(x.value) for x in _own_nodes(function) if isinstance(x, ast.Return)]
    return set().union(*found)


def fault_of(call: Call, signature: Signature) -> str:
    """Return what does not fit between a call and a signature; empty: it fits.

    Keywords that only `**kwargs` takes do not fit: there, a renamed parameter would be ignored.
    """
    definition = ast.parse(f"def f({signature.parameters}): ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    args = definition.args
    names = [x.arg for x in (*args.posonlyargs, *args.args)]
    by_keyword = [x.arg for x in args.kwonlyargs]
    optional = {*names[len(names) - len(args.defaults) :]}
    optional |= {x for x, value in zip(by_keyword, args.kw_defaults, strict=True) if value}
    place = len(call.positional)
    faults = []
    for number, (given, name) in enumerate(zip_longest(call.positional, names[:place]), 1):
        if name is None:
            faults.append(f"takes no argument {number} by position, isp passes {given}")
        elif given != _OUR_NAMES.get(name, name):
            faults.append(f"argument {number} is {name}, isp passes {given}")
    left = [*names[max(place, len(args.posonlyargs)) :], *by_keyword]
    faults += [f"takes no keyword {name}" for name in call.keywords if name not in left]
    needed = [x for x in (*names[place:], *by_keyword) if x not in optional]
    faults += [
        f"needs {name}, which isp does not pass" for name in needed if name not in call.keywords
    ]
    if call.results is not None and call.results not in signature.results:
        returned = " or ".join(map(str, signature.results)) or "no"
        faults.append(f"returns {returned} values, isp expects {call.results}")
    return "; ".join(faults)


def rows_of(calls: list[Call], sources: list[tuple[str, str, Path]]) -> Iterator[Row]:
    """Yield the functions that isp calls, in each version of their package among the sources."""
    for module, function in sorted({(call.module, call.function) for call in calls}):
        ours = [x for x in calls if (x.module, x.function) == (module, function)]
        package, folder = _package_of(module) or ("", "")
        versions: dict[str, Signature | None] = {}
        for name, version, root in sources:
            top = root / folder / module.split(".")[0]
            # sources may be a part of a package, such as the folder hopper alone
            if name == package and (top.is_dir() or top.with_suffix(".py").is_file()):
                versions[version] = signature_of(root / folder, module, function)
        for version, found in (versions or {"": None}).items():
            verdicts = {
                str(x): (fault_of(x, found) or "match") if found else "not in the sources"
                for x in ours
            }
            yield Row(package, version, f"{module}.{function}", found, verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="folder", type=Path, help="read packages here instead of downloading them"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}, too")
    args = parser.parse_args()
    if args.folder and not args.folder.is_dir():
        parser.error(f"--from {args.folder} is not a folder: name one with packages NAME-VERSION")
    with tempfile.TemporaryDirectory() as temporary:
        downloads, into = Path(temporary, "downloads"), Path(temporary, "unpacked")
        downloads.mkdir()
        if args.folder is None:
            download(downloads)
        rows = [*rows_of(calls_of(ISP), [*sources_in(args.folder or downloads, into)])]
    print("| package | version | function | isp's call | verdict |\n|---|---|---|---|---|")
    for row in rows:
        for call, verdict in row.calls.items():
            print(f"| {row.package} | {row.version} | {row.function} | {call} | {verdict} |")
    if args.write:
        functions = [
            row._asdict() | {"signature": row.signature and row.signature._asdict()} for row in rows
        ]
        result = {"date": str(date.today()), "functions": functions}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(verdict != "match" for row in rows for verdict in row.calls.values()))


if __name__ == "__main__":
    sys.exit(main())
