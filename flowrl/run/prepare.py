"""Everything that can be checked before the first network call, and then the objects of a run."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from flowrl import decays, plan
from flowrl.explain import explain
from flowrl.part import nearest, part
from flowrl.recipe import Recipe, Snapshot
from flowrl.recipes import catalogue, find
from flowrl.run import files, fingerprint, optimizers, prompts, scoring, trackers
from flowrl.run import resume as resuming
from flowrl.run.config import resolve
from flowrl.run.evaluation import Settings
from flowrl.run.learner import Learner, learning_rate
from flowrl.run.peers import check_alike, check_launcher, sharded
from flowrl.run.processes import Processes
from flowrl.run.resume import Origin
from flowrl.run.settings import Lora, Run
from flowrl.visual.pipelines import opening
from flowrl.visual.pipelines.folders import distilled
from flowrl.visual.policy import Example, Policy
from flowrl.visual.score import Score
from samplers import schedules


@dataclass(frozen=True)
class Prepared:
    """A run whose every part exists; nothing has been written yet."""

    run: Run
    recipe: Recipe
    policy: Policy
    learner: Learner
    processes: Processes
    train: list[Example]
    test: list[Example]  # the held-out prompts of the trained tags first
    trained_test: int  # how many of them those are
    score: Score  # in training: of the rewards with a weight
    score_held_out: Score  # in evaluation: of all rewards
    warnings: list[str]
    texts: Sequence[str]  # prompts that came without a file
    weights: Mapping[str, float]  # of the rewards, by column
    origin: Origin

    @property
    def ema(self) -> Snapshot | None:
        settings = self.run.optimizer
        return Snapshot(part(decays.warming, share=settings.ema), settings.ema_every) if settings.ema else None


def evaluation_settings(run: Run, recipe: Recipe) -> Settings:
    """The run file's, with the rollout's where it says nothing."""
    chosen, rollout = run.evaluation, recipe.rollout
    return Settings(
        steps=chosen.steps or rollout.steps,
        guidance=chosen.guidance or rollout.guidance,
        samples=chosen.samples,
        seed=chosen.seed,
        batch_size=run.budget.batch_size,
    )


def prepare(
    run: Run,
    *,
    pipe: object = None,
    functions: Mapping[str, Callable] | None = None,
    recipe: Recipe | None = None,
    texts: Sequence[str] = (),
    resume: bool = False,
) -> Prepared:
    """Check all settings, then load; ValueError names the first that cannot work.

    pipe:      a loaded diffusers pipeline in the place of model.path
    functions: reward functions by name, in the place of rewards.NAME.function
    recipe:    in the place of the recipe section
    texts:     prompts in the place of the file data.train, which the run writes
    resume:    go on with the run that lies in the directory `output`
    """
    check_launcher()
    trackers.check(run.log.trackers)
    optimizer = optimizers.find(run.optimizer.name, sharded=sharded())
    recipe = recipe.check() if recipe else run.build_recipe()
    counts = plan.count(
        recipe, schedules.linear(recipe.rollout.steps), prompts=run.budget.prompts_per_update, seed=run.seed
    )
    if not resume:
        files.check_output(Path(run.output))
    *held, warnings = read_prompts(run, texts)
    plan.check_allocation(recipe, len(held[0]), run.budget.prompts_per_update)
    everybody, device = held[0] + held[1], pick_device(run.model.device)
    declared = scoring.declare(run, functions or {})
    weights = scoring.weights_by_name(declared)
    check_best(run, list(weights), held[1])
    if pipe is not None:
        opening.accept(pipe, run.model.adapter)
    origin, told = resuming.origin(run, recipe_page(run, recipe), texts, pipe=pipe, resume=resume)
    processes = meet(run, device, origin, held[1])
    scorers = scoring.load(declared, everybody, processes.device)
    scores = scoring.trained_and_all(scorers, everybody)
    scoring.check_states(scores[0], recipe)
    noise = _noise_of_few(run, counts.leaves // run.budget.prompts_per_update)
    negative = [f"reward {name} has the weight {w:g}: lower is better." for name, w in weights.items() if w < 0]
    policy = ready_policy(run, recipe, origin, processes, pipe)
    scoring.check_frames(scores[1], policy.frames)
    few_steps = distilled(Path(pipe.config.get("_name_or_path") or "") if pipe else resolve(run.model.path))
    warnings = [*told, *warnings, *noise, *negative, *([few_steps] if few_steps else []), *policy.warnings(everybody)]
    learner = make_learner(run, policy, processes, optimizer)
    return Prepared(run, recipe, policy, learner, processes, *held, *scores, warnings, texts, weights, origin)


def _noise_of_few(run: Run, leaves: int) -> list[str]:
    """C91: what fits after shrinking may not learn."""
    few = {f"{leaves} pictures per prompt": leaves < 4, "one prompt per update": run.budget.prompts_per_update < 2}
    return [
        f"{name}: advantages are mostly noise. Memory is bounded by budget.batch_size and budget.micro_batch instead."
        for name, is_few in few.items()
        if is_few
    ]


def recipe_page(run: Run, recipe: Recipe) -> str:
    name = str(run.recipe["name"])
    return explain(recipe, find(name).__doc__ if name in catalogue() else f"{name}: a recipe given in Python.")


def meet(run: Run, device: str, origin: Origin, test: Sequence[Example]) -> Processes:
    """The processes of the run, set up alike and each with something to do."""
    processes = Processes(device, run.processes.timeout, sharded())
    check_alike(everywhere(run, origin), processes.gather)
    check_shares(run, test, processes.count)
    return processes


def everywhere(run: Run, origin: Origin) -> dict[str, object]:
    """What all processes of a run have to have in common, by name."""
    prints = dict(origin.prints)
    return {
        "run settings": run.model_dump(mode="json"),
        "recipe page": origin.page,
        "model": prints.pop("model.path"),
        "prompt files": prints,
        "checkpoint": origin.found.facts["update"] if origin.found else None,
        "versions": origin.versions,
    }


def ready_policy(run: Run, recipe: Recipe, origin: Origin, processes: Processes, pipe: object) -> Policy:
    """The policy that is trained: one that the recipe can sample from, started warm or not, whole or in shards."""
    policy = load_policy(run, processes.device, pipe, processes.sharded)
    grid = schedules.check(policy.sigmas(recipe.rollout.steps))
    if origin.found:
        resuming.check_sigmas(origin.found, grid.tolist())
    elif run.model.init_adapter:
        start_from(policy, run.model.init_adapter)
    plan.check_all(recipe, grid, seed=run.seed, updates=run.budget.updates)
    if processes.sharded:
        policy.distribute(processes.share_out)
    return policy


def start_from(policy: Policy, adapter: str) -> None:
    """A warm start: the weights of an adapter, and nothing else of the run that made it."""
    try:
        policy.load(resolve(adapter))
    except ValueError as error:
        raise ValueError(f"model.init_adapter = {error}") from None


def check_best(run: Run, columns: Sequence[str], test: Sequence[Example]) -> None:
    """checkpoint.best has to be a name that evaluations log."""
    tags = sorted({f"/{e.metadata['tag']}" for e in test if "tag" in e.metadata})
    known = [f"eval/{column}{tag}" for column in columns for tag in ("", *tags)]
    if run.checkpoint.best is not None and run.checkpoint.best not in known:
        hint = nearest(run.checkpoint.best, known)
        raise ValueError(f"checkpoint.best = {run.checkpoint.best!r}: {hint}Accepted here: {', '.join(known)}.")


def check_shares(run: Run, test: Sequence[Example], processes: int) -> None:
    """Every process needs something to do."""
    if run.budget.prompts_per_update < processes:
        raise ValueError(
            f"budget.prompts_per_update = {run.budget.prompts_per_update}: every process trains whole prompts, "
            f"so {processes} processes need at least {processes}."
        )
    if len(test) < processes:
        raise ValueError(f"{len(test)} held-out prompts for {processes} processes: each needs at least one.")


def read_prompts(run: Run, texts: Sequence[str] = ()) -> tuple[list[Example], list[Example], int, list[str]]:
    """(train, test, number of trained test prompts, warnings): the test prompts of the trained tags come first."""
    if texts:
        train, warnings = [Example(text) for text in texts], []
    else:
        train, warnings = prompts.read(resolve(run.data.train), "data.train")
    if run.data.test:
        test, more = prompts.read(resolve(run.data.test), "data.test")
    else:
        test, more = train, ["data.test is not given: the training prompts are evaluated, none is held out."]
    if run.data.balance and not any("tag" in e.metadata for e in train):
        raise ValueError("data.balance has no effect: no prompt of data.train has a tag.")
    others: list[Example] = []
    if run.data.tags:
        train = prompts.with_tags(train, run.data.tags, "data.tags")
        others = [e for e in test if e.metadata.get("tag") not in run.data.tags]
        test = prompts.with_tags(test, run.data.tags, "data.tags")
    pick = _in_turn if run.data.balance else _spread_out
    test = pick(test, run.evaluation.prompts)
    return train, test + pick(others, run.evaluation.others), len(test), warnings + more


def _spread_out(examples, count):
    """`count` examples at even distances: the same ones for every run of this file."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def _in_turn(examples, count):
    """`count` examples, their tags in turn; a tag with too few is gone through again (with other noise)."""
    kinds = [[examples[i] for i in kind] for kind in prompts.kinds(examples)] if examples else []
    each = [_spread_out(kind, -(-count // len(kinds))) for kind in kinds]
    return [each[i % len(each)][i // len(each) % len(each[i % len(each)])] for i in range(count)] if each else []


def pick_device(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device = 'cuda': torch sees no GPU here. Accepted here: auto, cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def load_policy(run: Run, device: torch.device, pipe: object = None, sharded: bool = False) -> Policy:
    """The policy of model.path, or over a pipeline that is loaded already; `sharded` if it is distributed next."""
    model, lora = run.model, run.model.lora
    settings = {name: getattr(model, name) for name in opening.DRAWN}
    settings |= {
        name: getattr(model, name) for name in ("adapter", "grid", "attention", "compile", "quantize", "offload")
    }
    settings |= {name: getattr(model, name) for name in ("vae_tiling", "vae_slicing")}
    if model.cache:
        if pipe is not None:
            raise ValueError("model.cache names texts by the files of model.path, and a loaded pipeline has none.")
        settings["cache"] = _cache(run, pick_dtype(model.dtype, device))
    settings |= {"gradient_checkpointing": model.gradient_checkpointing}
    settings |= {"batch_size": run.budget.batch_size, "seed": run.seed, "rank": 0, "alpha": 0.0, "sharded": sharded}
    if model.train == "lora":
        lora = lora or Lora()
        settings |= {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets}
    dtype = pick_dtype(model.dtype, device)
    if pipe is not None:
        return opening.adopt(pipe, dtype=None if model.dtype == "auto" else dtype, device=device, **settings)
    return opening.load(resolve(model.path), dtype=dtype, device=device, **settings)


def _cache(run, dtype):
    """Folder of encoded texts: one for all that they depend on; of the model that are its files."""
    path = resolve(run.model.path)
    print_of = fingerprint.of_model(path) | {name: version(name) for name in ("diffusers", "transformers")}
    print_of |= {"dtype": str(dtype), "family": opening.family_of(path, run.model.adapter).__name__}
    print_of |= {"max_sequence_length": run.model.max_sequence_length}
    digest = hashlib.sha256(json.dumps(print_of, sort_keys=True).encode()).hexdigest()
    return Path(run.model.cache) / digest[:16]


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Of the network's arithmetic and its frozen weights; those that are trained are fp32 everywhere."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if wanted != "float32" and device.type == "cpu":
        raise ValueError(f"model.dtype = {wanted} is about 100 times slower than float32 on a CPU; use float32.")
    return getattr(torch, wanted)


def make_learner(run: Run, policy: Policy, processes: Processes, optimizer: Callable) -> Learner:
    settings, updates = run.optimizer, run.budget.updates

    def rate(update: int) -> float:
        return learning_rate(
            update, rate=settings.learning_rate, schedule=settings.schedule, warmup=settings.warmup, updates=updates
        )

    return Learner(
        policy.trainable(),
        rate,
        micro_batch=run.budget.micro_batch,
        max_grad_norm=settings.max_grad_norm,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        reduce=processes.sum_,
        agree=processes.agree,
        gather=processes.gather,
        optimizer=optimizer,
    )
