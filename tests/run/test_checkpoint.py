"""Checkpoints: whole or not there, everything by name, written while training goes on."""

import errno
import json
import shutil
import threading
import time

import pytest
import torch

from flowrl import decays
from flowrl.part import part
from flowrl.recipe import Snapshot, frozen
from flowrl.run import checkpoint
from flowrl.run.checkpoint import Writer, capture, newest, numbered, read, restore, write

FACTS = {"learner": {"updates": 2, "skipped": 1, "in_a_row": 0}}


def trained(toy, loop, recipe_function, updates=2):
    """A toy policy after some updates, with an average, a full reference, and its learner."""
    policy = toy()
    policy.snapshot("ema", Snapshot(part(decays.constant, share=0.5)), 0)
    policy.snapshot("ref", frozen(), 0)
    learner = loop.learner(policy)
    for iteration in range(updates):
        for parameter in learner.parameters:
            parameter.grad = torch.full_like(parameter, 0.1 * (iteration + 1))
        learner.step()
        policy.snapshot("ema", Snapshot(part(decays.constant, share=0.5)), iteration + 1)
    return policy, learner


@pytest.fixture
def pair(toy, loop):
    return trained(toy, loop, None)


def taken(pair, memory=None, keep=True):
    return capture(*pair, memory or {}, keep)


def store(folder, groups, update, **facts):
    write(folder, groups, {"update": update, **FACTS, **facts}, {"recipe.txt": f"page {update}\n"})


def same(one, other):
    """Two captures, bit by bit."""
    return one.keys() == other.keys() and all(
        one[g].keys() == other[g].keys()
        and all(torch.equal(torch.as_tensor(x), torch.as_tensor(other[g][n])) for n, x in one[g].items())
        for g in one
    )


def test_what_is_read_is_what_was_written_by_the_name_of_each_parameter(pair, tmp_path):
    """Weights, both moments and the step of every parameter, snapshots, and a memory of tensors and numbers."""
    groups = taken(pair, {"pass_rate": torch.tensor([0.25, 1.0]), "seen": 3})
    store(tmp_path, groups, 2)
    found, skipped = newest(tmp_path)
    back = read(found.path)
    assert same(groups, back) and not skipped and found.facts["update"] == 2
    names = [name for name, _ in pair[0].trainable()]
    assert list(back["weights"]) == sorted(names)
    assert set(back["optimizer"]) == {f"{q}/{n}" for q in ("exp_avg", "exp_avg_sq", "step") for n in names}
    assert set(back["snapshots"]) == {f"{s}/{n}" for s in ("ema", "ref") for n in names}
    assert back["memory"]["seen"] == 3 and type(back["memory"]["seen"]) is int
    assert float(back["optimizer"][f"step/{names[0]}"]) == 2
    assert all(back["weights"][name].dtype == torch.float32 for name in names)
    assert not any(path.suffix in (".pkl", ".pt", ".bin") for path in found.path.iterdir())


def test_a_restored_run_goes_on_as_if_nothing_had_happened(pair, toy, loop, tmp_path):
    """C62, C63: the Parameters stay the same objects; the next step and the next average are equal bit by bit."""
    store(tmp_path, taken(pair), 2)
    policy, learner = trained(toy, loop, None, updates=0)
    parameters = list(learner.parameters)
    restore(read(tmp_path / "000002"), FACTS, policy, learner)
    assert all(a is b for a, (_, b) in zip(parameters, policy.trainable(), strict=True))
    assert learner.counters() == {"updates": 2, "skipped": 1, "in_a_row": 0}
    assert same(taken(pair), taken((policy, learner)))
    for one, other in (pair, (policy, learner)):
        for parameter in other.parameters:
            parameter.grad = torch.full_like(parameter, -0.3)
        other.step()
        one.snapshot("ema", Snapshot(part(decays.constant, share=0.5)), 3)
    assert same(taken(pair), taken((policy, learner)))


def test_an_adapters_reference_is_not_a_tensor_and_is_not_stored(pair):
    policy, learner = pair
    policy.snapshots._kept["ref"] = None  # as with adapters, which are switched off for it
    assert {name.partition("/")[0] for name in taken((policy, learner))["snapshots"]} == {"ema"}


