"""A 2-D flow policy that learns in seconds on a CPU, for tests and tutorials.

Its pictures are one pixel: the two coordinates squashed into red and green, so that the whole loop runs on it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowrl.recipe import Snapshot
from flowrl.visual.policy import Example, ShareOut, Snapshots
from samplers import schedules


class ToyPolicy:
    """Policy protocol over a small MLP; data is N(0, 0.7^2) before any training, the same for every prompt."""

    frames = 1

    def __init__(self, prompts: int = 4, hidden: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(prompts, 8)
        self.net = nn.Sequential(
            nn.Linear(2 + 1 + 8, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2)
        )
        for parameter in (*self.embed.parameters(), *self.net.parameters()):
            fan_in = parameter.shape[-1]
            parameter.data = (torch.randn(parameter.shape, generator=generator) / fan_in**0.5).to(dtype)
        self.dtype, self.guidance = dtype, 1.0
        self.forwards = self.backwards = 0
        self._fit(generator)
        self.snapshots = Snapshots([p for _, p in self.trainable()])

    def _fit(self, generator, steps=400, batch=256):
        """Flow matching on the starting distribution."""
        optimizer = torch.optim.Adam([p for _, p in self.trainable()], 3e-3)
        for _ in range(steps):
            x0, noise = (torch.randn(batch, 2, generator=generator).to(self.dtype) * s for s in (0.7, 1.0))
            sigma = torch.rand(batch, generator=generator).to(self.dtype)
            prompt = torch.randint(self.embed.num_embeddings, (batch,), generator=generator)
            latents = (1 - sigma[:, None]) * x0 + sigma[:, None] * noise
            loss = ((self.velocity(latents, sigma, prompt) - (noise - x0)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        self.forwards = self.backwards = 0

    rows_per_state = 1

    def encode(self, examples: Sequence[Example]) -> Tensor:
        return torch.tensor([int(e.prompt) for e in examples])

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, 2, generator=generator).to(self.dtype)

    def sigmas(self, steps: int) -> Tensor:
        return schedules.linear(steps)

    def velocity(self, latents: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        self.forwards += len(latents)
        self.backwards += len(latents) * torch.is_grad_enabled()
        return self.net(torch.cat([latents, sigma.to(latents.dtype)[:, None], self.embed(prompt)], dim=1))

    def decode(self, latents: Tensor) -> Tensor:
        pixels = torch.cat([latents.sigmoid(), torch.full_like(latents[:, :1], 0.5)], dim=1)
        return pixels[:, :, None, None]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [*self.embed.named_parameters("embed"), *self.net.named_parameters("net")]

    def distribute(self, share_out: ShareOut) -> None:
        for network in (self.embed, self.net):
            share_out(network, ())
        self.snapshots = Snapshots([p for _, p in self.trainable()], pinned=True)

    def snapshot(self, name: str, rule: Snapshot, update: int) -> None:
        self.snapshots.refresh(name, rule, update)

    def at(self, name: str):
        return self.snapshots.at(name)
