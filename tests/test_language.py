"""The generated language is what it says; held-out combinations do not occur in training. Statistical tests err once in 1e4."""

import itertools
import math
import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from lib import probe, streams
from lib.config import InputError
from lib.language import corpus, heads, jumps
from lib.language.corpus import CAPABILITIES
from lib.models import Transformer
from lib.run import Run, Training
from lib.tasks import Language
from lib.train import train

SEEDS = torch.arange(3)
SMALL = Language(length=24, filler=12, nouns=12, numbers=6, names=6, places=2, things=4, gap=3, rates=[0.2, 0.3, 0.2, 0.2])
PROMPT = {
    "copying": r"copy: ((?:n\d+ ){3})again: ",
    "induction": r"((?:n\d+ ){3})(?:w\d+ ){0,3}n\d+ n\d+ ",
    "pattern": r"((?:\d+ n\d+ ){3})",
    "ioi": r"when (A\d+) and (A\d+) went to (p\d+) , (A\d+) gave (t\d+) to ",
}


def draw(task=SMALL, seeds=SEEDS, size=2000, **options):
    return task.batch(task.constants(seeds), streams.key(seeds, "data", 1), size, **options)


def numbers(words):
    return [int(re.sub(r"\D", "", word)) for word in words]


def read(text):
    """The one passage of a text that was written by the rules: (capability, its combination's sum, the answer, place of the answer,
    place of what it is found by); None if it is all filler."""
    words = text.split()
    if all(word.startswith("w") for word in words):
        return None
    matches = {name: re.search(rf"(?:^| ){prompt}", text + " ") for name, prompt in PROMPT.items()}
    capability, match = next((name, match) for name, match in matches.items() if match)
    start, end = text[: match.start(1)].count(" "), (text + " ")[: match.end()].count(" ")
    if capability == "ioi":
        a, b, place, giver, thing = match.groups()
        assert a != b and giver in (a, b)
        other = b if giver == a else a
        return capability, sum(numbers((a, b, place, thing))), other, end, start + (2 if other == b else 0)
    if capability == "pattern":
        listed = match[1].split()
        first, *others = numbers(listed[::2])
        assert others == [first + 1, first + 2] and len(set(listed[1::2])) == 3
        return capability, first + sum(numbers(listed[1::2])), str(first + 3), end, end - 2
    nouns = match[1].split()
    assert len(set(nouns)) == 3
    if capability == "copying":
        return capability, sum(numbers(nouns)), nouns[0], end, start
    assert words[end - 2 : end] == nouns[:2]
    return capability, sum(numbers(nouns)), nouns[2], end, start + 2


def texts(task, batch, member=0):
    """Every whole sequence of a member as text."""
    whole = torch.cat([batch.inputs, batch.targets[..., -1:]], -1)[member]
    return [task.text(sequence) for sequence in whole]


# -------------------------------------------------------------------------------------------------------------- filler
@pytest.mark.parametrize("trigram, exponent", [(0.0, 1.0), (0.5, 1.0), (1.0, 0.0)])
def test_filler_follows_the_chain(trigram, exponent):
    """Every transition is one of the chain's, as often as its slots say; the words follow Zipf's law in the table."""
    words, branching = 6, 3
    table, weights = corpus.chain(words, branching, exponent, seed=4), corpus.slots(branching, exponent, trigram)
    assert torch.equal(table[:1, :, :branching].expand(words, -1, -1), table[..., :branching]), "a bigram's slots"
    text = corpus.filler(streams.key(SEEDS, "x"), 3000, 12, table, weights, exponent)
    assert torch.equal(text[..., 1:], corpus.filler(streams.key(SEEDS, "x"), 3000, 12, table, weights, exponent)[..., 1:])
    a, b, c = (text[..., i : i + 10].flatten() for i in range(3))
    seen = torch.bincount((a * words + b) * words + c, minlength=words**3).view(-1, words).numpy()
    expected = np.zeros((words * words, words))
    np.add.at(expected, (np.arange(words * words).repeat(2 * branching), table.flatten().numpy()), np.tile(weights, words * words))
    assert (seen[expected == 0] == 0).all()
    tests = [stats.chisquare(s[e > 0], e[e > 0] * s.sum()).pvalue for s, e in zip(seen, expected, strict=True)
             if s.sum() > 100 and (e > 0).sum() > 1]
    assert len(tests) > 5 and min(tests) > 1e-4 / len(tests)
    start = torch.bincount(text[..., 0].flatten(), minlength=words).numpy()
    assert stats.chisquare(start, np.array(corpus.zipf(words, exponent)) * start.sum()).pvalue > 1e-4
    drawn = torch.bincount(corpus.chain(300, 8, 1.0, 0)[..., 8:].flatten(), minlength=300).numpy()
    assert stats.chisquare(drawn, np.array(corpus.zipf(300, 1.0)) * drawn.sum()).pvalue > 1e-4


