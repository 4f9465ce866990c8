"""Policy x points -> the quantities that a recipe asked for."""

import torch
from torch import Tensor

from flowrl import vocabulary
from flowrl.recipe import Part
from flowrl.visual.policy import Policy

COMPUTED = {"velocity", "mean", "std", "log_prob"}


def evaluate(
    policy: Policy, rows: dict[str, Tensor], names: set[str], kernel: Part, density: Part, sigmas: Tensor
) -> dict[str, Tensor]:
    """Return `rows` with every name in `names`, each [B, K, ...]; a policy runs at most once per distinct call.

    Snapshots run first and without gradient, the current policy last. With one update per rollout the current policy
    *is* the old one: log_prob_old is log_prob.detach(), so the ratio is exactly 1; `log_prob_recorded` keeps what the
    rollout recorded, and its distance is logged.
    """
    wanted = {name: vocabulary.split(name) for name in names - {"log_prob_old"}}
    have = dict(rows)
    have["log_prob_recorded"] = have.pop("log_prob_old")
    snapshots = {s for _, s in wanted.values()} - {vocabulary.CURRENT}
    for suffix in [*sorted(snapshots), vocabulary.CURRENT]:
        computed = {q for q, s in wanted.values() if s == suffix and q in COMPUTED}
        computed |= {"log_prob"} if suffix == vocabulary.CURRENT else set()
        with policy.at(suffix or "current"), torch.set_grad_enabled(suffix == vocabulary.CURRENT):
            found = _quantities(policy, have, computed, kernel, density, sigmas)
        have |= {f"{name}_{suffix}" if suffix else name: x for name, x in found.items()}
    return have | {"log_prob_old": have["log_prob"].detach()}


def _quantities(policy, rows, computed, kernel, density, sigmas):
    """One run of the policy at the distinct calls of `rows`; every row then takes its own call's velocity."""
    shape, call = rows["sigma"].shape, rows["call"].flatten()
    _, which = call.unique(return_inverse=True)
    first = torch.empty(int(which.max()) + 1, dtype=torch.long).scatter_(0, which, torch.arange(len(call)))
    latents, sigma, sigma_next, next_latents = (
        rows[name].flatten(0, 1) for name in ("latents", "sigma", "sigma_next", "next_latents")
    )
    prompt = rows["prompt"].repeat_interleave(shape[1])
    first, which = first.to(latents.device), which.to(latents.device)
    velocity = policy.velocity(latents[first], sigma[first], prompt[first])[which]
    known = {"latents": latents, "velocity": velocity, "sigma": sigma, "sigma_next": sigma_next}
    known |= {"sigmas": sigmas, "step": rows["step"].flatten(), "steps": len(sigmas) - 1}
    mean, std = kernel(**known)
    out = {"velocity": velocity, "mean": mean, "std": std}
    if "log_prob" in computed:
        out["log_prob"] = density(next_latents=next_latents, mean=mean, std=std)
    return {name: out[name].unflatten(0, shape) for name in out if name in computed}
