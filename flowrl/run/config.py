"""The run file: model, data, rewards, budget, optimiser, evaluation, and the name of a recipe with its changes.

One strict loader. Precedence: recipe defaults < YAML < `key=value` on the command line; there, `recipe.name=` chooses
the recipe as published, without the changes that the file makes to its own. A key that does not exist, a wrong type
or a combination that cannot work is one line that names the setting, what was given and what is accepted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowrl.changes import changed
from flowrl.recipe import Recipe, nearest
from flowrl.recipes import find

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = Path(__file__).resolve().parents[1] / "data"

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Lora(Section):
    """Low-rank adapters; published runs on SD3 use rank 32, alpha 64 on the attention layers."""

    rank: Positive = 32
    alpha: Rate = 64.0
    targets: tuple[str, ...] | None = None  # module names by their end; default: the attention layers


class Model(Section):
    path: str  # folder of a saved diffusers pipeline
    train: Literal["lora", "full"] = "lora"
    lora: Lora | None = None  # only with train: lora
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of frozen weights; auto: float32 on a CPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    size: Positive | None = None  # pixels of a side; default: the pipeline's own
    grid: Literal["pipeline", "linear"] = "pipeline"  # the schedule of pipe(num_inference_steps) or of pipe(sigmas)
    max_sequence_length: Annotated[int, Field(ge=0)] = 256  # T5 tokens


class Data(Section):
    train: str  # .txt with a prompt per line, or .jsonl with "prompt" and metadata
    test: str | None = None  # held-out prompts of the same form; default: train
    tags: tuple[str, ...] | None = None  # train on the prompts whose metadata "tag" is one of these
    balance: bool = False  # take the tags in turn, in training and evaluation; a rare one is gone through more often


class RewardSetting(Section):
    weight: float | dict[str, float] = 1.0  # a dict names the components of a reward that returns several
    on_error: Literal["raise", "mask"] = "raise"
    function: str | None = None  # my_package.my_file:my_function; default: the built-in reward of this name
    numbers: dict[str, object] = {}  # what the reward's load() takes


class Budget(Section):
    updates: Positive = 100
    prompts_per_update: Positive = 8
    batch_size: Positive = 64  # rows per network call of a rollout
    micro_batch: Positive = 64  # network calls per backward pass


class Optimizer(Section):
    learning_rate: Rate = 3e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0  # updates
    max_grad_norm: Rate = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None  # decay of the averaged weights that are evaluated and saved
    ema_every: Positive = 1  # updates


class Evaluation(Section):
    every: Positive | None = None  # updates; default: before the first and after the last
    prompts: Positive = 256  # of the held-out file, spread over it
    others: Annotated[int, Field(ge=0)] = 0  # held-out prompts of tags that are not trained, printed beside
    samples: Positive = 1  # pictures per prompt; diversity needs 2
    steps: Positive | None = None  # default: those of the rollout
    guidance: Annotated[float, Field(ge=1)] | None = None  # default: that of the rollout
    pictures: Positive = 24  # in the grid
    seed: int = 0  # of the fixed noise


class Run(Section):
    """A run, resolved.  `recipe` holds "name" and changes by dotted name."""

    model: Model
    data: Data
    rewards: dict[str, RewardSetting]
    recipe: dict[str, object]
    budget: Budget = Budget()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    output: str
    seed: int = 0
    profile: bool = False  # log the share of time per part

    def build_recipe(self) -> Recipe:
        changes = {key: value for key, value in self.recipe.items() if key != "name"}
        return changed(find(str(self.recipe["name"]))(), changes).check()


def resolve(path: str | Path) -> Path:
    """A path as given, or the file of that name that came with flowrl (in the checkout, or inside the wheel)."""
    for folder in (Path(), ROOT, PACKAGED):
        if (folder / path).exists():
            return folder / path
    return Path(path)


def load(file: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Read a run file and apply `key=value` overrides."""
    path = resolve(file)
    if not path.is_file():
        path = resolve(Path("scripts/configs") / f"{file}.yaml")
    if not path.is_file():
        known = sorted(p.stem for p in resolve("scripts/configs").glob("*.yaml"))
        raise ValueError(f"run file {str(file)!r}: no such file. {nearest(file, known)}Runs here: {', '.join(known)}.")
    return from_dict(_parse(path.read_text(encoding="utf-8"), str(path)), overrides)


