"""Methods that place noise on the steps of a straight rollout."""

from flowrl import updates
from flowrl.advantages import history, many_rewards, outcome, steps, tree
from flowrl.allocation import budgets
from flowrl.memory import trackers
from flowrl.objectives import clipped, penalties, ratios, select, weights
from flowrl.part import part
from flowrl.recipe import Recipe, Rollout, copied, frozen
from flowrl.visual import points
from samplers import density, estimates, fork_plans, kernels, noise, noise_plans, schedules, solvers


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


def ddpo() -> Recipe:
    """DDPO: DDIM steps with eta 1, rewards compared with the last ones of the same prompt.  arXiv:2305.13301

    Four pictures of a prompt per update are OUR READING: a prompt's history is full after four updates.
    """
    return flow_grpo().but(
        rollout={"steps": 50, "roots": 4, "kernel": part(kernels.ddim, eta=1.0)},
        track=part(trackers.per_prompt, size=16, needed=16),
        advantage=part(history.against_history, eps=1e-6, clamp=5.0),
        penalties=(),
        snapshots={},
    )


def loop() -> Recipe:
    """LOOP: DDPO with the mean of the other pictures of the prompt as its baseline.  arXiv:2503.00897"""
    return ddpo().but(track=None, advantage=part(outcome.rloo))


def rloo() -> Recipe:
    """RLOO: Flow-GRPO with the mean of the others as baseline, divided by no spread.  arXiv:2402.14740"""
    return flow_grpo().but(advantage=part(outcome.rloo))


def mix_grpo() -> Recipe:
    """MixGRPO: noise and training inside a window that moves on, each reward by itself.  arXiv:2507.21802

    One initial noise: the way to the window is shared, and the group forks where it begins.
    """
    return dance_grpo().but(
        rollout={
            "steps": 25,
            "forks": part(fork_plans.first_noisy, children=12),
            "kernel": part(kernels.flow_sde, eta=0.7),
            "noisy": part(noise_plans.progressive, width=4, every=25),
        },
        advantage=part(many_rewards.per_reward, ddof=1, eps=1e-8, clamp=5.0),
        select=part(select.drawn),
    )


def mix_grpo_flash() -> Recipe:
    """MixGRPO-Flash: MixGRPO whose rollouts end in a few steps of a fast solver.  arXiv:2507.21802

    Two fifths of the steps after the window. Its variant Flash* is noisy = window with tail.share .2.
    """
    return mix_grpo().but(
        rollout={
            "noisy": part(noise_plans.progressive, width=4, every=20),
            "tail": part(schedules.compressed, share=0.4),
            "solver": part(solvers.dpm_solver),
        }
    )


def flow_grpo_fast_branch() -> Recipe:
    """Flow-GRPO-Fast, branching: a shared path to a random step, nine copies, two noisy steps.  arXiv:2505.05470"""
    return flow_grpo_fast().but(
        rollout={
            "roots": 1,
            "forks": part(fork_plans.first_noisy, children=9),
            "noisy": part(noise_plans.random_window, width=2, within=0.5),
        }
    )


def tempflow_grpo() -> Recipe:
    """TempFlow-GRPO: one noisy step earns it all, by the noise that it injects.  arXiv:2508.04324

    Four initial noises with six branches each; advantage = grpo_per_noise compares the branches of one noise alone.
    """
    return flow_grpo().but(
        rollout={
            "roots": 4,
            "forks": part(fork_plans.every_noisy, children=6),
            "noisy": part(noise_plans.single, within=0.9),
        },
        advantage=part(outcome.grpo, scope="group", ddof=0, eps=1e-4, clamp=5.0),
        credit=part(steps.noise_aware),
    )


def grpo_guard() -> Recipe:
    """GRPO-Guard: a log-ratio without its negative bias, and steps of equal gradient.  arXiv:2510.22319"""
    return flow_grpo().but(
        credit=part(steps.per_dt),
        ratio=part(ratios.guarded),
        objective=part(clipped.ppo_clip, clip_low=2e-6, clip_high=2e-6),
    )


def flow_dppo() -> Recipe:
    """Flow-DPPO: no clip range; steps that have moved far enough gain no more.  https://github.com/Tencent-Hunyuan/UniRL

    Two updates per rollout are OUR READING: in a first one nothing has moved yet.
    """
    return flow_grpo().but(
        rollout={"noisy": part(noise_plans.random_window, width=2, within=0.5)},
        update=part(updates.minibatches, count=2),
        objective=part(clipped.dppo, largest=1e-5),
        penalties=(),
        snapshots={"old": copied()},
    )


def superflow() -> Recipe:
    """SuperFlow: prompts of uncertain outcome more often, rewards against what was expected.  arXiv:2512.17951

    For rewards in [0, 1]. A step's share is its noise (noise_aware), the mean one (OUR READING).
    """
    return flow_grpo().but(
        rollout={"roots": 24},
        allocate=part(budgets.by_expected, fewer=(3, 2, 1, 0)),
        track=part(trackers.beta_counts, kept=0.9),
        advantage=part(history.against_expected),
        credit=part(steps.noise_aware),
    )


def stepwise_flow_grpo() -> Recipe:
    """Stepwise-Flow-GRPO: a step earns what it adds to the reward of the clean estimate.  arXiv:2603.28718

    Sixteen paths from one noise, five Euler steps to every estimate; clip range and KL are Flow-GRPO's (OUR READING).
    """
    return flow_grpo().but(
        rollout={"roots": 1, "forks": {0: 16}, "kernel": part(kernels.ddim_sde, eta=0.7)},
        estimate=part(estimates.clean_estimate, substeps=5),
        advantage=part(outcome.raw),
        credit=part(steps.gain, ddof=0, eps=1e-8, clamp=5.0),
    )


def drm_stepwise() -> Recipe:
    """DRM, step-wise GRPO: six candidates a step, compared by the reward of where they lead.  https://github.com/jjaxonx/DRM

    A random one goes on (OUR READING). Rewards on pictures see a one-step clean estimate; estimate = as_drawn shows
    rewards that ask for latents and sigma, as its own does, the noisy latents.
    """
    return flow_grpo().but(
        rollout={"roots": 4, "forks": part(fork_plans.every_noisy, children=6), "candidates": True},
        estimate=part(estimates.clean_estimate, substeps=1),
        advantage=part(outcome.raw),
        credit=part(steps.siblings, ddof=1, eps=1e-8, clamp=5.0),
        weight=part(weights.edge_mean),
        penalties=(),
        snapshots={},
    )


def sage_grpo() -> Recipe:
    """SAGE-GRPO: exact noise, steps of equal gradient, a moving anchor and a coefficient that adapts.  arXiv:2603.21872

    One noise for the four paths of a prompt is OUR READING.
    """
    return dance_grpo().but(
        rollout={"steps": 20, "forks": {0: 4}, "kernel": part(kernels.sage, eta=0.5)},
        track=part(trackers.adaptive_coefficient, target=1e-5, least=1e-7, most=1e-5),
        credit=part(steps.equalised),
        select=part(select.drawn),
        penalties=((1.0, part(penalties.kl_anchor_adaptive)), (0.1, part(penalties.log_prob_drop_adaptive))),
        snapshots={"anchor": copied(every=10)},
    )
