"""Pythia's checkpoints: small GPT-NeoX models in the hub's format, against the library itself and hooks on it."""

import hashlib
import http.server
import json
import re
import sys
import threading
from pathlib import Path

import pandas as pd
import pytest
import torch

from lib import probe
from lib.__main__ import main
from lib.config import InputError
from lib.language import heads, neox, prompts, pythia
from lib.language.checkpoints import STEPS, Checkpoints
from lib.language.pythia import Study, groups
from lib.language.search import binary_search, losses, scan, verdict
from lib.models import Transformer
from lib.run import Run, Training
from lib.tasks import LinearMap

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")
LAYERS, HEADS = 2, 4


def words() -> list[str]:
    texts = (text + target for examples in prompts.prompts().values() for text, target in examples)
    return sorted({word for text in texts for word in text.replace(".", " .").replace(",", " ,").split()})


def write(folder: Path, seed: int = 0) -> Path:
    """A checkpoint in the hub's format: a small model with random weights, and a tokenizer that knows the prompts' words."""
    vocabulary = {word: i for i, word in enumerate(["?", *words()])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(seed)
    config = transformers.GPTNeoXConfig(vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                                        intermediate_size=32, max_position_embeddings=64, initializer_range=0.5)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints after steps 0 and 1 of one model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (0, 1):
        write(folder / "pythia-14m-seed3" / f"step{step}", seed=step)
    return folder


def loaded(folder, step=0):
    model, tokenizer = neox.load(folder / "pythia-14m-seed3" / f"step{step}")
    return model, groups(tokenizer, prompts.prompts()["ioi"])[0][0]


def reference(folder, step=0):
    return transformers.GPTNeoXForCausalLM.from_pretrained(folder / "pythia-14m-seed3" / f"step{step}", attn_implementation="eager").eval()


def with_head(model, tokens, layer, head, new):
    """Logits of the library's model when `new(values)` (batch, position, head_dim) stands for a head's output, by hooks on its parts."""
    attention = model.gpt_neox.layers[layer].attention
    size, seen = attention.head_size, {}

    def keep(_, __, output):
        seen["v"] = output.unflatten(-1, (HEADS, 3 * size))[:, :, head, 2 * size :]

    def replace(_, arguments):
        mixed = arguments[0].clone()
        mixed[..., head * size : (head + 1) * size] = new(seen["v"])
        return (mixed,)

    hooks = [attention.query_key_value.register_forward_hook(keep), attention.dense.register_forward_pre_hook(replace)]
    with torch.no_grad():
        logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return logits[None]


# ----------------------------------------------------------------------------------------------------- the model itself
def test_logits_and_patterns_are_the_librarys(two):
    model, tokens = loaded(two)
    outputs, patterns = probe.record(neox.bind(model, tokens))
    with torch.no_grad():
        expected = reference(two)(tokens, output_attentions=True)
    torch.testing.assert_close(outputs, expected.logits[None])
    assert sorted(patterns) == list(range(LAYERS))
    for layer, pattern in patterns.items():
        torch.testing.assert_close(pattern[0], expected.attentions[layer])


def test_patched_and_ablated_logits_are_those_of_hooks(two):
    (model, tokens), (other, _) = loaded(two, 0), loaded(two, 1)
    forward, patterns = neox.bind(model, tokens), probe.record(neox.bind(other, tokens))[1]
    library, outputs = reference(two), probe.record(forward)[0]
    for layer, head in probe.every_head(patterns):
        ablated = probe.ablate(forward, [(layer, head)])
        torch.testing.assert_close(ablated, with_head(library, tokens, layer, head, torch.zeros_like))
        moved = probe.patch(forward, [(layer, head)], patterns)
        pattern = patterns[layer][0, :, head]
        torch.testing.assert_close(moved, with_head(library, tokens, layer, head, lambda v, pattern=pattern: pattern @ v))
        assert (ablated - outputs).abs().max() > 1e-3 and (moved - outputs).abs().max() > 1e-3


# -------------------------------------------------------------------------------------------- heads, on both kinds of model
def forwards(kind, two):
    if kind == "neox":
        (old, tokens), (new, _) = loaded(two, 0), loaded(two, 1)
        return neox.bind(old, tokens), neox.bind(new, tokens)
    run = Run(task=LinearMap(S=5, s=2), model=Transformer(layers=LAYERS, heads=HEADS, width=16, causal=True),
              training=Training(eval_size=8))
    batch = probe.held_out(run)
    return tuple(probe.bind(run, run.model.init(run.task, torch.tensor([seed])), batch) for seed in (0, 1))


@pytest.mark.parametrize("kind", ["neox", "book"])
def test_effects_are_those_of_single_patches_and_ablations(two, kind):
    before, after = forwards(kind, two)

    def measure(outputs):
        return outputs.softmax(-1)[..., 1].mean().item()

    table = heads.effects(before, after, measure)
    (old, _), (new, patterns) = probe.record(before), probe.record(after)
    assert len(table) == LAYERS * HEADS
    for row in table.itertuples():
        head = [(row.layer, row.head)]
        assert row.gain == pytest.approx(measure(probe.patch(before, head, patterns)) - measure(old))
        assert row.loss == pytest.approx(measure(new) - measure(probe.ablate(after, head)))
    chosen = heads.best(table, 3)
    assert [table["gain"].rank(ascending=False)[layer * HEADS + head] for layer, head in chosen] == [1, 2, 3]
    assert heads.joint(before, patterns, probe.every_head(patterns), measure) == pytest.approx(
        measure(probe.patch(before, probe.every_head(patterns), patterns)))
    assert heads.grid(table, "gain").shape == (LAYERS, HEADS)


def test_scattered_patterns_keep_each_querys_weights_and_see_nothing_ahead():
    pattern = torch.randn(1, 3, 2, 4, 6).masked_fill(~torch.ones(4, 6, dtype=torch.bool).tril(2), -torch.inf).softmax(-1)
    moved = heads.scattered({0: pattern})[0]
    torch.testing.assert_close(moved.sort(-1).values, pattern.sort(-1).values)
    assert torch.equal(moved.tril(2), moved) and not torch.equal(moved, pattern)
    assert not torch.equal(heads.scattered({0: pattern}, seed=1)[0], moved)


def test_random_heads_are_different_ones():
    every = [(layer, head) for layer in range(3) for head in range(4)]
    drawn = heads.random_heads(every, 5, draws=200)
    assert all(len(set(row)) == 5 for row in drawn)
    counts = pd.Series([head for row in drawn for head in row]).value_counts()
    assert len(counts) == 12 and counts.min() > 40  # 83 expected, standard deviation 7


# ------------------------------------------------------------------------------------------------------------- searching
@pytest.mark.parametrize("first", [*range(9), None])
def test_binary_search_finds_what_stays(first):
    steps = [2**n for n in range(9)]
    has = {step: first is not None and place >= first for place, step in enumerate(steps)}
    searched, scanned = binary_search(steps, has.get), scan(steps, has.get)
    assert searched[:2] == scanned[:2] == ((steps[first], steps[first - 1] if first else None) if first is not None else (None, steps[-1]))
    assert len(searched.asked) <= 5 and not losses(scanned) and verdict(searched, scanned).endswith("agrees with the scan")


def test_a_scan_tells_when_binary_search_is_wrong():
    has = {0: False, 1: True, 2: False, 4: False, 8: False, 16: True}
    searched, scanned = binary_search([*has], has.get), scan([*has], has.get)
    assert (searched.step, scanned.step, losses(scanned)) == (16, 1, [2])
    assert verdict(searched, scanned) == "binary search is wrong: it says step 16, and step 1 has it already; lost again at step 2"
    has[16] = False
    assert "says never" in verdict(binary_search([*has], has.get), scan([*has], has.get))
    with pytest.raises(InputError, match="ascending"):
        scan([3, 2], has.get)


# ---------------------------------------------------------------------------------------------------- a hub and its limits
class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub, for the folders <root>/<name>/<revision>/."""

    def log_message(self, *_):
        pass

    def _answer(self, body: bytes, status: int = 200, **headers: str):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        self.server.asked.append((self.command, *parts))
        api = parts[:2] == ["api", "models"]
        owner, name, _, revision = parts[2:6] if api else parts[:4]
        revision = self.server.revisions.get(revision, revision)
        place = self.server.root / name / revision
        if owner != "EleutherAI" or not place.parent.is_dir():
            return self._answer(b"", 404, X_Error_Code="RepoNotFound")
        if not place.is_dir():
            return self._answer(b"", 404, X_Error_Code="RevisionNotFound")
        commit = hashlib.sha1(f"{name}/{revision}".encode()).hexdigest()
        self.server.revisions[commit] = revision
        if api:
            files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(place.iterdir())]
            return self._answer(json.dumps({"id": f"{owner}/{name}", "sha": commit, "siblings": files}).encode())
        file = place / parts[4]
        if not file.exists():
            return self._answer(b"", 404, X_Error_Code="EntryNotFound")
        data = file.read_bytes()
        self._answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.asked, server.revisions = tmp_path / "hub", [], {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_revisions_and_seeds_resolve_and_the_disk_stays_within_its_limit(hub, tmp_path):
    made = [write(hub.root / name / f"step{step}", seed) for seed, (name, step) in enumerate(
        [("pythia-14m", 1000), ("pythia-14m", 0), ("pythia-14m-seed3", 1000), ("pythia-14m-seed3", 2000)])]
    for folder in made:
        (folder / "optimizer.bin").write_bytes(b"x" * 100_000)  # not asked for, so it must not come
    one = size_of(made[0]) - 100_000
    limit = dict(cache=tmp_path / "cache", gigabytes=2.5 * one / 1e9, endpoint=hub.url)
    plain, seeded = Checkpoints("14m", **limit), Checkpoints("14m", 3, **limit)
    assert (plain.repository, seeded.repository) == ("EleutherAI/pythia-14m", "EleutherAI/pythia-14m-seed3")
    for checkpoints, step, folder in ((plain, 1000, made[0]), (plain, 0, made[1]), (seeded, 1000, made[2]), (seeded, 2000, made[3])):
        path = checkpoints.path(step)
        assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        neox.load(path)
        assert size_of(tmp_path / "cache") <= limit["gigabytes"] * 1e9
    assert {path.parent.name for path in (tmp_path / "cache").glob("*/step*")} == {"pythia-14m-seed3"}  # least recently used went
    asked = len(hub.asked)
    seeded.path(1000)
    assert len(hub.asked) == asked, "what is there is not asked for again"
    plain.path(0)  # makes room: 2000 is now the least recently used
    assert {path.name for path in (tmp_path / "cache" / "pythia-14m-seed3").iterdir()} == {"step1000"}
    seeded.path(1000)  # now step 0 is the least recently used, but asked to stay
    plain.path(1000, keep=(0,))
    assert {path.name for path in (tmp_path / "cache" / "pythia-14m").iterdir()} == {"step0", "step1000"}
    with pytest.raises(InputError, match=r"^gigabytes: pythia-14m-seed3 needs .* raise the limit$"):
        Checkpoints("14m", 3, **limit | {"gigabytes": 0.5 * one / 1e9}).path(1000)


def test_a_download_that_broke_off_is_taken_up(hub, tmp_path, monkeypatch):
    import huggingface_hub

    folder = write(hub.root / "pythia-14m" / "step1000")
    whole, done = huggingface_hub.hf_hub_download, []

    def breaks(repo, name, **options):
        if len(done) == 2:
            raise OSError("the line went dead")
        done.append(name)
        return whole(repo, name, **options)

    checkpoints = Checkpoints("14m", cache=tmp_path / "cache", endpoint=hub.url)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", breaks)
    with pytest.raises(InputError, match="the line went dead"):
        checkpoints.path(1000)
    assert not checkpoints.local(1000).exists()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", whole)
    hub.asked.clear()
    assert {p.name for p in checkpoints.path(1000).iterdir()} == {p.name for p in folder.iterdir()} - {"generation_config.json"}
    fetched = {asked[-1] for asked in hub.asked if asked[0] == "GET" and "resolve" in asked}
    assert fetched and not fetched & set(done), "files that had come are not fetched again"


LINES = {
    "an unknown size": (dict(size="15m"), 0, r"size: Pythia has no '15m'"),
    "an unknown seed": (dict(size="14m", seed=10), 0, r"seed: pythia-14m was trained with no seed 10; there are 0 to 9"),
    "a seed of a large one": (dict(size="12b", seed=1), 0, r"seed: pythia-12b .* 0 alone"),
    "a step that never was": (dict(size="14m"), 3, r"step: EleutherAI/pythia-14m has no revision step3; there are"),
    "a step that the hub lacks": (dict(size="14m"), 2000, r"step: EleutherAI/pythia-14m has no revision step2000 on http"),
    "a model that the hub lacks": (dict(size="31m"), 1000, r"EleutherAI/pythia-31m at step1000 is not, .* put config.json, .*31m/tree/step1000 into FOLDER"),
    "no room": (dict(size="14m", gigabytes=0.0), 1000, r"gigabytes: must be above 0"),
}


@pytest.mark.parametrize("options, step, said", LINES.values(), ids=LINES)
def test_what_is_not_there_gets_one_line(hub, tmp_path, options, step, said):
    write(hub.root / "pythia-14m" / "step1000")
    with pytest.raises(InputError) as error:
        Checkpoints(**{"cache": tmp_path / "cache", "endpoint": hub.url} | options).path(step)
    assert "\n" not in str(error.value)
    assert re.match(said, str(error.value)), error.value


def test_no_network_says_what_to_download(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    with pytest.raises(InputError) as error:
        Checkpoints("14m", 3, cache=tmp_path, endpoint="http://127.0.0.1:9").path(1000)
    assert "cannot be reached" in str(error.value) and "\n" not in str(error.value)
    assert "http://127.0.0.1:9/EleutherAI/pythia-14m-seed3/tree/step1000 into FOLDER/pythia-14m-seed3/step1000" in str(error.value)


def test_pythias_steps():
    assert len(STEPS) == 154 and list(STEPS) == sorted(STEPS) and STEPS[:4] == (0, 1, 2, 4) and STEPS[10:13] == (512, 1000, 2000)


# ----------------------------------------------------------------------------------------------------------- the whole way
def test_measured_numbers_are_greedy_decoding_and_the_librarys_probability(two, tmp_path):
    study = Study(Checkpoints("14m", 3, folder=two), tmp_path / "pythia", say=lambda _: None)
    rows = study.measure(1).set_index("capability")
    model, (_, tokenizer) = reference(two, 1), neox.load(two / "pythia-14m-seed3" / "step1")
    for capability, examples in prompts.prompts().items():
        hits, chances = [], []
        for text, target in examples:
            tokens = torch.tensor([tokenizer(text)["input_ids"]])
            wanted = tokenizer(text + target)["input_ids"][tokens.shape[1]]
            hits.append(model.generate(tokens, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1].item() == wanted)
            with torch.no_grad():
                chances.append(model(tokens).logits[0, -1].softmax(-1)[wanted].item())
        assert rows["accuracy"][capability] == pytest.approx(sum(hits) / len(hits))
        assert rows["probability"][capability] == pytest.approx(sum(chances) / len(chances), rel=1e-4)


class Given(Study):
    """A study of all of Pythia's steps whose accuracies are given: from `first` on a capability is there, but for `gaps`."""

    first, gaps = {"copying": 16, "induction": 2000, "pattern": 143_000, "ioi": None}, ()

    def measure(self, step):
        self.__dict__.setdefault("loaded", set()).add(step)
        there = {name: first is not None and step >= first and step not in self.gaps for name, first in self.first.items()}
        return pd.DataFrame({"capability": there.keys(), "accuracy": [float(value) for value in there.values()]})


def test_the_search_loads_few_of_the_checkpoints_and_the_scan_speaks_up(tmp_path):
    lines = []
    study = Given(Checkpoints("14m"), tmp_path, say=lines.append)
    found = study.emergence()
    assert {name: f.step for name, f in found.items()} == Given.first
    assert {name: f.before for name, f in found.items()} == {"copying": 8, "induction": 1000, "pattern": 142_000, "ioi": 143_000}
    assert len(study.loaded) <= 4 * 8 and "pythia-14m ioi: not by step 143000" in lines
    Given.gaps = tuple(step for step in STEPS if 64 <= step <= 100_000)
    again = Given(Checkpoints("14m"), tmp_path, say=lines.append)
    assert again.emergence(stride=1)["copying"].step == 101_000
    assert any("copying: step 101000; binary search is wrong: it says step 101000, and step 16 has it already; lost again at step 64" in line
               for line in lines)
    assert again.loaded == set(STEPS)


def test_what_was_measured_is_kept_and_not_measured_again(two, tmp_path, monkeypatch):
    def study():
        return Study(Checkpoints("14m", 3, folder=two), tmp_path / "pythia", say=lambda _: None)

    def fail(*_):
        raise KeyboardInterrupt

    first = study()
    first.measure(0)
    monkeypatch.setattr(neox, "load", fail)
    with pytest.raises(KeyboardInterrupt):
        study().measure(1)
    again = study()
    assert again.measure(0).equals(pd.read_csv(tmp_path / "pythia" / "pythia-14m-seed3.csv"))
    monkeypatch.undo()
    again.measure(1)
    table = again.effects("ioi", 0, 1)
    monkeypatch.setattr(neox, "load", fail)
    assert study().measure(1)["probability"].tolist() == again.measure(1)["probability"].tolist()
    kept = study().effects("ioi", 0, 1)
    assert kept["gain"].tolist() == pytest.approx(table["gain"].tolist()) and len(kept) == LAYERS * HEADS
    monkeypatch.setattr(prompts, "VERSION", 2)  # other prompts: nothing of it counts
    assert not len(study().table)


def test_effects_average_over_prompts_of_all_lengths(two, tmp_path):
    """Induction's prompts differ in length: against one prompt at a time."""
    table = Study(Checkpoints("14m", 3, folder=two), tmp_path, say=lambda _: None).effects("induction", 0, 1)
    (old, tokenizer), (new, _) = (neox.load(two / "pythia-14m-seed3" / f"step{step}") for step in (0, 1))
    parts = []
    for example in prompts.prompts()["induction"]:
        ((tokens, targets),) = groups(tokenizer, [example])
        parts.append(heads.effects(neox.bind(old, tokens), neox.bind(new, tokens), pythia.right(targets)))
    expected = pd.concat(parts).groupby(["layer", "head"])[["gain", "loss", "before", "after"]].mean()
    assert len({tuple(group[0].shape) for group in groups(tokenizer, prompts.prompts()["induction"])}) > 1
    torch.testing.assert_close(torch.tensor(table[["gain", "loss", "before", "after"]].to_numpy()), torch.tensor(expected.to_numpy()), rtol=1e-3, atol=1e-6)


def answers_of(folder, step):
    """The prompts, with what the model after this step says as their targets."""
    model, tokenizer = neox.load(folder / "pythia-14m-seed3" / f"step{step}")

    def said(text):
        return " " + tokenizer.decode(model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1].argmax())

    examples = {name: [prompts.Prompt(text, said(text)) for text, _ in examples] for name, examples in prompts.prompts().items()}
    return lambda: examples


