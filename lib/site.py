"""The website: executed chapters and pages, gathered in one folder and rendered by Jupyter Book."""

from __future__ import annotations

import shutil
from pathlib import Path

from lib import chapters
from lib.config import InputError


def stage(executed: Path, source: Path) -> None:
    """Lay out in `source` what Jupyter Book reads: configuration, pages, bibliography and the executed notebooks."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(chapters.book(), source, ignore=shutil.ignore_patterns("*.ipynb", "results", ".*", "__pycache__"))
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy2(chapters.book().parent / name, source)
    for name in chapters.names():
        if not (executed / f"{name}.ipynb").exists():
            raise InputError(f"{name}: not executed yet; run `python -m lib run {name}` or `make book` first")
        shutil.copy2(executed / f"{name}.ipynb", source)


def build(folder: Path | None = None, *, strict: bool = True) -> Path:
    """Render the site from <folder>/chapters into <folder>/html (default: _build); returns its first page.

    Strict: a warning (a broken reference, a missing figure) is a BookError, raised once everything has been rendered.
    """
    from jupyter_book.sphinx import build_sphinx

    folder = folder or chapters.build_folder()
    source, html = folder / "site-src", folder / "html"
    stage(folder / "chapters", source)
    for old in (html, folder / ".doctrees"):  # Sphinx misses changed styles and keeps pages that are gone
        shutil.rmtree(old, ignore_errors=True)
    failed = build_sphinx(
        source,
        html,
        noconfig=True,
        path_config=source / "_config.yml",
        doctreedir=folder / ".doctrees",
        confoverrides={"external_toc_path": "_toc.yml", "latex_individualpages": False},
        quiet=True,
        warningiserror=strict,
        keep_going=True,
    )
    if failed:
        raise chapters.BookError("site: rendering warned or failed, as said above")
    for extra in folder.glob("scorecard.json"):
        shutil.copy2(extra, html)
    return html / "index.html"
