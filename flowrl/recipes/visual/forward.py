"""Methods that train on the forward process: finished pictures, noised again at levels that a rule draws.

They roll out without noise and without guidance, from different initial noises, and need only the finished pictures.
"""

from flowrl import decays
from flowrl.advantages import outcome
from flowrl.objectives import clipped, elbos, forward, penalties, ratios, select
from flowrl.part import part
from flowrl.recipe import Noising, Recipe, Snapshot, copied, frozen
from flowrl.recipes.visual.steps import flow_grpo
from flowrl.visual import points
from samplers import solvers, times

WITHOUT_NOISE = {"kernel": None, "density": None, "noisy": None, "noise": None}
FOLLOWING = Snapshot(
    part(decays.linear, slope=0.001, most=0.3)
)  # a copy at first, of which a refresh keeps 30 % at last


def diffusion_nft() -> Recipe:
    """DiffusionNFT: fit one mixture with an old policy to good pictures, its mirror to bad ones.  arXiv:2509.16117

    The old policy rolls out and follows ever more slowly; nine of ten steps' levels per picture.
    """
    return flow_grpo().but(
        rollout={**WITHOUT_NOISE, "roots": 24, "solver": part(solvers.dpm_solver), "by": "old"},
        noising=Noising(draws=9, times=part(times.discrete)),
        select=part(select.everything),
        points=part(points.on_noise),
        ratio=None,
        objective=part(forward.nft, beta=1.0, largest=5.0),
        penalties=((1e-4, part(penalties.velocity_mse)),),
        snapshots={"old": Snapshot(part(decays.linear, slope=0.001, most=0.5)), "ref": frozen()},
    )


def awm() -> Recipe:
    """Advantage Weighted Matching: policy gradient on the matching error in place of the log-prob.  arXiv:2509.25050

    The clip range of 1 hardly ever binds; an anchor that follows holds the policy back. On a schedule that is shifted
    already (SD3's own) set noising.times.shift = 1.
    """
    return diffusion_nft().but(
        rollout={"steps": 14, "by": "current"},
        noising=Noising(
            draws=6,
            times=part(times.stratified, first=1, fraction=0.9, shift=3.0),
            elbo=part(elbos.weighted, power=0.0),
        ),
        advantage=part(outcome.grpo, scope="batch", ddof=0, eps=1e-4, clamp=5.0, scale=0.2),
        ratio=part(ratios.elbo_per_draw),
        objective=part(clipped.ppo_clip, clip_low=1.0, clip_high=1.0),
        penalties=((1e-3, part(penalties.velocity_mse)), (1.0, part(penalties.velocity_mse_anchor))),
        snapshots={"ref": frozen(), "anchor": FOLLOWING},
    )


def v_grpo() -> Recipe:
    """V-GRPO: a ratio of self-normalised errors, four stratified levels, shared within a group.  arXiv:2604.23380

    With one update per rollout the ratio is 1 and its clip range idle; the soft clamp of the advantage holds it back.
    """
    return awm().but(
        rollout={"steps": 16},
        noising=Noising(draws=4, times=part(times.stratified), elbo=part(elbos.self_normalised), shared=True),
        advantage=part(outcome.grpo_soft, scope="batch", limit=3.0),
        points=part(points.on_noise, together=True),
        ratio=part(ratios.elbo_per_row),
        objective=part(clipped.ppo_clip, clip_low=1e-2, clip_high=1e-2),
        penalties=(),
        snapshots={},
    )


def dgpo() -> Recipe:
    """DGPO: advantage-weighted matching, weighed by what a group as a whole has yet to gain.  arXiv:2510.08425

    One reference that follows, for the gain, the clip and the penalty (OUR READING); it rolls out after 200 updates.
    Four of the first six steps' levels, per group and not the same for all groups (OUR READING).
    """
    return awm().but(
        rollout={"steps": 10, "roots": 16, "by": "ref", "by_after": 200},
        noising=Noising(
            draws=4, times=part(times.discrete, first=0, last=6), elbo=part(elbos.weighted, power=0.0), shared=True
        ),
        advantage=part(outcome.grpo, scope="batch", ddof=0, eps=1e-4, clamp=5.0),
        ratio=None,
        objective=part(forward.dgpo, beta=100.0, clip=1e-2),
        penalties=((1e-3, part(penalties.velocity_mse)),),
        snapshots={"ref": FOLLOWING},
    )


def crd() -> Recipe:
    """Centered Reward Distillation: the gain over an old policy shall equal the centred reward.  arXiv:2603.14128

    A third policy rolls out, and the reference is guided. Noise shared within a group is OUR READING.
    """
    return dgpo().but(
        rollout={"roots": 24, "by": "drawing", "by_after": 0},
        noising=Noising(draws=20, times=part(times.uniform), elbo=part(elbos.self_normalised, power=0.0), shared=True),
        objective=part(forward.crd, beta=1.0, largest=5.0, scope="group"),
        penalties=((0.1, part(penalties.velocity_mse_of_good, largest=5.0, least=1e-3)),),
        snapshots={
            "old": Snapshot(part(decays.linear, start=0.25, slope=0.005, most=0.999)),
            "drawing": Snapshot(part(decays.linear, after=75, slope=0.0075, most=0.999)),
            "ref": frozen(guidance=4.5),
        },
    )


def diffusion_dpo() -> Recipe:
    """Diffusion-DPO: prefer the best picture of a group to the worst, online.  arXiv:2311.12908

    The reference is refreshed every 40 updates; one logit-normal level and noise for both pictures of a pair.
    """
    return dgpo().but(
        rollout={"steps": 40, "roots": 24, "solver": None, "by": "current", "by_after": 0},
        noising=Noising(draws=1, times=part(times.logit_normal), elbo=part(elbos.weighted, power=0.0), shared=True),
        advantage=part(outcome.best_and_worst),
        select=part(select.preferred),
        objective=part(forward.dpo, beta=100.0),
        penalties=(),
        snapshots={"ref": copied(every=40)},
    )


def rwr() -> Recipe:
    """RWR: flow matching on one's own pictures, weighed by the reward itself.  arXiv:2302.12192

    Rewards must not be negative. Four logit-normal levels per picture are OUR READING.
    """
    return diffusion_dpo().but(
        rollout={"steps": 10},
        noising=Noising(draws=4, times=part(times.logit_normal), elbo=part(elbos.weighted, power=0.0)),
        advantage=part(outcome.reward_itself),
        select=part(select.everything),
        objective=part(forward.matching),
        snapshots={},
    )


def sft() -> Recipe:
    """SFT on the best: flow matching on the best of each group, the others left out.  arXiv:2304.06767"""
    return rwr().but(advantage=part(outcome.best_of_group))
