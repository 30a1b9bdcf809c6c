"""What chapters measure inside trained models, kept like runs: made once, found again, shipped with the frozen results.

A finished run keeps its curves and not its weights, so whatever looks into a model trains it again (`lib.probe.watch`).
`measuring` has such a function of a chapter called only where the live store and the frozen results do not know its answer. The
answer's name is a hash of the function's own source, of the functions of the notebook that it uses, and of its arguments:
whoever changes one of them gets a new measurement, and a function that uses anything else of the notebook is refused.
(`joblib.Memory` does the like and pickles what it keeps; nothing here is unpickled from a file.)

An array is called `<answer>/<name>`, with the name that the chapter's function gives it; `<answer>/about` is a text in JSON: the
chapter and profile, the function, the keys of the runs, when it was made, the version of torch and the processor.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import io
import json
import symtable
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import torch

from lib.config import InputError
from lib.files import write
from lib.run import Run
from lib.store import Store, processor, results_folder

VERSION = 1  # to be raised when a probe of this package comes to mean something else
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Names that functions of this source take from around them."""
    mine = {s.get_name() for s in table.get_symbols() if s.is_global()} if table.get_type() == "function" else set()
    return mine.union(*map(_globals, table.get_children()))


def _sources(function: FunctionType) -> dict[str, str]:
    """The source, without comments, of a function and of those of the same notebook or module that it uses.

    InputError for a function that uses a variable from around it, which may change without notice.
    """
    found: dict[str, str] = {}
    waiting = [function]
    while waiting:
        each = waiting.pop()
        text = found[each.__name__] = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(each))))
        for name in sorted(_globals(symtable.symtable(text, "<function>", "exec"))):
            value = each.__globals__.get(name, getattr(builtins, name, None))
            if isinstance(value, FunctionType) and value.__module__ == function.__module__:
                waiting += [value] if name not in found else []
            elif not isinstance(value, ModuleType) and not callable(value):
                raise InputError(f"measured: {each.__name__} uses {name}, a variable from around it; hand it over as an argument")
    return found


def _plain(value) -> dict:
    if isinstance(value, Run):
        return {"run": value.key}
    raise InputError(f"measured: an argument must be a run or plain values, not {type(value).__name__}")


def _runs(value) -> set[str]:
    """The keys of the runs among these arguments."""
    if isinstance(value, Run):
        return {value.key}
    return set().union(*map(_runs, value)) if isinstance(value, list | tuple) else set()


def _folder(store: Store) -> Path:
    return store.folder / "measured"


def _frozen(chapter: str, profile: str) -> Path:
    """The measurements that the repository ships with a chapter's results."""
    return results_folder() / f"{chapter}.{profile}.measured.npz"


def _read(path: Path, key: str) -> dict[str, np.ndarray] | None:
    """One measurement of a file; None if it is not there."""
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        return {name.partition("/")[2]: file[name] for name in file.files if name.startswith(f"{key}/")} or None


def _packed(entries: dict[str, dict[str, np.ndarray]]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{f"{key}/{name}": value for key, values in entries.items() for name, value in values.items()})
    return buffer.getvalue()


def measuring(chapter: str, profile: str, store: Store | None = None) -> Callable:
    """measure(function, *arguments) -> what the function returns: known to the store or the frozen results, or made now and kept.

    function   takes runs and plain values, or lists of them, and uses no other variable of the notebook;
               returns named arrays of numbers, truth values or texts. Double precision is handed over, and kept, as float32
    """
    return partial(_measure, store or Store(), chapter, profile)


def _measure(store: Store, chapter: str, profile: str, function: Callable[..., dict], *arguments) -> dict[str, np.ndarray]:
    what = json.dumps([VERSION, _sources(function), arguments], default=_plain, sort_keys=True)
    key = hashlib.sha256(what.encode()).hexdigest()[:20]
    mine, shipped = _folder(store) / f"{key}.npz", _frozen(chapter, profile)
    values = None
    try:
        values = _read(mine, key)
    except DAMAGED as error:
        print(f"store: the measurement {mine} is damaged ({' '.join(str(error).split())}); it is made again", file=sys.stderr)
    try:
        values = values or _read(shipped, key)
    except DAMAGED as error:
        raise InputError(f"{shipped}: damaged ({' '.join(str(error).split())[:200]}); fetch it again with `git checkout`") from None
    if values is None:
        values = {name: _array(function, name, value) for name, value in function(*arguments).items()}
        about = {"chapter": chapter, "profile": profile, "function": function.__name__, "runs": sorted(_runs(arguments)), "finished": time.time()}
        about |= {"torch": torch.__version__, "processor": processor(), "asked": hashlib.sha256(json.dumps(arguments, default=_plain).encode()).hexdigest()}
        values["about"] = np.array(json.dumps(about))
        store.open()
        mine.parent.mkdir(exist_ok=True)
        write(mine, _packed({key: values}))
    return {name: value for name, value in values.items() if name != "about"}


def _array(function: Callable, name: str, value) -> np.ndarray:
    """One named result as it is kept; InputError for anything but numbers, truth values and texts."""
    value = np.asarray(value)
    if value.dtype.kind not in "fiubU" or name == "about" or "/" in name:
        raise InputError(f"measured: {function.__name__} returns {name} of type {value.dtype}; numbers, truth values and texts can be kept")
    return value.astype(np.float32) if value.dtype == np.float64 else value


def freeze(runs: Iterable[str], store: Store, chapter: str, profile: str) -> int:
    """Write what the store has of a chapter's measurements on these runs (keys) into the results that ship; returns how many are there.

    Of one function and the same arguments the newest. What is frozen already stays, unless the store has it newer.
    """
    runs, newest = set(runs), {}
    for path in [_frozen(chapter, profile), *sorted(_folder(store).glob("*.npz"))]:
        if not path.exists():
            continue
        try:
            with np.load(path, allow_pickle=False) as file:
                for key in {name.partition("/")[0] for name in file.files}:
                    about = json.loads(str(file[f"{key}/about"]))
                    same = about["function"], about["asked"]
                    if (about["chapter"], about["profile"]) != (chapter, profile) or not runs.issuperset(about["runs"]):
                        continue
                    if same not in newest or newest[same][0] < about["finished"]:
                        newest[same] = about["finished"], key, _read(path, key)
        except DAMAGED as error:
            raise InputError(f"{path}: damaged ({' '.join(str(error).split())[:200]}); delete it and run the chapter again") from None
    if newest:
        write(_frozen(chapter, profile), _packed({key: values for _, key, values in sorted(newest.values(), key=lambda n: n[1])}))
    return len(newest)
