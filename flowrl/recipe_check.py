"""Whether the parts of a recipe fit together; a ValueError names the role that cannot work."""

from flowrl import vocabulary
from flowrl.part import Part, nearest

_SCHEDULE = ("steps", "iteration", "generator")
_LEAVES = ("reward", "reward_weight", "group", "prompt", "root")
_KERNEL = ("sigmas", "stds", "slopes")
_TABLE = (*_LEAVES, "edge", "noisy", "log_prob_old", *_KERNEL, "steps", "iteration", "generator")
_CHUNKS = ("chunk", "change")
_PATH = ("step", "depth", "sigma", "sigma_next", "latents", "next_latents", "advantage", "weight")
_NOISE = ("sigma", "x0", "noise", "latents", "peers", "advantage", "weight")
AVAILABLE = {  # what is known when a role acts; roles not listed see a row's quantities and those of snapshots
    "rollout.kernel": ("latents", "velocity", "sigma", "sigma_next", "sigmas", "step", "steps", "depth"),
    "rollout.density": ("next_latents", "mean", "std"),
    "rollout.noisy": (*_SCHEDULE, "sigmas", "forks"),
    "rollout.forks": ("noisy",),
    "rollout.noise": ("own", "shared"),
    "rollout.tail": ("sigmas", "after"),
    "rollout.solver": ("velocity", "latents", "prompt", "sigmas"),
    "noising.times": ("draws", "generator", "sigmas"),
    "noising.elbo": ("velocity", "x0", "noise", "sigma"),
    "allocate": ("count", "per_update", "roots", "generator", "memory"),
    "pilot": ("score",),
    "estimate": ("latents", "sigma", "prompt", "velocity"),
    "track": (*_LEAVES, "memory", "divergence"),
    "advantage": _LEAVES,
    "credit": (*_TABLE, "advantage", "state_reward"),
    "chunks": ("steps", "change"),
    "select": (*_TABLE, *_CHUNKS, "advantage"),
    "update": ("group", "generator", "iteration"),
    "weight": (*_TABLE, *_CHUNKS, "advantage", "mask"),
    "points": ("tree", "advantage", "weight", "drawn", "chunk"),
    "decay": ("refresh",),
}
_TRACKED = ("pilot", "advantage", "credit", "select", "weight")  # roles that see what the tracker gives
KEPT_NAMES = {"current": "the policy itself", "ema": "the averaged weights of optimizer.ema"}
ON_PATH = (*_PATH, "mask", "best_velocity", "velocity", "mean", "std", "log_prob")
ON_NOISE = (*_NOISE, "velocity", "elbo")


def check_recipe(recipe) -> None:
    """Raise ValueError for the first role that cannot work."""
    _check_rollout(recipe)
    for role, filled in recipe.parts():
        _check_part(recipe, role, filled)
    _check_density(recipe)
    _check_idle(recipe)
    _check_snapshots(recipe)
    if recipe.couples:
        _check_coupled(recipe)
    _check_table(recipe)


def _check_rollout(recipe):
    plan, on_noise = recipe.rollout, recipe.noising is not None
    if plan.roots < 2 and not plan.forks:
        raise ValueError(
            f"rollout.roots = {plan.roots} makes groups of one: a group needs at least 2 rollouts, "
            "or all advantages are 0. Raise rollout.roots or add rollout.forks."
        )
    if not plan.guidance >= 1:
        raise ValueError(f"rollout.guidance = {plan.guidance}: expected 1 (none) or more.")
    if on_noise != ("drawn" in recipe.points.needs):
        said = "has no effect" if on_noise else "is missing"
        raise ValueError(f"noising {said}: points = {recipe.points.name}. It belongs to points = on_noise.")
    if on_noise and recipe.noising.draws < 1:
        raise ValueError(f"noising.draws = {recipe.noising.draws}: expected 1 or more.")
    wanted = () if plan.noisy is None else ("kernel", "noise") if on_noise else ("kernel", "noise", "density")
    for name in ("kernel", "noise", "density"):
        if name in wanted and getattr(plan, name) is None:
            raise ValueError(f"rollout.{name} is missing: steps that draw noise need one.")
        if name not in wanted and getattr(plan, name) is not None:
            why = "no step draws noise (rollout.noisy)" if plan.noisy is None else "nothing is trained on the path"
            raise ValueError(f"rollout.{name} has no effect: {why}.")
    if plan.apart and (plan.solver or plan.tail):
        raise ValueError("rollout.apart: noisy steps that stand apart do not land together; take out solver and tail.")
    if plan.tail is not None and plan.noisy is None:
        raise ValueError("rollout.tail has no effect: no step draws noise (rollout.noisy), so there is no last one.")
    etas = [filled.number("eta") if filled else None for filled in (plan.noisy, plan.kernel)]
    if None not in etas and etas[0] != etas[1]:
        raise ValueError(
            f"rollout.noisy.eta = {etas[0]} and rollout.kernel.eta = {etas[1]}: {plan.noisy.name} measures the noise "
            "that the kernel draws. Set both to one value."
        )
    if plan.by == "current" and plan.by_after:
        raise ValueError("rollout.by_after has no effect: rollout.by names no snapshot.")


