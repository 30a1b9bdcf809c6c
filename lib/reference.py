"""The reference of the package, page by page, from its signatures and docstrings; read from the sources, nothing is imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # page -> (title, modules or packages)
    "api_tasks": ("Tasks and models", ["streams", "tasks", "models"]),
    "api_training": ("Runs, training, sweeps, the store", ["run", "train", "sweep", "cluster", "store", "measured", "estimate", "bench", "plain"]),
    "api_analysis": ("Theory, emergence, fits, probes, figures", ["theory", "emergence", "fit", "probe", "plots", "drawn", "claims"]),
    "api_language": ("Language models", ["language"]),
    "api_book": ("The book itself", ["chapters", "config", "files", "site", "pages", "pdf", "reference", "browser", "scorecard", "published", "audit", "reliability"]),
}


def sources(name: str) -> list[Path]:
    """The files of a module, or of a package, its own first."""
    path = ROOT / "lib" / f"{name}.py"
    return [path] if path.exists() else sorted((ROOT / "lib" / name).rglob("*.py"), key=lambda p: (len(p.parts), p.name != "__init__.py", p.name))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    return (node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"))


def _signature(node: ast.FunctionDef, method: bool = False) -> str:
    arguments = ast.parse(ast.unparse(node.args).join(("def f(", "): pass"))).body[0].args
    if method and not _is(node, "staticmethod"):
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def _is(node: ast.FunctionDef, decorator: str) -> bool:
    return any(decorator in ast.unparse(each) for each in node.decorator_list)


def _entry(kind: str, name: str, signature: str, node, inner: str = "", depth: int = 5) -> str:
    text = ast.get_docstring(node, clean=True)
    body = f"```text\n{text}\n```" if text else ""
    fence = ":" * depth
    return f"{fence}{{py:{kind}}} {name}{signature}\n\n{body}\n\n{inner}\n{fence}\n"


def _class(node: ast.ClassDef) -> str:
    inner = []
    for method in _public(node.body):
        if not isinstance(method, ast.FunctionDef):
            continue
        kind = "property" if _is(method, "property") else "method"
        inner.append(_entry(kind, method.name, "" if kind == "property" else _signature(method, method=True), method, depth=4))
    return _entry("class", node.name, "", node, "\n".join(inner))


def page(title: str, modules: list[str]) -> str:
    """Markdown of a page: each module's docstring, then its public functions and classes with theirs."""
    parts = [f"# {title}"]
    for path in (path for name in modules for path in sources(name)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = inspect.cleandoc(ast.get_docstring(tree, clean=False) or "")
        parts += [f"## {_module(path)}", f"```{{py:module}} {_module(path)}\n```", f"```text\n{said}\n```" if said else ""]
        parts += [_class(node) if isinstance(node, ast.ClassDef) else _entry("function", node.name, _signature(node), node) for node in _public(tree.body)]
    return "\n\n".join(parts) + "\n"


def write(folder: Path) -> None:
    """Write every page of the reference into the folder."""
    for name, (title, modules) in PAGES.items():
        (folder / f"{name}.md").write_text(page(title, modules), encoding="utf-8")