def test_a_copy_is_not_what_training_goes_on_with(pair):
    groups = taken(pair)
    before = {name: x.clone() for name, x in groups["weights"].items()}
    with torch.no_grad():
        for _, parameter in pair[0].trainable():
            parameter.add_(1.0)
    assert all(torch.equal(x, before[name]) for name, x in groups["weights"].items())


def test_only_the_main_process_keeps_the_copy(pair):
    """The others take part, where shards are put together (tests/run/test_sharding.py)."""
    kept, others = capture(*pair, {}, keep=True), capture(*pair, {}, keep=False)
    assert all(kept[group] for group in ("weights", "optimizer", "snapshots")) and not any(others.values())


@pytest.mark.parametrize("change", ["missing", "more", "shape"])
def test_weights_of_another_model_are_refused_by_name(pair, toy, loop, tmp_path, change):
    groups = taken(pair)
    name = next(iter(groups["weights"]))
    if change == "shape":
        groups["weights"][name] = groups["weights"][name][:1]
    elif change == "more":
        groups["weights"]["another"] = torch.ones(1)
    else:
        del groups["weights"][name]
    before = taken(pair)
    with pytest.raises(ValueError, match="'another'" if change == "more" else f"'{name}'"):
        restore(groups, FACTS, *pair)
    assert same(before, taken(pair))


# The newest whole one.


DAMAGE = {
    "no marker": (lambda path: (path / "state.json").unlink(), "it has no state.json, its writing was interrupted"),
    "half a marker": (lambda path: (path / "state.json").write_text('{"update": 3'), "its state.json is not whole"),
    "empty marker": (lambda path: (path / "state.json").write_text(""), "its state.json is not whole"),
    "zero bytes": (lambda path: (path / "weights.safetensors").write_bytes(b""), "weights.safetensors has 0 bytes"),
    "no optimizer": (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "one bit": (lambda path: flip(path / "snapshots.safetensors"), "snapshots.safetensors is damaged, its checksum"),
    "page": (lambda path: (path / "recipe.txt").write_text("page 4\n"), "recipe.txt is damaged, its checksum"),
}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("fault", DAMAGE)
def test_the_newest_whole_one_is_found_and_what_is_skipped_is_told(pair, tmp_path, fault):
    """C68: by content, not by number."""
    for update in (1, 2, 3):
        store(tmp_path, taken(pair), update)
    spoil, said = DAMAGE[fault]
    spoil(tmp_path / "000003")
    found, skipped = newest(tmp_path)
    assert found.path.name == "000002" and len(skipped) == 1
    assert skipped[0].startswith(f"{tmp_path.name}/000003 is skipped: {said}"), skipped


def test_nothing_whole_is_nothing_found(pair, tmp_path):
    assert newest(tmp_path / "nowhere") == (None, [])
    store(tmp_path, taken(pair), 1)
    DAMAGE["no marker"][0](tmp_path / "000001")
    found, skipped = newest(tmp_path)
    assert found is None and len(skipped) == 1
    with pytest.raises(ValueError, match=r"no whole checkpoint of update 1: it has no state.json.*here: none"):
        numbered(tmp_path, 1)


def test_numbers_are_compared_as_numbers(pair, tmp_path):
    for update in (999_999, 1_000_000):
        store(tmp_path, taken(pair), update)
    assert newest(tmp_path)[0].path.name == "1000000"


class Killed(BaseException):
    """A process that dies at this point runs nothing more."""


@pytest.mark.parametrize("replaced", [False, True])
def test_dying_at_any_point_of_a_write_leaves_a_whole_checkpoint(pair, tmp_path, monkeypatch, replaced):
    """C68: every file, every wait for the disk and every rename is once the last thing that happens."""
    points, real = [], {"sync": checkpoint.sync, "save_file": checkpoint.save_file, "rename": type(tmp_path).rename}
    allowed = 0

    def dying(name):
        def call(*arguments):
            points.append(name)
            if len(points) > allowed:
                raise Killed
            return real[name](*arguments)

        return call

    older, newer = taken(pair), taken(pair, {"seen": 1})
    for allowed in range(30):
        folder = tmp_path / str(allowed)
        store(folder, older, 1)
        points.clear()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "sync", dying("sync"))
            patch.setattr(checkpoint, "save_file", dying("save_file"))
            patch.setattr(type(tmp_path), "rename", dying("rename"))
            try:
                store(folder, newer, 1 if replaced else 2)
                break
            except Killed:
                pass
        found, _ = newest(folder)
        assert same(read(found.path), newer if found.facts["update"] == 2 else older) or replaced
        assert same(read(found.path), older) or same(read(found.path), newer)
    assert set(points) == set(real) and 12 <= len(points) <= allowed
    assert same(read(newest(folder)[0].path), newer)


