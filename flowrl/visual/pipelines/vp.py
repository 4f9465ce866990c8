"""Variance-preserving models, which predict epsilon or v at integer timesteps, as flows.

With a the cumulative alpha of a timestep, sigma = sqrt(1 - a) / (sqrt(a) + sqrt(1 - a)), and the model's own latents
are ours divided by hypot(1 - sigma, sigma): sqrt(a) = (1 - sigma) / hypot(1 - sigma, sigma) weighs the data, and
sqrt(1 - a) = sigma / hypot(1 - sigma, sigma) the noise.  DDIM's step in these variables is samplers.kernels.ddim.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.visual.pipelines import grids
from flowrl.visual.pipelines.family import Family, Text
from samplers.kernels import spread


class VariancePreserving(Family):
    """A subclass says what the network predicts of the model's own latents; the pipeline's scheduler, what that is."""

    GRIDS = ("pipeline",)  # DDIM takes no sigmas

    def __init__(self, pipe, *drawn, **named):
        super().__init__(pipe, *drawn, **named)
        table = grids.table(pipe.scheduler)
        self.range = float(table[0]), float(table[-1])
        self.between = {table.device: (table[:-1] + table[1:]) / 2}  # by device
        self.predicts = pipe.scheduler.config.prediction_type

    @abstractmethod
    def predict(self, latents: Tensor, timestep: Tensor, texts: Sequence[Text]) -> Tensor:
        """Epsilon or v [B, *shape] of the model's own latents [B, *shape] at timestep [B], int64."""

    def network(self):
        return getattr(self.pipe, self.NETWORKS[0])

    def default_size(self):
        sides = self.network().config.sample_size
        height, width = (sides, sides) if isinstance(sides, int) else sides
        return height * self.pipe.vae_scale_factor, width * self.pipe.vae_scale_factor

    def multiple(self):
        return math.lcm(8, self.pipe.vae_scale_factor)  # diffusers asks for 8

    def shape(self):
        scale = self.pipe.vae_scale_factor
        return self.network().config.in_channels, self.height // scale, self.width // scale

    def sigmas(self, steps, grid):
        return grids.walked_by_ddim(self.pipe.scheduler, steps)

    def timestep(self, sigma: Tensor) -> Tensor:
        """Nearest entry of the table, [B] int64."""
        if sigma.device not in self.between:  # copied once: to copy is to wait for the device
            self.between[sigma.device] = self.between[torch.device("cpu")].to(sigma.device)
        return torch.bucketize(sigma.contiguous(), self.between[sigma.device])

    def velocity(self, latents, sigma, texts, guidance):
        """Beyond the table the latents keep their own scale, and the prediction is read as at its end."""
        own = latents.float() / spread(torch.hypot(1 - sigma, sigma), latents)
        predicted = self.predict(own.to(latents.dtype), self.timestep(sigma), texts).float()
        sigma = spread(sigma.clamp(*self.range), latents)
        scale = torch.hypot(1 - sigma, sigma)
        signal, noise = (1 - sigma) / scale, sigma / scale
        if self.predicts == "epsilon":
            return ((signal + noise) * predicted - own) / signal
        return (signal + noise) * predicted + (noise - signal) * own

    def decode(self, latents):
        return self.pipe.vae.decode(latents / self.pipe.vae.config.scaling_factor, return_dict=False)[0]

    def one_step(self, steps):
        return grids.ddim(self.pipe.scheduler)

    def draw(self, prompts, noise, steps, guidance, pictures):
        return self.pipe(
            prompt=prompts, guidance_scale=guidance, num_inference_steps=steps, latents=noise, height=self.height,
            width=self.width, output_type="pt", **self.asked(),
        ).images  # fmt: skip

    def asked(self) -> dict[str, object]:
        """Arguments of pipe(...) that the class has beside those of all."""
        return {}
