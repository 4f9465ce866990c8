"""`flowrl check`: what it finds on a sound model, and on adapters that are wrong."""

import pytest
import torch

from flowrl.run.check import check
from flowrl.visual.pipelines.sd3 import StableDiffusion3

SETTINGS = ["model.grid=linear", "model.max_sequence_length=0"]


def findings(base, *more):
    return {found.name: found for found in check(str(base), [*SETTINGS, *more], steps=3)}


def test_the_embedded_base_passes_everything(base):
    found = findings(base)
    assert all(each.passed for each in found.values()), found
    assert list(found) == [
        "parity at guidance 1", "parity at guidance 3", "batch invariance", "ratio 1", "direction", "LoRA round trip",
        "memory",
    ]  # fmt: skip


def test_without_adapters_there_is_no_round_trip(base):
    assert "LoRA round trip" not in findings(base, "model.train=full")


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (lambda v: lambda self, x, sigma, *rest: v(self, x, 0.98 * sigma, *rest), {"parity at guidance 1"}),
        (lambda v: lambda self, x, sigma, *rest: v(self, x, sigma[:1].expand_as(sigma), *rest), {"batch invariance"}),
        (lambda v: lambda self, *rest: -v(self, *rest), {"parity at guidance 1", "direction"}),
        (lambda v: lambda self, x, *rest: v(self, x, *rest) + 0.1 * torch.rand_like(x), {"ratio 1"}),
    ],
)
def test_a_wrong_adapter_fails_where_it_is_wrong(base, monkeypatch, broken, failing):
    monkeypatch.setattr(StableDiffusion3, "velocity", broken(StableDiffusion3.velocity))
    failed = {name for name, found in findings(base, "model.train=full").items() if not found.passed}
    assert failing <= failed


def test_a_setting_of_a_run_is_refused(base):
    with pytest.raises(ValueError, match=r"'budget\.updates=3' has no effect: a check knows the settings model\."):
        next(check(str(base), ["budget.updates=3"], steps=3))


def test_parts_that_are_off_the_device_are_refused(base):
    """The pipeline itself draws here, and would find its encoders elsewhere."""
    with pytest.raises(ValueError, match=r"'model.offload=true': the pipeline itself draws in a check, whole on one"):
        next(check(str(base), ["model.offload=true"], steps=3))


def test_a_half_downloaded_folder_is_one_line(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline", "vae": ["diffusers", "X"]}')
    with pytest.raises(ValueError, match=r"cannot be loaded: ") as caught:
        next(check(str(tmp_path), (), steps=3))
    assert "\n" not in str(caught.value)
