"""Files are data: nothing that is read is run. And the site says to the browser what it may load."""

import ast
import base64
import hashlib
import json
import pickle
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_faults import RUNS

from lib import chapters, site
from lib.config import InputError
from lib.store import Store, _seal
from lib.train import train

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {  # names that run what they read, and where one of them stands with a reason
    "eval": (), "exec": ("chapters.py:_run",), "compile": ("chapters.py:_run",), "__import__": (),
    "pickle": (), "cPickle": (), "cloudpickle": (), "dill": (), "joblib": (), "marshal": (), "shelve": (),
    "read_pickle": (), "to_pickle": (), "unsafe_load": (), "full_load": (), "load_all": (), "UnsafeLoader": (), "FullLoader": (),
}  # fmt: skip


def uses(tree: ast.AST):
    """(function, name) of each name, attribute and import in a module."""
    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Name):
                yield inside, child.id
            elif isinstance(child, ast.Attribute) and not (isinstance(child.value, ast.Name) and child.value.id == "re"):
                yield inside, child.attr
            elif isinstance(child, ast.Import | ast.ImportFrom):
                yield from ((inside, part) for alias in child.names for part in alias.name.split("."))
                yield from ((inside, part) for part in (getattr(child, "module", None) or "").split("."))
            yield from walk(child, inside)

    yield from walk(tree, "")


def unsafe(path: Path, source: str) -> list[str]:
    tree = ast.parse(source)
    found = [f"{path.name}:{f}: {name}" for f, name in uses(tree) if name in FORBIDDEN and f"{path.name}:{f}" not in FORBIDDEN[name]]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        text, keywords = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
        if text == "torch.load" and keywords.get("weights_only") != "True":
            found.append(f"{path.name}: torch.load without weights_only=True")
        if text == "yaml.load" and not (path.name == "chapters.py" and ast.unparse(call.args[1]) == "_Plain"):
            found.append(f"{path.name}: yaml.load")
        if text in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
            found.append(f"{path.name}: {ast.unparse(call)}")
    return found


def test_nothing_that_is_read_from_a_file_is_unpickled_or_evaluated():
    assert [line for path in sorted((ROOT / "lib").rglob("*.py")) for line in unsafe(path, path.read_text())] == []
    for name in chapters.names():
        for cell in chapters.read(name).cells:
            assert cell.cell_type != "code" or unsafe(Path(f"{name}.ipynb"), cell.source) == []


@pytest.mark.parametrize("source", ["eval('1')", "import pickle", "from joblib import load", "torch.load(p)", "yaml.load(f, yaml.Loader)",
                                    "pd.read_pickle(p)", "np.load(p, allow_pickle=True)", "torch.load(p, weights_only=False)"])  # fmt: skip
def test_the_test_above_can_fail(source):
    assert unsafe(Path("x.py"), source)


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_result_file_that_carries_a_pickle_is_only_data(tmp_path, faults):
    store, burst = Store(tmp_path / "store").open(), tmp_path / "burst"
    store.put(train(RUNS[:1])[0])
    bomb = pickle.dumps(Bomb(burst))
    path = store.path(RUNS[0].key, ".parquet")
    column = pa.field("step", pa.int64(), metadata={b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": bomb})
    pq.write_table(pa.table({"step": [1]}, schema=pa.schema([column], metadata={b"pandas": bomb, b"pickle": bomb})), path)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    sidecar["made"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(sidecar | {"seal": _seal(sidecar)}))
    faults.count("a pickle within a result file")
    store.get(RUNS[0])
    assert not burst.exists()
    pickle.loads(bomb)
    assert burst.exists()  # it would have


@pytest.mark.parametrize("where", ["shard", "temporary", "record"])
def test_links_do_not_lead_out_of_the_store(tmp_path, faults, where):
    store, outside = Store(tmp_path / "store").open(), tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    path = store.path(RUNS[0].key, ".json")
    if where == "shard":
        path.parent.symlink_to(outside)
    else:
        path.parent.mkdir()
        (path if where == "record" else path.with_name(f"{path.name}.1.tmp")).symlink_to(outside / "file")
    faults.count("a link that leads out of the store")
    if where == "shard":
        with pytest.raises(InputError, match="is a link.*remove it"):
            store.put(train(RUNS[:1])[0])
    elif where == "record":
        assert store.get(RUNS[0]) is None  # set aside: the link, not what it leads to
    if where != "shard":
        store.put(train(RUNS[:1])[0])
        assert store.get(RUNS[0]) and not path.is_symlink()
    assert {p.name: p.read_text() for p in outside.iterdir()} == {"file": "precious"}


# ---------------------------------------------------------------------------------------------------------------- site
PAGE = """<html><head><meta charset="utf-8"/><script>let a = 1;</script><script src="x.js"></script>
<script type="application/json">{"no": "script"}</script></head><body><p onclick="window.print()">x</p></body></html>"""


def test_a_page_s_policy_names_its_own_scripts_and_nothing_elsewhere(tmp_path):
    (tmp_path / "x.html").write_text(PAGE.replace(' onclick="window.print()"', ""))
    site.protect(tmp_path)
    text = (tmp_path / "x.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    digest = base64.b64encode(hashlib.sha256(b"let a = 1;").digest()).decode()
    assert f"script-src 'self' file: 'sha256-{digest}';" in policy and policy.count("sha256-") == 1
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe-eval" not in policy
    assert text.index("Content-Security-Policy") < text.index("<script")
    (tmp_path / "x.html").write_text(PAGE)
    site.protect(tmp_path)
    assert base64.b64encode(hashlib.sha256(b"window.print()").digest()).decode() in (tmp_path / "x.html").read_text()
    (tmp_path / "x.html").write_text(PAGE.replace("<p ", '<a href="javascript:alert(1)">y</a><p '))
    with pytest.raises(chapters.BookError, match="x.html: the link javascript"):
        site.protect(tmp_path)


def test_every_dependency_is_pinned_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {re.fullmatch(r"([\w.-]+)==([\w.]+)", line)[1].lower().replace("_", "-") for line in lines}
    declared = re.findall(r'^    "([\w-]+)[=<>\[]', (ROOT / "pyproject.toml").read_text(), re.M)
    declared += re.findall(r'"([\w-]+)[=<>]', re.search(r"cluster = (.*)\n", (ROOT / "pyproject.toml").read_text())[1])
    assert len(declared) > 20 and {name.lower().replace("_", "-") for name in declared} <= pinned


def test_every_action_of_continuous_integration_is_pinned_to_a_commit():
    uses = [line for path in (ROOT / ".github" / "workflows").glob("*.yml") for line in path.read_text().splitlines() if "uses:" in line]
    assert len(uses) >= 5 and all(re.search(r"uses: [\w/-]+@[0-9a-f]{40}\b", line) for line in uses)
