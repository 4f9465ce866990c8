"""Methods that train several consecutive steps as one decision."""

from flowrl.objectives import chunks, clipped, ratios, select, weights
from flowrl.part import part
from flowrl.recipe import Recipe
from flowrl.recipes.visual.steps import dance_grpo
from flowrl.visual import points
from samplers import kernels


def chunk_grpo() -> Recipe:
    """Chunk-GRPO: one ratio for all steps of a chunk, half of the chunks trained.  arXiv:2510.21583

    On the first, on-policy update its gradient is that of steps; select = weighted_chunks prefers chunks that change
    much, chunks = by_change finds their borders.
    """
    return dance_grpo().but(
        rollout={"steps": 17, "kernel": part(kernels.flow_sde, eta=0.7)},
        chunks=part(chunks.fixed, sizes=(2, 3, 4, 7)),
        select=part(select.random_chunks, fraction=0.5),
        weight=part(weights.chunk_mean),
        points=part(points.on_chunks),
        ratio=part(ratios.per_row),
        objective=part(clipped.ppo_clip, clip_low=5e-5, clip_high=5e-5),
    )
