"""The memory that `flowrl plan` foresees."""

from pathlib import Path

import pytest

from flowrl.run.config import from_dict, resolve
from flowrl.run.estimate import GIB, memory, too_large
from flowrl.run.use import plan
from flowrl.visual.pipelines import blueprint

FILES = sorted(file.stem for file in (Path(__file__).parents[2] / "scripts" / "configs").glob("*.yaml"))
NETWORK, ENCODERS, AUTOENCODER = 3_484_688, 2 * 107_456, 133_183  # parameters of the embedded base
ADAPTER = (6 * 7 + 5) * 4 * (128 + 128)


def foreseen(given, **changes):
    run = from_dict({**given, **changes})
    recipe, blue = run.build_recipe(), blueprint.read(resolve(run.model.path))
    return memory(run, recipe, blue.pipe, blue.family(blue.pipe, max_sequence_length=0)), run


def test_weights_gradients_and_moments_are_those_of_the_parameters(given):
    found, _ = foreseen(given, model=given["model"] | {"dtype": "float32"})
    assert (found.parameters, found.trained) == (NETWORK, ADAPTER)
    expected = {"networks": 4 * NETWORK, "adapters": 4 * ADAPTER, "encoders": 4 * ENCODERS, "gradients": 4 * ADAPTER}
    expected |= {"autoencoder": 4 * AUTOENCODER, "moments": 8 * ADAPTER, "copies": 0}
    for name, size in expected.items():
        assert getattr(found, name) == pytest.approx(size / GIB), name


def test_full_weights_are_fp32_and_a_reference_is_a_copy_of_them(given):
    model = {"path": given["model"]["path"], "train": "full", "dtype": "bfloat16"}
    found, _ = foreseen(given, model=model, optimizer={"name": "adamw_8bit", "ema": 0.9})
    assert found.trained == NETWORK and found.adapters == 0
    assert found.networks == pytest.approx(4 * NETWORK / GIB) and found.encoders == pytest.approx(2 * ENCODERS / GIB)
    assert found.copies == pytest.approx(2 * 4 * NETWORK / GIB), "the reference and the averaged weights"
    assert found.moments < 2.1 * NETWORK / GIB


@pytest.mark.parametrize(
    ("changes", "factor"),
    [({}, 1), ({"budget": {"micro_batch": 128}}, 2), ({"recipe": {"name": "flow_grpo", "rollout.guidance": 2.0}}, 2)],
)
def test_activations_grow_with_the_rows_of_a_micro_batch(given, changes, factor):
    assert foreseen(given, **changes)[0].activations == pytest.approx(factor * foreseen(given)[0].activations)


def test_each_setting_that_is_said_to_help_helps(given):
    plain, _ = foreseen(given)
    for setting in ({"gradient_checkpointing": True}, {"offload": True}, {"quantize": "bitsandbytes_4bit"}):
        assert foreseen(given, model=given["model"] | setting)[0].update < plain.update, setting


def test_what_does_not_fit_is_said_with_what_helps(given):
    found, run = foreseen(given)
    assert too_large(found, run, 80.0) == []
    (line,) = [line for line in too_large(found, run, found.update / 2) if line.startswith("update")]
    assert "budget.micro_batch" in line and "model.offload" in line


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "sd35_24gb")) for n in FILES])
def test_every_run_file_is_planned_and_those_for_24_gb_fit(name):
    """C91: from the architecture alone, whatever needs more is said with what would help."""
    found = plan(name, (), gpu_memory=24.0)
    most = max(found.memory.update, found.memory.encoding)
    assert found.table["forwards"]["total"] > 0 and 0 < found.memory.activations < most
    needs = [line for line in found.lines if " needs " in line]
    assert bool(needs) == (most > 24)
    if "24gb" in name:
        assert not needs and most > 5
