"""The log and the line of progress."""

import io
import json
import math

import pytest
import torch

from flowrl.run import metrics
from flowrl.run.metrics import Metrics, Progress, duration, read_lines


def test_every_line_is_whole_json_as_soon_as_it_is_written(tmp_path):
    log = Metrics(tmp_path / "metrics.jsonl")
    for iteration in range(3):
        log.write({"iteration": iteration, "reward/x": torch.tensor(0.5), "flag": True})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["iteration"] for line in lines] == list(range(iteration + 1))
    assert log.lines[0] == {"iteration": 0, "reward/x": 0.5, "flag": True} == json.loads(lines[0])


def test_small_numbers_keep_their_digits(tmp_path):
    """C24: a deviation of 1.2345678e-7 is not rounded to nothing."""
    log = Metrics(tmp_path / "metrics.jsonl")
    log.write({"ratio/deviation": 1.23456789012e-7})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["ratio/deviation"] == 1.2345679e-7


def test_a_number_that_is_not_finite_stays_json(tmp_path):
    log = Metrics(tmp_path / "metrics.jsonl")
    log.write({"a": math.nan, "b": torch.tensor(math.inf)})
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == {"a": "nan", "b": "inf"}


def test_without_a_file_the_lines_are_kept_all_the_same():
    log = Metrics(None)
    log.write({"iteration": 0})
    assert log.lines == [{"iteration": 0}]


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(metrics.time, "monotonic", lambda: self.now)


def test_progress_says_rate_time_left_and_facts(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress(10, shown=True, every=10.0)
    clock.now += 12
    progress.update(4, {"reward/x": 0.123456})
    assert capsys.readouterr().out == "update 4/10  3.00 s each  0 min 18 s left  reward/x 0.1235\n"


def test_a_file_gets_a_line_every_ten_seconds_and_the_last(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress(6, shown=True, every=10.0)
    for done in range(1, 7):
        clock.now += 4
        progress.update(done, {})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3/6", "6/6"]


def test_other_processes_say_nothing(capsys):
    progress = Progress(1, shown=False)
    progress.say("text")
    progress.update(1, {})
    assert capsys.readouterr().out == ""


def test_a_terminal_without_unicode_gets_escapes(monkeypatch):
    """C76: an emoji in a prompt or in the name of a reward never stops a run."""
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding="ascii", write_through=True))
    progress = Progress(1, shown=True)
    progress.say("a \U0001f98a")
    progress.update(1, {"reward/\U0001f98a": 1.0})
    assert buffer.getvalue().splitlines()[0] == b"a \\U0001f98a" and buffer.getvalue().count(b"\\U0001f98a") == 2


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 min 00 s"), (59.6, "1 min 00 s"), (7261.0, "2 h 01 min")])
def test_a_duration_is_read_by_people(seconds, text):
    assert duration(seconds) == text


def test_the_time_before_the_first_update_is_not_the_updates(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress(2, shown=True)
    clock.now += 500
    progress.begin()
    clock.now += 12
    progress.update(1, {"reward/invalid": 1})
    assert capsys.readouterr().out == "update 1/2  12.00 s each  0 min 12 s left  reward/invalid 1\n"


def test_a_log_goes_on_after_the_lines_that_are_given_and_nothing_else(tmp_path):
    file = tmp_path / "metrics.jsonl"
    log = Metrics(file)
    for iteration in range(4):
        log.write({"iteration": iteration, "x": iteration / 3})
    lines = read_lines(file, 2)
    again = Metrics(file, lines)
    again.write({"iteration": 3, "x": 7.0})
    again.sync()
    assert [json.loads(line) for line in file.read_text().splitlines()] == again.lines
    assert again.lines == [*log.lines[:3], {"iteration": 3, "x": 7.0}]
    Metrics(file, [])
    assert file.read_text() == ""


def test_a_torn_last_line_is_left_out_and_a_missing_one_is_not_made_up(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 0}\n{"iteration": 1}\n{"iteration": 2, "rew')
    assert read_lines(file, 1) == [{"iteration": 0}, {"iteration": 1}] and read_lines(file, -1) == []
    with pytest.raises(ValueError, match="does not hold the lines of updates 0 to 2"):
        read_lines(file, 2)
    with pytest.raises(ValueError, match="updates 0 to 0"):
        read_lines(tmp_path / "nowhere", 0)


def test_updates_of_an_earlier_start_take_no_time(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    progress = Progress(10, shown=True, every=10.0)
    progress.begin(6)
    clock.now += 12
    progress.update(8, {})
    assert capsys.readouterr().out == "update 8/10  6.00 s each  0 min 12 s left  \n"