def _check_part(recipe, role, filled):
    where = "decay" if role.startswith("snapshots.") else role
    known = AVAILABLE.get(where) or _of_a_row(recipe)
    known += recipe.gives if where in _TRACKED or where not in AVAILABLE else ()
    for number, takes in filled.takes.items():
        if takes.default is takes.empty and number not in filled.numbers:
            raise ValueError(f"{role}: {filled.name} needs a value for {number!r}: set {role}.{number}.")
    for name in filled.needs:
        quantity = name if where in AVAILABLE else _without_suffix(name)
        if quantity not in known:
            raise ValueError(
                f"{role}: {filled.name} asks for {name!r}. {nearest(name, known)}Known there: {', '.join(known)}."
            )
        if quantity == "elbo" and recipe.noising.elbo is None:
            raise ValueError(f"{role}: {filled.name} asks for {name!r}: set noising.elbo.")
        if quantity == "chunk" and recipe.chunks is None:
            raise ValueError(f"{role}: {filled.name} asks for {name!r}: set chunks.")
    if "ratio" in filled.needs and recipe.ratio is None:
        raise ValueError(f"{role}: {filled.name} asks for the ratio, but the recipe has none.")


def _check_density(recipe):
    density = recipe.rollout.density
    if recipe.ratio and getattr(recipe.ratio.fn, "of_gaussians", False) and not getattr(density.fn, "normal", False):
        raise ValueError(
            f"ratio: {recipe.ratio.name} is one of Gaussian densities, and rollout.density = {density.name}. Set "
            "rollout.density = gaussian, or another ratio."
        )


def _check_idle(recipe):
    """A part that gives what no other asks for; where credit compares states, advantage = raw stands for none."""
    roles = [recipe.objective, recipe.ratio, *(p for _, p in recipe.penalties)]
    of_rows = {_without_suffix(name) for filled in roles if filled for name in filled.needs}
    choosing = {name for filled in (recipe.pilot, recipe.allocate) if filled for name in filled.needs}
    given = {  # role -> (what it gives, what is asked for where that is known)
        "advantage": ((), set()) if recipe.advantage.name == "raw" else (("advantage",), recipe.asks),
        "ratio": (("ratio",), of_rows),
        "noising.elbo": (("elbo",), of_rows),
        "track": (recipe.gives, recipe.asks | of_rows | choosing),
    }
    for role, filled in recipe.parts():
        names, asked = given.get(role, ((), set()))
        remembered = role == "track" and "memory" in choosing  # allocate looks at what is kept
        if names and not asked & set(names) and not remembered:
            instead = "advantage = raw" if role == "advantage" else f"{role} = null"
            raise ValueError(
                f"{role} = {filled.name} has no effect: no part asks for {', '.join(names)}. Set {instead}, or a part "
                "that does."
            )
    plan = recipe.rollout
    if plan.noise is not None and plan.noise.name != "independent" and not plan.forks:
        raise ValueError(
            f"rollout.noise = {plan.noise.name} has no effect: siblings alone share noise, and rollout.forks "
            "makes none. Set rollout.noise = independent."
        )


def _of_a_row(recipe):
    return (*(ON_PATH if recipe.noising is None else ON_NOISE), "ratio")


