"""Whether the names an adapter stands on are in the installed framework, read by ``ast``.

Nothing is imported: a framework whose import needs an accelerator can be checked without one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from nereus_core.declaration import Seam
from nereus_core.errors import SeamBroken

_MAX_HOPS = 8
"""Re-exports followed from ``from .x import Y``; chosen, not measured."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def check_seam(seam: Seam) -> None:
    """Raise SeamBroken, saying what was found instead, unless the seam holds."""
    tree, module = _parse(seam, seam.module)
    outer, *inner = seam.qualname.split(".")
    found = _resolve(seam, tree, module, outer, _MAX_HOPS)
    for name in inner:
        found = _part(seam, found, module, outer, name)
        outer = name
    if seam.parameters is not None:
        _check_parameters(seam, found)


def source_of(module: str) -> Path | None:
    """Return the source file of a dotted module without importing it or its parents."""
    search: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        # By its last name: a folder without __init__.py would ask for a parent that is imported.
        spec = PathFinder.find_spec(parts[depth - 1], search)
        if spec is None:
            return None
        if depth == len(parts):
            return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        search = spec.submodule_search_locations
        if search is None:
            return None
    return None


def _parse(seam: Seam, module: str) -> tuple[ast.Module, str]:
    path = source_of(module)
    if path is None:
        raise SeamBroken(str(seam), f"no source of module {module} is installed")
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _tree(path, path.stat().st_mtime_ns), package


@functools.lru_cache(maxsize=8)  # seams of one module follow each other
def _tree(path: Path, written_ns: int) -> ast.Module:
    del written_ns  # a file that has changed is read again
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a body is executed, those inside if/try/with included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, part, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _resolve(seam: Seam, tree: ast.Module, package: str, name: str, hops: int) -> ast.stmt:
    """Find what binds a name in a module, following re-exports."""
    for node in _statements(tree.body):
        if isinstance(node, _Definition) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            return node
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == name:
            return node
        if isinstance(node, ast.ImportFrom) and hops:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
                    target = ".".join(p for p in (parent, node.module) if p)
                    inner, inner_package = _parse(seam, target)
                    return _resolve(seam, inner, inner_package, alias.name, hops - 1)
    raise SeamBroken(str(seam), f"the module has no {name}")


def _part(seam: Seam, owner: ast.stmt, package: str, called: str, name: str) -> ast.stmt:
    """Find a member of a class, or what a function defines inside itself."""
    if isinstance(owner, ast.ClassDef):
        member, kind = _member(seam, owner, package, name), "class"
    elif isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
        member, kind = _definition(owner, name), "function"
    else:
        raise SeamBroken(str(seam), f"{called} is neither a class nor a function")
    if member is None:
        raise SeamBroken(str(seam), f"{kind} {called} has no {name}")
    return member


def _definition(owner: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> ast.stmt | None:
    inner = (node for node in _statements(owner.body) if isinstance(node, _Definition))
    return next((node for node in inner if node.name == name), None)


def _set_on_self(owner: ast.ClassDef, name: str) -> ast.stmt | None:
    """Find where a method of a class sets an attribute of its instance."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in getattr(target, "elts", [target])]
            if any(_is_of_self(part, name) for part in parts):
                return node
    return None


def _is_of_self(target: ast.expr, name: str) -> bool:
    owner = getattr(target, "value", None)
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(owner, ast.Name)
        and owner.id == "self"
    )


def _member(seam: Seam, owner: ast.ClassDef, package: str, name: str) -> ast.stmt | None:
    """Find a member in a class or, failing that, in the bases that its own module defines.

    Attributes that a method sets on its instance are members too.
    """
    for node in _statements(owner.body):
        if isinstance(node, _Definition) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == name for t in node.targets):
            return node
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
            return node
    if (found := _set_on_self(owner, name)) is not None:
        return found
    for base in owner.bases:
        if isinstance(base, ast.Name):
            tree, package = _parse(seam, seam.module)
            try:
                parent = _resolve(seam, tree, package, base.id, _MAX_HOPS)
            except SeamBroken:  # a base from outside the framework cannot hold a seam of it
                continue
            if isinstance(parent, ast.ClassDef) and parent is not owner:
                return _member(seam, parent, package, name)
    return None


def _check_parameters(seam: Seam, found: ast.stmt) -> None:
    if isinstance(found, ast.ClassDef):
        inits = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not inits:
            raise SeamBroken(str(seam), f"class {found.name} has no __init__ of its own")
        found = inits[0]
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        raise SeamBroken(str(seam), f"{seam.qualname} is not a function")
    arguments = found.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = iter(names)
    if not all(wanted in rest for wanted in seam.parameters or ()):
        raise SeamBroken(str(seam), f"found {seam.qualname}({', '.join(names)})")
