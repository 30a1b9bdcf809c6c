"""Claims: the file is complete and fair, the verdicts follow the rules, nothing bad is written."""

import ast
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from lib import claims, scorecard
from lib.config import InputError
from lib.models.toy import Toy
from lib.models.transformer import Transformer
from lib.run import Training
from lib.tasks.single_location import SingleLocation

IDS = [f"A{i}" for i in range(1, 19)] + [f"B{i}" for i in range(1, 13)]
CHAPTERS = {"theory", "regression", "associative_recall", "linear_map", "cellular_automata", "scaling", "language_models"}
KEYS = {"id", "paper", "claim", "reported", "measured", "interval", "seeds", "censored", "profile", "verdict", "chapter"}
ALL = {claim.id: claim for claim in claims.load()}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A build folder of the test's own."""
    monkeypatch.setenv("BOOK_BUILD", str(tmp_path))
    return tmp_path


def estimate(value, low, high):
    return SimpleNamespace(value=value, low=low, high=high)


def record(id="A3", **changes):
    measured = {"T": 0.98, "d": estimate(0.49, 0.48, 0.50), "r2": 0.9995}
    return claims.record(id, **({"chapter": "theory", "profile": "quick", "measured": measured, "seeds": 1} | changes))


# --------------------------------------------------------------------------------------------------------- claims.yml
def test_every_claim_of_both_papers_is_there_once_and_in_order():
    raw = yaml.safe_load(claims.CLAIMS.read_text(encoding="utf-8"))
    assert [claim["id"] for claim in raw if claim["paper"] != "R"] == IDS
    assert {claim.chapter for claim in ALL.values()} == CHAPTERS


@pytest.mark.parametrize("claim", ALL.values(), ids=str)
def test_a_rule_can_be_kept_and_can_be_broken(claim):
    assert any(ends != claims.ANY for ends in claim.rule["direction"].values()), "direction judges nothing"
    inside = {name: _point(ends) for name, ends in claim.rule["agrees"].items()}
    assert claim.judge(inside) == "agrees"
    beyond = {name: _point(ends, outside=True) for name, ends in claim.rule["direction"].items()}
    assert claim.judge(beyond) == "disagrees"


@pytest.mark.parametrize("claim", ALL.values(), ids=str)
def test_what_the_paper_reports_agrees_with_its_own_claim(claim):
    inside = {name: _point(ends) for name, ends in claim.rule["agrees"].items()}
    assert claim.judge(inside | claim.reported.numbers) == "agrees"


def _point(ends, outside=False):
    low, high = (math.isfinite(end) for end in ends)
    if outside:
        return ends[0] - 1 if low else ends[1] + 1 if high else 0.0
    return sum(ends) / 2 if low and high else ends[0] + 1 if low else ends[1] - 1 if high else 0.0


def test_the_toy_models_exponents_do_not_pass_for_the_transformers():
    toy_law = {"d": 0.5, "T": 1.0, "B": -1.0, "r2": 0.999, "time_ratio": 1.0}
    assert ALL["A9"].judge(toy_law) == "direction"


BROKEN = [
    (lambda c: c.update(figur="1a"), "figur"),
    (lambda c: c.pop("why"), "why"),
    (lambda c: c.update(kind="guess"), "kind"),
    (lambda c: c.update(id="A30x"), "id"),
    (lambda c: c.update(paper="B"), "A3"),
    (lambda c: c["rule"]["agrees"].pop("T"), "rule"),
    (lambda c: c["rule"].pop("direction"), "rule"),
    (lambda c: c["rule"]["agrees"].update(x=[0, 1]), "rule"),
    (lambda c: c["rule"]["agrees"].update(T=[0.9, 0.8]), "range"),
    (lambda c: c["rule"]["agrees"].update(T=[0.9]), "T"),
    (lambda c: c["rule"]["agrees"].update(T=["0.9", 1]), "T"),
    (lambda c: c["rule"]["direction"].update(T=[1, None]), "T"),
    (lambda c: c["reported"]["numbers"].update(TT=1.0), "TT"),
    (lambda c: c["measures"].update({"T T": "x"}), "T T"),
]


