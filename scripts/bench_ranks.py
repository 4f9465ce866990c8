"""How much of an update's time two processes of one thread each save, against one process of one thread.

    python scripts/bench_ranks.py [flow_grpo branch_grpo ...] [--pairs 3] [--updates 3] [--train full|lora] [--sharded]

Each pair is a run on one process and a run on two, in turn first; the first update of a run is left out, since it
encodes the prompts. It wants two idle cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent


def seconds(recipe: str, processes: int, given: argparse.Namespace) -> float:
    """Median seconds of an update of a run on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        settings = [f"recipe.name={recipe}", f"model.train={given.train}", f"budget.updates={given.updates + 1}"]
        settings += ["evaluation.prompts=2", "evaluation.others=0", "evaluation.samples=1", f"output={output}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parent)}
        if given.sharded and processes > 1:
            environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        command = [*launcher, str(SCRIPTS / "train.py"), "bench", *settings]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return statistics.median(line["seconds"] for line in lines[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["flow_grpo", "branch_grpo", "diffusion_nft"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--train", choices=("full", "lora"), default="full")
    parser.add_argument("--sharded", action="store_true", help="the two share out their weights with FSDP2")
    given = parser.parse_args()
    for recipe in given.recipes:
        found = []
        for pair in range(given.pairs):
            counts = (1, 2) if pair % 2 == 0 else (2, 1)
            took = {count: seconds(recipe, count, given) for count in counts}
            found.append(took[2] / took[1])
        print(
            f"{recipe}, {given.train}{', shards' if given.sharded else ''}: two processes take "
            f"{statistics.median(found):.3f} of one ({min(found):.3f} to {max(found):.3f}, {given.pairs} pairs)",
            flush=True,
        )


if __name__ == "__main__":
    main()
