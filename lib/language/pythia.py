"""When do Pythia's capabilities emerge, and which heads carry them (Baherwani et al. 2026)? `python -m lib pythia`.

What is measured is kept after every checkpoint: `<store>/pythia/<name>.csv`, one row a step and capability, and
`<name>.heads.csv`, one row a capability and head. Tables copied into book/results/pythia are shipped with the book.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

from lib import probe
from lib.config import InputError
from lib.files import write
from lib.language import heads, neox, prompts
from lib.language.checkpoints import Checkpoints
from lib.language.search import Found, binary_search, scan, verdict
from lib.store import Store, results_folder
from lib.train import numerics, resolve_device

SHARE = 0.5  # of its prompts that must be answered rightly for a capability to count as there


def groups(tokenizer, examples: list[prompts.Prompt]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts of equal length side by side: [(tokens (batch, position), target's first token (batch,))]."""
    by_length: dict[int, list] = {}
    for text, target in examples:
        read, whole = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, text + target))
        if whole[: len(read)] != read or len(whole) == len(read):
            raise InputError(f"prompt {text!r}: its end and {target!r} share a token of this tokenizer; choose another prompt")
        by_length.setdefault(len(read), []).append((read, whole[len(read)]))
    return [tuple(map(torch.tensor, zip(*group, strict=True))) for _, group in sorted(by_length.items())]


def right(targets: torch.Tensor) -> heads.Measure:
    """The mean probability of these next tokens (batch,)."""
    return lambda outputs: probe.probability(outputs[:, :, -1], targets[None]).mean().item()


class Study:
    """One model's measurements, made as they are asked for and kept."""

    def __init__(self, checkpoints: Checkpoints, folder: Path | None = None, device: str = "cpu", say: Callable[[str], None] = print):
        self.checkpoints, self.device, self.say = checkpoints, device, say
        self.folder = folder or Store().open().folder / "pythia"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prompts = prompts.prompts()
        self._loaded: tuple[int, object, object] | None = None

    def _path(self, suffix: str = "") -> Path:
        return self.folder / f"{self.checkpoints.name}{suffix}.csv"

    @cached_property
    def table(self) -> pd.DataFrame:
        """What has been measured: size, seed, step, prompts (their version), capability, accuracy, probability."""
        return _read(self._path())

    def _keep(self, table: pd.DataFrame, path: Path) -> None:
        write(path, table.to_csv(index=False).encode())

    def _model(self, step: int, keep: tuple[int, ...] = ()):
        if self._loaded is None or self._loaded[0] != step:
            self._loaded = None
            self._loaded = (step, *neox.load(self.checkpoints.path(step, keep), self.device))
        return self._loaded[1:]

    def _label(self) -> dict:
        return {"size": self.checkpoints.size, "seed": self.checkpoints.seed, "prompts": prompts.VERSION}

    def measure(self, step: int) -> pd.DataFrame:
        """Accuracy (greedy) and probability of the right token after this step, one row a capability."""
        done = self.table.query("step == @step") if len(self.table) else self.table
        if len(done) == len(self.prompts):
            return done
        model, tokenizer = self._model(step)
        rows = []
        with numerics(self.device, False), torch.no_grad():
            for capability, examples in self.prompts.items():
                hits, chances = [], []
                for tokens, targets in groups(tokenizer, examples):
                    logits = model(input_ids=tokens.to(self.device), use_cache=False).logits[:, -1].cpu()
                    hits.append(logits.argmax(-1) == targets)
                    chances.append(probe.probability(logits, targets))
                measured = {"accuracy": torch.cat(hits).float().mean().item(), "probability": torch.cat(chances).mean().item()}
                rows.append(self._label() | {"step": step, "capability": capability} | measured)
        rows = pd.DataFrame(rows)
        self.table = pd.concat([self.table, rows], ignore_index=True).sort_values(["step", "capability"], ignore_index=True)
        self._keep(self.table, self._path())
        self.say(f"{self.checkpoints.name} step {step}: " + ", ".join(f"{r.capability} {r.accuracy:.2f}" for r in rows.itertuples()))
        return rows

    def has(self, capability: str) -> Callable[[int], bool]:
        """Whether the capability is there after a step."""
        return lambda step: self.measure(step).set_index("capability")["accuracy"][capability] >= SHARE

    def emergence(self, stride: int = 0) -> dict[str, Found]:
        """Each capability's checkpoint by binary search; with a stride, checked by a scan of every stride-th checkpoint."""
        steps, found = self.checkpoints.steps(), {}
        for capability in self.prompts:
            found[capability] = searched = binary_search(steps, self.has(capability))
            there = f"step {searched.step}" if searched.step is not None else f"not by step {steps[-1]}"
            note = f"; {verdict(searched, scan(steps[::stride], self.has(capability)))}" if stride else ""
            self.say(f"{self.checkpoints.name} {capability}: {there}{note}")
        return found

    def effects(self, capability: str, before: int, after: int) -> pd.DataFrame:
        """The heads' effects between two checkpoints (`lib.language.heads.effects`), kept; averages over all prompts."""
        path, keys = self._path(".heads"), {"capability": capability, "before_step": before, "after_step": after}
        kept = _read(path)
        if len(kept) and len(done := kept.loc[(kept[list(keys)] == pd.Series(keys)).all(axis=1)]):
            return done
        old, tokenizer = self._model(before, keep=(after,))
        self._loaded = None
        new, _ = self._model(after, keep=(before,))
        parts = []
        with numerics(self.device, False):
            for tokens, targets in groups(tokenizer, self.prompts[capability]):
                tokens, targets = tokens.to(self.device), targets.to(self.device)
                pair = (neox.bind(model, tokens) for model in (old, new))
                part = heads.effects(*pair, right(targets))
                patterns = probe.record(neox.bind(new, tokens))[1]
                parts.append(part.merge(heads.roles(patterns, tokens[None])).assign(weight=len(tokens)))
        table = pd.concat(parts)
        measures = [name for name in table if name not in ("layer", "head", "weight")]
        table[measures] = table[measures].mul(table["weight"], axis=0)
        table = table.groupby(["layer", "head"], as_index=False)[[*measures, "weight"]].sum()
        table[measures] = table[measures].div(table.pop("weight"), axis=0)
        rows = table.assign(**self._label(), **keys)
        self._keep(pd.concat([kept, rows], ignore_index=True), path)
        return rows


