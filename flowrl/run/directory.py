"""What a run directory tells: how it begins, the pictures of an evaluation, the last words."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from flowrl import plan
from flowrl.run import config, files, prompts
from flowrl.run.metrics import Progress, duration
from flowrl.run.prepare import Prepared, evaluation_settings
from rewards import media


def start(prepared: Prepared, directory: Path) -> None:
    """Make the run directory; from here on something is written."""
    directory.mkdir(parents=True)
    (directory / "samples").mkdir()
    if prepared.texts:
        Path(prepared.run.data.train).write_text(prompts.dump(prepared.texts), encoding="utf-8")
    files.replace_text(directory / "run.yaml", config.dump(prepared.run))
    run, sigmas = prepared.run, prepared.policy.sigmas(prepared.recipe.rollout.steps).tolist()
    page = f"{prepared.origin.page}\n\n# sigmas ({run.model.grid} grid)\n{sigmas}\n"
    (directory / "recipe.txt").write_text(page, encoding="utf-8")
    _name_pictures(prepared, directory)


def go_on(prepared: Prepared, directory: Path, update: int) -> None:
    """Note what changes, and put away the pictures of updates that are done again."""
    files.replace_text(directory / "run.yaml", config.dump(prepared.run))
    for picture in (directory / "samples").glob("*.png"):
        if picture.stem.isdigit() and int(picture.stem) > update:
            picture.unlink()
    _name_pictures(prepared, directory)


def _name_pictures(prepared, directory):
    shown = [e.prompt for e in prepared.test[: prepared.run.evaluation.pictures]]
    (directory / "samples" / "prompts.txt").write_text("\n".join(shown) + "\n", encoding="utf-8")


def overview(prepared: Prepared) -> Iterator[str]:
    """What an update consists of, counted before it runs; the log holds the same numbers as they turned out."""
    run, recipe = prepared.run, prepared.recipe
    groups = run.budget.prompts_per_update
    grid, pairs = prepared.policy.sigmas(recipe.rollout.steps), prepared.policy.pairs
    n = plan.count(recipe, grid, prompts=groups, seed=run.seed, pairs=pairs)
    changes = ", ".join(f"{k} = {v}" for k, v in run.recipe.items() if k != "name")
    trained = sum(p.numel() for _, p in prepared.policy.trainable())
    yield f"{run.recipe['name']}{f' with {changes}' if changes else ''}; {trained:,} trainable parameters"
    evaluated = evaluation_settings(run, recipe)
    yield f"guidance: {recipe.rollout.guidance:g} in rollouts and training, {evaluated.guidance:g} in evaluations"
    yield (
        f"an update: {groups} prompts x {n.leaves // groups} leaves = {n.leaves} pictures, {n.scored} scored, "
        f"{n.rollout_calls:,} network rows to draw them, {n.train_calls:,} to train "
        f"{n.train_edges:,} decisions, {n.optimizer_steps} optimizer step(s); "
        f"{prepared.processes.count} process(es)"
    )


def headline(log: Mapping[str, object]) -> dict[str, float | int]:
    """What the line of progress shows: the rewards, how far the weights moved, and invalid scores if there are any."""
    shown = {name: x for name, x in log.items() if name.startswith("reward/") or name == "param_delta_norm"}
    return {name: x for name, x in shown.items() if name != "reward/invalid" or x}


def pictures(directory: Path, update: int) -> Path:
    """Where the grid of an evaluation lies."""
    return directory / "samples" / f"{update:06d}.png"


def save_pictures(pictures: Tensor, path: Path) -> None:
    """A grid with six columns."""
    scale = max(96 // pictures.shape[-1], 1)
    media.save_png(media.picture_grid(pictures, columns=6, scale=scale), path)


def finish(prepared: Prepared, directory: Path, progress: Progress, first: Mapping, last: Mapping) -> None:
    """Say what changed and where everything lies."""
    grids = [pictures(directory, line["iteration"]) for line in (first, last)]
    media.before_after(*grids, directory / "before_after.png")
    progress.say(f"{'':<34}{'before':>9}{'after':>9}{'change':>9}")
    for name in (n for n in first if n.startswith("eval/") and n != "eval/invalid" and n in last):
        tags = prepared.run.data.tags
        tagged = name.count("/") == 2 and not name.startswith("eval/image/")
        note = "  (not trained)" if tags and tagged and name.rpartition("/")[2] not in tags else ""
        before, after = float(first[name]), float(last[name])  # a log line says "nan"
        progress.say(f"{name:<34}{before:9.3f}{after:9.3f}{after - before:+9.3f}{note}")
    progress.say(f"{last['iteration']} updates in {duration(last['elapsed'])}. Everything lies in {directory}:")
    folder = f"  {prepared.policy.folder}/ (for diffusers), checkpoints/ (to go on from), "
    progress.say(folder + "metrics.jsonl, samples/, before_after.png, run.yaml, recipe.txt")
