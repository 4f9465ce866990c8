"""flowrl/run/packages.py: packages that only some runs need."""

from flowrl.run.packages import installed


def test_a_package_is_there_if_it_can_be_imported_and_not_if_only_a_folder_has_its_name(tmp_path, monkeypatch):
    """wandb leaves ./wandb behind, and the working directory is searched for modules."""
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("torch") and not installed("only_a_folder") and not installed("no_such_package")
