"""Sampling that lets a reward choose at every step: DRM's step-wise sampling.  https://github.com/jjaxonx/DRM"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.candidates import best_one
from samplers.kernels import bind, ode, spread
from samplers.tree import started


@torch.no_grad()
def guided(
    velocity: Callable,
    latents: Float[Tensor, "B *L"],
    prompt: Int[Tensor, " B"],
    sigmas: Float[Tensor, " T1"],
    kernel: Callable,
    score: Callable,
    *,
    count: int,
    ahead: bool = True,
    generators: Sequence[torch.Generator],
) -> Float[Tensor, "B *L"]:
    """The finals: at every step but the last `count` draws of each state, of which the best scored goes on.

    kernel:     of every step; there is no tree, so it may not ask for the depth in one
    velocity:   (latents, sigma, prompt) -> [B, *L]; asked once for every draw, and what goes on keeps its own
    score:      (latents [B * count, *L], sigma [B * count]), the draws of a state next to each other -> [B * count]
    ahead:      score one-step clean estimates; otherwise the noisy draws, and the network sees only what goes on
    generators: one private CPU generator per row
    """
    steps, rows, latents = len(sigmas) - 1, len(latents), started(latents, sigmas)
    v = velocity(latents, sigmas[:1].to(latents.device).expand(rows), prompt)
    for t in range(steps - 1):
        sigma, sigma_next = (sigmas[i].to(latents.device).expand(rows) for i in (t, t + 1))
        step = bind(kernel, sigmas=sigmas, step=torch.tensor(t), steps=steps)
        mean, std = (x.repeat_interleave(count, 0) for x in step(latents, v, sigma, sigma_next))
        noise = [torch.randn(count, *latents.shape[1:], generator=g) for g in generators]
        drawn = mean + spread(std, mean) * torch.cat(noise).to(mean)
        level = sigma_next.repeat_interleave(count)
        if ahead:
            seen = velocity(drawn, level, prompt.repeat_interleave(count))
            worth = score(drawn - spread(level, drawn) * seen, torch.zeros_like(level))
        else:
            worth = score(drawn, level)
        chosen = (torch.arange(rows) * count + best_one(worth.view(rows, count)).cpu()).to(drawn.device)
        latents = drawn[chosen]
        v = seen[chosen] if ahead else velocity(latents, sigma_next, prompt)
    return ode(latents, v, sigmas[-2].to(latents.device).expand(rows), sigmas[-1].to(latents.device).expand(rows))[0]