def test_the_command_line(two, tmp_path, monkeypatch, capsys):
    """What the later checkpoint says is taken for right, so that all capabilities emerge between the two."""
    monkeypatch.setenv("BOOK_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(prompts, "prompts", answers_of(two, 1))
    given = ["pythia", "--size", "14m", "--seed", "3", "--folder", str(two), "--stride", "1"]
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in prompts.prompts():
        assert f"pythia-14m-seed3 {name}: step 1; binary search agrees with the scan" in lines
        assert any(line.startswith(f"pythia-14m-seed3 {name}: from 0.") and "patterns of heads" in line for line in lines)
    table, effects = pythia.results(), pythia.results(".heads")
    assert len(table) == 8 and table.query("step == 1")["accuracy"].tolist() == [1.0] * 4
    emerged = pythia.emergence(table)
    assert len(emerged) == 4 and set(emerged["emergence"]) == {1} and emerged["emerged"].all()
    late = pythia.emergence(table.assign(accuracy=0.0))
    assert late["emergence"].isna().all() and set(late["observed_until"]) == {1}
    assert len(effects) == 4 * LAYERS * HEADS and set(effects["capability"]) == set(prompts.prompts())
    monkeypatch.setattr(neox, "load", None)
    assert main(given) == 0  # all of it is kept


def test_the_command_line_gets_one_line_for_bad_input(two, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BOOK_STORE", str(tmp_path / "store"))
    for wrong, said in ((["--seed", "2"], "put config.json"), (["--stride", "-1"], "stride: must be"), (["--device", "tpu"], "device: 'tpu'")):
        assert main(["pythia", "--size", "14m", "--folder", str(two), *wrong]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error


def test_without_the_library_it_says_what_to_install(two, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"^pythia: transformers is not installed; pip install -e '.\[language\]'$"):
        Study(Checkpoints("14m", 3, folder=two), tmp_path, say=lambda _: None).measure(0)


def test_a_damaged_checkpoint_gets_one_line(two, tmp_path):
    folder = tmp_path / "pythia-14m" / "step0"
    write(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError) as error:
        Study(Checkpoints("14m", folder=tmp_path), tmp_path / "out", say=lambda _: None).measure(0)
    assert "cannot be loaded" in str(error.value) and "\n" not in str(error.value)


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_that_is_a_pickle_is_only_data(tmp_path):
    folder, burst = tmp_path / "pythia-14m" / "step0", tmp_path / "burst"
    write(folder)
    weights = safetensors.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    neox.load(folder)  # weights alone are welcome
    torch.save(weights | {"bomb": Bomb(burst)}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded"):
        neox.load(folder)
    assert not burst.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert burst.exists()  # it would have


def test_a_table_that_is_not_ours_gets_one_line(two, tmp_path):
    (tmp_path / "pythia-14m-seed3.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="not a table of this program") as error:
        Study(Checkpoints("14m", 3, folder=two), tmp_path, say=lambda _: None).measure(0)
    assert "\n" not in str(error.value) and (tmp_path / "pythia-14m-seed3.csv").read_text() == "a,b\n1,2\n"
