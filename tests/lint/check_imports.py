"""Checks that no modules of the Python client import each other in a circle, and that no call is repeated but by the application.

Every import counts: one under TYPE_CHECKING and one inside a function are parts of a circle, too. `check_layers` runs this.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "headwater"
# Where the package is, relative to the root.
FOLDER = f"client/python/{PACKAGE}"
# Loops that wait or continue after an error by design: those of an application. Retries, replay and reconnecting are the core's.
APPLICATION_LOOPS = {
    f"{PACKAGE}._client": {"_await_weights"},  # another client's upload
    f"{PACKAGE}._core": {"_end_futures"},  # at exit
    f"{PACKAGE}._recovery": {"follow", "patiently"},
    f"{PACKAGE}.torch._forward_check": {"run"},  # tries several modules of a model
    f"{PACKAGE}.torch.teachers": {"serve_teacher", "_serve"},  # a server of its own: the next trainer, the next question
}


def module_name(path: Path, folder: Path) -> str:
    """`headwater.torch._losses` for its file under the package's folder."""
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: str, is_package: bool, tree: ast.AST, modules: set[str]) -> set[str]:
    """The modules of the package that this one imports, wherever it does; packages within it, whose __init__ runs first, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = module.split(".")
                base = parts[: len(parts) - node.level + is_package]
                source = ".".join([*base, *([node.module] if node.module else [])])
            # A name of a package is a module of it, or what its __init__ has.
            found |= {name if (name := f"{source}.{alias.name}") in modules else source for alias in node.names}
    own = {module.rsplit(".", count)[0] for count in range(module.count(".") + 1)}
    parents = {name.rsplit(".", count)[0] for name in found for count in range(1, name.count(".") + 1)}
    return {name for name in found | (parents - own - {PACKAGE}) if name in modules and name != module}


def functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """The outermost functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        else:
            yield from functions(child)


def repeats(node: ast.AST, errors: set[str]) -> bool:
    """Whether a part of a loop sleeps, or continues after one of the package's errors."""
    if isinstance(node, ast.ExceptHandler):
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type is not None else set()
        return bool(caught & errors) and not isinstance(node.body[-1], (ast.Raise, ast.Return, ast.Break))
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep")


def repeating_loops(tree: ast.AST, errors: set[str]) -> set[tuple[int, str]]:
    """The lines in loops that repeat, with the name of the outermost function; "" outside of any."""
    outermost = list(functions(tree))
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.While, ast.For))]
    lines = {node.lineno for loop in loops for node in ast.walk(loop) if repeats(node, errors)}
    return {(line, next((f.name for f in outermost if f.lineno <= line <= f.end_lineno), "")) for line in lines}


def check_package(folder: Path) -> list[str]:
    """All errors of the package in this folder."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    names = {path: module_name(path, folder) for path in trees}
    modules = set(names.values())
    graph = {names[path]: imports(names[path], path.name == "__init__.py", tree, modules) for path, tree in trees.items()}
    errors = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        errors.append(f"{FOLDER}: a circle of imports: {', '.join(sorted(set(error.args[1])))}")
    classes = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    exceptions = {"Exception", "BaseException", *(name for name in classes if name.endswith("Error"))}
    for path, tree in trees.items():
        errors += [
            f"{FOLDER}/{path.relative_to(folder).as_posix()}:{line}: {function} repeats or waits in a loop, as only the core may"
            for line, function in sorted(repeating_loops(tree, exceptions))
            if function not in APPLICATION_LOOPS.get(names[path], ())
        ]
    return errors
