"""Policy x points -> the quantities that a recipe asked for."""

from contextlib import contextmanager

import torch
from torch import Tensor

from flowrl import vocabulary
from flowrl.recipe import Recipe
from flowrl.visual.policy import Policy

COMPUTED = {"velocity", "mean", "std", "log_prob", "elbo"}


def evaluate(
    policy: Policy,
    rows: dict[str, Tensor],
    names: set[str],
    recipe: Recipe,
    sigmas: Tensor,
    *,
    on_policy: bool = True,
    gradient: bool = True,
) -> dict[str, Tensor]:
    """Return `rows` with every name in `names`, each [B, K, ...]; a policy runs at most once per distinct call.

    Snapshots run first and without gradient, the current policy last. on_policy: the current policy *is* the one that
    drew, so what is recorded of that (log_prob_old, elbo_old) is its own value detached and ratios are exactly 1;
    the log-prob that the rollout recorded is then at hand as log_prob_recorded.
    """
    recorded = names & recipe.recorded
    wanted = {name: vocabulary.split(name) for name in names - recorded}
    have = dict(rows)
    if on_policy and "log_prob_old" in have:
        have["log_prob_recorded"] = have.pop("log_prob_old")
    for suffix in [*sorted({s for _, s in wanted.values()} - {vocabulary.CURRENT}), vocabulary.CURRENT]:
        computed = {q for q, s in wanted.values() if s == suffix and q in COMPUTED}
        if suffix == vocabulary.CURRENT:
            computed |= {name.removesuffix("_old") for name in recorded}
        with _as(policy, suffix, recipe), torch.set_grad_enabled(gradient and suffix == vocabulary.CURRENT):
            found = _quantities(policy, have, computed, recipe, sigmas) if computed else {}
        have |= {f"{name}_{suffix}" if suffix else name: x for name, x in found.items()}
    return have | ({name: have[name.removesuffix("_old")].detach() for name in recorded} if on_policy else {})


@contextmanager
def _as(policy, suffix, recipe):
    """The policy with the weights and the guidance of a snapshot."""
    own = recipe.snapshots[suffix].guidance if suffix else None
    before = policy.guidance
    with policy.at(suffix or "current"):
        policy.guidance = before if own is None else own
        try:
            yield
        finally:
            policy.guidance = before


def _quantities(policy, rows, computed, recipe, sigmas):
    """One run of the policy at the distinct calls of `rows`; every row then takes its own call's velocity."""
    shape = rows["sigma"].shape
    latents, sigma = rows["latents"].flatten(0, 1), rows["sigma"].flatten()
    out = {"velocity": _velocity(policy, rows, latents, sigma)}
    if "next_latents" in rows and computed & {"mean", "std", "log_prob"}:
        known = {"latents": latents, "sigma": sigma, "sigma_next": rows["sigma_next"].flatten()}
        known |= {"sigmas": sigmas, "steps": len(sigmas) - 1}
        known |= {name: rows[name].flatten() for name in ("step", "depth")}
        out["mean"], out["std"] = recipe.rollout.kernel(**known, **out)
        if "log_prob" in computed:
            out["log_prob"] = recipe.rollout.density(next_latents=rows["next_latents"].flatten(0, 1), **out)
    out = {name: x.unflatten(0, shape) for name, x in out.items()}
    if "elbo" in computed:
        out["elbo"] = recipe.noising.elbo(**rows | out)
    return {name: out[name] for name in out if name in computed}


def _velocity(policy, rows, latents, sigma):
    prompt, call = rows["prompt"].repeat_interleave(rows["sigma"].shape[1]), rows["call"].flatten()
    _, which = call.unique(return_inverse=True)
    count = int(which.max()) + 1
    if count == len(call):
        return policy.velocity(latents, sigma, prompt)
    first = torch.empty(count, dtype=torch.long).scatter_(0, which, torch.arange(len(call)))
    prompt, first, which = prompt[first], first.to(latents.device), which.to(latents.device)
    return policy.velocity(latents[first], sigma[first], prompt)[which]
