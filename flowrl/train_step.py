"""One optimiser step.  The same for images and text: only `evaluate` differs."""


def train_step(recipe, points, evaluate, learner):
    """Minimise  sum of weight * (objective + penalties)  over all points of one update; return what to log.

    points:   rows of decisions; weights sum to 1 over all ranks, fixed before the split
    evaluate: (rows, names) -> {name: [B, K, ...]}; snapshots first, the current policy last and with gradient
    learner:  .micro_batches splits the points, .backward accumulates, .step reduces over ranks and steps once
    """
    log = dict.fromkeys(_names(recipe), 0.0)
    for rows in learner.micro_batches(points):
        q = evaluate(rows, recipe.needs)
        if recipe.ratio:
            q["ratio"] = recipe.ratio(**q)
        terms = [recipe.objective(**q), *(scale * p(**q) for scale, p in recipe.penalties)]  # [B, K] each
        terms = [(rows["weight"] * x).sum() for x in terms]
        learner.backward(sum(terms))
        log = {name: total + x.detach() for (name, total), x in zip(log.items(), terms, strict=True)}
    return {name: float(x) for name, x in log.items()} | learner.step()


def _names(recipe):
    """Log keys of the terms of the loss, in order."""
    return [f"objective/{recipe.objective.name}", *(f"penalty/{p.name}" for _, p in recipe.penalties)]
