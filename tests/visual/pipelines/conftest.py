"""Pipelines for the adapter: the embedded base, and random ones of the same classes with all that it lacks."""

import functools
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from tiny_pipelines import seeded, tiny
from tiny_pipelines.sd3 import pipeline

from flowrl.run.config import resolve
from flowrl.visual.pipelines import opening

FIVE = ["a red circle", "two blue squares", "a green cross", "the number 12 in red", "three yellow triangles"]


@pytest.fixture(scope="session")
def base():
    """Folder of the embedded base."""
    return resolve("assets/shapes").resolve()


@pytest.fixture(scope="session")
def folders(base, tmp_path_factory):
    """Pipeline folders by what is special about them."""
    saved = {"base": base}
    kinds = {"sd3 with T5": {"t5": True}, "sd3.5": {"dual": True, "t5": True}}
    kinds["dynamic"] = {"use_dynamic_shifting": True}
    for name, kind in kinds.items():
        schedule = {} if name == "dynamic" else {"shift": 3.0}
        saved[name] = tmp_path_factory.mktemp("pipelines") / name.replace(" ", "-")
        seeded(lambda kind=kind | schedule: pipeline(**kind))().save_pretrained(saved[name])
    return saved


@pytest.fixture(scope="session")
def opened(folders):
    """A fresh policy over one of `folders` in fp32; all weights, or adapters if a rank is given."""

    def make(kind="base", rank=0, alpha=1.0, **settings):
        settings = {"grid": "linear", "max_sequence_length": 0 if kind == "base" else 4} | settings
        policy = opening.load(
            folders[kind], dtype=torch.float32, device=torch.device("cpu"), rank=rank, alpha=alpha, **settings
        )
        return policy

    return make


@pytest.fixture(scope="session")
def plain(folders):
    """The same folder as diffusers' own documentation loads it."""

    def make(kind="base", folder=None):
        absent = {} if "T5" in kind or "3.5" in kind else {"text_encoder_3": None, "tokenizer_3": None}
        pipe = StableDiffusion3Pipeline.from_pretrained(folder or folders[kind], dtype=torch.float32, **absent)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


@pytest.fixture
def spied():
    """Record every call of a module: its arguments by name."""

    def watch(module):
        calls, forward = [], module.forward

        def recorded(*args, **kwargs):
            calls.append(SimpleNamespace(args=args, **kwargs))
            return forward(*args, **kwargs)

        module.forward = recorded
        return calls

    return watch


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """name -> folder of a tiny pipeline, made once."""

    @functools.cache
    def folder(name):
        path = tmp_path_factory.mktemp("tiny") / name
        tiny()[name].build().save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def policy_of(saved):
    """A fresh policy over a tiny pipeline in fp32: adapters of rank 4 where its class takes them, or all weights."""

    def make(name, train=None, size=None, dtype=torch.float32, **settings):
        rank = 4 if (train or ("lora" if tiny()[name].lora else "full")) == "lora" else 0
        settings = tiny()[name].settings | {"size": size or tiny()[name].sizes[0], "alpha": 8.0} | settings
        return opening.load(saved(name), dtype=dtype, device=torch.device("cpu"), rank=rank, **settings)

    return make


@pytest.fixture(scope="session")
def plain_of(saved):
    """The same pipeline as diffusers' own documentation loads it."""

    def make(name, folder=None):
        pipe = DiffusionPipeline.from_pretrained(folder or saved(name), dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make
