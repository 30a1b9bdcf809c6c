"""The PDF: printed pages in one file, in order, with an outline; and what is said where it cannot be made."""

import shutil

import pytest
from pypdf import PdfReader

from lib import chapters, pdf
from lib.__main__ import main
from lib.config import InputError


@pytest.fixture
def two(tmp_path):
    for name in ("One", "Two"):
        (tmp_path / f"{name}.html").write_text(f"<html><head><title>{name} — the book</title></head><body><h1>Page {name}</h1></body></html>", encoding="utf-8")
    return [tmp_path / "One.html", tmp_path / "Two.html"]


@pytest.mark.skipif(not any(map(shutil.which, pdf.BROWSERS)), reason="needs Chromium; on Debian: apt install chromium")
def test_pages_are_printed_into_one_file_with_an_outline(two, tmp_path):
    assert pdf.write(two, tmp_path / "book.pdf") == 2
    reader = PdfReader(tmp_path / "book.pdf")
    assert ["Page One" in reader.pages[0].extract_text(), "Page Two" in reader.pages[1].extract_text()] == [True, True]
    assert [item.title for item in reader.outline] == ["One", "Two"]


def test_without_a_browser_or_a_site_it_says_so(two, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BOOK_BUILD", str(tmp_path / "nothing"))
    assert main(["pdf"]) == 2 and "make book" in capsys.readouterr().err
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="apt install chromium"):
        pdf.write(two, tmp_path / "book.pdf")
    assert not (tmp_path / "book.pdf").exists()


def test_the_pages_come_in_the_order_of_the_contents(book):
    found = pdf.pages(book / "html")
    assert [path.stem for path in found[:2]] == ["intro", "theory"] and len(found) >= len(chapters.names())