@pytest.mark.parametrize("breaking, named", BROKEN, ids=range(len(BROKEN)))
def test_a_malformed_claim_gets_one_line_that_names_it(tmp_path, breaking, named):
    claim = next(c for c in yaml.safe_load(claims.CLAIMS.read_text(encoding="utf-8")) if c["id"] == "A3")
    breaking(claim)
    path = tmp_path / "claims.yml"
    path.write_text(yaml.safe_dump([claim]), encoding="utf-8")
    with pytest.raises(InputError) as error:
        claims.load(path)
    assert named in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1", "- 1", "a: 1", "- !!python/object/apply:os.getcwd []", "\x00", "- {1: 2}"])
def test_a_file_that_holds_no_claims_gets_one_line(tmp_path, text):
    path = tmp_path / "claims.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        claims.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_claim_given_twice_is_named(tmp_path):
    path = tmp_path / "claims.yml"
    path.write_text(claims.CLAIMS.read_text(encoding="utf-8") * 2, encoding="utf-8")
    with pytest.raises(InputError, match="A1 "):
        claims.load(path)


# ------------------------------------------------------------------------------------------------------------ verdicts
VERDICTS = [  # A3 agrees: T 0.97 to 1.03, d 0.47 to 0.53, r2 0.999 to 1; direction: T and d from 0
    ({"T": 1.0, "d": 0.5, "r2": 1.0}, "agrees"),
    ({"T": 0.97, "d": 0.53, "r2": 0.999}, "agrees"),
    ({"T": 0.969, "d": 0.5, "r2": 1.0}, "direction"),
    ({"T": 1.0, "d": 0.5, "r2": 0.998}, "direction"),
    ({"T": 9.0, "d": 0.0, "r2": 0.0}, "direction"),
    ({"T": -0.1, "d": 0.5, "r2": 1.0}, "disagrees"),
    ({"T": 1.0, "d": -1e-9, "r2": 1.0}, "disagrees"),
    ({"T": 1.0, "d": None, "r2": 1.0}, "not run"),
    ({"T": -0.1, "d": None, "r2": 1.0}, "disagrees"),
    ({"T": 1.0, "d": 0.5, "r2": None}, "direction"),
    ({"T": None, "d": None, "r2": None}, "not run"),
]


@pytest.mark.parametrize("measured, verdict", VERDICTS)
def test_verdicts_by_table(build, measured, verdict):
    assert ALL["A3"].judge(measured) == verdict
    assert record(measured=measured).verdict == verdict
    assert next(row for row in claims.scorecard() if row["id"] == "A3")["verdict"] == verdict


def test_a_number_that_is_only_shown_does_not_make_a_verdict():
    only_shown = dict.fromkeys(ALL["A14"].measures) | {"tokens_recall": 1.0, "pairs_recall": 1.0}
    assert ALL["A14"].judge(only_shown) == "not run"
    assert ALL["A14"].judge(only_shown | {"tokens": 0.8, "pairs": 2.2, "r2": 0.98, "pairs_recall": None}) == "agrees"


def test_a_verdict_is_one_line_with_everything_in_it(build):
    verdict = record(note="two\nlines", censored=2)
    for text in (str(verdict), repr(verdict), verdict._repr_markdown_()):
        assert "\n" not in text
        for part in ("A3", "agrees", "√d T", "T 0.98", "d 0.49 [0.48, 0.5]", "r2 0.9995", "quick", "seeds 1", "censored 2"):
            assert part in text
    assert ". Paper: " in str(verdict)
    others = claims.Verdict(claim=ALL["R9"], chapter="linear_map", profile="quick", measured={"moved": 0.1}, interval={}, seeds=3, censored=0)
    assert "Paper" not in str(others) and ". Reported by others: " in str(others)


