"""What a run was made from, in digests."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowrl.run import fingerprint
from flowrl.run.config import from_dict
from flowrl.run.fingerprint import MIB, difference, of_ends, of_file, of_model, of_pipeline, take


@pytest.fixture
def model(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    return tmp_path / "model"


def test_the_digest_of_a_file_is_its_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert of_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("size", [10, MIB, 2 * MIB, 5 * MIB])
@pytest.mark.parametrize("place", ["first", "last", "longer"])
def test_a_weight_file_is_known_by_its_size_and_both_ends(tmp_path, size, place):
    path = tmp_path / "weights.safetensors"
    content = bytearray(os.urandom(size))
    path.write_bytes(content)
    before = of_ends(path)
    if place == "longer":
        content[size // 2 : size // 2] = b"0"
    else:
        content[0 if place == "first" else -1] ^= 1
    path.write_bytes(content)
    assert of_ends(path) != before and before.startswith(f"{size} bytes, ")


def test_every_file_of_a_component_counts_and_what_lies_beside_does_not(model):
    """The embedded base has its prompts and its model card beside the components."""
    before = of_model(model)
    assert {"model_index.json", "scheduler/scheduler_config.json", "transformer/config.json"} <= before.keys()
    assert not {"README.md", "train.jsonl", "test.jsonl"} & before.keys()
    (model / "README.md").write_text("another")
    (model / "transformer" / ".cache").mkdir()
    (model / "transformer" / ".cache" / "lock").write_text("")
    assert of_model(model) == before
    for name in before:
        path = model / name
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        changed = of_model(model)
        assert [n for n in before if changed[n] != before[n]] == [name]
        path.write_bytes(content)


def test_a_large_weight_file_is_not_read_as_a_whole(tmp_path, monkeypatch):
    """A sparse file of 40 GB takes no time."""
    (tmp_path / "transformer").mkdir()
    with (tmp_path / "transformer" / "x.safetensors").open("wb") as stream:
        stream.truncate(40 * 2**30)
    monkeypatch.setattr(fingerprint, "of_file", lambda path: pytest.fail("read as a whole"))
    assert of_model(tmp_path)["transformer/x.safetensors"].startswith(f"{40 * 2**30} bytes, ")


def test_the_first_difference_is_told_with_setting_file_and_both_digests():
    one = {"data.train": {"content": "a" * 64}, "model.path": {"x/y.json": "b" * 64, "x/w.safetensors": "10 bytes, cc"}}
    assert difference(one, one) is None
    assert difference(one, one | {"data.train": {"content": "d" * 64}}) == (
        f"data.train has changed since the checkpoint: sha256 {'a' * 12} is now {'d' * 12}"
    )
    gone = one | {"model.path": {"x/y.json": "b" * 64}}
    assert difference(one, gone).endswith("(x/w.safetensors): sha256 10 bytes, cc is now absent")
    assert difference(gone, one).endswith("(x/w.safetensors): sha256 absent is now 10 bytes, cc")
    assert difference(one, one | {"data.test": {"content": "e" * 64}}).startswith("data.test has changed")


def test_prompts_of_a_list_have_the_digest_of_the_file_that_the_run_writes(given, tmp_path):
    texts = ["a red circle\nand a blue one", "", "\U0001f98a"]
    given["data"] = {"train": str(tmp_path / "prompts.jsonl")}
    (tmp_path / "prompts.jsonl").write_text(fingerprint.prompts.dump(texts), encoding="utf-8")
    assert take(from_dict(given), texts)["data.train"] == take(from_dict(given))["data.train"]
    assert "data.test" not in take(from_dict(given))


class Part(nn.Module):
    """A component of a pipeline: a matrix, a bias, and a configuration as diffusers keeps it."""

    def __init__(self, seed, **config):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(8, 12, generator=draw).bfloat16().float())
        self.bias = nn.Parameter(torch.randn(3, generator=draw).bfloat16().float())
        self.config = {"layers": 2, "_name_or_path": f"/somewhere/{seed}", **config}


class StableDiffusion3Pipeline(SimpleNamespace):
    """Known by the name of its class."""


def made(**config):
    parts = {"transformer": Part(0, **config), "vae": Part(1), "scheduler": object(), "text_encoder_3": None}
    return StableDiffusion3Pipeline(components=parts, transformer=parts["transformer"])


def test_a_pipeline_in_memory_is_known_by_its_configuration_and_its_frozen_weights(given):
    one = made()
    before = take(from_dict(given), pipe=one)["model.path"]
    assert list(before) == ["transformer, configuration", "transformer, weights", "vae, weights"]
    assert before["transformer, weights"] != before["vae, weights"]
    one.transformer.config["_name_or_path"] = "/elsewhere"
    for part in ("transformer", "vae"):
        one.components[part].double()
    assert of_pipeline(one, "lora") == before, "neither its place nor a wider dtype makes another base"
    assert of_pipeline(made(layers=3), "lora") | {"transformer, configuration": ""} == before | {
        "transformer, configuration": ""
    }
    assert of_pipeline(made(layers=3), "lora") != before


@pytest.mark.parametrize("part", ["transformer", "vae"])
@pytest.mark.parametrize("name, place", [("matrix", (0, 0)), ("matrix", (5, 0)), ("bias", 2)])
def test_another_weight_is_another_base(part, name, place):
    """16 of 96 numbers are looked at, every sixth; of three all."""
    one, before = made(), of_pipeline(made(), "lora")
    with torch.no_grad():
        getattr(one.components[part], name)[place] += 1
    assert [n for n, x in of_pipeline(one, "lora").items() if x != before[n]] == [f"{part}, weights"]


def test_weights_that_are_trained_as_a_whole_are_those_of_the_checkpoint():
    one, before = made(), of_pipeline(made(), "full")
    named = SimpleNamespace(components={"unet": one.components["transformer"], "vae": one.components["vae"]})
    assert list(of_pipeline(named, "full", ("unet",))) == ["unet, configuration", "vae, weights"]
    with torch.no_grad():
        one.transformer.matrix.add_(1)
    assert of_pipeline(one, "full") == before and list(before) == ["transformer, configuration", "vae, weights"]
