"""What the last soak counted, promise by promise: `make soak` writes it, the reliability chapter shows it."""

from __future__ import annotations

import json

import pandas as pd

from lib import chapters
from lib.config import InputError
from lib.store import results_folder

PROMISES = {  # what is promised -> words of which one stands in the name of each test that holds us to it
    "Nothing finished is lost or trained twice, whoever is killed": ("kill_9", "workers_and_schedulers_die", "two_processes"),
    "A full or read-only disk is said in one line and leaves nothing in pieces": ("full_disk", "read_only"),
    "A damaged file is set aside and named, never trusted": ("damaged", "record_is_missing", "later_version"),
    "Ctrl-C ends cleanly, keeps what is done and says how to go on": ("ctrl_c",),
    "A run that dies, diverges or does not fit stops no other": ("takes_its_worker", "out_of_memory", "nan_in", "diverges"),
    "A clock that jumps changes nothing": ("clock",),
    "A chapter that fails fails the build, is named with its cell, and is kept": ("chapter_that_fails",),
    "Bad input gets one line that names it and changes nothing on disk": (
        "any_task", "any_chapter", "any_parameter_file", "hostile_yaml", "odd_names", "values_of_the_command_line",
    ),
    "What is read from a file is data: it is not run and leads nowhere": ("carries_a_pickle", "links_do_not"),
    "A cluster with TLS refuses plain connections and strangers": ("with_tls",),
}  # fmt: skip


def load() -> dict:
    """The last soak in the build folder, or else the one that the repository ships; InputError if there is none."""
    for folder in (chapters.build_folder(), results_folder()):
        if (path := folder / "soak.json").exists():
            return json.loads(path.read_bytes())
    raise InputError("soak: there is no soak.json; make it with `make soak`")


def promise(test: str) -> str:
    """The promise that a test holds us to; for a test of something else, "other"."""
    for text, words in PROMISES.items():
        if any(word in test for word in words):
            return text
    return "other"


def faults(soak: dict) -> pd.DataFrame:
    """One row a fault: promise, fault, injected, held, test (its function's name)."""
    table = pd.DataFrame(soak["faults"])
    table["test"] = table["test"].str.split("::").str[-1]
    return table.assign(promise=table["test"].map(promise))[["promise", "fault", "injected", "held", "test"]]


def promises(soak: dict) -> pd.DataFrame:
    """One row a promise: injected, held, and how it is tested (the kinds of faults). What was not tested has not held."""
    table = faults(soak).groupby("promise").agg(injected=("injected", "sum"), held=("held", "all"), faults=("fault", "; ".join))
    every = table.reindex(PROMISES).reset_index()
    return every.assign(held=every["held"].eq(True), injected=every["injected"].fillna(0).astype(int), faults=every["faults"].fillna("not tested"))


def injected(soak: dict, word: str) -> int:
    """How many faults whose name holds this word."""
    return sum(row["injected"] for row in soak["faults"] if word in row["fault"])


def measured(soak: dict, what: str) -> pd.DataFrame:
    """The timed rows of this name, with `rate`, runs a second."""
    table = pd.DataFrame([row for row in soak["measured"] if row["what"] == what])
    return table.assign(rate=table["runs"] / table["seconds"])
