"""Whether the time of a tree's update follows its network calls.

    python scripts/bench_trees.py [branch_grpo e_grpo ...] [--width 512] [--repeats 3] [--prompts 12]

Every recipe is compared with dance_grpo of the same leaves and steps, all noisy steps trained. A network of random
weights is wide enough that its calls dominate. An update of each is timed in turn, in one process; time / cost says by
how much the time ratio exceeds that of forwards + 2 x backwards.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from flowrl import plan
from flowrl.objectives import select
from flowrl.part import part
from flowrl.plan import Counts
from flowrl.recipe import Recipe
from flowrl.recipes import find
from flowrl.recipes.visual.steps import dance_grpo
from flowrl.run.learner import Learner
from flowrl.visual import trainer
from flowrl.visual.policy import Example, Snapshots
from flowrl.visual.toy import ToyPolicy
from rewards.table import RewardTable

PAPERS = {"branch_grpo": 0.71, "branch_grpo_depth_pruned": 0.45, "branch_grpo_mix": 0.21, "tree_grpo_visual": 0.41}
RECIPES = [*PAPERS, "tempflow_grpo", "e_grpo"]
LARGEST = 1.1  # of the time ratio over the cost ratio
LAYERS, SIDE = 12, 4  # of the network; of its pictures, in pixels
DIMS = 3 * SIDE**2
ROWS = 64  # per network call
NAMED = {"seed": 0, "iteration": 0}


class WidePolicy(ToyPolicy):
    """The toy with more latent dims, and a network of random weights whose rows cost something."""

    def __init__(self, width: int, prompts: int):
        generator = torch.Generator().manual_seed(0)
        sizes = [DIMS + 1 + 8, *[width] * LAYERS, DIMS]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.SiLU())]
        self.embed, self.net = nn.Embedding(prompts, 8), nn.Sequential(*layers[:-1])
        for _, parameter in self.trainable():
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        self.guidance, self.forwards, self.backwards = 1.0, 0, 0
        self.snapshots = Snapshots([p for _, p in self.trainable()])

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, DIMS, generator=generator)

    def decode(self, latents: Tensor) -> Tensor:
        return latents.sigmoid().reshape(-1, 3, SIDE, SIDE)


@dataclass(frozen=True)
class Job:
    """A recipe that is timed, and what plan counts for its update."""

    recipe: Recipe
    counts: Counts

    @property
    def cost(self) -> int:
        return self.counts.forwards + 2 * self.counts.backwards


@dataclass(frozen=True)
class Row:
    """One recipe beside its dance_grpo; a time ratio for each repeat."""

    key: str
    job: Job
    cost: float
    times: Sequence[float]

    @property
    def excess(self) -> float:
        return statistics.median(self.times) / self.cost


class Bench:
    """One policy and one optimiser, whose steps move nothing, so that every update is the same work."""

    def __init__(self, width: int, prompts: int):
        self.policy, self.examples = WidePolicy(width, prompts), [Example(str(i)) for i in range(prompts)]
        self.learner = Learner(self.policy.trainable(), lambda update: 1e-12, micro_batch=ROWS)

    def job(self, recipe: Recipe) -> Job:
        for name, rule in recipe.snapshots.items():
            self.policy.snapshot(name, rule, 0)
        sigmas = self.policy.sigmas(recipe.rollout.steps)
        return Job(recipe, plan.count(recipe, sigmas, prompts=len(self.examples), **NAMED))

    def seconds(self, job: Job) -> float:
        """Of the processor, which other processes disturb least, for one update; its rows are those counted."""
        policy, given = self.policy, (job.recipe, self.examples, score, self.learner)
        policy.forwards = policy.backwards = 0
        start = time.process_time()
        trainer.update(policy, *given, **NAMED, batch_size=ROWS)
        taken = time.process_time() - start
        made, counted = (policy.forwards, policy.backwards), (job.counts.forwards, job.counts.backwards)
        assert made == counted, f"{made} forwards and backwards where {counted} were counted"
        return taken


def score(images: Tensor, examples: Sequence[Example], group: Tensor) -> RewardTable:
    """How red a picture is: no two are alike."""
    value = images[:, :1].mean((2, 3))
    return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("red",))


def alike(recipe: Recipe, leaves: int) -> Recipe:
    """dance_grpo with as many leaves and steps, every noisy step trained."""
    rollout = {"steps": recipe.rollout.steps, "forks": {0: leaves}}
    return dance_grpo().but(rollout=rollout, select=part(select.drawn))


def measure(bench: Bench, keys: Sequence[str], repeats: int) -> list[Row]:
    """Every job once to warm up, then all of them in turn, as often as asked."""
    jobs = {key: bench.job(find(key)()) for key in keys}
    shapes = {key: (job.recipe.rollout.steps, job.counts.leaves // len(bench.examples)) for key, job in jobs.items()}
    beside = {shape: bench.job(alike(jobs[key].recipe, shape[1])) for key, shape in shapes.items()}
    every: Mapping[object, Job] = jobs | beside
    for job in every.values():
        bench.seconds(job)
    took = [{name: bench.seconds(job) for name, job in every.items()} for _ in range(repeats)]
    return [
        Row(key, job, job.cost / beside[shapes[key]].cost, [one[key] / one[shapes[key]] for one in took])
        for key, job in jobs.items()
    ]


def table(rows: Sequence[Row], prompts: int) -> str:
    """Markdown; counts are of one prompt."""
    head = ["recipe", "steps", "leaves", "forwards", "backwards", "cost", "cost / dance_grpo", "time / dance_grpo"]
    lines = [[*head, "time / cost", "paper's time"], ["---"] * 10]
    for row in rows:
        counts = row.job.counts
        numbers = (counts.leaves, counts.forwards, counts.backwards, row.job.cost)
        each = [f"{x / prompts:g}" for x in numbers]
        time_ratio = f"{statistics.median(row.times):.3f} ({min(row.times):.3f} to {max(row.times):.3f})"
        said = [f"{row.cost:.3f}", time_ratio, f"{row.excess:.3f}", f"{PAPERS.get(row.key, '-')}"]
        lines.append([row.key, str(row.job.recipe.rollout.steps), *each, *said])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = measure(Bench(given.width, given.prompts), given.recipes, given.repeats)
    print(table(rows, given.prompts))
    print(
        f"\nWidth {given.width}, {LAYERS} layers, {given.prompts} prompts, {ROWS} rows a call, fp32, "
        f"{torch.get_num_threads()} thread(s), {given.repeats} repeats; cost = forwards + 2 x backwards, per prompt."
    )
    if slow := [f"{row.key} {row.excess:.3f}" for row in rows if row.excess > LARGEST]:
        raise SystemExit(f"time / cost above {LARGEST}: {', '.join(slow)}")


if __name__ == "__main__":
    main()
