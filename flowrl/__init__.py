"""Online reinforcement learning for diffusion and flow-matching generators."""

from flowrl.recipe import Part, Recipe, Rollout, frozen, part
from flowrl.train_step import train_step

__all__ = ["Part", "Recipe", "Rollout", "frozen", "part", "train_step"]
