"""What can be wrong between processes: launchers that are refused."""

import pytest

from flowrl.run.peers import check_launcher


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", ["DeepSpeed", "sums gradients over ranks", "unproven with ZeRO"]),
        ("ACCELERATE_USE_MEGATRON_LM", "true", ["Megatron-LM", "cannot split"]),
        ("ACCELERATE_USE_FSDP", "True", ["FSDP", "not supported yet: replicas with one summed gradient"]),
        ("ACCELERATE_MIXED_PRECISION", "bf16", ["'bf16'", "set model.dtype instead"]),
        ("ACCELERATE_MIXED_PRECISION", "fp16", ["'fp16'", "--mixed_precision no"]),
        ("ACCELERATE_MIXED_PRECISION", "fp8", ["'fp8'", "model.dtype"]),
    ],
)
def test_what_a_launcher_cannot_have_is_refused_before_anything_is_loaded(
    variable, value, said, refused, run_file, monkeypatch
):
    path = run_file()
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("flowrl.run.config.load", lambda *given: pytest.fail("the run file was read"))
    line = refused("train", path)
    assert variable in line and all(part in line for part in said), line


def test_from_python_a_launcher_is_refused_as_well(prepared, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP"):
        prepared()


def test_plain_replicas_are_accepted():
    check_launcher({})
    check_launcher({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "false"})
