"""The built site as one PDF, printed page by page by a headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from lib import chapters
from lib.config import InputError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--no-pdf-header-footer",
         "--virtual-time-budget=20000")  # time, as the page sees it, for its equations to be set


def pages(html: Path) -> list[Path]:
    """The site's pages in the order of the table of contents; InputError if it has not been built."""
    contents = re.findall(r"(?:root|file):\s*(\S+)", (chapters.book().parent / "_toc.yml").read_text(encoding="utf-8"))
    found = [html / f"{name}.html" for name in contents]
    if missing := next((path for path in found if not path.exists()), None):
        raise InputError(f"pdf: there is no {missing}; build the site first, with `make book`")
    return found


def write(pages: list[Path], out: Path) -> int:
    """Print pages into one PDF with an outline entry each; returns its number of sheets."""
    from pypdf import PdfReader, PdfWriter

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError("pdf: it is printed by Chromium, and there is none here; on Debian: apt install chromium")
    writer = PdfWriter()
    with tempfile.TemporaryDirectory() as scratch:
        for number, page in enumerate(pages):
            printed = Path(scratch) / f"{number}.pdf"
            command = [browser, *FLAGS, f"--user-data-dir={scratch}/profile", f"--print-to-pdf={printed}", page.resolve().as_uri()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if not printed.exists():
                raise chapters.BookError(f"pdf: {page.name} could not be printed: {' '.join(done.stderr.split())[-200:]}")
            title = re.search(r"<title>(.*?)(?: &#8212;| —|</title>)", page.read_text(encoding="utf-8"), re.S)
            writer.append(PdfReader(printed), outline_item=title[1].strip() if title else page.stem)
        writer.add_metadata({"/Title": "How sparse attention emerges"})
        with out.open("wb") as file:
            writer.write(file)
    return len(writer.pages)
