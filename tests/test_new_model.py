"""docs/new_model.md: the code on that page, run as it stands."""

import re
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowrl.run.check import check
from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import train

PAGE = (Path(__file__).parents[1] / "docs" / "new_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(# (\w+)\.py\n.*?)```", PAGE, re.DOTALL)
SETTINGS = ["model.adapter=my_adapter:SiT", "model.train=full"]
CLASSES = ["class 0", "class 1"]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The files of the page, importable, and the folder of a model."""
    for code, name in BLOCKS:
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    import my_sit

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scheduler = FlowMatchEulerDiscreteScheduler()
        my_sit.SiTPipeline(my_sit.SiT(), scheduler).save_pretrained(tmp_path / "sit")
    yield tmp_path / "sit"
    for _, name in BLOCKS:
        sys.modules.pop(name, None)


def test_the_adapter_takes_fewer_than_a_hundred_lines():
    assert [name for _, name in BLOCKS] == ["my_sit", "my_adapter"]
    assert sum(code.count("\n") for code, _ in BLOCKS) < 110 and BLOCKS[1][0].count("\n") < 60


def test_the_model_of_the_page_passes_its_check(page):
    found = {each.name: each for each in check(str(page), SETTINGS, 5, CLASSES)}
    assert {name for name, each in found.items() if each.passed} == set(found)
    assert {"parity at guidance 1", "batch invariance", "ratio 1", "direction"} <= set(found)


def test_an_adapter_that_forgets_to_turn_the_sign_fails_it(page):
    file = page.parent / "my_adapter.py"
    file.write_text(file.read_text(encoding="utf-8").replace("return -self.pipe", "return self.pipe"))
    found = {each.name: each for each in check(str(page), SETTINGS, 5, CLASSES)}
    assert not found["parity at guidance 1"].passed


def test_it_is_trained_by_a_run_file(page, tmp_path):
    (tmp_path / "classes.txt").write_text("class 0\nclass 1\nclass 2\n")
    run = {
        "model": {"path": str(page), "adapter": "my_adapter:SiT", "train": "full"},
        "data": {"train": str(tmp_path / "classes.txt")},
        "rewards": {"redness": 1.0},
        "recipe": {"name": "flow_grpo", "rollout.steps": 5, "rollout.roots": 8},
        "budget": {"updates": 2, "prompts_per_update": 2},
        "output": str(tmp_path / "run"),
    }
    result = train(prepare(from_dict(run), functions={"redness": lambda images: images[:, 0].mean((1, 2))}))
    assert result.metrics[-1]["eval/redness"] != result.metrics[0]["eval/redness"]


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("absent:SiT", r"model\.adapter = 'absent:SiT' cannot be imported: ModuleNotFoundError"),
        ("my_adapter:Absent", r"cannot be imported: AttributeError"),
        ("my_sit:SiT", r"expected a subclass of Family whose PIPELINE is 'SiTPipeline'"),
    ],
)
def test_an_adapter_that_is_none_is_one_line(page, adapter, said):
    with pytest.raises(ValueError, match=said):
        next(check(str(page), [f"model.adapter={adapter}", "model.train=full"], 3))
