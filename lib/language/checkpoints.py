"""The checkpoints of Pythia (Biderman et al. 2023), from the hub or from a folder, within a limit of disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lib.config import InputError

SIZES = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
SEEDED = SIZES[:5]  # were trained with seeds 1 to 9, too
STEPS = (0, *(2**n for n in range(10)), *range(1000, 143_001, 1000))
HUB = "https://huggingface.co"
GIGABYTE = 10**9
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "model.safetensors.index.json")


def needs(extra: str = "language"):
    """The module transformers; InputError with what to install where it is absent."""
    try:
        import transformers
    except ImportError:
        raise InputError(f"pythia: transformers is not installed; pip install -e '.[{extra}]'") from None
    return transformers


class Checkpoints:
    """One model's checkpoints: `EleutherAI/pythia-{size}`, or `-seed{seed}` for a seed from 1 on, at revisions step{n}.

    folder     holds <name>/step<n>/ in the hub's format; nothing is downloaded and nothing deleted
    cache      where downloads go, if there is no folder; at most `gigabytes` (10^9 bytes) are kept, least recently used go first
    endpoint   the hub
    """

    def __init__(self, size: str, seed: int = 0, *, folder: Path | str | None = None, cache: Path | str | None = None,
                 gigabytes: float = 5.0, endpoint: str = HUB):
        if size not in SIZES:
            raise InputError(f"size: Pythia has no {size!r}; choose one of {', '.join(SIZES)}")
        if seed < 0 or seed > (9 if size in SEEDED else 0):
            there = "0 to 9" if size in SEEDED else f"0 alone; {', '.join(SEEDED)} have more"
            raise InputError(f"seed: pythia-{size} was trained with no seed {seed}; there are {there}")
        if not gigabytes > 0:
            raise InputError(f"gigabytes: must be above 0, not {gigabytes:g}")
        self.size, self.seed, self.endpoint, self.limit = size, seed, endpoint.rstrip("/"), int(gigabytes * GIGABYTE)
        self.name = f"pythia-{size}" + (f"-seed{seed}" if seed else "")
        self.repository = f"EleutherAI/{self.name}"
        self.folder = Path(folder) if folder else None
        self.cache = Path(cache) if cache else Path.home() / ".cache" / "sparse-attention-book" / "pythia"

    def steps(self) -> list[int]:
        """The steps with a checkpoint: those in the folder, or all that the hub has."""
        if self.folder is None:
            return list(STEPS)
        found = [re.fullmatch(r"step(\d+)", path.name) for path in (self.folder / self.name).glob("step*")]
        steps = sorted(int(match[1]) for match in found if match and self.local(int(match[1])).joinpath("config.json").exists())
        if not steps:
            raise InputError(f"folder: no checkpoint in {self.folder / self.name}; {self._manual(STEPS[-1])}")
        return steps

    def local(self, step: int) -> Path:
        """Where this step lies, or would lie."""
        return (self.folder or self.cache) / self.name / f"step{step}"

    def path(self, step: int, keep: tuple[int, ...] = ()) -> Path:
        """A folder with the checkpoint after `step`, downloaded if need be; the steps in `keep` are not deleted for it."""
        place = self.local(step)
        if place.joinpath("config.json").exists():
            if self.folder is None:
                os.utime(place)  # most recently used
            return place
        if self.folder is not None:
            raise InputError(f"folder: {place} holds no checkpoint; {self._manual(step)}")
        if step not in STEPS:
            raise InputError(f"step: {self.repository} has no revision step{step}; there are 0, 1, 2, 4 to 512, and each thousand to 143000")
        self._download(step, place, keep)
        return place

    def _manual(self, step: int) -> str:
        """What to download by hand, and where to put it."""
        files = "config.json, tokenizer.json and model.safetensors"
        return f"put {files} of {self.endpoint}/{self.repository}/tree/step{step} into FOLDER/{self.name}/step{step} and give --folder FOLDER"

    def _ask(self, step: int, action: Callable):
        """Do something with the hub; whatever goes wrong is one line that says what to do."""
        from huggingface_hub import errors

        try:
            return action()
        except errors.RevisionNotFoundError:
            raise InputError(f"step: {self.repository} has no revision step{step} on {self.endpoint}; choose another step") from None
        except (errors.RepositoryNotFoundError, errors.EntryNotFoundError):
            raise InputError(f"{self.repository} at step{step} is not, or not whole, on {self.endpoint}; {self._manual(step)}") from None
        except (errors.HTTPError, OSError) as error:
            raise InputError(f"{self.endpoint} cannot be reached ({_short(error)}); {self._manual(step)}") from None

    def _download(self, step: int, place: Path, keep: tuple[int, ...]) -> None:
        needs()
        os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")  # the hub's own cache would be beside ours, and is not counted
        from huggingface_hub import HfApi, hf_hub_download

        revision, api = f"step{step}", HfApi(endpoint=self.endpoint)
        info = self._ask(step, lambda: api.model_info(self.repository, revision=revision, files_metadata=True))
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        weights = [n for n in sizes if re.fullmatch(r"model(-.*)?\.safetensors", n)] or [n for n in sizes if n == "pytorch_model.bin"]
        if not weights:
            raise InputError(f"{self.repository} at {revision} has no weights on {self.endpoint}; choose another step")
        wanted = [name for name in sizes if name in TEXTS] + weights
        part = place.with_name(f"{place.name}.part")
        shutil.rmtree(place, ignore_errors=True)  # what has no config.json was never whole
        self._make_room(sum(sizes[name] for name in wanted), {part, *(self.local(other) for other in keep)})
        for name in wanted:
            self._ask(step, lambda name=name: hf_hub_download(
                self.repository, name, revision=info.sha or revision, local_dir=part, endpoint=self.endpoint))
        shutil.rmtree(part / ".cache", ignore_errors=True)
        os.replace(part, place)

    def _make_room(self, needed: int, keep: set[Path]) -> None:
        """Delete the least recently used checkpoints of the cache until `needed` more bytes fit."""
        there = {path: _bytes(path) for path in self.cache.glob("pythia-*/step*") if path.is_dir() and path not in keep}
        held = sum(_bytes(path) for path in keep if path.is_dir() and not path.name.endswith(".part"))
        if held + needed > self.limit:
            least = (held + needed) / GIGABYTE
            raise InputError(f"gigabytes: {self.name} needs {least:.2g} at once and {self.limit / GIGABYTE:g} are allowed; raise the limit")
        for path in sorted(there, key=lambda path: path.stat().st_mtime):
            if held + needed + sum(there.values()) <= self.limit:
                break
            shutil.rmtree(path)
            del there[path]


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 100 else f"{text[:97]}..."
