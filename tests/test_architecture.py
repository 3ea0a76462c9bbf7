"""The structure of the source: one order of packages, no import cycle, no class name twice, nothing set at import."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

ARCHITECTURE = SOURCE.parent / "docs/architecture.md"


def documented_layers() -> list[list[str]]:
    """The order of packages in the documentation: a line for each layer, in the block after the sentence about it."""
    _, _, after = ARCHITECTURE.read_text(encoding="utf-8").partition(
        "each imports only packages on the lines above its own"
    )
    return [line.split(", ") for line in after.split("```")[1].split("\n") if line]


LAYERS = documented_layers()
"""A package imports only packages of layers above its own in this list, and none of its own layer.

The package `leyden` itself only imports its public names when they are used, and anything may import it (for the
version), so it has no layer.
"""
LAYER = {package: number for number, layer in enumerate(LAYERS) for package in layer}

ENGINES = ("leyden.engine.torch", "leyden.engine.vllm")
"""Engines, which only the engine package and `local.engine` name: everything else knows the protocol."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the source by its name, parsed."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(name: str) -> Iterator[tuple[str, int]]:
    """The modules of ours that a module imports anywhere, for type checking too, with the line."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}:{node.lineno}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [target if target in modules() else node.module for target in inner]
        else:
            continue
        yield from ((target, node.lineno) for target in targets if target.partition(".")[0] == "leyden")


def package(name: str) -> str:
    """The part of a module's name after `leyden.`, up to the next dot; empty for `leyden` itself."""
    return [*name.split("."), ""][1]


def test_every_package_has_a_layer() -> None:
    assert {package(name) for name in modules()} - {""} == set(LAYER)


def test_no_package_imports_upwards_or_sideways() -> None:
    wrong = [
        f"{name}:{line} imports {target}"
        for name in modules()
        for target, line in imports(name)
        if package(name) and package(target) and package(name) != package(target)
        if LAYER[package(target)] >= LAYER[package(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_local_names_an_engine() -> None:
    wrong = [
        f"{name}:{line} imports {target}"
        for name in modules()
        for target, line in imports(name)
        if target.startswith(ENGINES) and package(name) != "engine" and name != "leyden.local.engine"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_orchestrator_does_not_import_torch() -> None:
    """Neither itself nor through a module of ours."""
    _check_reached([name for name in modules() if name.startswith("leyden.orchestrator")], "torch", "transformers")


def test_a_server_starts_without_packages_that_only_some_need() -> None:
    """The imports of `renderers` (which imports openai) and aiohttp take longer than all others of a server."""
    _check_reached(["leyden.server.__main__"], "torch", "renderers", "openai", "aiohttp", "jsonschema")


def _check_reached(reached: list[str], *heavy: str) -> None:
    """Check that modules do not import these packages, neither themselves nor through a module of ours."""
    for name in reached:
        named = {"leyden", *(target for target, _ in _imported(name))}
        assert not any(target.partition(".")[0] in heavy for target in named), name
        reached += [target for target in named if target in modules() and target not in reached]


def test_importing_the_orchestrator_and_the_protocol_of_a_learner_does_not_load_torch() -> None:
    names = [name for name in modules() if name.startswith("leyden.orchestrator")] + ["leyden.learner.protocol"]
    script = f"import sys, {', '.join(names)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def _imported(name: str) -> Iterator[tuple[str, int]]:
    """What a module imports when it is imported, packages on the way included; nothing for type checking only."""
    for node in _at_import(modules()[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            yield from ((".".join(parts[:end]), node.lineno) for end in range(1, len(parts) + 1))


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {name: {target for target, _ in imports(name)} - {name} for name in modules() if package(name)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice


def test_no_environment_variable_is_set_at_import() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in _at_import(tree)
        if _sets_environment(node)
    ]
    assert not wrong, "\n".join(wrong)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that run when it is imported: those outside functions, and not for type checking."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _at_import(child)


def _sets_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return ast.unparse(node.value) in ("os.environ", "environ")
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).removeprefix("os.")
        return called in ("putenv", "unsetenv", *(f"environ.{method}" for method in ("setdefault", "update", "pop")))
    return False


def test_no_two_helper_modules_of_tests_have_one_name() -> None:
    """Tests import their helpers by a bare name from folders on the path: the first of two would hide the other."""
    tests = Path(__file__).parent
    folders = [conftest.parent for conftest in tests.rglob("conftest.py")] + [tests.parent / "spark"]
    named = defaultdict(list)
    for folder in folders:
        for path in folder.glob("*.py"):
            if path.stem != "conftest" and not path.stem.startswith("test_"):
                named[path.stem].append(str(path.relative_to(tests.parent)))
    assert not {name: paths for name, paths in named.items() if len(paths) > 1}
