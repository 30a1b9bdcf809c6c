"""Chapters as files and the command line: what bad input gets, what good input leaves, on a tiny book of its own."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Literal

import nbformat
import papermill
import pytest
from pydantic import NonNegativeInt, PositiveInt

from lib import chapters
from lib.__main__ import main
from lib.config import InputError

CELLS = {
    "imports": """
        from typing import Literal
        from pydantic import NonNegativeInt, PositiveInt
        from lib.chapters import check
        from lib.models.transformer import Transformer
        from lib.run import Run, Training
        from lib.sweep import sweep
        from lib.tasks.single_location import SingleLocation""",
    "parameters": """
        profile: Literal["quick", "laptop", "paper"] = "quick"
        missing: Literal["train", "skip"] = "train"
        workers: NonNegativeInt = 1
        T: PositiveInt = 4
        B: int = 1
        p: float = 0.0
        seeds: PositiveInt = 2
        rates: list[float] = [1e-3]
        name: str = "tiny"
        fail: bool = False""",
    "check": "check(globals())",
    "grid": """
        experiments = {"all": [
            Run(task=SingleLocation(T=T, d=2, B=B, p=p), model=Transformer(layers=1, heads=1, width=8, head_dim=8),
                training=Training(steps=3, every=1, eval_size=8, learning_rate=rate), seed=seed)
            for rate in rates for seed in range(seeds)]}""",
    "sweep": 'results = sweep(experiments, chapter="tiny", profile=profile, missing=missing, workers=workers)',
    "numbers": "print(len(results['all'].rows), 'of', results['all'].wanted, 'runs')",
    "end": "assert not fail, 'asked to fail'",
}
TAGS = {"parameters": ["parameters"], "grid": ["grid"], "numbers": [chapters.CHECKED]}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with one tiny chapter, its profiles, an empty store and nothing built."""
    for folder in ("book", "params/quick", "params/laptop", "results"):
        (tmp_path / folder).mkdir(parents=True)
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    for name, source in CELLS.items():
        cell = nbformat.v4.new_code_cell(textwrap.dedent(source).strip(), id=name)
        cell.metadata["tags"] = TAGS.get(name, [])
        notebook.cells.append(cell)
    nbformat.write(notebook, tmp_path / "book" / "tiny.ipynb")
    (tmp_path / "params" / "laptop" / "tiny.yml").write_text("T: 6\nrates: [0.002, 0.003]\n")
    for variable, folder in {
        "BOOK_DIR": "book",
        "BOOK_BUILD": "build",
        "BOOK_STORE": "store",
        "BOOK_RESULTS": "results",
    }.items():
        monkeypatch.setenv(variable, str(tmp_path / folder))
    return tmp_path


def tree(folder):
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def stored(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("store/??/*.json")}


# ---------------------------------------------------------------------------------------------------------------- check
@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (PositiveInt, 0, "T: must be greater than 0, not 0"),
        (PositiveInt, 2.5, "T: must be a valid integer, not 2.5"),
        (PositiveInt, True, "T: must be a valid integer, not True"),
        (PositiveInt, "24", "T: '24' is a text, and a int is expected; write 24, unquoted"),
        (float, "1e-3", "T: '1e-3' is a text, and a float is expected; write 0.001, unquoted"),
        (float, "1e-5", "T: '1e-5' is a text, and a float is expected; write 1.0e-05, unquoted"),
        (float, float("nan"), "T: must be a finite number, not nan"),
        (list[float], [1.0, "x"], "T[1]: must be a valid number, not 'x'"),
        (Literal["quick", "laptop"], "lapto", "T: must be 'quick' or 'laptop', not 'lapto'"),
    ],
)
def test_check_names_the_parameter_and_the_fix(annotation, value, said):
    with pytest.raises(InputError) as error:
        chapters.check({"__annotations__": {"T": annotation}, "T": value})
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(float, 1), (list[int], []), (NonNegativeInt, 0), (bool, False), (str, "24"), (int | None, None)],
)
def test_check_accepts_what_is_right(annotation, value):
    chapters.check({"__annotations__": {"T": annotation}, "T": value, "unrelated": object()})