@pytest.mark.parametrize("length", [3, 9])
def test_filler_entropy_is_the_log_likelihood_of_samples(length):
    """By the chain rule, word by word, from the table; and where every word has one successor only the start is uncertain."""
    words, branching, exponent = 5, 3, 0.7
    table, weights = corpus.chain(words, branching, exponent, seed=1), corpus.slots(branching, exponent, 0.4)
    text = corpus.filler(streams.key(SEEDS[:1], "x"), 20_000, length, table, weights, exponent)[0]
    unigram = torch.tensor(corpus.zipf(words, exponent), dtype=torch.float64)
    surprise = -unigram[text[:, :2]].log().sum(1)
    for t in range(2, length):
        hits = (table[text[:, t - 2], text[:, t - 1]] == text[:, t, None]) * torch.tensor(weights, dtype=torch.float64)
        surprise = surprise - hits.sum(-1).log()
    surprise = surprise / length
    entropy = corpus.filler_entropy(length, table.numpy(), weights, exponent)
    assert abs(surprise.mean() - entropy) < 4 * surprise.std() / 20_000**0.5
    one = corpus.filler_entropy(length, corpus.chain(words, 1, exponent, 1).numpy(), corpus.slots(1, exponent, 0.0), exponent)
    assert one == pytest.approx(-2 * (unigram * unigram.log()).sum().item() / length)


# ------------------------------------------------------------------------------------------------------------ passages
@pytest.mark.parametrize("train", [True, False])
def test_every_sequence_is_read_by_the_rules_and_its_answer_stands_where_the_pattern_says(train):
    batch = draw(size=1500, train=train)
    for member in range(2):
        rows = batch.pattern[member].nonzero().tolist()
        found = {}
        for i, text in enumerate(texts(SMALL, batch, member)):
            if passage := read(text):
                found[i] = passage
                words = text.split()
                assert words[passage[3]] == passage[2], (text, passage)
                assert (passage[1] % SMALL.held_out == 0) is not train, "held-out combinations are for the tests alone"
        assert [(i, p[3] - 1, p[4]) for i, p in found.items()] == [tuple(row) for row in rows]
    kinds = Counter(p[0] for p in found.values())
    assert set(kinds) == set(CAPABILITIES)
    if train:
        expected = np.array([*SMALL.rates, 1 - sum(SMALL.rates)]) * 1500
        assert stats.chisquare([*(kinds[name] for name in CAPABILITIES), 1500 - len(found)], expected).pvalue > 1e-4