def _read(path: Path) -> pd.DataFrame:
    """A kept table, without what was measured with other prompts."""
    if not path.exists():
        return pd.DataFrame()
    try:
        return pd.read_csv(path).query(f"prompts == {prompts.VERSION}").reset_index(drop=True)
    except (ValueError, pd.errors.UndefinedVariableError) as error:
        raise InputError(f"{path}: not a table of this program ({' '.join(str(error).split())}); move it away") from None


def results(suffix: str = "") -> pd.DataFrame:
    """All that was measured here or is shipped with the book: of capabilities, or with suffix ".heads" of heads. May be empty."""
    tables: dict[str, pd.DataFrame] = {}
    for folder in (results_folder() / "pythia", Store().folder / "pythia"):
        for path in sorted(folder.glob(f"pythia-*{suffix}.csv")):
            if path.name.endswith(".heads.csv") == bool(suffix):
                tables[path.name] = _read(path)
    return pd.concat(tables.values(), ignore_index=True) if tables else pd.DataFrame()


def emergence(table: pd.DataFrame) -> pd.DataFrame:
    """One row a model and capability of `results()`: size, seed, capability, emergence (step, NaN), emerged, observed_until."""
    rows = []
    for (size, seed, capability), steps in table.sort_values("step").groupby(["size", "seed", "capability"], sort=False):
        first = steps.loc[steps["accuracy"] >= SHARE, "step"].min()
        rows.append({"size": size, "seed": seed, "capability": capability, "emergence": first, "emerged": pd.notna(first),
                     "observed_until": float(first if pd.notna(first) else steps["step"].max())})
    return pd.DataFrame(rows)


def run(size: str, seed: int = 0, *, folder=None, cache=None, gigabytes: float = 5.0, stride: int = 0, device: str = "cpu") -> None:
    """All of it for one model: emergence of each capability, then the heads around it."""
    if stride < 0:
        raise InputError(f"stride: must be 0 (no scan) or more, not {stride}")
    study = Study(Checkpoints(size, seed, folder=folder, cache=cache, gigabytes=gigabytes), device=resolve_device(device),
                  say=lambda line: print(line, file=sys.stdout, flush=True))
    for capability, found in study.emergence(stride).items():
        if found.step is not None and found.before is not None:
            table = study.effects(capability, found.before, found.step)
            top = ", ".join(f"{r.layer}.{r.head} {r.gain:+.2f}" for r in table.nlargest(3, "gain").itertuples())
            study.say(f"{study.checkpoints.name} {capability}: from {table['before'].iloc[0]:.2f} to {table['after'].iloc[0]:.2f}; "
                      f"most gained by the patterns of heads {top}")
    study.say(f"kept in {study.folder}")
