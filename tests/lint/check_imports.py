"""Checks that no modules of the Python client import each other in a circle, and that no call is repeated but by the application.

Every import counts: one under TYPE_CHECKING and one inside a function are parts of a circle, too. `check_layers` runs this.
"""

import ast
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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules, of two or more, each of which imports all others of its group, perhaps by way of them."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reached = {module: reachable(module) for module in graph}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return sorted(sorted(group) for group in groups if group)


class _Loops(ast.NodeVisitor):
    """Finds loops that sleep, or continue after one of the package's errors."""

    def __init__(self, errors: set[str]):
        self.found: list[tuple[int, str]] = []  # line, and name of the outermost function
        self._errors = errors
        self._functions: list[str] = []
        self._loops = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node.name)
        outer, self._loops = self._loops, 0
        self.generic_visit(node)
        self._loops = outer
        self._functions.pop()

    def visit_While(self, node: ast.While) -> None:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    def visit_For(self, node: ast.For) -> None:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) in ("time.sleep", "sleep"):
            self._note(node)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type is not None else set()
        leaves = node.body and isinstance(node.body[-1], (ast.Raise, ast.Return, ast.Break))
        if caught & self._errors and not leaves:
            self._note(node)
        self.generic_visit(node)

    def _note(self, node: ast.expr | ast.ExceptHandler) -> None:
        if self._loops:
            self.found.append((node.lineno, self._functions[0] if self._functions else ""))


def package_errors(tree: ast.AST) -> set[str]:
    """Names of the exceptions that a module defines."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name.endswith("Error")}


def check_package(folder: Path) -> list[str]:
    """All errors of the package in this folder."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    names = {path: module_name(path, folder) for path in trees}
    modules = set(names.values())
    graph = {names[path]: imports(names[path], path.name == "__init__.py", tree, modules) for path, tree in trees.items()}
    errors = [f"{FOLDER}: a circle of imports: {', '.join(group)}" for group in circles(graph)]
    exceptions = {"Exception", "BaseException"}.union(*map(package_errors, trees.values()))
    for path, tree in trees.items():
        loops = _Loops(exceptions)
        loops.visit(tree)
        errors += [
            f"{FOLDER}/{path.relative_to(folder).as_posix()}:{line}: {function} repeats or waits in a loop, as only the core may"
            for line, function in loops.found
            if function not in APPLICATION_LOOPS.get(names[path], ())
        ]
    return errors
