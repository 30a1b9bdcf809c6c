"""Chapters as files: their parameters, their grid of runs, their execution. Knows no particular chapter.

A chapter is a notebook in the book's folder. Its first code cell imports; the cell tagged `parameters` holds annotated
parameters; the next calls `check(globals())`; the cells tagged `grid`, if any, build `experiments`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
import textwrap
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

import nbformat
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from lib.config import InputError, short

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ("quick", "laptop", "paper")
LONGEST = 1 << 16  # bytes of a parameter file
CHECKED = "nbval-check-output"  # tag of the cells whose output is kept in the repository and compared by the tests


class BookError(RuntimeError):
    """A chapter or a site that failed while it was made, said in one line that names the place."""


def book() -> Path:
    """The folder of the chapters: BOOK_DIR, else book/ of this repository. params/ and _toc.yml lie beside it."""
    return Path(os.environ.get("BOOK_DIR") or ROOT / "book").resolve()


def build_folder() -> Path:
    """Where executed chapters, the scorecard and the site go: BOOK_BUILD, else _build/ of this repository."""
    return Path(os.environ.get("BOOK_BUILD") or ROOT / "_build").resolve()


def names() -> list[str]:
    """All chapters, in the order of the table of contents; those it leaves out come last."""
    toc = book().parent / "_toc.yml"
    order = re.findall(r"file:\s*(\S+)", toc.read_text(encoding="utf-8")) if toc.exists() else []
    found = {path.stem for path in book().glob("*.ipynb")}
    return [name for name in order if name in found] + sorted(found - set(order))


def one_of(what: str, name: str, known) -> str:
    """The name, if it is a known one; else InputError with the nearest."""
    if name in known:
        return name
    close = get_close_matches(name, known, 1)
    raise InputError(
        f"{what} {name!r}: there is none of that name; "
        + (f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known) or '(none exist)'}")
    )


def read(chapter: str) -> nbformat.NotebookNode:
    """The chapter's notebook; InputError if there is none."""
    return nbformat.read(book() / f"{one_of('chapter', chapter, names())}.ipynb", as_version=4)


def tagged(notebook, tag: str) -> list:
    """The notebook's code cells with this tag."""
    return [c for c in notebook.cells if c.cell_type == "code" and tag in c.metadata.get("tags", ())]