def test_check_finds_an_injected_and_an_unannotated_name():
    history = ["import math", "T: int = 4", "# Parameters\nTT = 3\n", "check(globals())"]
    with pytest.raises(InputError, match=r"TT: no such parameter of this chapter; did you mean T\?"):
        chapters.check({"__annotations__": {"T": int}, "T": 4, "In": history})
    history = ["T: int = 4\nTT = 3", "check(globals())"]
    with pytest.raises(InputError, match="TT: no such parameter"):
        chapters.check({"__annotations__": {"T": int}, "T": 4, "In": history})
    history = ["T: int = 4\nTT = 3", "check(globals())", "T: int = 4", "later = 1", "check(globals())"]
    chapters.check({"__annotations__": {"T": int}, "T": 4, "In": history})  # mended and run again


def test_papermill_alone_is_stopped_at_the_check(tiny):
    with pytest.raises(
        papermill.PapermillExecutionError, match="seed: no such parameter of this chapter; did you mean seeds"
    ):
        papermill.execute_notebook(tiny / "book/tiny.ipynb", tiny / "out.ipynb", {"seed": 2}, progress_bar=False)
    assert not (tiny / "store").exists()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("T", "24", 24),
        ("p", "1e-3", 0.001),
        ("p", "1", 1),
        ("rates", "[1e-3, 2]", [0.001, 2]),
        ("name", "24", "24"),
        ("name", "a b", "a b"),
        ("fail", "true", True),
        ("fail", "True", True),
        ("missing", "skip", "skip"),
    ],
)
def test_the_command_line_reads_a_text_as_its_annotation_asks(tiny, name, text, value):
    read = chapters.parse("tiny", {name: text})[name]
    assert read == value and type(read) is type(value)


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("run tiy", "'tiy'"),
        ("run tiny --profile lapto", "did you mean laptop"),
        ("run tiny -p TT 3", "TT: no such parameter of this chapter; did you mean T?"),
        ("run tiny -p T x", "T: must be a valid integer, not 'x'"),
        ("run tiny -p T 0", "T: must be greater than 0"),
        ("run tiny -p B 5", "B"),
        ("run tiny -p p 1.5", "p"),
        ("run tiny --out book/tiny.ipynb", "lies among the book's sources"),
        ("run tiny --out params/quick", "cannot be written"),
        ("run tiny --out params/laptop/tiny.yml/out.ipynb", "cannot be written"),
        ("run tiny -p profile laptop", "use --profile"),
        ("run tiny -p seeds two", "seeds"),
        ("sweep tiny --experiment al", "did you mean all"),
        ("sweep tiny -p T 2.5", "T: must be a valid integer"),
        ("freeze tiny", "tiny"),
        ("build --profile papr", "did you mean paper"),
        ("refresh tinny", "did you mean tiny"),
    ],
)
def test_bad_input_gets_one_line_and_changes_nothing(tiny, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tiny)
    before = tree(tiny)
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1
    assert tree(tiny) == before


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("T: 1e-3", "'1e-3'"),
        ("TT: 3", "did you mean T?"),
        ("T: [", "cannot be read as YAML"),
        ("- 3", "name: value"),
        ("profile: paper", "profile"),
    ],
)
def test_a_bad_parameter_file_is_named(tiny, capsys, content, named):
    (tiny / "params/quick/tiny.yml").write_text(content)
    assert main(["run", "tiny"]) == 2
    said = capsys.readouterr().err
    assert named in said and "params/quick/tiny.yml" in said and said.count("\n") == 1


