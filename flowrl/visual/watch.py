"""What the loop looks at while an update evaluates its rows."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from flowrl import vocabulary
from flowrl.objectives.penalties import kl_gaussian
from flowrl.recipe import Recipe
from flowrl.visual.evaluate import evaluate
from flowrl.visual.policy import Policy, uncounted
from flowrl.visual.ranks import is_spare


class Watch:
    """How far recorded and recomputed log-probs, and the policies, are apart.

    numbers: quantities that are one number for all rows, such as the coefficient that a tracker gives
    """

    def __init__(self, recipe: Recipe, numbers: Mapping[str, Tensor]):
        needs = sorted(vocabulary.split(name)[::-1] for name in recipe.needs - recipe.recorded)
        self._compared = {suffix: quantity for suffix, quantity in needs if suffix}  # the last: velocity, if asked for
        means = [suffix for suffix, quantity in needs if suffix and quantity == "mean"]  # one, says the recipe's check
        self._means_of = means[0] if "divergence" in recipe.asks else None
        self._recipe, self._numbers = recipe, numbers
        self._seen, self._moved, self._apart = [], [], {suffix: [] for suffix in self._compared}

    def __call__(self, policy: Policy, sigmas: Tensor, on_policy: bool) -> Callable:
        def evaluated(rows, names, gradient=True):
            with uncounted(policy) if is_spare(rows) else nullcontext():
                given, asked = rows | self._numbers, names | ({"mean", "std"} if self._means_of is not None else set())
                q = evaluate(policy, given, asked, self._recipe, sigmas, on_policy=on_policy, gradient=gradient)
            self._look(q, on_policy)
            return q

        return evaluated

    @torch.no_grad()
    def _look(self, q, on_policy):
        if on_policy and "log_prob" in q and "log_prob_recorded" in q:
            self._seen.append((q["log_prob"] - q["log_prob_recorded"]).exp().sub(1).abs().max())
        for suffix, quantity in self._compared.items():
            if quantity in q and f"{quantity}_{suffix}" in q:
                self._apart[suffix].append((q[quantity] - q[f"{quantity}_{suffix}"]).abs().max())
        if self._means_of is not None:
            self._moved.append((q["weight"] * kl_gaussian(q["mean"], q[f"mean_{self._means_of}"], q["std"])).sum())

    def log(self) -> dict[str, float]:
        """ratio/deviation: largest |ratio - 1| before training has moved; snapshot/NAME_distance: of what is compared.

        That is the velocity, the mean of a step or the elbo, the largest difference anywhere. divergence: KL of a step
        to the snapshot that a penalty compares means with, by the weights of the rows here, over all optimizer updates.
        """
        found = {"ratio/deviation": self._seen}
        found |= {f"snapshot/{suffix}_distance": seen for suffix, seen in self._apart.items()}
        log = {name: float(torch.stack(seen).max()) if seen else 0.0 for name, seen in found.items()}
        if self._means_of is not None:  # also of a process without rows: the others wait for its share
            log["divergence"] = float(sum(self._moved))
        return log