# ------------------------------------------------------------------------------------------------------------- records
BAD = [
    ({"id": "A33"}, "A33"),
    ({"id": "a3"}, "a3"),
    ({"chapter": "theorie"}, "theory"),
    ({"chapter": "../theory"}, "../theory"),
    ({"profile": "fast"}, "quick, laptop, paper"),
    ({"measured": {"T": 1.0, "d": 0.5}}, "r2"),
    ({"measured": {"T": 1.0, "d": 0.5, "r2": 1.0, "TT": 1.0}}, "TT"),
    ({"measured": {"T": math.nan, "d": 0.5, "r2": 1.0}}, "T is nan"),
    ({"measured": {"T": math.inf, "d": 0.5, "r2": 1.0}}, "T is inf"),
    ({"measured": {"T": estimate(math.nan, 0, 1), "d": 0.5, "r2": 1.0}}, "T is nan"),
    ({"measured": {"T": "one", "d": 0.5, "r2": 1.0}}, "T must be"),
    ({"measured": {"T": [1.0], "d": 0.5, "r2": 1.0}}, "T must be"),
    ({"seeds": -1}, "seeds"),
    ({"seeds": 1.5}, "seeds"),
    ({"censored": "1"}, "censored"),
]


@pytest.mark.parametrize("changes, named", BAD, ids=range(len(BAD)))
def test_a_bad_record_gets_one_line_and_writes_nothing(build, changes, named):
    with pytest.raises(InputError) as error:
        record(**changes)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert not list(build.iterdir())


def test_a_close_name_is_suggested(build):
    with pytest.raises(InputError, match="did you mean theory"):
        record(chapter="theroy")


def test_records_of_claims_and_profiles_live_side_by_side_and_the_last_one_of_each_counts(build):
    record()
    record(profile="laptop", measured={"T": 0.5, "d": 0.5, "r2": 1.0}, seeds=np.int64(5))
    record("A5", measured={"escape_time": np.float32(1.0), "r2": 0.995})
    record(measured={"T": -1.0, "d": 0.5, "r2": 1.0})
    kept = json.loads((build / "measured" / "theory.json").read_text())
    assert {id: set(profiles) for id, profiles in kept.items()} == {"A3": {"quick", "laptop"}, "A5": {"quick"}}
    assert kept["A3"]["quick"]["measured"]["T"] == -1.0 and kept["A3"]["laptop"]["seeds"] == 5
    assert [path.name for path in (build / "measured").iterdir()] == ["theory.json"]  # no temporary file stays


def test_a_write_that_fails_leaves_the_old_record(build, monkeypatch):
    record()
    before = (build / "measured" / "theory.json").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(claims.os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        record(profile="laptop")
    assert (build / "measured" / "theory.json").read_bytes() == before
    assert [path.name for path in (build / "measured").iterdir()] == ["theory.json"]


def test_a_build_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BOOK_BUILD", str(tmp_path / "file"))
    for act in (record, claims.write_scorecard):
        with pytest.raises(InputError, match="BOOK_BUILD"):
            act()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"A3": 1}', '{"A3": {"quick": {"measured": {"T": 1}}}}'])
def test_a_damaged_record_is_named(build, text):
    path = build / "measured" / "theory.json"
    path.parent.mkdir()
    path.write_text(text)
    for act in (record, claims.scorecard):
        with pytest.raises(InputError) as error:
            act()
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert path.read_text() == text


# ----------------------------------------------------------------------------------------------------------- scorecard
def test_with_nothing_measured_every_claim_is_not_run(build):
    rows = claims.scorecard()
    assert [row["id"] for row in rows] == IDS
    assert {row["verdict"] for row in rows} == {"not run"}
    assert not any(row["measured"] or row["interval"] or row["profile"] for row in rows)


