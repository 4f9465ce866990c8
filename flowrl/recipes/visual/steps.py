"""Methods that place noise on the steps of a straight rollout."""

from flowrl import updates
from flowrl.advantages import outcome, tree
from flowrl.objectives import clipped, penalties, ratios, select, weights
from flowrl.part import part
from flowrl.recipe import Recipe, Rollout, frozen
from flowrl.visual import points
from samplers import density, kernels, noise, noise_plans


def flow_grpo() -> Recipe:
    """Flow-GRPO: SDE rollouts, group mean over batch std, PPO clip on every step, KL to the base.  arXiv:2505.05470"""
    return Recipe(
        rollout=Rollout(
            steps=10,
            roots=16,
            kernel=part(kernels.flow_sde, eta=0.7),
            density=part(density.gaussian),
            noisy=part(noise_plans.all_but_last),
            noise=part(noise.independent),
        ),
        advantage=part(outcome.grpo, scope="batch", ddof=0, eps=1e-4, clamp=5.0),
        credit=part(tree.broadcast),
        select=part(select.drawn),
        update=part(updates.once),
        weight=part(weights.token_mean),
        points=part(points.on_path),
        ratio=part(ratios.per_decision),
        objective=part(clipped.ppo_clip, clip_low=1e-4, clip_high=1e-4),
        penalties=((0.04, part(penalties.kl_mean_over_s2)),),
        snapshots={"ref": frozen()},
    )


def flow_grpo_fast() -> Recipe:
    """Flow-GRPO-Fast: noise and training inside a short random window, no guidance, no KL.  arXiv:2505.05470

    The window form with the coefficients-preserving kernel and its squared-error density, whose clip range is 1e-5.
    """
    return flow_grpo().but(
        rollout={
            "kernel": part(kernels.cps, eta=0.8),
            "density": part(density.squared_error),
            "noisy": part(noise_plans.random_window, width=3, within=0.5),
        },
        objective=part(clipped.ppo_clip, clip_low=1e-5, clip_high=1e-5),
        penalties=(),
        snapshots={},
    )


def flow_cps() -> Recipe:
    """Flow-CPS: Flow-GRPO on coefficients-preserving steps; squared errors in place of densities.  arXiv:2509.05952"""
    return flow_grpo().but(
        rollout={"kernel": part(kernels.cps, eta=0.8), "density": part(density.squared_error)},
        objective=part(clipped.ppo_clip, clip_low=1e-5, clip_high=1e-5),
        penalties=((0.04, part(penalties.mean_mse)),),
    )


def dance_grpo() -> Recipe:
    """DanceGRPO: constant-noise SDE from one shared noise, group z-score, 60 % of the steps.  arXiv:2505.07818"""
    return flow_grpo().but(
        rollout={"steps": 16, "roots": 1, "forks": {0: 12}, "kernel": part(kernels.dance_sde, eta=0.3)},
        advantage=part(outcome.grpo, scope="group", ddof=1, eps=1e-8, clamp=5.0),
        select=part(select.random_steps, fraction=0.6),
        penalties=(),
        snapshots={},
    )