def test_a_store_that_cannot_be_written_is_named_before_anything_runs(tiny, monkeypatch, capsys):
    (tiny / "file").touch()
    monkeypatch.setenv("BOOK_STORE", str(tiny / "file" / "store"))
    before = tree(tiny)
    assert main(["run", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "store: cannot write" in said and said.count("\n") == 1
    assert tree(tiny) == before


def test_no_arguments_say_how_to_use_it(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2 and "usage" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- good input
def test_a_run_leaves_the_executed_chapter_and_trains_nothing_twice(tiny, capsys):
    assert main(["run", "tiny", "-p", "seeds", "3"]) == 0
    executed = nbformat.read(tiny / "build/chapters/tiny.ipynb", as_version=4)
    cells = {cell.id: cell for cell in executed.cells}
    assert cells["numbers"].outputs[0].text == "3 of 3 runs\n"
    assert [c.source for c in executed.cells if "injected-parameters" in c.metadata.tags] == [
        "# Parameters\nseeds = 3\n"
    ]
    once = stored(tiny)
    assert len(once) == 3
    assert main(["run", "tiny", "-p", "seeds", "3", "--out", str(tiny / "again.ipynb")]) == 0
    assert stored(tiny) == once and (tiny / "again.ipynb").exists()


def test_the_profile_s_file_comes_over_the_defaults_and_the_overrides_over_both(tiny):
    values = chapters.parameters("tiny", "laptop", {"seeds": 1})
    assert values["T"] == 6 and values["seeds"] == 1 and values["B"] == 1 and values["profile"] == "laptop"
    assert len(chapters.grid("tiny", "laptop", {"seeds": 1})["all"]) == 2


def test_a_failing_cell_is_named_and_the_notebook_kept(tiny, capsys):
    assert main(["run", "tiny", "-p", "fail", "true"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "tiny: cell [8] (assert not fail, 'asked to fail') failed: AssertionError: asked to fail" in said
    kept = nbformat.read(tiny / "build/chapters/tiny.ipynb", as_version=4)
    assert any("of 2 runs" in output.get("text", "") for cell in kept.cells for output in cell.get("outputs", []))


def test_sweep_then_freeze_then_the_book_shows_the_frozen_results(tiny, capsys, monkeypatch):
    assert chapters.best_profile("tiny") == "quick"
    assert main(["sweep", "tiny", "--profile", "laptop", "--experiment", "all"]) == 0
    assert "tiny: all: 4 runs (4 finished)" in capsys.readouterr().out
    assert main(["freeze", "tiny", "--profile", "laptop"]) == 0
    assert (tiny / "results/tiny.laptop.csv").exists() and chapters.best_profile("tiny") == "laptop"

    seen, empty = [], str(tiny / "empty")
    monkeypatch.setenv("BOOK_STORE", empty)
    monkeypatch.setattr("lib.site.build", lambda: tiny / "build/html/index.html")
    monkeypatch.setattr(chapters, "execute", lambda *arguments: seen.append(arguments) or tiny)
    assert main(["build"]) == 0
    assert seen == [("tiny", "laptop", {"missing": "skip"})] and not os.path.exists(empty)
    assert {"id", "verdict"} <= set(json.loads((tiny / "build/scorecard.json").read_text())[0])


@pytest.fixture
def three(tiny):
    """The tiny chapter twice before a scorecard: two that may be executed side by side, and one that waits for them."""
    for name in ("other", "scorecard"):
        (tiny / "book" / f"{name}.ipynb").write_bytes((tiny / "book/tiny.ipynb").read_bytes())
    (tiny / "_toc.yml").write_text("".join(f"- file: {name}\n" for name in ("tiny", "other", "scorecard")))
    return tiny


def test_chapters_side_by_side_then_what_reads_them(three, monkeypatch):
    monkeypatch.setattr("lib.site.build", lambda: three / "build/html/index.html")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["build"]) == 0
    made = [nbformat.read(three / f"build/chapters/{name}.ipynb", as_version=4).metadata.papermill for name in ("tiny", "other", "scorecard")]
    assert max(made[0].end_time, made[1].end_time) < made[2].start_time


def test_one_of_them_that_fails_is_named_in_one_line_and_the_scorecard_waits(three, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (three / "params/quick/other.yml").write_text("fail: true\n")
    assert main(["build"]) == 1
    said = capfd.readouterr().err.strip().splitlines()
    assert "other: cell [8] (assert not fail, 'asked to fail') failed: AssertionError" in said[-1]
    assert not any("Traceback" in line for line in said) and not (three / "build/chapters/scorecard.ipynb").exists()


def test_they_end_at_once_when_interrupted(three):
    for name in ("tiny", "other"):
        notebook = chapters.read(name)
        notebook.cells[-1].source = "import time; open(f'../{name}.begun', 'w').close(); time.sleep(300)".replace("{name}", name)
        nbformat.write(notebook, three / "book" / f"{name}.ipynb")
    process = subprocess.Popen(
        [sys.executable, "-m", "lib", "build"], cwd=chapters.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a shell starts in the background is deaf to it
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (three / "tiny.begun").exists() and not (three / "other.begun").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    said = process.communicate(timeout=30)[1]  # far less than the cells would sleep
    assert process.returncode == 130 and "interrupted" in said.strip().splitlines()[-1] and "Traceback" not in said


def test_refresh_keeps_the_checked_outputs_and_no_others(tiny):
    chapters.refresh("tiny")
    cells = {cell.id: cell for cell in chapters.read("tiny").cells}
    assert cells["numbers"].outputs[0].text == "2 of 2 runs\n"
    assert not any(cell.outputs or cell.execution_count for name, cell in cells.items() if name != "numbers")
    before = (tiny / "book/tiny.ipynb").read_bytes()
    chapters.refresh("tiny")
    assert (tiny / "book/tiny.ipynb").read_bytes() == before


def test_an_interruption_ends_in_one_line(tiny, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chapters, "execute", interrupted)
    assert main(["run", "tiny"]) == 130
    assert capsys.readouterr().err.strip().count("\n") == 0


# -------------------------------------------------------------------------------------------------------- the real book
FILES = sorted((chapters.ROOT / "params").glob("*/*.yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_parameter_file_makes_a_grid(path):
    profile = path.parent.name
    values = chapters.parameters(path.stem, profile)
    assert values["profile"] == profile
    if profile == "quick":  # what opening the notebook, papermill and the tests run without any file
        assert values == chapters.defaults(path.stem)
    for runs in chapters.grid(path.stem, profile).values():
        assert runs and len({run.key for run in runs}) == len(runs)
    assert len(path.read_text().splitlines()) < 40


def test_the_chapters_stand_in_the_table_of_contents():
    contents = (chapters.ROOT / "_toc.yml").read_text()
    assert chapters.names() and all(f"file: {name}\n" in contents for name in chapters.names())


@pytest.mark.parametrize("arguments, named", [
    (["-p", "T", "0"], "T: "), (["-p", "B", "99"], "B: 99 copies"), (["-p", "p", "1.5"], "p: "), (["-p", "heads", "3"], "heads: 3"),
    (["-p", "feature", "false"], "unsolvable"), (["--profile", "huge"], "huge"), (["-p", "lerning_rate", "1"], "did you mean learning_rate?"),
    (["-p", "seeds", "1.5"], "seeds: "),
])
def test_the_regression_chapter_says_what_is_wrong_with_its_input(arguments, named, capsys, tmp_path, monkeypatch):
    for name in ("STORE", "BUILD"):
        monkeypatch.setenv(f"BOOK_{name}", str(tmp_path / name))
    assert main(["run", "regression", *arguments]) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("values, message", [
    ({"heads_grid": [3]}, "heads: 3 heads do not divide width 32"), ({"mixers": ["mamba2"]}, "mixer: .*'mamba'.*got 'mamba2'"),
    ({"mixers": ["xlstm"], "heads": 32, "width_grid": [64]}, "heads: mixer xlstm normalises each head"),
])
def test_a_head_count_or_a_mixer_that_cannot_be_is_named_in_one_line(values, message):
    with pytest.raises(InputError, match=message) as error:
        chapters.grid("scaling", overrides=values)
    assert "\n" not in str(error.value)
