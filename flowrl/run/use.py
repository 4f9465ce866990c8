"""A policy without learning: count, evaluate, draw."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from flowrl import plan as plans
from flowrl.run import files
from flowrl.run.config import load, resolve
from flowrl.run.evaluation import evaluate as score_prompts
from flowrl.run.evaluation import sample as draw
from flowrl.run.prepare import evaluation_settings, load_policy, load_rewards, make_score, pick_device, read_prompts
from flowrl.run.processes import Processes
from flowrl.run.settings import Lora, Run
from flowrl.visual.pipelines import sd3
from flowrl.visual.policy import Example, Policy
from rewards import media
from samplers import schedules


def plan(file: str, overrides: Sequence[str]) -> dict[str, dict[str, int]]:
    """{quantity: {"per_prompt", "per_update", "total"}}; total is over all updates, without evaluation."""
    run = load(file, overrides)
    recipe = run.build_recipe()
    grid = schedules.linear(recipe.rollout.steps)
    plans.check_all(recipe, grid, seed=run.seed, updates=run.budget.updates)
    read_prompts(run)
    counts = asdict(plans.count(recipe, grid, seed=run.seed))
    prompts, updates = run.budget.prompts_per_update, run.budget.updates
    table = {
        name: {
            "per_prompt": counts[name],
            "per_update": counts[name] * prompts,
            "total": counts[name] * prompts * updates,
        }
        for name in counts
    }
    lora = (run.model.lora or Lora()) if run.model.train == "lora" else None
    targets = (lora.targets or sd3.TARGETS) if lora else ()
    trainable = sd3.count_trainable(resolve(run.model.path), rank=lora.rank if lora else 0, targets=targets)
    table["optimizer_steps"] = {"per_prompt": 1, "per_update": 1, "total": updates}
    table["trainable_parameters"] = dict.fromkeys(("per_prompt", "per_update", "total"), trainable)
    return table


def evaluation(file: str, overrides: Sequence[str], weights: Path | None) -> Callable[[], dict[str, float]]:
    """Prepare to score the held-out prompts of a run file; the function returned does it."""
    run = load(file, overrides)
    train, test, main, _ = read_prompts(run)
    scorers = load_rewards(run, {}, train + test, pick_device(run.model.device))
    score = make_score(scorers, train + test)
    processes, policy = _policy(run, weights)
    settings = evaluation_settings(run, run.build_recipe())

    def run_it():
        return score_prompts(policy, test, score, settings, processes.ranks(), main=main, pictures=0)[0]

    return run_it


def sample(file: str, overrides: Sequence[str], prompts: Sequence[str], weights: Path | None, to: Path) -> str:
    """Write a grid of pictures, a row per prompt if there are several samples, and say where."""
    run = load(file, overrides)
    files.check_output(to, "--to")
    examples = [Example(p) for p in prompts] or read_prompts(run)[1][: run.evaluation.pictures]
    _, policy = _policy(run, weights)
    pictures = draw(policy, examples, evaluation_settings(run, run.build_recipe()))
    columns = run.evaluation.samples if run.evaluation.samples > 1 else min(8, len(pictures))
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    media.save_png(media.picture_grid(pictures, columns=columns, scale=max(96 // pictures.shape[-1], 1)), to)
    return f"{len(pictures)} pictures of {len(examples)} prompts in {to}"


def _policy(run: Run, weights: Path | None) -> tuple[Processes, Policy]:
    processes = Processes(pick_device(run.model.device))
    policy = load_policy(run, processes.device)
    if weights is not None:
        policy.load(weights)
    return processes, policy
