"""What every chapter has in common, as a file; and that a number changed by hand does not pass unseen."""

import ast
import statistics
import subprocess
import sys

import nbformat
import pytest

from lib import chapters

NAMES = chapters.names()


@pytest.fixture(params=NAMES)
def notebook(request):
    return chapters.read(request.param)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def lines(cell):
    return [line for line in cell.source.splitlines() if line.strip() and not line.strip().startswith("#")]


def figure(cell):
    return cell.metadata.get("mystnb", {}).get("figure")


def test_there_are_chapters():
    assert {"theory", "regression", "scorecard"} <= set(NAMES)


def test_it_is_valid_with_ids_of_its_own_and_a_common_kernel(notebook):
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"


def test_it_begins_with_imports_parameters_and_their_check(notebook):
    imports, parameters, check = code(notebook)[:3]
    assert "parameters" in parameters.metadata.tags and len(chapters.tagged(notebook, "parameters")) == 1
    assert check.source.startswith("check(globals())")
    assert not any(isinstance(node, ast.Assign | ast.AnnAssign) for node in ast.parse(imports.source).body)


def test_every_parameter_is_annotated_and_the_cell_commented(notebook):
    source = chapters.tagged(notebook, "parameters")[0].source
    for node in ast.parse(source).body:
        assert isinstance(node, ast.AnnAssign) and node.value is not None, ast.unparse(node)
    assert "#" in source


def test_it_keeps_no_output_but_the_checked_ones(notebook):
    checked = chapters.tagged(notebook, chapters.CHECKED)
    assert checked and all(cell.outputs for cell in checked), "run `python -m lib refresh` on this chapter"
    for cell in code(notebook):
        assert cell in checked or not (cell.outputs or cell.execution_count)
        assert all(output.output_type == "stream" and output.name == "stdout" for output in cell.outputs)


def test_it_reads_like_a_lecture(notebook):
    body = code(notebook)[3:]
    first = next(i for i, cell in enumerate(body) if figure(cell))
    assert sum(len(lines(cell)) for cell in body[: first + 1]) <= 40, "a figure comes early"
    assert statistics.median(len(lines(cell)) for cell in body) <= 8
    assert not any(isinstance(node, ast.ClassDef) for cell in body for node in ast.walk(ast.parse(cell.source)))


def test_every_figure_has_a_caption_a_name_and_words_for_who_cannot_see_it(notebook):
    for cell in code(notebook):
        if ".subplots(" in cell.source:
            assert figure(cell), f"cell {cell.id} draws and has no figure metadata"
        if figure(cell):
            assert figure(cell)["caption"] and figure(cell)["name"].startswith("fig-")
            assert cell.metadata.mystnb.image["alt"]
            assert cell.source.rstrip().endswith(";"), (
                f"cell {cell.id}: a value beside the figure would be a second figure"
            )


def test_a_number_changed_by_hand_fails(tmp_path):
    cell = nbformat.v4.new_code_cell(
        "print('exponent', round(0.97312, 2))", metadata={"tags": [chapters.CHECKED]}, execution_count=1
    )
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="exponent 0.97\n")]
    notebook = nbformat.v4.new_notebook(
        cells=[cell], metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbval-lax",
        "--nbval-current-env",
        "x.ipynb",
    ]

    nbformat.write(notebook, tmp_path / "x.ipynb")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    cell.outputs[0].text = "exponent 0.98\n"
    nbformat.write(notebook, tmp_path / "x.ipynb")
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 1 and "0.98" in said.stdout
