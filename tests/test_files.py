"""Files are written whole or not at all."""

import pytest

from lib.config import InputError
from lib.files import write


def test_a_file_and_its_folder_are_made_and_replaced(tmp_path):
    path = tmp_path / "a" / "b.json"
    for content in (b"first", b"second"):
        write(path, content)
        assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_is_named_and_the_old_one_stays(tmp_path, monkeypatch):
    path = tmp_path / "b.json"
    write(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"b\.json: cannot be written \(No space left on device\); free space"):
        write(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="cannot be written"):
        write(path / "c", b"")  # its folder is a file
