"""What can be wrong between processes: launchers that are refused, and ranks that disagree."""

from pathlib import Path

import pytest
import torch
import yaml

from flowrl.run import peers
from flowrl.run.checkpoint import Found
from flowrl.run.config import from_dict
from flowrl.run.peers import check_alike, check_launcher
from flowrl.run.prepare import everywhere
from flowrl.run.resume import Origin

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", ["DeepSpeed", "sums gradients over ranks", "unproven with ZeRO"]),
        ("ACCELERATE_USE_MEGATRON_LM", "true", ["Megatron-LM", "cannot split"]),
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
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="DeepSpeed"):
        prepared()


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("FSDP_VERSION", "1", "set fsdp_version: 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "set fsdp_offload_params: false"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "let go after each call"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "the model's own blocks"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "JointTransformerBlock", "leave it out"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "model.gradient_checkpointing"),
    ],
)
def test_what_a_launcher_asks_of_fsdp_and_would_not_get_is_refused(variable, value, said):
    with pytest.raises(ValueError, match=f"FSDP with {variable}={value}: .*{said}"):
        check_launcher({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", variable: value})
    check_launcher({variable: value})


def test_the_launch_file_for_fsdp_is_accepted_as_accelerate_hands_it_on():
    """`accelerate launch` turns each line of fsdp_config into a variable."""
    file = yaml.safe_load((ROOT / "scripts/accelerate/fsdp2.yaml").read_text(encoding="utf-8"))
    given = {name.upper(): str(value) for name, value in file["fsdp_config"].items()}
    assert file["distributed_type"] == "FSDP" and given.keys() <= peers.FSDP.keys()
    check_launcher({"ACCELERATE_USE_FSDP": "true", **given})


def test_plain_replicas_are_accepted():
    check_launcher({})
    check_launcher({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "false"})


PARTS = {"run settings": {"seed": 0}, "recipe page": "flow_grpo", "prompt files": {"data.train": "abc"}}


def said_to(*changes):
    """What each process says when they meet, each with its own changes of PARTS; None where nothing is wrong."""
    rows = []
    for change in changes:
        check_alike(PARTS | change, lambda mine: rows.append(mine) or mine)
    said = []
    for change in changes:
        try:
            said.append(check_alike(PARTS | change, lambda mine: torch.cat(rows)))
        except ValueError as error:
            said.append(str(error))
    return said


def test_processes_that_are_set_up_alike_may_start():
    assert said_to({}, {}, {}) == [None] * 3


def test_every_process_names_the_one_that_differs_and_in_what():
    one, *others = said_to({}, {}, {"prompt files": {"data.train": "abd"}, "run settings": {"seed": 1}})
    assert one == ("the 3 processes are not set up alike: process 2 differs in its run settings, prompt files.")
    assert others == [one, one]


def test_the_first_process_can_be_the_one_that_differs():
    assert "process 0 differs in its recipe page" in said_to({"recipe page": "branch_grpo"}, {}, {})[2]


def test_of_two_the_second_is_said_to_differ():
    said = said_to({}, {"recipe page": "branch_grpo"})
    assert "process 1 differs in its recipe page" in said[0] and "process 0" not in said[0] and said[0] == said[1]


def test_a_run_compares_settings_page_files_model_checkpoint_and_versions(given, tmp_path):
    prints = {"data.train": {"content": "a"}, "data.test": {"content": "b"}, "model.path": {"model_index.json": "c"}}
    origin = Origin("page", prints, {"torch": "2.0"}, Found(tmp_path, {"update": 3}))
    parts = everywhere(from_dict(given), origin)
    assert parts["prompt files"].keys() == {"data.train", "data.test"} and parts["model"] == prints["model.path"]
    assert (parts["recipe page"], parts["checkpoint"]) == ("page", 3)
    assert parts["run settings"]["output"] == given["output"]
    assert parts["versions"] == {"torch": "2.0"}


def test_a_run_is_compared_before_a_model_is_loaded(prepared, monkeypatch):
    def other(parts, gather):
        raise ValueError(f"not alike: {', '.join(parts)}")

    monkeypatch.setattr("flowrl.run.prepare.check_alike", other)
    monkeypatch.setattr("flowrl.run.prepare.load_policy", lambda *given: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match="not alike: run settings, recipe page, model, prompt files"):
        prepared()


def test_another_line_of_code_is_another_version(tmp_path, monkeypatch):
    (tmp_path / "flowrl" / "run").mkdir(parents=True)
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "flowrl" / "run" / "peers.py"))
    (tmp_path / "flowrl" / "a.py").write_text("x = 1")
    before = peers.versions()["flowrl"]
    (tmp_path / "flowrl" / "a.py").write_text("x = 2")
    assert peers.versions()["flowrl"] != before and peers.versions()["torch"] == torch.__version__
