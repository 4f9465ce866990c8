"""Objectives on the forward process: finished pictures, noised again -> loss [B, K].

Those marked `couples` compare rows with their `peers`, the pictures of a group at one noise level and noise. They see
scalars only, the table of an update over all ranks; train_step passes their slopes back row by row (two passes).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.groups import group_mean, group_sum
from flowrl.objectives.elbos import self_normalised

BK = Float[Tensor, "B K"]
Latents = Float[Tensor, "B K *L"]
Peers = Int[Tensor, "B K"]


def nft(
    velocity: Latents,
    velocity_old: Latents,
    x0: Latents,
    noise: Latents,
    sigma: BK,
    advantage: BK,
    *,
    beta: float = 1.0,
    largest: float = 5.0,
) -> BK:
    """DiffusionNFT: fit v+ to good pictures and v- to bad ones, both mixtures of the policy and the old one.

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v. The share of v+ is (advantage / largest + 1) / 2 in
    [0, 1]: at advantage 0 both pull towards the old policy, on purpose. Each is fitted by its clean estimate,
    elbos.self_normalised.  arXiv:2509.16117
    """
    share = (advantage / largest / 2 + 0.5).clamp(0, 1)
    good, bad = beta * velocity + (1 - beta) * velocity_old, (1 + beta) * velocity_old - beta * velocity
    fit_good, fit_bad = (-self_normalised(v, x0, noise, sigma) for v in (good, bad))
    return largest * (share * fit_good + (1 - share) * fit_bad) / beta


def matching(elbo: BK, advantage: BK) -> BK:
    """Flow matching weighted by the advantage: -advantage * elbo.  Silent at advantage 0.  arXiv:2302.12192"""
    return -advantage * elbo


def dgpo(
    elbo: BK,
    elbo_ref: BK,
    advantage: BK,
    peers: Peers,
    *,
    beta: float = 100.0,
    clip: float = 1e-2,
) -> BK:
    """DGPO: advantage-weighted matching, scaled by how far the whole group still is from what it prefers.

    With errors d = -elbo: z = mean over peers of advantage * beta * (d - d_ref), w = sigmoid(z) detached, loss
    w * advantage * d. A row that has moved beyond clip in the direction of its advantage, exp(d_ref - d) > 1 + clip
    (or < 1 - clip for a negative one), leaves no gradient.  arXiv:2510.08425
    """
    error, error_ref, flat = -elbo, -elbo_ref, peers.flatten()
    gap = (advantage * beta * (error - error_ref)).detach().flatten()
    share = group_mean(gap, flat).sigmoid().view_as(error)
    ratio = (error_ref - error).exp()
    done = ((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip))
    return share * advantage * torch.where(done, error.detach(), error)


def crd(
    elbo: BK,
    elbo_old: BK,
    advantage: BK,
    peers: Peers,
    *,
    beta: float = 1.0,
    largest: float = 5.0,
    scope: str = "group",
) -> BK:
    """Centered reward distillation: implied rewards beta * (elbo - elbo_old) shall equal rewards, both centred.

    Rewards are (advantage / largest + 1) / 2 in [0, 1]; loss largest / beta * squared difference. scope: centred over
    the "group" at one noise level, as the text says and where the constant cancels, or over the "batch" of the update,
    as published code does. OUR READING: scope, and beta 1.  arXiv:2603.14128
    """
    if scope not in ("batch", "group"):
        raise ValueError(f"scope {scope!r}: accepted are batch, group.")
    index = peers.flatten() if scope == "group" else torch.zeros_like(peers.flatten())
    wanted = (advantage / largest / 2 + 0.5).clamp(0, 1)
    implied, wanted = (x.flatten() - group_mean(x.flatten(), index) for x in (elbo - elbo_old, wanted))
    return (largest / beta * (beta * implied - wanted) ** 2).view_as(elbo)


def dpo(elbo: BK, elbo_ref: BK, advantage: BK, peers: Peers, *, beta: float = 100.0) -> BK:
    """Diffusion-DPO: the best picture of a group shall gain on the reference more than the worst.

    advantage is 1 for the winner, -1 for the loser; both rows bear the pair's loss -log sigmoid(beta / 2 * margin),
    margin = sum over peers of advantage * (elbo - elbo_ref).  arXiv:2311.12908
    """
    margin = group_sum((advantage * (elbo - elbo_ref)).flatten(), peers.flatten()).view_as(elbo)
    return torch.where(advantage != 0, torch.nn.functional.softplus(-beta / 2 * margin), 0)


dgpo.couples = crd.couples = dpo.couples = True  # a row's loss depends on its peers
matching.silent = True  # no advantage, no gradient: such rows may be skipped
