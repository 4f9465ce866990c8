"""Euler steps in the place of a multi-step scheduler, which no one-step rollout can equal."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler


class OwnLevels(FlowMatchEulerDiscreteScheduler):
    """Euler at the levels of another scheduler, whose timesteps are not cut to whole numbers."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def set_timesteps(self, num_inference_steps, device=None):
        self.other.set_timesteps(num_inference_steps)
        super().set_timesteps(sigmas=self.other.sigmas[:-1].tolist(), device=device)

    def start(self, noise):
        """Noise as a state at the first level, which may lie below 1: as samplers.rollout takes it."""
        self.set_timesteps(1)
        return noise * torch.hypot(1 - self.sigmas[0], self.sigmas[0])
