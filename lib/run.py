"""A run: task, model, training and seed; frozen, checked, and named by a hash of all of it."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, ClassVar, Literal, Union

from pydantic import Field, model_validator

from lib.config import Config
from lib.models import MODELS
from lib.tasks import TASKS

Task = Annotated[Union[TASKS], Field(discriminator="kind")]
Model = Annotated[Union[MODELS], Field(discriminator="kind")]
SEEDS = ("init_seed", "data_seed", "eval_seed")


class Training(Config):
    """How the one training loop treats a run.

    optimizer      adam, sgd (no momentum) or adamw; learning_rate is constant after `warmup` linear steps
    batch          fresh sequences a step; steps: the budget, at which an unfinished run is censored
    every, spacing the test loss is read every max(every, spacing * step) steps: a geometric grid
    eval_size      held-out sequences, drawn once a run
    stop_below     the run may end once the test loss is at or below this; None: never early
    tail           go on for this fraction of the steps so far before ending early
    perturb        every initial weight is multiplied by 1 + perturb * z, z normal; 1e-7 is what rounding to float32 does
    """

    version: ClassVar[int] = 1
    optimizer: Literal["adam", "sgd", "adamw"] = "adam"
    learning_rate: float = Field(1e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup: int = Field(0, ge=0, le=1 << 40)
    batch: int = Field(32, ge=1, le=1 << 20)
    steps: int = Field(50_000, ge=1, le=1 << 40)
    every: int = Field(10, ge=1, le=1 << 40)
    spacing: float = Field(0.04, ge=0, le=1)
    eval_size: int = Field(128, ge=1, le=1 << 20)
    stop_below: float | None = 0.1
    tail: float = Field(0.2, ge=0, le=1e6)
    tf32: bool = False
    perturb: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _possible(self):
        if self.weight_decay and self.optimizer != "adamw":
            raise ValueError(f"weight_decay: {self.optimizer} ignores it; set optimizer = 'adamw' or weight_decay = 0")
        return self

    def evaluations(self) -> list[int]:
        """The steps after which the test loss is read: 0, then the geometric grid, then the last."""
        steps = [0]
        while steps[-1] < self.steps:
            steps.append(min(self.steps, steps[-1] + max(self.every, round(self.spacing * steps[-1]))))
        return steps


class Run(Config):
    """One training run. `init_seed`, `data_seed` and `eval_seed` default to `seed`."""

    task: Task
    model: Model
    training: Training = Training()
    seed: int = Field(0, ge=0, lt=1 << 62)
    init_seed: int | None = Field(None, ge=0, lt=1 << 62)
    data_seed: int | None = Field(None, ge=0, lt=1 << 62)
    eval_seed: int | None = Field(None, ge=0, lt=1 << 62)

    @model_validator(mode="after")
    def _possible(self):
        self.model.check(self.task)
        return self

    @property
    def seeds(self) -> dict[str, int]:
        """The three seeds by name."""
        chosen = {"init": self.init_seed, "data": self.data_seed, "eval": self.eval_seed}
        return {name: self.seed if value is None else value for name, value in chosen.items()}

    @property
    def alike(self) -> str:
        """Equal for runs that differ in seeds alone: they may share a batch."""
        return json.dumps([self._part("task"), self._part("model"), self._part("training")], sort_keys=True)

    @property
    def key(self) -> str:
        """Name of the run: hash of what differs from the defaults, and of the versions of task, model and loop."""
        parts = {"seeds": self.seeds} | {name: self._part(name) for name in ("task", "model", "training")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]

    def __hash__(self) -> int:
        return hash(self.key)

    def _part(self, name: str) -> dict:
        """One part's values where they are not the defaults: a new switch does not rename old runs."""
        part = getattr(self, name)
        return part.model_dump(exclude_defaults=True) | {"kind": getattr(part, "kind", name), "version": part.version}

    def row(self) -> dict:
        """The configuration flat, by bare names; the kinds as `task` and `model`, the allowed steps as `budget`.

        The three seeds are in it where they are set apart from `seed`.
        """
        flat = {"run": self.key, "task": self.task.kind, "model": self.model.kind, "seed": self.seed}
        for part in (self.task, self.model, self.training):
            flat |= {name: value for name, value in part.model_dump().items() if name != "kind"}
        flat["budget"] = flat.pop("steps")
        return flat | {name: value for name in SEEDS if (value := getattr(self, name)) is not None}

    @classmethod
    def from_row(cls, row: dict) -> Run:
        """The run of a row as `row()` gives it, further columns ignored; KeyError or ValueError where it does not fit."""
        kinds = {name: {kind.model_fields["kind"].default: kind for kind in choices}[row[name]]
                 for name, choices in (("task", TASKS), ("model", MODELS))}
        row = row | {"steps": row["budget"]}
        parts = {name: {field: row[field] for field in kind.model_fields if field in row} | {"kind": row[name]} for name, kind in kinds.items()}
        training = {field: row[field] for field in Training.model_fields if field in row}
        return cls.model_validate_json(json.dumps(parts | {"training": training} | {name: row.get(name) for name in ("seed", *SEEDS)}))
