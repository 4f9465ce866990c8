"""The launch configurations say what accelerate understands, and what a run accepts."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from flowrl.run.peers import check_launcher, sharded

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "accelerate"
NAMES = {
    "one_gpu": ("NO", 1, 1),
    "eight_gpus": ("MULTI_GPU", 1, 8),
    "two_nodes": ("MULTI_GPU", 2, 16),
    "fsdp2": ("FSDP", 1, 8),
}


def test_every_configuration_is_looked_at():
    assert {path.stem for path in FOLDER.iterdir()} == NAMES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_accelerates_own_loader_reads_machines_and_processes(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert (config.distributed_type.value, config.num_machines, config.num_processes) == NAMES[name]
    assert (config.mixed_precision, config.use_cpu, config.dynamo_config["dynamo_backend"]) == ("no", False, "NO")


@pytest.mark.parametrize("name", NAMES)
def test_the_launcher_asks_for_nothing_that_a_run_refuses(name):
    given = ["--config_file", str(FOLDER / f"{name}.yaml"), "--main_process_ip", "node0", "--machine_rank", "1", "x.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    kind, _, processes = NAMES[name]
    assert not (arguments.use_deepspeed or arguments.use_megatron_lm) and arguments.use_fsdp == (kind == "FSDP")
    assert bool(arguments.multi_gpu) == (kind == "MULTI_GPU") and arguments.num_processes == processes
    assert (arguments.machine_rank, arguments.main_process_ip) == (1, "node0")
    check_launcher(handed_on := prepare_multi_gpu_env(arguments))
    assert sharded(handed_on) == (kind == "FSDP")
