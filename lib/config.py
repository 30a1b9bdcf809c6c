"""Frozen, strict configuration: what a run is made of, checked before anything starts."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Seeds = Annotated[int, Field(ge=1, le=1_000)]  # a chapter's number of runs that differ in their seed alone


class InputError(ValueError):
    """Bad input, said in one line that names the thing and the fix."""


def short(value) -> str:
    """A value as Python writes it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(error: ValidationError) -> str:
    """The first problem of a pydantic error as `field: what is wrong (got value)`."""
    problem = error.errors()[0]
    where = ".".join(part if str(part).isidentifier() and len(part) <= 80 else short(part) for part in problem["loc"]) or error.title
    if problem["type"] == "value_error":  # raised by our own validators: the message already names the field and the fix
        return str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        return f"{where}: no such parameter of {error.title}; remove it or correct its name"
    return f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]} (got {short(problem['input'])})"


class Config(BaseModel):
    """A frozen configuration; unknown names, wrong types and values out of range raise `InputError`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(one_line(error)) from None