def _check_snapshots(recipe):
    plan, used = recipe.rollout, recipe.suffixes | {recipe.rollout.by}
    if plan.by != "current" and plan.by not in recipe.snapshots:
        known = ("current", *recipe.snapshots)
        raise ValueError(f"rollout.by = {plan.by!r}: no such snapshot. Accepted: {', '.join(known)}.")
    for suffix in recipe.snapshots.keys() - used:
        raise ValueError(f"snapshots.{suffix} has no effect: no part asks for a quantity that ends in _{suffix}.")
    for suffix in recipe.suffixes - recipe.snapshots.keys():
        raise ValueError(f"a part asks for a quantity that ends in _{suffix}, but snapshots has no {suffix!r}.")
    for name, rule in recipe.snapshots.items():
        if name in KEPT_NAMES:
            raise ValueError(f"snapshots.{name}: {name!r} is {KEPT_NAMES[name]}; choose another, such as 'anchor'.")
        if rule.every < 1 or (rule.decay is None and rule.every != 1):
            raise ValueError(f"snapshots.{name}.every = {rule.every}: expected 1 or more, and no frozen snapshot.")
        if rule.guidance is not None and (name not in recipe.suffixes or not rule.guidance >= 1):
            raise ValueError(
                f"snapshots.{name}.guidance = {rule.guidance}: expected 1 (none) or more, for a snapshot that a part "
                "asks for; who draws has rollout.guidance."
            )


def _check_table(recipe):
    plan, asked = recipe.rollout, recipe.asks | set(recipe.points.needs)
    if recipe.chunks is not None and "chunk" not in asked:
        raise ValueError("chunks has no effect: no part asks for the chunk of a step.")
    if recipe.pilot is not None and (recipe.allocate is not None or recipe.track is None):
        raise ValueError("pilot: it chooses by what a tracker gives, and alone. Set track, and take out allocate.")
    if ("state_reward" in asked) != (recipe.estimate is not None):
        said = "is missing: a part asks for state_reward" if recipe.estimate is None else "has no effect: no part asks"
        raise ValueError(f"estimate {said}. It scores states on the way (credit = gain).")
    compared = sum(vocabulary.split(n)[0] == "mean" for n in recipe.needs - recipe.recorded - {"mean"})
    if "divergence" in asked and compared != 1:
        raise ValueError(
            f"track = {recipe.track.name} asks for the divergence, but the penalties compare means with {compared} "
            "snapshots: expected one, as kl_anchor_adaptive does."
        )
    for name in _KERNEL[1:]:
        if name in asked and plan.kernel is None:
            raise ValueError(f"a part asks for {name!r}, but nothing is drawn: set rollout.noisy and rollout.kernel.")
    if plan.candidates and (plan.apart or plan.solver or not plan.forks or recipe.estimate is None):
        raise ValueError(
            "rollout.candidates: the children of rollout.forks are compared where they arrive. Set rollout.forks, "
            "estimate and credit = siblings, and take out rollout.apart and rollout.solver."
        )
    if plan.apart and plan.noisy is None:
        raise ValueError("rollout.apart has no effect: no step draws noise (rollout.noisy).")
    if plan.strides != (1,) and not plan.apart:
        raise ValueError(f"rollout.strides = {list(plan.strides)} has no effect: set rollout.apart = true.")
    if plan.noisy is not None and "forks" in plan.noisy.needs and isinstance(plan.forks, Part):
        raise ValueError(
            f"rollout.noisy = {plan.noisy.name} asks for the forks and rollout.forks = {plan.forks.name} for the noisy "
            "steps. Set rollout.forks to {step: children}."
        )
    several = recipe.update.name != "once" or plan.by != "current"
    if "mean_old" in recipe.needs & recipe.recorded and several:
        raise ValueError(
            "a part asks for 'mean_old' in more updates than one, or of a snapshot that draws: keep it as "
            "snapshots.old (snapshots.old.decay: constant, snapshots.old.decay.share: 0)."
        )


def _check_coupled(recipe):
    """A coupled objective sees the scalars of an update's whole table."""
    name, needs = recipe.objective.name, recipe.objective.needs
    scalars = {"advantage", "weight", "sigma", "peers"}
    for asked in needs:
        if _without_suffix(asked) not in scalars | {"elbo"}:
            raise ValueError(f"objective: {name} couples rows and asks for {asked!r}; it may see scalars only.")
    if "peers" in needs and not recipe.noising.shared:
        raise ValueError(f"objective: {name} compares pictures at one noise level: set noising.shared = true.")
    if recipe.update.takes.get("whole_groups") and not recipe.update.numbers.get("whole_groups"):
        raise ValueError(f"objective: {name} compares the pictures of a group: set update.whole_groups = true.")


def _without_suffix(name):
    """The quantity that a name stands for; a name that stands for none, as it is."""
    try:
        return vocabulary.split(name)[0]
    except ValueError:
        return name
