"""The package's imports go down only: no circle between modules, none to a higher floor, none between implementations.

An import counts wherever it stands in a file, and each is of one kind: "module", run when the file is imported; "function",
run when a function is called; "typing", under `if TYPE_CHECKING`, never run. All three count: an import that is put off
still ties two files together. `from package import name` is an import of the module `package.name` where there is one, else
of `package`. What does not count: that Python imports `a` and `a.b` on the way to `a.b.c`, and names in strings, such as a
builder's or a program's that another process runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

import warploom
from warploom.runtime import dispatch

# From the ground up. A module lies on the floor of its longest prefix; those of one floor know their own prefix only.
FLOORS = (
    ("warploom.runtime",),
    ("warploom.bias", "warploom.kernels", "warploom.masks", "warploom.smem"),
    ("warploom.fp8",),
    ("warploom.attention", "warploom.decode", "warploom.delta", "warploom.linear"),
    ("warploom.distributed", "warploom.nn"),
    ("warploom",),
    ("warploom.integrations",),
    ("warploom.bench",),
    ("warploom.demo", "warploom.smem.device"),
    ("warploom.commands",),
    ("warploom.cli",),
    ("warploom.__main__",),
)

Edges = dict[str, dict[str, str]]  # module -> what it imports -> the kind of the import


def modules(package: Path) -> dict[str, Path]:
    """Name and file of each module of a package."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path) -> Iterator[tuple[str, str, str]]:
    """The package and the name within it, or "", that each import of a file asks for, and the kind."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def walk(node: ast.AST, kind: str) -> Iterator[tuple[str, str, str]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((source, alias.name, kind) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, "typing")
            for child in node.orelse:
                yield from walk(child, kind)
        else:
            inside = "function" if kind == "module" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else kind
            for child in ast.iter_child_nodes(node):
                yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text()), "module")


def edges(files: Mapping[str, Path]) -> Edges:
    found: Edges = {}
    for name, path in files.items():
        targets = found[name] = {}
        for source, attribute, kind in imports(name, path):
            target = next((each for each in (f"{source}.{attribute}", source) if each in files), None)
            if target is not None:
                targets.setdefault(target, kind)
    return found


def circle(graph: Edges) -> list[str] | None:
    """One circle, as the imports it goes through, or None."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            around = [*path[path.index(name) :], name]
            return [f"{a} -> {b} ({graph[a][b]})" for a, b in pairwise(around)]
        if name in done:
            return None
        for target in graph[name]:
            found = search(target, [*path, name])
            if found:
                return found
        done.add(name)
        return None

    return next((found for name in graph if (found := search(name, []))), None)


@pytest.fixture(scope="module")
def graph() -> Edges:
    return edges(modules(Path(warploom.__file__).parent))


def test_masks_and_their_bases_imported_each_other(graph: Edges) -> None:
    """So did masks/base with draw and startend, and runtime/modules with module_worker."""
    assert circle(graph) is None


def place(name: str) -> tuple[int, str]:
    """The floor of a module and the prefix that put it there."""
    prefixes = [(prefix, at) for at, floor in enumerate(FLOORS) for prefix in floor if f"{name}.".startswith(f"{prefix}.")]
    prefix, at = max(prefixes, key=lambda each: len(each[0]))
    return at, prefix


def upward(graph: Edges) -> list[str]:
    """Imports of a higher floor, or of a neighbour on the same."""
    found = []
    for name, targets in graph.items():
        at, own = place(name)
        for target, kind in targets.items():
            floor, prefix = place(target)
            if floor > at or (floor == at and prefix != own):
                found.append(f"{name} -> {target} ({kind})")
    return found


def test_the_laboratory_imported_a_command(graph: Edges) -> None:
    """And runtime/ attention's arguments, decode and linear attention those of attention."""
    assert upward(graph) == []


def implementation(name: str) -> str | None:
    """The implementation that a module belongs to, as warploom.attention.hopper."""
    parts = name.split(".")
    family = ".".join(parts[:2])
    found = ".".join(parts[:3])
    ours = ("ampere", "cpu", "cpu_block", "hopper", "reference", "triton")
    inside = family in FLOORS[3] and len(parts) > 2 and parts[2] in ours
    return found.replace("cpu_block", "cpu") if inside else None


def test_every_implementation_that_dispatch_knows_is_looked_at() -> None:
    """One of a name that is not listed above could import any other."""
    for family in ("attention", "decode", "delta", "linear"):
        import_module(f"warploom.{family}.registry")
        for each in dispatch.implementations(family):
            assert implementation(type(each).__module__) == f"warploom.{family}.{each.name}"


def test_implementations_do_not_import_each_other(graph: Edges) -> None:
    found = [f"{a} -> {b}" for a, targets in graph.items() for b in targets if implementation(a) and implementation(b)]
    assert len(found) > 100
    assert [pair for pair in found if len({implementation(name) for name in pair.split(" -> ")}) == 2] == []


def test_an_import_of_a_higher_floor_is_found() -> None:
    assert upward({"warploom.runtime.a": {"warploom.masks.b": "typing"}}) == ["warploom.runtime.a -> warploom.masks.b (typing)"]
    assert upward({"warploom.decode.a": {"warploom.attention.b": "function"}}) == [
        "warploom.decode.a -> warploom.attention.b (function)"
    ]
    assert upward({"warploom.smem.device.a": {"warploom.smem.b": "module", "warploom": "module"}}) == []


def test_only_the_kernel_library_and_kernels_import_the_dsl() -> None:
    """The spine does not, but to compile."""
    files = modules(Path(warploom.__file__).parent)
    roots = {name: {source.split(".")[0] for source, _, _ in imports(name, path)} for name, path in files.items()}
    users = [name for name, found in roots.items() if "cutlass" in found]
    assert len(users) > 1
    others = [name for name in users if not name.startswith("warploom.kernels.cute.") and implementation(name) is None]
    assert others == ["warploom.runtime.compile"]


@pytest.mark.parametrize(
    ("back", "kind"),
    [
        ("from house.a import A", "module"),
        ("from house import a", "module"),
        ("from .a import A", "module"),
        ("from . import a", "module"),
        ("import house.a as other", "module"),
        ("class B:\n    def method(self):\n        from house.a import A", "function"),
        ("import typing\nif typing.TYPE_CHECKING:\n    from house.a import A", "typing"),
        ("try:\n    from house.a import A\nexcept ImportError:\n    A = None", "module"),
    ],
)
def test_a_circle_is_found_wherever_its_imports_stand(tmp_path: Path, back: str, kind: str) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").touch()
    (house / "a.py").write_text("from house.b import B\n")
    (house / "b.py").write_text("import math\n")
    assert circle(edges(modules(house))) is None
    (house / "b.py").write_text(back)
    found = circle(edges(modules(house)))
    assert found is not None and set(found) == {"house.a -> house.b (module)", f"house.b -> house.a ({kind})"}
