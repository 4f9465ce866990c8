"""Importance ratio of a row's decisions: (log_prob, log_prob_old, ...: [B, K]) -> ratio [B, K]; 1: equal policies.

On the forward process `elbo` stands in for log_prob.
"""

from jaxtyping import Float
from torch import Tensor

BK = Float[Tensor, "B K"]


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