def test_the_written_card_has_the_contracts_keys_and_what_was_measured(build):
    record(measured={"T": estimate(0.98, 0.97, math.inf), "d": 0.49, "r2": 0.9995}, censored=3)
    path = claims.write_scorecard()
    rows = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert path == build / "scorecard.json" and len(rows) == len(IDS)
    assert all(set(row) == KEYS for row in rows) and {row["verdict"] for row in rows} <= set(claims.VERDICTS)
    row = rows[IDS.index("A3")]
    assert row["measured"] == {"T": 0.98, "d": 0.49, "r2": 0.9995} and row["interval"] == {"T": [0.97, None]}
    assert (row["seeds"], row["censored"], row["profile"], row["chapter"]) == (1, 3, "quick", "theory")
    assert row["reported"]["numbers"] == {"T": 1.0, "d": 0.5, "r2": 0.999}


def test_the_largest_profile_with_a_verdict_is_shown(build):
    def shown():
        row = next(row for row in claims.scorecard() if row["id"] == "A3")
        return row["profile"], row["chapter"]

    nothing = dict.fromkeys(ALL["A3"].measures)
    record(profile="laptop")
    record(profile="quick")
    assert shown() == ("laptop", "theory")
    record(profile="paper", measured=nothing)
    assert shown() == ("laptop", "theory")
    record(profile="laptop", chapter="scaling")
    assert shown() == ("laptop", "theory")  # the claim's own chapter comes first
    record(profile="paper", chapter="scaling")
    assert shown() == ("paper", "scaling")


def test_a_record_under_names_that_the_rule_has_no_longer_is_left_out(build):
    record()
    path = build / "measured" / "theory.json"
    path.write_text(path.read_text().replace('"r2"', '"r_squared"'))
    assert {row["verdict"] for row in claims.scorecard()} == {"not run"}


def test_the_readers_tables_and_reading_show_every_verdict(build):
    assert scorecard.counts().loc["A"].to_dict() == {"agrees": 0, "direction": 0, "disagrees": 0, "not run": 18}
    record(note="a <b>note</b>")
    record("A5", measured={"escape_time": 0.9, "r2": 0.995})
    record("A2", measured={"lead": 1.5})
    assert scorecard.counts().loc["A"].to_dict() == {"agrees": 1, "direction": 1, "disagrees": 1, "not run": 15}
    html, words = scorecard.table("A").to_html(), scorecard.reading()
    assert "a &lt;b&gt;note&lt;/b&gt;" in html and "regression 7" in words.split("papers' own sizes")[1]
    assert all(f">{id}<" in html for id in IDS[:18]) and all(f">{verdict}<" in html for verdict in claims.VERDICTS)
    assert "Hold (1):** A3." in words and "escape time 0.9 (to agree: 0.95 to 1.05)" in words
    assert "**A2**" in words and "A14, A15, A16, A17, A18: the chapter `associative_recall`" in words
    assert all(f">{id}<" in scorecard.rules().to_html() for id in IDS)


# ------------------------------------------------------------------------------------------------------------- choices
def test_the_switches_on_the_page_of_choices_are_the_codes():
    parts = {part.__name__: part for part in (SingleLocation, Transformer, Training, Toy)}
    part, checked = None, set()
    for line in claims.CLAIMS.with_name("choices.md").read_text(encoding="utf-8").splitlines():
        if header := re.search(r"Switch \(`(\w+)`\)", line):
            part = parts[header[1]]
        elif line.startswith("#"):
            part = None
        elif part and line.startswith("|"):
            for other, name, default in re.findall(r"`(?:(\w+)\.)?(\w+)(?:=([^`]+))?`", line.rsplit("|", 2)[1]):
                checked.add(part)
                field = parts.get(other, part).model_fields[name]
                assert not default or field.default == ast.literal_eval(default), f"{name}: {field.default} in the code"
    assert checked == set(parts.values())
