"""One optimiser step.  The same for images and text: only `evaluate` differs."""


def train_step(recipe, points, evaluate, learner):
    """Minimise  sum of weight * (objective + penalties)  over all points of one update; return what to log.

    points:   rows of decisions; weights sum to 1 over all ranks, fixed before the split
    evaluate: (rows, names) -> {name: [B, K, ...]}; snapshots first, the current policy last and with gradient
    learner:  .micro_batches splits the points, .backward accumulates, .step reduces over ranks and steps once
    """
    log = {}
    for rows in learner.micro_batches(points):
        q = evaluate(rows, recipe.needs)
        if recipe.ratio:
            q["ratio"] = recipe.ratio(**q)
        terms = {f"objective/{recipe.objective.name}": recipe.objective(**q)}  # [B, K] each
        terms |= {f"penalty/{p.name}": scale * p(**q) for scale, p in recipe.penalties}
        terms = {name: (rows["weight"] * x).sum() for name, x in terms.items()}
        learner.backward(sum(terms.values()))
        log = {name: log.get(name, 0.0) + x.detach() for name, x in terms.items()}
    return {name: float(x) for name, x in log.items()} | learner.step()
