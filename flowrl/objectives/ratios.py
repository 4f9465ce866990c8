"""Importance ratio of a row's decisions: (log_prob, log_prob_old, ...: [B, K]) -> ratio [B, K]; 1: equal policies."""

from jaxtyping import Float
from torch import Tensor

BK = Float[Tensor, "B K"]


def per_decision(log_prob: BK, log_prob_old: BK) -> BK:
    """One ratio per token or denoising step.  arXiv:1707.06347

    With log-probs per latent dimension its mean is below 1: E[log ratio] = -KL, so clip ranges are 1e-5 to 1e-3.
    """
    return (log_prob - log_prob_old).exp()
