"""Methods whose rollouts branch."""

from flowrl.advantages import history, many_rewards, outcome, tree
from flowrl.allocation import prompts
from flowrl.memory import trackers
from flowrl.objectives import clipped, penalties, select, weights
from flowrl.part import part
from flowrl.recipe import Recipe
from flowrl.recipes.visual.steps import dance_grpo, flow_grpo
from samplers import fork_plans, kernels, merges, noise, noise_plans


def branch_grpo() -> Recipe:
    """BranchGRPO: DanceGRPO on a binary tree: fork at four steps, compare the edges of one depth.  arXiv:2509.06040"""
    return dance_grpo().but(
        rollout={"steps": 20, "forks": {0: 2, 3: 2, 6: 2, 9: 2}, "noise": part(noise.correlated, strength=4.0)},
        advantage=part(outcome.raw),
        credit=part(tree.tree_depthwise, ddof=1, eps=1e-8, clamp=5.0),
        select=part(select.drawn),
        weight=part(weights.edge_mean),
        objective=part(clipped.ppo_clip, clip_low=1e-3, clip_high=1e-3),
    )


def branch_grpo_depth_pruned() -> Recipe:
    """BranchGRPO, pruned by depth: four depths are left untrained, and move up slowly.  arXiv:2509.06040"""
    return branch_grpo().but(select=part(select.depth_pruned, first=15, count=4, every=30, stop=9))


def branch_grpo_width_pruned() -> Recipe:
    """BranchGRPO, pruned by width: below the last fork the better half is trained.  arXiv:2509.06040

    select = extremes keeps the best and the worst quarter of the tree instead.
    """
    return branch_grpo().but(select=part(select.parent_top, share=0.5))


def branch_grpo_mix() -> Recipe:
    """BranchGRPO-Mix: noise at the forks and in a window that moves, the ODE elsewhere.  arXiv:2509.06040"""
    return branch_grpo().but(rollout={"noisy": part(noise_plans.window_and_forks, width=4)})


def tree_grpo_visual() -> Recipe:
    """TreeGRPO: three children at each of three steps, values backed up by softmax.  arXiv:2512.08153

    objective = reinforce with ratio = null is the loss of its algorithm; its text clips.
    """
    return dance_grpo().but(
        rollout={
            "steps": 10,
            "forks": part(fork_plans.every_noisy, children=3),
            "kernel": part(kernels.flow_sde, eta=0.7),
            "noisy": part(noise_plans.geometric_window, width=3, ratio=0.5),
        },
        advantage=part(many_rewards.standardised),
        credit=part(tree.edge_softmax, temperature=1.0),
        select=part(select.drawn),
        weight=part(weights.edge_mean),
    )


def dynamic_tree_rpo() -> Recipe:
    """Dynamic-TreeRPO: a binary tree on a moving window, noise growing with depth, best paths copied.  arXiv:2509.23352

    Values are means (tree_value); what else is OUR READING is said by the functions. The penalty is LayerTuning-RL.
    """
    return tree_grpo_visual().but(
        rollout={
            "forks": part(fork_plans.every_noisy, children=2),
            "kernel": part(kernels.growing_sde, eta=0.7, growth=0.5, levels=4),
            "noisy": part(noise_plans.progressive, width=4, every=25),
        },
        track=part(trackers.best_path, kept=0.9),
        advantage=part(outcome.grpo, scope="group", ddof=0, eps=1e-4, clamp=5.0),
        credit=part(tree.tree_value),
        objective=part(clipped.ppo_clip_by_outcome, clip_low=1e-4, clip_high=1e-4, sensitivity=0.5),
        penalties=((0.1, part(penalties.best_path_mse)),),
    )


def adagrpo() -> Recipe:
    """AdaGRPO: prompts at the policy's own level, compared with their group and with all prompts.  arXiv:2606.06828

    One of ten candidates each, by one picture along the ODE; its noise is drawn anew for the rollout (OUR READING).
    """
    return e_grpo().but(
        rollout={"noisy": part(noise_plans.listed, at=(0, 2, 4, 6))},
        pilot=part(prompts.nearest_to_proficiency, candidates=10),
        track=part(trackers.proficiency, kept=0.8),
        advantage=part(history.group_and_global, ddof=1, eps=1e-8, clamp=5.0),
        objective=part(clipped.unclipped),
    )


def e_grpo() -> Recipe:
    """E-GRPO: high-entropy jumps off one deterministic path, a group for each; weak steps merge.  arXiv:2601.00423

    rollout.strides = (1, 2) finishes every jump twice, the second time over every other level, and adds what both earn.
    """
    return flow_grpo().but(
        rollout={
            "steps": 16,
            "roots": 1,
            "forks": part(fork_plans.every_noisy, children=12),
            "apart": True,
            "noisy": part(merges.merged, eta=0.7, threshold=2.2, within=0.5),
        },
        advantage=part(outcome.grpo, scope="group", ddof=1, eps=1e-8, clamp=5.0),
        credit=part(tree.leaf_sum),
        penalties=(),
        snapshots={},
    )
