"""Noise levels that a pipeline walks, made by its own scheduler."""

import copy
import inspect

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor


def euler(scheduler: SchedulerMixin) -> FlowMatchEulerDiscreteScheduler:
    """The one-step scheduler of the same flow: itself, or what shares its shift where it keeps a history of steps."""
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return copy.deepcopy(scheduler)
    config = scheduler.config
    if config.get("use_flow_sigmas") and config.get("prediction_type") == "flow_prediction":
        return FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=config.num_train_timesteps, shift=config.get("flow_shift") or 1.0
        )
    raise ValueError(
        f"scheduler {type(scheduler).__name__}: its noise levels are no flow's. Accepted are "
        "FlowMatchEulerDiscreteScheduler, and multi-step schedulers with use_flow_sigmas and flow_prediction."
    )


def walked(scheduler: SchedulerMixin, steps: int, *, linear: bool, mu: float | None = None) -> Tensor:
    """fp32 [steps + 1] after set_timesteps(steps), or with `linear` after set_timesteps(sigmas=linspace(1, 1/steps)).

    A multi-step scheduler is asked for its own levels: it shifts them once, where Euler's set_timesteps(steps) shifts
    them twice. It starts short of 1 (.9997), for its logarithms; here it starts at 1, where all is noise.

    mu: shift of a scheduler with use_dynamic_shifting
    """
    one_step = euler(scheduler)
    walk = one_step if linear else copy.deepcopy(scheduler)
    extra = {"mu": mu} if walk.config.get("use_dynamic_shifting") else {}
    if linear:
        walk.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), **extra)
    else:
        walk.set_timesteps(steps, **extra)
    sigmas = walk.sigmas.cpu().float()
    if walk.config.get("use_flow_sigmas"):
        sigmas[0] = 1
    return sigmas


class Levels(FlowMatchEulerDiscreteScheduler):
    """Euler steps along given noise levels, however many it is asked for."""

    def __init__(self, sigmas: Tensor):
        super().__init__()
        self.levels = sigmas

    def set_timesteps(self, num_inference_steps=None, device=None, **ignored):
        super().set_timesteps(sigmas=self.levels[:-1].tolist(), device=device)


def shift_by_tokens(config, tokens: int, *, most: float) -> float:
    """mu of use_dynamic_shifting: linear in the number of image tokens.

    most: max_shift where the scheduler's configuration does not say
    """
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", most)
    return least + (most - least) * (tokens - low) / (high - low)


def ddim(scheduler: SchedulerMixin) -> DDIMScheduler:
    """The one-step scheduler of the same variance-preserving process, ending at alpha 1 and clipping nothing.

    Spaced by "linspace", DDIM's timesteps are not those that its steps end at; "trailing" begins at the same one
    (arXiv:2305.08891).
    """
    config = scheduler.config
    if "beta_schedule" not in config or config.get("prediction_type") not in ("epsilon", "v_prediction"):
        raise ValueError(
            f"scheduler {type(scheduler).__name__}: expected a variance-preserving one that predicts epsilon or "
            "v_prediction, such as DDIMScheduler."
        )
    if config.get("rescale_betas_zero_snr") and config["prediction_type"] == "epsilon":
        raise ValueError(
            f"scheduler {type(scheduler).__name__}: rescale_betas_zero_snr begins at noise without signal, where "
            "epsilon says nothing about the picture; expected prediction_type = v_prediction with it."
        )
    # its own values, not from_config: that puts DDIM's defaults in the place of the other class's
    same = {name: config[name] for name in inspect.signature(DDIMScheduler).parameters if name in config}
    if same.get("timestep_spacing") == "linspace":
        same["timestep_spacing"] = "trailing"
    return DDIMScheduler(**same | {"set_alpha_to_one": True, "clip_sample": False, "thresholding": False})


def table(scheduler: SchedulerMixin) -> Tensor:
    """sigma of every training timestep, rising, fp32: sqrt(1 - a) / (sqrt(a) + sqrt(1 - a)), a the cumulative alpha."""
    kept = ddim(scheduler).alphas_cumprod.double()
    return ((1 - kept).sqrt() / (kept.sqrt() + (1 - kept).sqrt())).float()


def walked_by_ddim(scheduler: SchedulerMixin, steps: int) -> Tensor:
    """fp32 [steps + 1]: the levels at DDIM's timesteps, and 0.  They begin below 1, but for zero terminal SNR.

    With "trailing" and a number of steps that does not divide that of the timesteps, DDIMScheduler.step ends at another
    level than that of its next timestep, one off at most; here they are the same.
    """
    levels, walk = table(scheduler), ddim(scheduler)
    if steps >= len(levels):
        raise ValueError(
            f"{steps} steps: the scheduler has {len(levels)} timesteps; accepted are 1 to {len(levels) - 1}."
        )
    walk.set_timesteps(steps)
    return torch.cat([levels[walk.timesteps], torch.zeros(1)])
