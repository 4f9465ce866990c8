"""Train the quick start once per seed and print what it gains, on which kinds, at what cost in diversity and time.

    python scripts/bench_quickstart.py [--seeds 0 1 2] [--output runs/bench_quickstart] [key=value ...]

A seed whose run is complete is not trained again, so an interrupted bench goes on where it stopped.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
SHOWN = ("eval/shapes_strict", "eval/shapes_soft", "eval/diversity")
KINDS = ("count", "two_objects", "position", "one_object", "number")


def read(directory: Path) -> list[dict]:
    """The lines of a complete run, or nothing."""
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    complete = len(lines) > 1 and "eval/shapes_strict" in lines[-1]
    return lines if complete else []


def train(directory: Path, seed: int, overrides: list[str], processes: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    # --multi_gpu makes accelerate start several processes on CPUs too; with --cpu it starts one.
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_machines",
        "1",
        "--num_processes",
        str(processes),
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"] + ["--multi_gpu", "--main_process_port", "0"] * (
        processes > 1
    )
    command = [*launch, str(SCRIPTS / "train.py"), "quickstart", f"output={directory}", f"seed={seed}", *overrides]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def row(name: str, first: dict, last: dict) -> str:
    return f"  {name:<32}{first[name]:8.3f}{last[name]:8.3f}{last[name] - first[name]:+8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_quickstart"))
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    gains = []
    for number, seed in enumerate(given.seeds, 1):
        directory = given.output / f"seed_{seed}"
        if not read(directory):
            print(f"seed {seed}: run {number} of {len(given.seeds)}", flush=True)
            train(directory, seed, given.overrides, given.processes)
        first, last = (lines := read(directory))[0], lines[-1]
        print(f"seed {seed}: {len(lines) - 1} updates in {last['elapsed']:.0f} s    before   after  change")
        names = [*SHOWN, *(f"eval/shapes_strict/{kind}" for kind in KINDS)]
        print("\n".join(row(name, first, last) for name in names if name in first), flush=True)
        gains.append((last[SHOWN[0]] - first[SHOWN[0]], last[SHOWN[1]] - first[SHOWN[1]]))
    strict, soft = zip(*gains, strict=True)
    print(f"smallest gain over {len(gains)} seeds: strict {min(strict):+.3f}, soft {min(soft):+.3f}")


if __name__ == "__main__":
    main()