def test_prompts_of_the_tests_cannot_occur_in_training():
    """All combinations of a language small enough to see them all: training has every one that is not held out, and no other."""
    task = Language(length=12, filler=3, nouns=6, numbers=4, names=3, places=2, things=2, span=2, items=2, gap=1, held_out=2,
                    rates=[0.25, 0.25, 0.25, 0.25])
    pairs = list(itertools.permutations(range(6), 2))
    every = {
        "copying": pairs, "induction": pairs, "pattern": [(n, *pair) for n in range(2) for pair in pairs],
        "ioi": [(*names, place, thing) for names in itertools.permutations(range(3), 2) for place in range(2) for thing in range(2)],
    }
    fixed = {"copying": r"copy: n(\d+) n(\d+) again:", "induction": r"n(\d+) n(\d+) (?:w\d+ )?n\1 n\2", "pattern": r"(\d+) n(\d+) \d+ n(\d+) \d+",
             "ioi": r"when A(\d+) and A(\d+) went to p(\d+) , A\d+ gave t(\d+) to"}

    def seen(train):
        combinations = {name: set() for name in fixed}
        for text in texts(task, draw(task, size=20_000, train=train)):
            for name, rule in fixed.items():
                combinations[name] |= {tuple(map(int, match.groups())) for match in re.finditer(rf"(?:^|(?<= )){rule}(?= |$)", text)}
        return combinations

    trained, tested = seen(True), seen(False)
    for name, combinations in every.items():
        held_out = {c for c in combinations if sum(c) % 2 == 0}
        assert tested[name] == held_out and trained[name] == set(combinations) - held_out, name


