"""Importance ratio of a row's decisions: (log_prob, log_prob_old, ...: [B, K]) -> ratio [B, K]; 1: equal policies.

On the forward process `elbo` stands in for log_prob.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.objectives.penalties import kl_gaussian

BK = Float[Tensor, "B K"]
Latents = Float[Tensor, "B K *L"]


def per_decision(log_prob: BK, log_prob_old: BK) -> BK:
    """One ratio per token or denoising step.  arXiv:1707.06347

    With log-probs per latent dimension its mean is below 1: E[log ratio] = -KL, so clip ranges are 1e-5 to 1e-3.
    """
    return (log_prob - log_prob_old).exp()


def elbo_per_draw(elbo: BK, elbo_old: BK) -> BK:
    """One ratio per noise level and noise.  arXiv:2509.25050"""
    return (elbo - elbo_old).exp()


def elbo_per_row(elbo: BK, elbo_old: BK) -> BK:
    """One ratio per picture, the mean over its draws inside the exponential; the same in all K.  arXiv:2604.23380"""
    return (elbo - elbo_old).mean(1, keepdim=True).exp().expand_as(elbo)


def per_row(log_prob: BK, log_prob_old: BK, mask: BK) -> BK:
    """One ratio for all decisions of a row, the geometric mean of theirs; the same in all K.  arXiv:2510.21583

    Chunk-GRPO's, with a chunk as a row; of whole sequences that of GSPO (arXiv:2507.18071). Decisions that are not in
    the row (mask 0) have no part in it. On the first, on-policy update its gradient is that of per_decision.
    """
    moved = torch.where(mask > 0, log_prob - log_prob_old, 0).sum(1, keepdim=True)
    return (moved / mask.sum(1, keepdim=True).clamp(min=1)).exp().expand_as(log_prob)


def guarded(log_prob: BK, log_prob_old: BK, mean: Latents, mean_old: Latents, std: BK) -> BK:
    """GRPO-Guard: the log-ratio without its negative bias and on one scale for all steps.  arXiv:2510.22319

    log ratio = std * (log_prob - log_prob_old + KL) = mean(noise * (mean - mean_old)), noise that of the rollout. For
    Gaussian densities only. Scales the gradient by std, which credit = per_dt undoes.
    """
    return (std * (log_prob - log_prob_old + kl_gaussian(mean, mean_old, std))).exp()


guarded.of_gaussians = True  # the KL is added to log-probs: they have to be those of the Gaussian
