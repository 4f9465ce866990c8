"""One deterministic picture of every candidate: which prompts an update rolls out."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowrl import randomness
from flowrl.advantages.outcome import raw
from flowrl.recipe import Recipe
from flowrl.visual.policy import Example, Policy
from flowrl.visual.ranks import Ranks, in_step
from flowrl.visual.score import Score, show
from samplers import rollout


def pilot(
    policy: Policy,
    recipe: Recipe,
    examples: Sequence[Example],
    score: Score,
    memory: Mapping[str, Tensor],
    *,
    seed: int,
    iteration: int,
    batch_size: int,
    ranks: Ranks,
) -> tuple[list[int], dict[str, Tensor], Mapping[str, Tensor]]:
    """(places of the examples that are chosen, what the tracker gives, the memory after it), the same on every rank.

    The policy has the weights that roll out. Candidates stand next to each other, as many for each choice as the
    recipe's pilot says. The tracker sees the scores of all of them before any is chosen.
    """
    first, mine = ranks.share(examples)
    names = range(first, first + len(mine))
    noise = [policy.noise(1, randomness.generator(seed, iteration, "pilot noise", i)) for i in names]
    policy.guidance = recipe.rollout.guidance
    velocity = in_step(policy, ranks, len(mine), batch_size)
    tree = rollout(velocity, torch.cat(noise), policy.encode(mine), policy.sigmas(recipe.rollout.steps))
    table = show(score, policy.decode, tree.leaves(), mine, torch.tensor(names))
    reward, valid = ranks.gather(table.value), ranks.gather(table.valid)
    if not bool(valid.any()):
        raise RuntimeError(f"none of {len(examples)} candidates could be scored, so no prompt can be chosen.")
    tracked, memory = recipe.track(reward=reward[valid], reward_weight=table.weight, memory=memory)
    total = torch.where(valid, raw(reward, table.weight), torch.inf)  # what has no score is far from any target
    places, chosen = torch.arange(len(examples)), []
    for block in places.split(int(recipe.pilot.number("candidates"))):
        chosen.append(int(block[recipe.pilot(score=total[block], **tracked)]))
    return chosen, tracked, memory