def from_dict(given: Mapping[str, object], overrides: Sequence[str] = ()) -> Run:
    """Check a run that is already a mapping."""
    settings, pairs = _plain(given), [_pair(override) for override in overrides]
    if "recipe.name" in dict(pairs) or "recipe" in dict(pairs):  # the file's changes belong to the file's recipe
        settings["recipe"] = {}
    for key, value in pairs:
        _put(settings, key, value)
    settings["recipe"] = _flat_recipe(settings.get("recipe"))
    for name, value in dict(settings.get("rewards") or {}).items():
        if value is None:  # rewards.NAME=null takes a reward of the file out
            del settings["rewards"][name]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            settings["rewards"][name] = {"weight": value}
    try:
        run = Run.model_validate(settings)
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None
    return _combinations(run)


def _pair(override):
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{override!r}: expected key=value, such as budget.updates=50.")
    return key.strip(), _parse(text, override)


def dump(run: Run) -> str:
    """The resolved run as YAML that `load` reads back."""
    return yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _combinations(run):
    """Settings that are right one by one and wrong together."""
    if run.model.train == "full" and run.model.lora:
        raise ValueError("model.lora has no effect with model.train = full. Remove it, or set model.train = lora.")
    if run.evaluation.others and not run.data.tags:
        raise ValueError(
            "evaluation.others has no effect without data.tags: every held-out prompt is evaluated already."
        )
    if run.optimizer.ema is None and run.optimizer.ema_every != 1:
        raise ValueError("optimizer.ema_every has no effect without optimizer.ema.")
    if not run.rewards:
        raise ValueError("rewards: at least one reward is needed, such as {jpeg_size: 1.0}.")
    if run.model.device == "cpu" and run.model.dtype in ("bfloat16", "float16"):
        raise ValueError(
            f"model.dtype = {run.model.dtype} is about 100 times slower than float32 on a CPU; use float32."
        )
    return run


def _flat_recipe(given):
    """{"name": ..., "rollout.steps": ...}: nested sections and dotted names mean the same."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError(f"recipe = {given!r}: expected the name of a recipe, or a section with `name`.")

    def flat(section, prefix=""):
        for key, value in section.items():
            if isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(flat(given))


def _put(settings, key, value):
    """Set a dotted key; whatever follows `recipe.` stays one name."""
    if isinstance(settings.get("recipe"), str):
        settings["recipe"] = {"name": settings["recipe"]}
    head, _, tail = key.partition(".")
    path = [head, tail] if head == "recipe" and tail else key.split(".")
    if path[0] == "rewards" and isinstance((settings.get("rewards") or {}).get(path[1]), int | float) and len(path) > 2:
        settings["rewards"][path[1]] = {"weight": settings["rewards"][path[1]]}
    for name in path[:-1]:
        if not isinstance(settings.get(name), dict):
            settings[name] = {}
        settings = settings[name]
    if head == "recipe" and tail:
        _drop_nested(settings, tail)
    settings[path[-1]] = value


def _drop_nested(section, dotted):
    """An override of recipe.a.b wins over a nested section {a: {b: ...}} of the file."""
    head, _, tail = dotted.partition(".")
    if tail and isinstance(section.get(head), dict):
        _drop_nested(section[head], tail)
        section[head].pop(tail, None)


def _parse(text, where):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{where}{place}: not YAML: {getattr(error, 'problem', None) or error}.") from None


def _plain(given):
    if not isinstance(given, Mapping):
        raise ValueError(f"a run file is a mapping of settings, not {type(given).__name__}.")
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in given.items()}


def _one_line(error):
    """The first fault that pydantic found, in our words."""
    fault = error.errors()[0]
    place = [str(x) for x in fault["loc"]]
    setting, given = ".".join(place), fault.get("input")
    if fault["type"] == "extra_forbidden":
        known = list(_section(place[:-1]).model_fields)
        elsewhere = f" There is {found!r}." if (found := _elsewhere(place[-1])) else ""
        hint = nearest(place[-1], known)
        return f"{setting}: no such setting. {hint}Settings here: {', '.join(known)}.{elsewhere}"
    if fault["type"] == "missing":
        return f"{setting} is missing."
    if fault["type"] == "literal_error":
        hint = nearest(given, accepted := fault["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
        return f"{setting} = {given!r}: {hint}Accepted: {', '.join(accepted)}."
    return f"{setting} = {given!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}."


def _section(place, model=Run):
    """The model that holds the setting at `place`."""
    for name in place:
        if name in model.model_fields:
            kind = model.model_fields[name].annotation
            options = get_args(kind) if get_origin(kind) is not None else (kind,)
            model = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), model)
    return model


def _elsewhere(name):
    """Full name of a setting that exists in another section."""
    for section, entry in Run.model_fields.items():
        kind = entry.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and name in kind.model_fields:
            return f"{section}.{name}"
    return None
