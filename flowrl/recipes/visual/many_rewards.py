"""Methods that say how several rewards become one advantage."""

from flowrl.advantages import many_rewards
from flowrl.memory import trackers
from flowrl.objectives import select
from flowrl.part import part
from flowrl.recipe import Recipe
from flowrl.recipes.visual.steps import dance_grpo, flow_grpo


def gdpo() -> Recipe:
    """GDPO: a z-score for each reward, summed, then whitened over the batch.  arXiv:2601.05242"""
    return flow_grpo().but(advantage=part(many_rewards.gdpo))


def gd2po() -> Recipe:
    """GD2PO: GDPO without the pictures whose rewards contradict each other.  arXiv:2606.16771"""
    return flow_grpo().but(advantage=part(many_rewards.gd2po, tau=0.2), select=part(select.kept))


def dvao() -> Recipe:
    """DVAO: rewards weighed by their spread in the group, so that what is settled fades.  arXiv:2605.25604"""
    return flow_grpo().but(advantage=part(many_rewards.dvao))


def self_paced_grpo() -> Recipe:
    """Self-Paced GRPO: rewards from easy to hard, mixed by how far each prompt has come.  arXiv:2511.19356

    The order of the rewards in the run file is that of the stages; they lie in [0, 1].
    """
    return dance_grpo().but(rollout={"forks": {0: 16}}, track=part(trackers.self_paced, tau=(0.75,)))
