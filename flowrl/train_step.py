"""One optimiser step.  The same for images and text: only `evaluate` differs."""

import torch


def train_step(recipe, points, evaluate, learner, place=lambda rows: (rows, slice(None)), *, trained=True):
    """Minimise  sum of weight * (objective + penalties)  over all points of one update; return what to log.

    points:   rows of decisions; weights sum to 1 over all ranks, fixed before the split
    evaluate: (rows, names[, gradient]) -> {name: [B, K, ...]}; snapshots first, the current policy last, with gradient
    learner:  .micro_batches splits the points, .backward accumulates, .step reduces over ranks and steps once, .skip
              leaves the weights as they are
    place:    [n, ...] of this rank -> (the rows of all ranks, which of them are its own)
    trained:  whether any rank has a row of a weight; if not, momentum and decay move nothing either
    """
    asked, start, log = recipe.needs, 0, dict.fromkeys(_names(recipe), 0.0)
    if recipe.couples:
        slope, loss = _slopes(recipe, points, evaluate, learner, place)
        asked = {"elbo", "weight"}.union(*(p.needs for _, p in recipe.penalties))
    for rows in learner.micro_batches(points):
        q = evaluate(rows, asked)
        if recipe.ratio:
            q["ratio"] = recipe.ratio(**q)
        if recipe.couples:
            here = slope[start : start + len(q["elbo"])].to(q["elbo"].device)  # none is left for a spare row
            terms, start = [(here * q["elbo"]).sum()], start + len(here)
        else:
            terms = [(rows["weight"] * recipe.objective(**q)).sum()]
        terms += [scale * (rows["weight"] * p(**q)).sum() for scale, p in recipe.penalties]
        learner.backward(sum(terms))
        for name, x in zip(log, [*terms, *_of_ratio(recipe, q)], strict=True):
            log[name] = log[name] + x.detach()
    if recipe.couples:
        log[next(iter(log))] = loss
    return {name: float(x) for name, x in log.items()} | (learner.step() if trained else learner.skip())


def _slopes(recipe, points, evaluate, learner, place):
    """(d loss / d elbo of the rows here, what they add to the loss), from the scalars of the rows of all ranks.

    First of two passes for an objective that compares rows: no gradient, so no group has to fit into one backward.
    """
    nothing = {name: points.columns["peers" if name == "peers" else "weight"][:0] for name in recipe.objective.needs}
    found = {name: [x] for name, x in nothing.items()} | {"weight": [points.columns["weight"][:0]]}
    for rows in learner.micro_batches(points):
        q = evaluate(rows, set(found), gradient=False)
        for name, seen in found.items():
            seen.append(q[name].cpu())
    placed = {name: place(torch.cat(seen)[: len(points)]) for name, seen in found.items()}  # without spare rows
    table, (_, mine) = {name: rows for name, (rows, _) in placed.items()}, placed["weight"]
    elbo = table["elbo"].requires_grad_()
    loss = table["weight"] * recipe.objective(**table)
    (slope,) = torch.autograd.grad(loss.sum(), elbo)
    return slope[mine], loss[mine].detach().sum()


def _of_ratio(recipe, q):
    """Distance of the ratio from 1, and share outside of the clip range, by the weights of the rows."""
    if not recipe.ratio:
        return []
    weight, off = q["weight"], q["ratio"].detach() - 1
    low, high = recipe.objective.number("clip_low"), recipe.objective.number("clip_high")
    outside = torch.zeros_like(off) if low is None else ((off < -low) | (off > high)).to(off.dtype)
    return [(weight * off.abs()).sum(), (weight * outside).sum()]


def _names(recipe):
    """Log keys, in order: the terms of the loss, then the ratio."""
    terms = [f"objective/{recipe.objective.name}", *(f"penalty/{p.name}" for _, p in recipe.penalties)]
    return [*terms, *(["ratio/distance", "ratio/clipped"] if recipe.ratio else [])]