# The writer.


def written(folder):
    return sorted(path.name for path in folder.iterdir())


def save(writer, pair, update, best=None):
    writer.save(taken(pair), {"update": update, **FACTS}, {"recipe.txt": ""}, best)


def test_the_last_ones_and_the_best_stay(pair, tmp_path):
    writer = Writer(tmp_path, 2, 0)
    for update, best in ((0, 0), (10, 10), (20, 10), (30, 10), (40, 10), (50, 50)):
        save(writer, pair, update, best)
    writer.wait()
    assert written(tmp_path) == ["000040", "000050"]
    save(writer, pair, 60, 10)
    writer.wait()
    assert written(tmp_path) == ["000050", "000060"]


def test_the_best_stays_while_others_go(pair, tmp_path):
    writer = Writer(tmp_path, 1, 0)
    for update in (0, 10, 20, 30):
        save(writer, pair, update, best=10 if update else 0)
    writer.wait()
    assert written(tmp_path) == ["000010", "000030"]


def test_a_resumed_writer_counts_what_is_whole_and_removes_what_is_not_of_the_run_any_more(pair, tmp_path):
    for update in (10, 20, 30, 40):
        store(tmp_path, taken(pair), update)
    DAMAGE["no optimizer"][0](tmp_path / "000030")
    shutil.copytree(tmp_path / "000010", tmp_path / ".000050.new")
    writer = Writer(tmp_path, 3, 30)  # damaged: the run goes on from 20, say, whatever lies there
    save(writer, pair, 31)
    writer.wait()
    assert written(tmp_path) == ["000010", "000020", "000031"]


def test_training_waits_for_the_copy_alone(pair, tmp_path, monkeypatch):
    """The write is slow; `save` is not."""
    gate, real = threading.Event(), checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *given: (gate.wait(10), real(*given)))
    writer = Writer(tmp_path, 2, 0)
    started = time.perf_counter()
    save(writer, pair, 1)
    assert time.perf_counter() - started < 1 and newest(tmp_path)[0] is None
    gate.set()
    writer.wait()
    assert newest(tmp_path)[0].facts["update"] == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def test_a_full_disk_is_told_once_and_leaves_the_previous_checkpoint(pair, tmp_path, monkeypatch):
    """C68: ENOSPC in the middle; the half that was written is removed, later ones work again."""
    writer = Writer(tmp_path, 1, 0)
    save(writer, pair, 1)
    writer.wait()
    before = {path.name: path.read_bytes() for path in (tmp_path / "000001").iterdir()}
    real = checkpoint.save_file

    def full(values, path):
        if path.name.startswith("snapshots"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(values, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    save(writer, pair, 2)
    said = r"^the checkpoint of update 2 could not be written \(.*No space left on device\); 000001 is whole\.$"
    with pytest.raises(RuntimeError, match=said):
        save(writer, pair, 3)
    assert written(tmp_path) == ["000001"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "000001").iterdir()} == before
    monkeypatch.setattr(checkpoint, "save_file", real)
    save(writer, pair, 3)
    writer.wait()
    assert written(tmp_path) == ["000003"]


def test_state_json_says_what_the_other_files_are(pair, tmp_path):
    store(tmp_path, taken(pair), 2, sigmas=[1.0, 0.5, 0.0])
    state = json.loads((tmp_path / "000002" / "state.json").read_text())
    assert state["sigmas"] == [1.0, 0.5, 0.0] and state["format"] == 1
    files = {p.name: p.stat().st_size for p in (tmp_path / "000002").iterdir() if p.name != "state.json"}
    assert {name: size for name, (size, _) in state["files"].items()} == files
    assert all(len(digest) == 64 for _, digest in state["files"].values())
