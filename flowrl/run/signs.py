"""Signs in the log that a run goes wrong: (the lines before, the new log) -> what to tell, or None.

Pure functions of the log; each is told once in a run.  WINDOW updates in a row have to show it, where nothing else is
said: one update may be an accident.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from flowrl.recipe import Recipe

Line = Mapping[str, object]
WINDOW = 10


class Signs:
    """The signs that have not been told yet; a resumed run, whose `lines` are given, tells none of them again."""

    def __init__(self, recipe: Recipe, lines: Sequence[Line] = ()):
        self._open = [
            nothing_scored,
            equal_groups,
            grain,
            worse_than_at_first,
            ratio_at_first,
            same_as_snapshot,
            partial(clip_range, recipe=recipe),
        ]
        if not recipe.scales_each_reward:
            self._open.append(reward_scales)
        for i, line in enumerate(lines):
            self.new(lines[:i], line)

    def new(self, lines: Sequence[Line], log: Line) -> list[str]:
        """What the new log shows for the first time."""
        told = {sign: text for sign in self._open if (text := sign(lines, log))}
        self._open = [sign for sign in self._open if sign not in told]
        return list(told.values())


def nothing_scored(lines: Sequence[Line], log: Line) -> str | None:
    """An update of which no picture could be scored, which on_error = mask lets pass."""
    if log.get("train_calls") != 0 or not log.get("reward/invalid"):
        return None
    return (
        f"update {log['iteration']} trained nothing: none of its {log['reward/invalid']} pictures was scored with "
        "others of its group. See the rewards whose on_error is mask."
    )


def equal_groups(lines: Sequence[Line], log: Line) -> str | None:
    """C01: more than half of the groups taught nothing."""
    shares = _last(lines, log, "group/zero_spread")
    if len(shares) < WINDOW or sum(shares) <= WINDOW / 2:
        return None
    return (
        f"{sum(shares) / WINDOW:.0%} of the groups of the last {WINDOW} updates had equal rewards and taught nothing. "
        "Raise rollout.roots or use a denser reward."
    )


def grain(lines: Sequence[Line], log: Line) -> str | None:
    """C97: the pictures of one evaluation hold more than twice the high frequencies of the first."""
    name = "eval/image/high_frequency"
    first = next((float(line[name]) for line in lines if name in line), math.inf)
    if not float(log.get(name, 0.0)) > 2 * first:
        return None
    return (
        f"the pictures turn grainy: {name} is {log[name]:.3g}, at first {first:.3g}. Remedies: a KL or velocity "
        "penalty, a lower learning rate, averaged weights, a second reward."
    )


def worse_than_at_first(lines: Sequence[Line], log: Line, *, evaluations: int = 3) -> str | None:
    """C40: the held-out reward has left its start band, two standard errors, downwards three times in a row."""
    seen = [line for line in [*lines, log] if "eval/total" in line]
    first, recent = seen[0] if seen else {}, seen[1:][-evaluations:]
    low = float(first.get("eval/total", 0.0)) - 2 * float(first.get("eval/stderr", math.inf))
    if "eval/total" not in log or len(recent) < evaluations or not all(line["eval/total"] < low for line in recent):
        return None
    return (
        f"the model gets worse: eval/total is {log['eval/total']:.3g}, at first {first['eval/total']:.3g} +- "
        f"{first['eval/stderr']:.2g}, and below that band in {evaluations} evaluations in a row. checkpoints/ keeps "
        "the best one. Remedies: a lower learning rate, less noise (rollout.kernel.eta, rollout.kernel = cps), a KL or "
        "velocity penalty."
    )


def ratio_at_first(lines: Sequence[Line], log: Line, *, most: float = 5e-4) -> str | None:
    """C21: the policy that learns is the one that drew, and the ratio is not 1: in one update, before weights moved."""
    if not float(log.get("ratio/deviation", 0.0)) > most:
        return None
    return (
        f"training does not see the network that drew: ratio/deviation is {log['ratio/deviation']:.1e} in update "
        f"{log['iteration']} before any step, and rounding explains at most {most:g} (1e-5 in float32). Check "
        "model.dtype, dropout and modules in training mode, guidance, the sigma table (model.grid), and whether the "
        "network depends on other rows of a batch (budget.batch_size, budget.micro_batch)."
    )


def same_as_snapshot(lines: Sequence[Line], log: Line, *, window: int = 5) -> str | None:
    """C64: weights move and a snapshot that a part compares with never differs, so comparing says nothing.

    For NFT the loss is then the same number whatever the reward, and only its gradient knows of it.
    """
    recent = [*lines[-window:], log]
    moved = [float(before.get("param_delta_norm", 0.0)) > 0 for before, _ in pairwise(recent)]
    if len(moved) < window or not all(moved):
        return None
    names = [name for name in log if name.startswith("snapshot/")]
    same = [name for name in names if all(line.get(name) == 0 for line in recent[1:])]
    if not same:
        return None
    name = same[0].removeprefix("snapshot/").removesuffix("_distance")
    return (
        f"snapshot {name} has not differed from the current policy in {window} updates, though the weights moved: "
        f"comparing them says nothing. Check snapshots.{name}.decay (0 copies the policy before it is compared), "
        f"snapshots.{name}.every, and update (one per rollout starts from the copy)."
    )


def clip_range(lines: Sequence[Line], log: Line, *, recipe: Recipe) -> str | None:
    """C29: the range never binds and is far too wide, or clips more than 80 %; with the order that would fit.

    Only of optimizer updates whose policy is not the one that drew: of the others the ratio is 1 and the range idle.
    """
    low, high = recipe.objective.number("clip_low"), recipe.objective.number("clip_high")
    recent = [*lines[-WINDOW + 1 :], log]
    found = [_of_moved_policy(line, recipe) for line in recent]
    if low is None or len(found) < WINDOW or None in found:
        return None
    distance, clipped = (sum(x) / WINDOW for x in zip(*found, strict=True))
    if not 0 < distance < math.inf:
        return None
    said = f"|ratio - 1| is {distance:.1e} on average, so a range of the order of 1e{round(math.log10(distance))} fits"
    if clipped == 0 and distance < min(low, high) / 10:
        return (
            f"the clip range {low:g}, {high:g} has not bound in {WINDOW} updates: {said}. Log-probs are per latent "
            "dimension here, which makes ratios far closer to 1 than those of language models."
        )
    if clipped > 0.8:
        return (
            f"{clipped:.0%} of the decisions of the last {WINDOW} updates lay outside of the clip range {low:g}, "
            f"{high:g}: {said}. A lower learning rate or fewer updates per rollout keep the policy closer."
        )
    return None


def _of_moved_policy(line, recipe):
    """(distance of the ratio from 1, share clipped), mean over the optimizer updates after the one on-policy."""
    if "ratio/clipped" not in line:
        return None
    count = line["optimizer_steps"]
    moved = count - (recipe.rollout.drawn_by(line["iteration"] - 1) == "current")
    if not moved:
        return None
    return tuple(float(line[name]) * count / moved for name in ("ratio/distance", "ratio/clipped"))


def reward_scales(lines: Sequence[Line], log: Line, *, most: float = 20.0) -> str | None:
    """C11: within a prompt one reward, times its weight, spreads more than 20 times as far as another that does spread.

    It then explains more than 99.7 % of what the advantage sees. Of a factor of 3 (90 %) nothing is said: weights are
    often meant so, and that between the strict and the soft score of the quick start is 6.
    """
    names = [name for name in log if name.startswith("reward_share/")]
    shares = {name: sum(_last(lines, log, name)) for name in names if len(_last(lines, log, name)) == WINDOW}
    shares = {name.removeprefix("reward_share/"): share for name, share in shares.items() if share > 0}
    if not shares or max(shares.values()) <= most**2 * min(shares.values()):
        return None
    large, small = max(shares, key=shares.get), min(shares, key=shares.get)
    factor = math.sqrt(shares[large] / shares[small])
    return (
        f"reward {large}, times its weight, spreads {factor:.0f} times as far within a prompt as reward {small}, which "
        "hardly counts. Set recipe.advantage = gdpo, which brings every reward to one scale, or weights that do."
    )


def _last(lines, log, name):
    """The values of the last WINDOW updates that have them all in a row, fewer at the start."""
    return [float(line[name]) for line in [*lines[-WINDOW + 1 :], log] if name in line]
