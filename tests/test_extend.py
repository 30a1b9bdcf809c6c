"""The page on additions: its code, written to the files that it names in a copy of the package, works as it says."""

import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from lib import chapters

BLOCK = re.compile(r"```\{code-block\} python\n:caption: (.+?)\n(.*?)```", re.S)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of what a reader has, with the page's additions made."""
    root = tmp_path_factory.mktemp("extended")
    for name in ("lib", "tests"):
        shutil.copytree(chapters.ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "_toc.yml", "_config.yml"):
        shutil.copy2(chapters.ROOT / name, root)
    (root / "book" / "results").mkdir(parents=True)
    shutil.copy2(chapters.ROOT / "book" / "claims.yml", root / "book")
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    found = BLOCK.findall((chapters.ROOT / "book" / "extend.md").read_text(encoding="utf-8"))
    assert len(found) == 10
    for caption, code in found:
        if match := re.fullmatch(r"at the end of (\S+)", caption):
            with (root / match[1]).open("a") as file:
                file.write("\n" + code)
        elif match := re.fullmatch(r"book/look_back.ipynb, tagged (\w+)", caption):
            notebook.cells.append(nbformat.v4.new_code_cell(code.rstrip(), metadata={"tags": [match[1]]}))
        else:
            (root / caption).write_text(code)
    nbformat.write(notebook, root / "book" / "look_back.ipynb")
    return root


def python(root, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BOOK_")}
    return subprocess.run([sys.executable, *arguments], cwd=root, env=environment | {"PYTHONPATH": str(root)}, capture_output=True, text=True)


def test_the_additions_pass_the_books_own_tests(repository):
    done = python(repository, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", "pyproject.toml", "lib/tasks/look_back.py",
                  "tests/test_mixers.py", "tests/test_controls.py", "-k", "look_back or LookBack or running_mean")  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 8, done.stdout[-2000:]


def test_the_chapter_runs_and_a_wrong_parameter_is_named(repository):
    done = python(repository, "-m", "lib", "run", "look_back", "-p", "steps", "40", "-p", "seeds", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    executed = nbformat.read(repository / "_build" / "chapters" / "look_back.ipynb", as_version=4)
    shown = [output.data for cell in executed.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("image/png" in data for data in shown) and any("running_mean" in data.get("text/plain", "") for data in shown)
    wrong = python(repository, "-m", "lib", "run", "look_back", "-p", "sedes", "1")
    assert wrong.returncode == 2 and "did you mean seeds?" in wrong.stderr
    task = python(repository, "-c", "from lib.tasks import LookBack; LookBack(T=3, k=5)")
    assert "k: a sequence of T = 3 tokens has none 5 places before the last" in task.stderr