def test_prompts_stand_where_answers_says_and_cycle_through_capabilities_and_places():
    size = 200
    batch, answers = draw(size=size, train=False), SMALL.answers(size)
    for (_, capability, position), text in zip(answers, texts(SMALL, batch)[size // 2 :], strict=True):
        assert (read(text)[0], read(text)[3] - 1) == (capability, position)
    assert Counter(name for _, name, _ in answers) == dict.fromkeys(CAPABILITIES, size // 8)
    assert {position for _, _, position in answers} == set(range(11, 24))  # the longest prompt has 12 words
    some = SMALL.model_copy(update={"rates": [0.5, 0.0, 0.0, 0.5]})
    assert {name for _, name, _ in some.answers(50)} == {"copying", "ioi"}
    assert SMALL.model_copy(update={"rates": [0.0] * 4}).answers(50) == []


@pytest.mark.parametrize("train", [True, False])
def test_grouping_changes_no_bit_and_all_runs_speak_one_language(train):
    together = draw(size=50, train=train)
    for seed in SEEDS:
        for all_members, one in zip(together, draw(seeds=seed[None], size=50, train=train), strict=True):
            assert torch.equal(all_members[seed], one[0])
    chain = SMALL.constants(SEEDS)["chain"]
    assert torch.equal(chain[0], chain[2]) and not torch.equal(chain[0], SMALL.model_copy(update={"grammar": 1}).constants(SEEDS)["chain"][0])
    assert not torch.equal(together.inputs[0], together.inputs[1])


# ------------------------------------------------------------------------------------------------------------ measures
def test_metrics_of_a_model_that_knows_and_of_one_that_guesses():
    """One that knows the targets, and one that guesses evenly among the words that fit: `guessing` says how well it does."""
    size, batch = 400, draw(size=400, train=False)
    knows = torch.nn.functional.one_hot(batch.targets, SMALL.features) * 40.0
    measured = SMALL.metrics(knows, batch.targets)
    assert all(measured[f"{name}_{kind}"].min() > 0.999 for name in CAPABILITIES for kind in ("accuracy", "probability"))
    assert measured["text_loss"].max() < 1e-3 and measured["filler_loss"].max() < 1e-3
    guesses = torch.zeros(*batch.targets.shape, SMALL.features)
    for member, (i, name, position) in itertools.product(SEEDS.tolist(), SMALL.answers(size)):
        words = batch.inputs[member, i, : position + 1].tolist()
        if name == "pattern":
            listed = [w for w in words if SMALL.text(torch.tensor([w])).isdigit()]
            candidates = {*listed, listed[-1] + 1}
        else:
            candidates = {w for w in words if SMALL.text(torch.tensor([w]))[0] == ("A" if name == "ioi" else "n")}
        guesses[member, i, position, list(candidates)] = 40.0
    measured = SMALL.metrics(guesses, batch.targets)
    for name, level in SMALL.guessing.items():
        assert measured[f"{name}_probability"].tolist() == pytest.approx([level] * 3, rel=1e-3)
    text = batch.targets[:, : size // 2]
    uniform = SMALL.metrics(torch.zeros_like(guesses), batch.targets)
    assert uniform["text_loss"].tolist() == pytest.approx([SMALL.chance_loss] * 3) and SMALL.chance_loss == math.log(12 + 12 + 6 + 6 + 2 + 4 + 8)
    loaded = torch.zeros_like(guesses)
    loaded[..., 0] = (batch.targets < 12) * 1.0  # the first word is favoured, where filler follows
    share = ((text == 0).sum((1, 2)) / (text < 12).sum((1, 2))).double()
    expected = math.log(49 + math.e) - share
    assert SMALL.metrics(loaded, batch.targets)["filler_loss"].double().tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_language_of_filler_alone_has_no_prompts_and_is_learnt_down_to_no_less_than_its_entropy():
    """No model can pass that bound, and a small one comes near it in 400 steps."""
    task = Language(length=12, filler=6, branching=2, rates=[0.0] * 4)
    training = Training(steps=400, every=100, learning_rate=5e-3, batch=64, eval_size=512, stop_below=None)
    model = Transformer(layers=2, heads=4, width=32, causal=True, positions="learned", embedding="table", layer_norm=True)
    curves = train([Run(task=task, model=model, training=training)])[0].curves
    assert not any(name in key for key in curves for name in CAPABILITIES)
    assert curves["filler_loss"] == curves["text_loss"] == pytest.approx(curves["test_loss"], rel=1e-5)
    first = -sum(p * math.log(p) for p in corpus.zipf(6, 1.0))  # the first of its 13 words is read and not predicted
    least = (13 * task.filler_entropy - first) / 12
    assert 0.97 * least < curves["test_loss"][-1] < 1.15 * least


@pytest.mark.parametrize("options, word", [
    (dict(rates=[0.5, 0.5, 0.5, 0.0]), "rates"), (dict(rates=[-0.1, 0.1, 0.1, 0.1]), "rates"), (dict(rates=[0.1]), "rates"),
    (dict(nouns=8), "nouns"), (dict(things=2), "things"), (dict(numbers=3), "numbers"), (dict(length=12), "length"),
    (dict(held_out=1), "held_out"), (dict(nous=3), "nous"), (dict(zipf=-1.0), "zipf"),
])
def test_bad_input_gets_one_line(options, word):
    with pytest.raises(InputError) as error:
        Language(**options)
    assert str(error.value).startswith(word) and "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------------------- jumps
RUN = Run(task=SMALL, model=Transformer(layers=2, heads=4, width=16, causal=True), seed=2,
          training=Training(eval_size=64, steps=30, every=10, learning_rate=3e-3, stop_below=None))


def test_prompts_of_a_run_are_those_of_its_curves():
    kept, curves = probe.replay(RUN), train([RUN])[0].curves
    for capability in CAPABILITIES:
        found = jumps.prompts(RUN, capability)
        assert found.batch.inputs.shape[1] == 64 // 8
        for place, step in enumerate(curves["step"]):
            outputs = probe.record(probe.bind(RUN, kept[step], found.batch))[0]
            assert found.measure(outputs) == pytest.approx(curves[f"{capability}_probability"][place], rel=1e-4)
    with pytest.raises(InputError, match="no prompts of 'nonsense'"):
        jumps.prompts(RUN, "nonsense")
    assert jumps.parameters(RUN) == sum(v[0].numel() for v in kept[0].values())


def test_rise_by_hand():
    steps = [0, 1, 2, 3, 4, 5]
    assert jumps.rise(steps, [0.0, 0.1, 0.5, 0.89, 0.91, 1.0]) == (1, 4)
    assert jumps.rise(steps, [0.0, 0.1, 0.5, 0.89, 0.91, 1.0], base=0.5) == (3, 5)
    assert np.isnan(jumps.rise(steps, [1.0, 2, 3, 2, 1, 1])).all()
    assert jumps.rise(steps, -np.array([4.0, 3, 2, 1, 0, 0]), shares=(0.5, 1.0)) == (2, 4)


def test_around_a_jump():
    curve = pd.DataFrame({"step": [0, 10, 20, 30, 40], "ioi_accuracy": [0.0, 0.2, 0.4, 0.8, 0.3]})
    assert jumps.around(curve, "ioi", 0.75, 0.5) == (10, 30) and jumps.around(curve, "ioi", 0.75, 0.99) == (20, 30)
    assert jumps.around(curve, "ioi", 0.9, 0.5) is None and jumps.around(curve, "ioi", 0.0, 0.5) is None
    with pytest.raises(InputError, match="back"):
        jumps.around(curve, "ioi", 0.5, 1.0)


def test_logrank_is_that_of_a_permutation_test_and_counts_the_censored():
    """Against all ways to share out the pooled runs, ranked by the same observed minus expected, written by hand."""
    until, emerged = np.array([3.0, 5, 7, 9, 11, 12, 12, 12]), np.array([1, 1, 1, 1, 1, 0, 1, 0], bool)

    def excess(first):
        at_risk = [(until >= t).sum() for t in until[emerged]]
        mine = [(until[first] >= t).sum() for t in until[emerged]]
        return emerged[first].sum() - sum(m / n for m, n in zip(mine, at_risk, strict=True))

    def table(rows):
        return pd.DataFrame({"observed_until": until[rows], "emerged": emerged[rows]})

    groups = [list(group) for group in itertools.combinations(range(8), 4)]
    size = np.array([abs(excess(group)) for group in groups])
    for group in groups:
        other = [i for i in range(8) if i not in group]
        exact = (size >= abs(excess(group)) - 1e-9).mean()
        assert jumps.logrank(table(group), table(other)) == pytest.approx(exact, abs=0.12)  # the normal limit, with four a group
    assert jumps.logrank(table([0, 1, 2, 3]), table([4, 5, 6, 7])) < 0.05
    assert math.isnan(jumps.logrank(table([5]), table([7]))) and math.isnan(jumps.logrank(table([]), table([0])))


class Reads:
    """A model that is its attention: the outputs are the heads' weights on the first position, times what each head is worth."""

    worth = torch.tensor([0.5, 0.2, 0.1, 0.05, 0.0, -0.1])

    def __init__(self, seen):
        rest = (1 - torch.tensor(seen)) / 3
        self.pattern = torch.stack([torch.tensor(seen), rest, rest, rest], -1)[None, None, :, None].float()

    def __call__(self, tap):
        return (tap(0, self.pattern)[..., 0, 0] * self.worth).sum(-1)


def test_recovery_where_the_answer_is_the_attention():
    before, after = Reads([0.1] * 6), Reads([0.9] * 6)
    shares = heads.recovery(before, after, lambda outputs: outputs.item(), count=2, draws=200)
    assert shares["all"] == pytest.approx(1) and shares["best"] == pytest.approx(0.7 / 0.75)
    assert shares["top_share"] == pytest.approx(0.5 / 0.85)
    assert abs(shares["others"] - 2 * 0.05 / 4 / 0.75) < 0.03  # two of the other four, worth 0.05 together
    assert abs(shares["scattered"] - (0.25 - 0.1) * 0.7 / 0.8 / 0.75) < 0.1  # a weight of 0.9 stands at each of four places as often
    assert math.isnan(heads.recovery(after, before, lambda outputs: outputs.item())["best"])


def test_attended_and_roles_are_means_over_what_counts():
    found = jumps.prompts(RUN, "induction")
    _, patterns = probe.record(probe.bind(RUN, RUN.model.init(RUN.task, torch.tensor([0])), found.batch))
    table = heads.attended(patterns, found.batch.pattern)
    each = torch.arange(len(found.positions))
    source = found.batch.pattern[0, each, found.positions].int().argmax(-1)
    expected = [p[0, each, :, found.positions, source].mean(0) for p in patterns.values()]
    torch.testing.assert_close(torch.tensor(heads.grid(table, "attention")).float(), torch.stack(expected))
    roles = heads.roles(patterns, found.batch.inputs)
    expected = torch.stack([probe.previous_token(p)[0] for p in patterns.values()])
    torch.testing.assert_close(torch.tensor(heads.grid(roles, "previous_token")).float(), expected)
