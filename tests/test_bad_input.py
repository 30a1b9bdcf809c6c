"""Whatever is given as a parameter either runs a step or gets one line with the parameter's name; nothing else happens on disk."""

import json
import math
import os
import random
import re
import typing

import pytest
import yaml
from conftest import Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chapters import tiny, tree  # noqa: F401 (a fixture)

from lib import chapters
from lib.__main__ import main
from lib.config import InputError
from lib.models import MODELS, Toy, Transformer
from lib.run import Run, Training
from lib.sweep import _fit
from lib.tasks import TASKS, SingleLocation

CASES = 7800 if Faults.full else 60  # of whole runs; the other properties have their share of it


def cases(share: float):
    return settings(
        max_examples=max(20, round(CASES * share)), deadline=None, database=None, derandomize=not Faults.full, print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip


ODD_TEXT = st.one_of(st.text(max_size=12), st.sampled_from(["", "1e-3", "true", "None", "../../x", "a\nb", "x" * 9999, "é\u202e", "`id`", "%s{0}"]))
ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 9), st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400, -(10**30)]),
        st.floats(), ODD_TEXT, st.binary(max_size=4), st.dates(),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXT, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def likely(annotation, low: int = 1):
    """Values of the right kind and small enough to run, at and beyond the edges too."""
    if typing.get_origin(annotation) is typing.Literal:
        return st.sampled_from(typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return likely(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is list:
        return st.lists(likely(typing.get_args(annotation)[0]), max_size=2)
    if args := typing.get_args(annotation):  # a union
        return st.one_of([likely(arg) for arg in args])
    kinds = {bool: st.booleans(), int: st.integers(low - 1, 6), str: ODD_TEXT, type(None): st.none()}
    kinds[float] = st.one_of(st.floats(0, 4), st.sampled_from([0.0, 1.0, 1e-30, 1e30, 1.7e308, -1.0, math.inf, math.nan]))
    return kinds.get(annotation, ANYTHING)


def within(field):
    """Values that a field of a configuration allows, small ones."""
    bounds = {kind: getattr(m, kind) for m in field.metadata for kind in ("ge", "gt", "le", "lt") if hasattr(m, kind)}
    low = bounds.get("ge", bounds.get("gt", 0))
    if field.annotation is int:
        return st.integers(low, low + 4)
    if field.annotation is float:
        return st.one_of(st.just(field.default), st.floats(low, min(low + 2, bounds.get("le", low + 2)), exclude_min="gt" in bounds))
    return likely(field.annotation)


@st.composite
def part(draw, kinds):
    """(class, values): a few fields of one configuration, most of them allowed, now and then an edge or anything at all."""
    dice = random.Random(draw(st.integers(0, 2**64)))  # hypothesis' own integers favour the edges, and nothing would run
    kind = dice.choice(kinds)
    values = {}
    for name, field in kind.model_fields.items():
        if name != "kind" and dice.random() < 0.25:
            luck = dice.random()
            values[name] = draw(within(field) if luck > 0.04 else likely(field.annotation) if luck > 0.02 else ANYTHING)
    if dice.random() < 0.02:
        values[draw(ODD_TEXT.filter(lambda text: text != "self"))] = draw(ANYTHING)
    if values.get("mixer", "attention") != "attention" and dice.random() < 0.9:
        values["causal"] = values["mixer"] != "mlp_mixer_unmasked"
        values.pop("head_dim", None)
        values.pop("score_bias", None)
    return kind, values


SMALL_TASK = {"T": 4, "d": 2, "N_pairs": 2, "N_tokens": 6, "S": 4, "s": 2, "states": 2, "pool": 2}
SMALL_MODEL = {"layers": 1, "heads": 2, "width": 4, "mlp_factor": 1}


def smaller(kind, values, sizes):
    """Where a size is not given: a small one instead of the default, if the parameter exists."""
    return {name: size for name, size in sizes.items() if name in kind.model_fields} | values


def ran(parts) -> str:
    """'ran', or the one line that says why not."""
    (task, of_task), (model, of_model), of_training = parts
    of_training = {"batch": 2, "eval_size": 2} | of_training
    try:
        run = Run(
            task=task(**smaller(task, of_task, SMALL_TASK)), model=model(**smaller(model, of_model, SMALL_MODEL)),
            training=Training(**{"steps": 1} | of_training),
        )  # fmt: skip
        run = run.model_copy(update={"training": run.training.model_copy(update={"steps": 1, "stop_below": None})})
        json.dumps(run.row()), run.key, Run.model_validate_json(run.model_dump_json())
    except InputError as error:
        return str(error)
    done = []
    assert _fit([run], "cpu", done.append) == []
    assert (done[0].status, done[0].steps) in (("finished", 1), ("diverged", 1), ("diverged", 0))
    return "ran"


def named(said: str, parts) -> bool:
    (_, of_task), (_, of_model), of_training = parts
    fields = {*of_task, *of_model, *of_training, "model toy", *SMALL_TASK, *SMALL_MODEL}
    assert MODELS == (Toy, Transformer), "a new model: generate it in `whole`, too"
    return any(names(said, field) for field in fields)


def names(said: str, name) -> bool:
    """Whether a line holds a parameter's name, as a word of its own; an odd name as the line writes it, shortened."""
    name = str(name)
    return bool(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said)) if re.fullmatch(r"\w{1,80}", name) else repr(name)[1:-1][:20] in said


def test_a_line_that_names_nothing_is_seen():
    assert names("T: must be at least 2", "T") and names("p, B: exclude each other", "B") and names(r"'a\nb': no such parameter", "a\nb")
    assert not any(names("something went wrong: bad setup", field) for field in (*SMALL_TASK, *SMALL_MODEL))


OUTCOMES: dict[str, int] = {"ran": 0, "refused": 0}


@st.composite
def whole(draw):
    """The parts of a run: task, model, training."""
    task, of_task = draw(part(TASKS))
    model, of_model = draw(part([Transformer] if task is not SingleLocation else [Transformer, Toy]))
    if model is Toy:
        of_task = of_task | {"position": "fixed", "feature": False}
    return (task, of_task), (model, of_model), draw(part([Training]))[1]


@cases(1)
@given(parts=whole())
def check_runs(parts):
    said = ran(parts)
    OUTCOMES["ran" if said == "ran" else "refused"] += 1
    assert said == "ran" or ("\n" not in said and len(said) < 500 and named(said, parts)), said


def test_any_task_model_and_training_runs_a_step_or_is_refused_by_name(faults):
    try:
        check_runs()
    finally:
        faults.count("generated run: made a step", OUTCOMES["ran"])
        faults.count("generated run: refused in one line", OUTCOMES["refused"])
    assert min(OUTCOMES.values()) > 0.1 * sum(OUTCOMES.values()), OUTCOMES


# ------------------------------------------------------------------------------------------------- chapters' parameters
CHAPTERS = [name for name in chapters.names() if chapters.tagged(chapters.read(name), "parameters")]


HUGE = st.sampled_from([10**3, 10**8, 10**9]).flatmap(lambda n: st.sampled_from([n, [n], [[n]], [n, n]]))


@st.composite
def settings_of(draw):
    """(chapter, values): a chapter with a few of its parameters set, at most one to anything, and at most one unknown."""
    chapter = draw(st.sampled_from(CHAPTERS))
    annotations = ANNOTATIONS[chapter]
    chosen = draw(st.lists(st.sampled_from(sorted(annotations)), max_size=3, unique=True))
    values = {name: draw(likely(annotations[name])) for name in chosen}
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(annotations)) | ODD_TEXT)
        values[name] = draw(ANYTHING | HUGE)
    return chapter, values


