"""Reading a run file.

One strict loader. Precedence: recipe defaults < YAML < `key=value` on the command line; there, `recipe.name=` chooses
the recipe as published, without the changes that the file makes to its own. A key that does not exist, a wrong type
or a combination that cannot work is one line that names the setting, what was given and what is accepted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from flowrl.part import nearest
from flowrl.run.settings import Run

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = Path(__file__).resolve().parents[1] / "data"


def resolve(path: str | Path) -> Path:
    """A path as given, or the file of that name that came with flowrl (in the checkout, or inside the wheel)."""
    path = Path(path).expanduser()
    found = (folder / path for folder in (Path(), ROOT, PACKAGED) if (folder / path).exists())
    return next(found, path)


def load(file: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Read a run file and apply `key=value` overrides."""
    return from_dict(read(run_file(file)), overrides)


def is_run_file(file: str | Path) -> bool:
    """Whether there is a run file of this path, or of this name in scripts/configs."""
    return _run_file(file).is_file()


def names() -> list[str]:
    """The run files of scripts/configs."""
    return sorted(p.stem for p in resolve("scripts/configs").glob("*.yaml"))


def _run_file(file):
    path = resolve(file)
    return path if path.is_file() else resolve(Path("scripts/configs") / f"{file}.yaml")


def run_file(file: str | Path) -> Path:
    """The run file of this path, or of this name in scripts/configs."""
    path = _run_file(file)
    if not path.is_file():
        known = names()
        raise ValueError(f"run file {str(file)!r}: no such file. {nearest(file, known)}Runs here: {', '.join(known)}.")
    return path


def read(path: Path) -> Mapping[str, object]:
    """A YAML file that holds a mapping."""
    try:
        given = _parse(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: a run file is a mapping of settings, not {type(given).__name__}.")
    return given


def from_dict(given: Mapping[str, object], overrides: Sequence[str] = ()) -> Run:
    """Check a run that is already a mapping."""
    settings, pairs = _plain(given), [_pair(override) for override in overrides]
    if "recipe.name" in dict(pairs) or "recipe" in dict(pairs):  # the file's changes belong to the file's recipe
        settings["recipe"] = {}
    for key, value in pairs:
        _put(settings, key, value)
    settings["recipe"] = _flat_recipe(settings.get("recipe"))
    for name, value in _rewards(settings).items():
        if value is None:  # rewards.NAME=null takes a reward of the file out
            del settings["rewards"][name]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            settings["rewards"][name] = {"weight": value}
    try:
        run = Run.model_validate(settings)
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None
    return _combinations(run.model_copy(update={"output": str(Path(run.output).expanduser())}))


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
    if run.model.train == "full" and run.model.init_adapter:
        raise ValueError("model.init_adapter has no effect with model.train = full. Remove it, or set it to lora.")
    if run.evaluation.patience and not run.evaluation.every:
        raise ValueError("evaluation.patience has no effect without evaluation.every: nothing is evaluated in between.")
    if run.evaluation.others and not run.data.tags:
        raise ValueError(
            "evaluation.others has no effect without data.tags: every held-out prompt is evaluated already."
        )
    if run.optimizer.warmup >= run.budget.updates:
        raise ValueError(
            f"optimizer.warmup = {run.optimizer.warmup} is not over after budget.updates = {run.budget.updates}."
        )
    if run.evaluation.every and run.evaluation.every > run.budget.updates:
        raise ValueError(f"evaluation.every = {run.evaluation.every} exceeds budget.updates = {run.budget.updates}.")
    if run.optimizer.ema is None and run.optimizer.ema_every != 1:
        raise ValueError("optimizer.ema_every has no effect without optimizer.ema.")
    if not run.rewards:
        raise ValueError("rewards: at least one reward is needed, such as {jpeg_size: 1.0}.")
    return run


def _flat_recipe(given):
    """{"name": ..., "rollout.steps": ...}: nested sections and dotted names mean the same."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError(f"recipe = {given!r}: expected the name of a recipe, or a section with `name`.")

    def flat(section, prefix=""):
        for key, value in section.items():
            if isinstance(value, Mapping) and value and not all(str(k).isdigit() for k in value):  # {step: children}
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    pairs = list(flat(given))
    names = [name for name, _ in pairs]
    for name in (name for name in names if names.count(name) > 1):
        raise ValueError(f"recipe.{name} is given twice, as a section and by its dotted name.")
    return dict(pairs)


def _put(settings, key, value):
    """Set a dotted key; whatever follows `recipe.` stays one name."""
    if isinstance(settings.get("recipe"), str):
        settings["recipe"] = {"name": settings["recipe"]}
    head, _, tail = key.partition(".")
    path = [head, tail] if head == "recipe" and tail else key.split(".")
    if head == "rewards" and len(path) > 2 and isinstance(weight := _rewards(settings).get(path[1]), int | float):
        settings["rewards"][path[1]] = {"weight": weight}
    for name in path[:-1]:
        if not isinstance(settings.get(name), dict):
            settings[name] = {}
        settings = settings[name]
    if head == "recipe" and tail:
        _drop_nested(settings, tail)
    settings[path[-1]] = value


def _rewards(settings):
    """A copy of the `rewards` section as it was given."""
    given = settings.get("rewards", {})
    if not isinstance(given, Mapping):
        raise ValueError(
            f"rewards = {given!r}: expected a section with a weight per reward, such as {{jpeg_size: 1.0}}."
        )
    return dict(given)


def _drop_nested(section, dotted):
    """An override of recipe.a.b wins over a nested section {a: {b: ...}} of the file."""
    head, _, tail = dotted.partition(".")
    if tail and isinstance(section.get(head), dict):
        _drop_nested(section[head], tail)
        section[head].pop(tail, None)
        if not section[head]:
            del section[head]


class _Strict(yaml.SafeLoader):
    """YAML in which a key may be given once."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def _parse(text, where):
    try:
        return yaml.load(text, _Strict)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{where}{place}: not YAML: {getattr(error, 'problem', None) or error}.") from None


def _plain(given):
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in given.items()}


def _one_line(error):
    """The first fault that pydantic found, in our words."""
    fault = error.errors()[0]
    place = [str(x) for x in fault["loc"] if x not in ("float", "dict[str,float]")]  # the two forms of a weight
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
    if fault["type"] == "value_error":
        return f"{setting} = {given!r}: {fault['ctx']['error']}."
    said = _EXPECTED.get(fault["type"], fault["msg"][0].lower() + fault["msg"][1:])
    return f"{setting} = {given!r}: {said}."


_EXPECTED = {
    "model_type": "expected a section of settings",
    "dict_type": "expected a section of settings",
    "tuple_type": "expected a list, such as [a, b]",
}


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
