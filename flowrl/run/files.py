"""Files of a run directory, written beside and renamed so that what stands there is always whole."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def check_output(path: Path, setting: str = "output") -> None:
    """Refuse a path that exists or cannot be made; `setting` names it in messages.  Nothing is written."""
    if path.exists():
        raise ValueError(f"{setting} = {str(path)!r} exists. Give another, or remove it first.")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir():
        raise ValueError(f"{setting} = {str(path)!r}: {str(parent)!r} is a file, not a directory.")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"{setting} = {str(path)!r}: {str(parent)!r} cannot be written to.")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Put a whole file in the place of `path`."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    sync(new)
    new.replace(path)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder and put it in the place of `folder`; a failure leaves the old one."""
    new, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    write(new)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