ANNOTATIONS = {name: chapters._namespace(chapters.read(name)).get("__annotations__", {}) for name in CHAPTERS}


def grid_or_line(chapter, values) -> str:
    try:
        for runs in chapters.grid(chapter, "quick", values).values():
            assert all(isinstance(run, Run) for run in runs)
        return "grid"
    except InputError as error:
        return str(error)


def test_any_chapter_makes_its_grid_or_names_the_parameter(faults):
    counts = {"grid": 0, "refused": 0}

    @cases(0.08)
    @given(pair=settings_of())
    def property_(pair):
        chapter, values = pair
        said = grid_or_line(chapter, values)
        counts["grid" if said == "grid" else "refused"] += 1
        assert said == "grid" or ("\n" not in said and len(said) < 600 and any(names(said, n) for n in values)), said

    try:
        property_()
    finally:
        faults.count("generated chapter parameters: a grid", counts["grid"])
        faults.count("generated chapter parameters: refused in one line", counts["refused"])
    assert min(counts.values()) > 0


# ------------------------------------------------------------------------------------------------------ parameter files
YAML_SCALARS = ["1", "2", "0", "-1", "1e-3", "[1]", "{a: 1}", "~", "'x'", "!!python/object/apply:os.system ['touch burst']", "&a 1", "*a",
                "!!binary aGk=", "2026-01-01", "0x10", "1_0", "!x 3", "[", "}", "|", "? a", ".inf", "9" * 5000, "\x07", "@", "\t- 1"]  # fmt: skip
LINES = st.tuples(st.sampled_from(["T", "B", "p", "seeds", "rates", "name", "fail", "workers", "missing", "profile", "TT", "<<", "!!str T", "? [a]", "&b T"]),
                  st.sampled_from(YAML_SCALARS)).map(lambda pair: f"{pair[0]}: {pair[1]}")  # fmt: skip
FILES = st.one_of(
    st.lists(LINES, max_size=4).map("\n".join),
    st.text(max_size=60),
    ANYTHING.map(lambda value: yaml.dump(value)),
    st.dictionaries(st.sampled_from(["T", "B", "p", "seeds", "rates", "name"]), st.integers(-1, 3) | st.floats() | ODD_TEXT, max_size=3).map(yaml.safe_dump),
)