# ----------------------------------------------------------------------------------------------------------- parameters
class _Plain(yaml.SafeLoader):
    """Safe YAML without aliases, which may stand for gigabytes, and without a name given twice."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias (*{self.peek_event().anchor}) is not taken; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise yaml.YAMLError(f"{sorted(twice)[0]!r} is given twice; remove one")
        return super().construct_mapping(node, deep)


def load_yaml(text: str):
    """The value of a YAML text; ValueError for anything but plain values, in one line."""
    try:
        return yaml.load(text, _Plain)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as e:
        raise ValueError(" ".join(str(e).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _read_yaml(path: Path) -> dict:
    """A parameter file's values; {} if there is no such file."""
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= LONGEST):
            raise ValueError(f"no file of at most {LONGEST} bytes; it says only what differs from the defaults")
        values = load_yaml(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: cannot be read as YAML: {' '.join(str(e).split())}") from None
    if not isinstance(values, dict | None):
        raise InputError(f"{path}: must hold lines of the form `name: value`")
    return values or {}


def _problem(name: str, value, annotation) -> str | None:
    """What is wrong with a parameter's value, in one line; None if it is right."""

    def error(candidate) -> str | None:
        try:
            TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(candidate)
        except ValidationError as e:
            problem = e.errors()[0]
            place = "".join(f"[{part}]" for part in problem["loc"] if isinstance(part, int))
            return f"{name}{place}: {problem['msg'].replace('Input should', 'must', 1)}, not {short(problem['input'])}"

    message = error(value)
    if message and isinstance(value, str):
        for meant in _readings(value)[:-1]:
            if error(meant) is None:
                written = yaml.safe_dump(meant, default_flow_style=True).split("\n")[0]
                kind = type(meant).__name__
                return f"{name}: {short(value)} is a text, and a {kind} is expected; write {written}, unquoted"
    return message


def _readings(text: str) -> list:
    """What a text may mean: JSON, YAML, the text itself."""
    values = []
    for parse in (json.loads, load_yaml):
        with suppress(ValueError, RecursionError):
            values.append(parse(text))
    return [*values, text]


def _unknown(name: str, annotations: dict) -> str:
    close = get_close_matches(name, annotations, 1)
    return f"{name if name.isidentifier() and len(name) <= 80 else short(name)}: no such parameter of this chapter; " + (
        f"did you mean {close[0]}?" if close else f"it has {textwrap.shorten(', '.join(annotations), 400, placeholder=' ...') or 'none'}"
    )


def _check(values: dict, annotations: dict, where: str = "") -> None:
    for name, value in values.items():
        if problem := _problem(name, value, annotations[name]) if name in annotations else _unknown(str(name), annotations):
            raise InputError(where + problem)


def _assigned(source: str) -> tuple[set[str], set[str]]:
    """Names that a cell assigns at its top level: (with an annotation, without)."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return set(), set()
    plain = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return (
        {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)},
        {name.id for target in plain for name in ast.walk(target) if isinstance(name, ast.Name)},
    )


def check(namespace: dict) -> None:
    """Validate a chapter's parameters, in its namespace, against their annotations; InputError names the culprit.

    A name without an annotation that the `parameters` cell, or the cell that papermill injects after it, assigns is an
    unknown parameter.
    """
    annotations = namespace.get("__annotations__", {})
    cells = list(namespace.get("In", ()))[:-1]
    last = max((i for i, cell in enumerate(cells) if _assigned(cell)[0]), default=0)
    for i, cell in enumerate(cells[last:]):
        if i == 0 or cell.startswith("# Parameters"):
            _check({name: None for name in _assigned(cell)[1] if name not in annotations}, annotations)
    _check({name: namespace[name] for name in annotations if name in namespace}, annotations)


def _namespace(notebook) -> dict:
    """What stands in the notebook's namespace after its `parameters` cell."""
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    space: dict = {}
    for cell in [*cells[:1], *(c for c in tagged(notebook, "parameters") if c is not cells[0])]:
        _run(cell, space)
    return space


def _run(cell, space: dict) -> None:
    """Run a cell's source as a notebook would: without this module's own `from __future__`."""
    exec(compile(cell.source, f"<cell {cell.get('id')}>", "exec", dont_inherit=True), space)


def _defaults(space: dict) -> dict:
    return {name: space[name] for name in space.get("__annotations__", {})}


def parse(chapter: str, texts: dict[str, str]) -> dict:
    """Parameter values from the command line's texts: each read as its annotation asks (JSON, YAML or plain text)."""
    annotations = _namespace(read(chapter)).get("__annotations__", {})
    _check({name: None for name in texts if name not in annotations}, annotations)
    return {
        name: next((v for v in _readings(text) if _problem(name, v, annotations[name]) is None), _readings(text)[0])
        for name, text in texts.items()
    }


def _file(chapter: str, profile: str) -> Path:
    return book().parent / "params" / one_of("profile", profile, PROFILES) / f"{chapter}.yml"


def _resolve(space: dict, chapter: str, profile: str, overrides: dict | None) -> dict:
    annotations = space.get("__annotations__", {})
    path = _file(chapter, profile)
    from_file = _read_yaml(path)
    for given, where in ((from_file, f"{path}: "), (overrides or {}, "")):
        _check(given, annotations, where)
        if given.get("profile", profile) != profile:
            raise InputError(f"{where}profile: {given['profile']!r}, but {profile!r} was asked for; use --profile")
    values = _defaults(space) | from_file | (overrides or {})
    if "profile" in annotations:
        values["profile"] = profile
    _check(values, annotations)
    return values


def defaults(chapter: str) -> dict:
    """The values that stand in the chapter's own `parameters` cell."""
    return _defaults(_namespace(read(chapter)))


def parameters(chapter: str, profile: str = "quick", overrides: dict | None = None) -> dict:
    """Every parameter's value: the chapter's defaults, params/<profile>/<chapter>.yml over them, then the overrides."""
    return _resolve(_namespace(read(chapter)), chapter, profile, overrides)


def grid(chapter: str, profile: str = "quick", overrides: dict | None = None) -> dict[str, list]:
    """The chapter's experiments at these parameters, validated and not trained; none for a chapter without runs."""
    notebook = read(chapter)
    space = _namespace(notebook)
    standard, values = _defaults(space), _resolve(space, chapter, profile, overrides)
    changed = [name for name, value in values.items() if value != standard[name]]
    space |= values
    for cell in tagged(notebook, "grid"):
        try:
            _run(cell, space)
        except InputError as e:
            name, own = str(e).partition(":")[0], overrides or {}
            from_file = set([name] if name in changed else changed) - set(own)
            source = f"; it comes from {', '.join(changed)}" if name not in changed and changed else ""
            raise InputError((f"{_file(chapter, profile)}: " if from_file else "") + f"{e}{source}") from None
        except Exception as e:
            said = f"{type(e).__name__}: {' '.join(str(e).split())}"
            raise InputError(f"{chapter}: no grid can be built from these parameters ({', '.join(changed)}): {said}") from e
    return space.get("experiments", {})


# ------------------------------------------------------------------------------------------------------------ execution
def best_profile(chapter: str) -> str:
    """The best profile that frozen results of the chapter exist for, else quick."""
    from lib.store import results_folder

    frozen = (p for p in ("paper", "laptop") if (results_folder() / f"{chapter}.{p}.csv").exists())
    return next(frozen, "quick")


def output(chapter: str, out: Path | None = None) -> Path:
    """Where the executed chapter goes; InputError if it cannot be written there. Makes nothing."""
    path = Path(out or build_folder() / "chapters" / f"{chapter}.ipynb").resolve()
    if path.parent == book():
        raise InputError(f"{path}: lies among the book's sources; choose another folder")
    there = next(place for place in (path, *path.parents) if place.exists())
    if not os.access(there, os.W_OK) or there.is_dir() == (there == path):
        raise InputError(f"{path}: cannot be written, because of {there}; choose another place")
    return path


def execute(chapter: str, profile: str = "quick", overrides: dict | None = None, out: Path | None = None) -> Path:
    """Run the chapter through papermill in the book's folder; returns the executed notebook's path.

    BookError names the cell that failed; the notebook as far as it got is kept.
    """
    import papermill

    space = _namespace(read(chapter))
    defaults = _defaults(space)
    values = _resolve(space, chapter, profile, overrides)
    out = output(chapter, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    source = book() / f"{chapter}.ipynb"
    with tempfile.TemporaryFile() as noise:
        try:
            with _standard_error_to(noise):
                papermill.execute_notebook(source, out, changed, kernel_name="python3", language="python", cwd=book(), progress_bar=False)
        except papermill.PapermillExecutionError as e:
            why = " ".join(e.evalue.split())
            raise BookError(f"{_place(chapter, e.exec_count, e.source)} failed: {e.ename}: {why}; executed so far: {out}") from None
        except RuntimeError as e:  # the kernel died: what it said last is the only trace
            noise.seek(0)
            sys.stderr.write(noise.read().decode(errors="replace"))
            code = [c for c in nbformat.read(out, as_version=4).cells if c.cell_type == "code"] if out.exists() else []
            begun = [(number, c) for number, c in enumerate(code, 1) if c.metadata.get("papermill", {}).get("start_time")]
            where = _place(chapter, begun[-1][0], begun[-1][1].source) if begun else chapter
            raise BookError(f"{where} failed: {' '.join(str(e).split())}; executed so far: {out}") from None
    return out


def _place(chapter: str, number: int, source: str) -> str:
    """A cell by its chapter, its number and its first line."""
    first = next((line for line in source.splitlines() if line.strip()), "")
    return f"{chapter}: cell [{number}] ({first.strip()})"


@contextmanager
def _standard_error_to(file):
    """Keep a kernel's own messages (ports, debugger, a traceback when it is stopped) off the terminal."""
    sys.stderr.flush()
    terminal = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def refresh(chapter: str) -> Path:
    """Run the chapter at its defaults; store in it the outputs of the cells tagged `nbval-check-output`, no others."""
    source = read(chapter)
    executed = {cell.id: cell for cell in tagged(nbformat.read(execute(chapter), as_version=4), CHECKED)}
    for cell in source.cells:
        if cell.cell_type == "code":
            ran = executed.get(cell.id, {})
            cell.outputs = ran.get("outputs", [])
            cell.execution_count = ran.get("execution_count")  # nbval asks for one where there are outputs
    source.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    path = book() / f"{chapter}.ipynb"
    nbformat.write(source, path)
    return path
