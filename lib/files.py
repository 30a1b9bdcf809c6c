"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

from lib.config import InputError


def why(error: OSError) -> str:
    """What the system says of a file that it refused, in a few words."""
    return error.strerror or str(error)


def write(path: Path, content: bytes) -> None:
    """Write a file, and its folder where there is none: a reader sees the old one or the new one, never a part.

    It is on the disk when this returns. InputError where the disk is full or does not take it; then the old one stays.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({why(error)}); free space, or name another folder in BOOK_STORE, BOOK_RESULTS or BOOK_BUILD") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