@pytest.fixture
def small(tiny, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tiny)
    return tiny


def test_any_parameter_file_trains_or_is_refused_by_name(small, faults, capsys):
    """Through the command line; what is right is trained for real."""
    file, counts = small / "params/quick/tiny.yml", {0: 0, 2: 0}

    @cases(0.24)
    @given(content=FILES)
    def property_(content):
        with open(file, "w", encoding="utf-8", errors="surrogatepass", newline="") as out:
            out.write(content)
        before = tree(small)
        code = main(["sweep", "tiny"])
        out, said = capsys.readouterr()
        counts[code] += 1
        if code == 2:
            assert said.count("\n") == 1 and str(file) in said and "Traceback" not in said and len(said) < 900, said
            assert tree(small) == before
        else:
            assert said == "" and ("finished" in out or "diverged" in out)
        assert not (small / "burst").exists() and not list(small.rglob("*.tmp"))

    try:
        property_()
    finally:
        faults.count("generated YAML file: trained", counts[0])
        faults.count("generated YAML file: refused in one line", counts[2])
    assert min(counts.values()) > 0


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)])


HOSTILE = {
    "a tag that runs a command": "T: !!python/object/apply:os.system ['touch burst']",
    "a tag that names a module": "T: !!python/name:os.system",
    "an unknown tag": "T: !secret 3",
    "a bomb of anchors": bomb(30),
    "an anchor within itself": "T: &a [*a]",
    "a hundred thousand brackets": "T: " + "[" * 50_000,
    "a number of ten thousand digits": "T: " + "9" * 10_000,
    "a name given twice": "T: 4\nT: 5",
    "two documents": "T: 4\n---\nT: 5",
    "a text that is not UTF-8": b"name: \xff\xfe",
    "a zero byte": b"T: 4\x00",
    "a name of two lines": '"T\\nB": 4',
    "a name that is no text": "[1, 2]: 3",
    "a number as a name": "3: 4",
    "a hundred megabytes": None,
    "a folder": "folder",
    "a pipe that never ends": "pipe",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_yaml_gets_one_line_at_once(small, faults, capsys, what):
    file, content = small / "params/quick/tiny.yml", HOSTILE[what]
    if what == "a folder":
        file.mkdir()
    elif what == "a pipe that never ends":
        os.mkfifo(file)
    elif content is None:
        with open(file, "wb") as out:
            for _ in range(100):
                out.write(b"T: 4\n" * 209_716)
        assert file.stat().st_size > 100e6
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = tree(small)
    assert main(["sweep", "tiny"]) == 2
    said = capsys.readouterr().err
    faults.count("hostile YAML")
    assert said.count("\n") == 1 and str(file) in said and len(said) < 900
    assert tree(small) == before


ODD_NAMES = ["../tiny", "/etc/passwd", "tiny.ipynb", "tiny/../tiny", "", " ", ".", "..", "tiny\n", "tiny\x1b[31m", "$(id)", "`id`", "%n", "ti\u202eny", "é" * 300, "-", "*"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_get_one_line_and_lead_nowhere(small, faults, capsys, name):
    before = tree(small)
    for arguments in (["sweep", "--", name], ["freeze", "--", name], ["refresh", "--", name], ["sweep", "tiny", "--profile", f"x{name}"],
                      ["sweep", "tiny", f"--experiment=x{name}"], ["sweep", "tiny", "-p", f"x{name}", "1"], ["run", "tiny", "-p", "name2", f"x{name}"]):  # fmt: skip
        assert main(arguments) == 2
        said = capsys.readouterr().err
        faults.count("odd name")
        assert said.count("\n") == 1 and "\x1b" not in said and len(said) < 900, arguments
    assert tree(small) == before


def test_values_of_the_command_line_are_data(small, faults, capsys):
    for value in ["!!python/object/apply:os.system ['touch burst']", "__import__('os').system('touch burst')", "&a [*a]", "[" * 3_000, "9" * 9_999, "{", "\x07"]:
        for name in ("T", "rates", "p", "fail"):
            assert main(["sweep", "tiny", "-p", name, value]) == 2
            said = capsys.readouterr().err
            faults.count("hostile value on the command line")
            assert said.startswith(f"python -m lib: {name}") and said.count("\n") == 1 and len(said) < 500
    assert not (small / "burst").exists() and not (small / "store").exists()


def test_results_do_not_leave_their_folder(small, monkeypatch):
    from lib.store import Store, freeze

    for chapter, profile in (("../x", "quick"), ("x", "../quick"), ("/x", "quick"), ("x\0", "quick"), ("", "quick")):
        with pytest.raises(InputError, match="name files in"):
            freeze([], Store(small / "store"), chapter, profile)


def test_an_unknown_parameter_gets_a_line_that_can_be_read(capsys):
    assert main(["run", "scaling", "-p", "zzzzqqq", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 600 and "zzzzqqq: no such parameter" in said and said.rstrip().endswith("...")
