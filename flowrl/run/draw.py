"""`flowrl draw`: roll out one prompt as an update of a run does, and write the tree as a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrl import plan
from flowrl.part import nearest
from flowrl.recipe import Recipe
from flowrl.recipes import catalogue, describe
from flowrl.run import checkpoint, config, files, resume, scoring, tree_chart
from flowrl.run.prepare import load_policy, pick_device, read_prompts
from flowrl.run.processes import Processes
from flowrl.run.settings import Run
from flowrl.run.tree_chart import Grown
from flowrl.run.update import prompts_of
from flowrl.visual.paths import along_paths, score_finished
from flowrl.visual.pilot import pilot
from flowrl.visual.policy import Example, Policy
from flowrl.visual.ranks import Ranks, in_step
from flowrl.visual.score import Score
from flowrl.visual.table import earned
from flowrl.visual.trainer import roll_out
from rewards import media

ON_THE_BASE = "bench"  # the run file that a bare recipe is drawn with


@dataclass(frozen=True)
class Subject:
    """Whose tree is drawn, and of which update."""

    run: Run
    found: checkpoint.Found | None  # of a run directory; else the base model draws

    @property
    def key(self) -> str:
        return str(self.run.recipe["name"])

    @property
    def iteration(self) -> int:
        return self.found.facts["update"] if self.found else 0


def subject(name: str, overrides: Sequence[str]) -> Subject:
    """A recipe on the embedded base, the directory of a run at its last checkpoint, or a run file."""
    if name in catalogue():
        return Subject(config.load(ON_THE_BASE, [f"recipe.name={name}", *overrides]), None)
    if (Path(name) / "run.yaml").is_file():
        run = resume.load(Path(name), overrides)
        return Subject(run, resume.find(run)[0])
    if not config.is_run_file(name):
        hint = nearest(name, [*catalogue(), *config.names()])
        raise ValueError(f"{name!r} is no run file, no directory of a run and no recipe. {hint}")
    return Subject(config.load(name, overrides), None)


def tree(name: str, overrides: Sequence[str], prompt: str | None, output: Path | None) -> Callable[[], str]:
    """Prepare to draw the tree of one prompt; the function returned does it and says where it lies.

    prompt: by default the first one that is trained on, with a pilot the first one that it chooses; one of the run's
            prompts comes with its metadata
    output: by default RECIPE-tree.svg
    """
    chosen = subject(name, overrides)
    run, recipe, iteration = chosen.run, chosen.run.build_recipe(), chosen.iteration
    to = output or Path(f"{chosen.key}-tree.svg")
    files.check_output(to, "--output")
    device = pick_device(run.model.device)
    train = read_prompts(run)[0]
    example, number, score = _asked(run, prompt, device, recipe.pilot is not None)
    policy = load_policy(run, Processes(device).device)
    counts = plan.count(recipe, policy.sigmas(recipe.rollout.steps), seed=run.seed, iteration=iteration)
    if counts.leaves > tree_chart.MOST:
        raise ValueError(
            f"{counts.leaves} leaves, of which {tree_chart.MOST} at most can be told apart: lower recipe.rollout.roots "
            "or recipe.rollout.forks."
        )
    groups = checkpoint.read(chosen.found.path) if chosen.found else None
    memory = restore(groups, policy, recipe.rollout.drawn_by(iteration)) if groups else {}
    whose = f"update {iteration + 1} of {name}" if chosen.found else "an update of the base model"
    candidates = prompts_of(run, recipe, train, iteration, memory)[0] if recipe.pilot else []
    how = "the first that was chosen of" if prompt is None else "compared with"
    chosen_of = f", {how} {len(candidates)} candidates," if candidates else ""
    note = f"{counts.leaves} leaves, {counts.edges} transitions, {counts.rollout_calls} network calls; {whose}"

    def run_it():
        remembered, tracked, drawn, named = memory, None, example, number
        if candidates:
            found = _piloted(policy, recipe, [train[i] for i in candidates], score, memory, run, iteration)
            first, tracked, remembered = found
            if prompt is None:
                drawn, named = train[candidates[first]], candidates[first]
        grown = grow(policy, recipe, drawn, score, named, remembered, run, iteration, tracked)
        title = f"{describe(chosen.key)['title']} ({chosen.key})"
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        files.replace_text(to, tree_chart.picture(grown, title=title, prompt=drawn.prompt, note=note))
        return f"{counts.leaves} leaves of {drawn.prompt!r}{chosen_of} in {to}"

    return run_it


def grow(
    policy: Policy,
    recipe: Recipe,
    example: Example,
    score: Score,
    number: int,
    memory: Mapping[str, Tensor],
    run: Run,
    iteration: int,
    tracked: Mapping[str, Tensor] | None = None,
) -> Grown:
    """One prompt as an update treats it, up to where training would begin.

    number: see trainer.update, prompts; tracked: what the tracker gave of a pilot's candidates
    """
    named, size = {"seed": run.seed, "iteration": iteration}, run.budget.batch_size
    rolled, noisy = roll_out(policy, recipe, [example], **named, batch_size=size)
    pictures, alike = policy.decode(rolled.leaves()), [example] * len(rolled.final)
    table = score_finished(rolled, alike, lambda _: pictures, score)
    velocity = in_step(policy, Ranks(), recipe.rollout.roots, size)
    table, states = along_paths(recipe, rolled, table, alike, velocity, policy.decode, score)
    found = earned(
        recipe, rolled, noisy, table, [number], memory, Ranks(), **named, state_reward=states, tracked=tracked
    )
    reward = torch.where(table.valid, table.total(), torch.nan)
    return Grown(rolled, found.advantage, torch.stack(found.weights).sum(0) > 0, reward, media.stills(pictures).cpu())


def _piloted(policy, recipe, candidates, score, memory, run, iteration):
    """(place of the candidate that an update rolls out first, what the tracker gives, the memory after it)."""
    named = {"seed": run.seed, "iteration": iteration, "batch_size": run.budget.batch_size, "ranks": Ranks()}
    chosen, tracked, memory = pilot(policy, recipe, candidates, score, memory, **named)
    return chosen[0], tracked, memory


def _asked(run, prompt, device, piloted):
    """(the prompt, with its metadata if it is one of the run's; its number, which no other prompt has; its score).

    piloted: whether the rewards see other prompts of the run too
    """
    train, test, *_ = read_prompts(run)
    known = {e.prompt: e for e in [*test, *train]}
    example = train[0] if prompt is None else known.get(prompt, Example(prompt))
    try:
        loaded = scoring.load(scoring.declare(run, {}), [example], device)
        score, _ = scoring.trained_and_all(loaded, [example, *(train if piloted else ())])
    except ValueError as error:
        hint = "" if prompt in (None, *known) else f" --prompt {prompt!r} is none of the run's, so it has no metadata."
        raise ValueError(f"{error}{hint}") from None
    return example, train.index(example) if example in train else len(train), score


def restore(groups: Mapping, policy: Policy, drawn_by: str) -> Mapping[str, Tensor]:
    """Give the policy the weights that roll out at a checkpoint, of which these are the groups; returns the memory."""
    weights = groups["weights"] if drawn_by == "current" else checkpoint.averaged(groups, drawn_by)
    checkpoint.load_weights(weights, policy)
    return groups["memory"]
