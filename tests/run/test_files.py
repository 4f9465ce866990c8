"""Folders that are whole at any time, and outputs that are refused before anything is written."""

import pytest

from flowrl.run import files


def writing(text):
    def write(folder):
        folder.mkdir()
        (folder / "weights").write_text(text)

    return write


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for text in ("one", "two"):
        files.replace_folder(tmp_path / "adapter", writing(text))
        assert (tmp_path / "adapter" / "weights").read_text() == text
        assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_write_that_fails_leaves_the_old_folder(tmp_path):
    def half(folder):
        writing("half")(folder)
        raise OSError(28, "No space left on device")

    files.replace_folder(tmp_path / "adapter", writing("one"))
    with pytest.raises(OSError, match="No space left"):
        files.replace_folder(tmp_path / "adapter", half)
    assert (tmp_path / "adapter" / "weights").read_text() == "one"
    files.replace_folder(tmp_path / "adapter", writing("three"))
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_an_output_that_can_be_made_is_accepted_and_not_made(tmp_path):
    files.check_output(tmp_path / "a" / "b" / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("output", "said"), [("dir", "exists"), ("file", "exists"), ("file/run", "is a file")])
def test_an_output_that_cannot_be_made_is_refused(tmp_path, output, said):
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"^output = '.*{output}'.* {said}"):
        files.check_output(tmp_path / output)


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match="cannot be written to"):
        files.check_output(tmp_path / "run")
