"""The command line.  A fault before the start is one line and exit code 2, a fault of a running job one line and 1."""

import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flowrl.explain import explain as explain_page
from flowrl.run.peers import PeerLost, check_launcher
from flowrl.run.stopping import Stopped

RANK = int(os.environ.get("RANK", "0"))  # set by the launcher; no process is set up yet when it is read
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # on its machine: another one may lack a file

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Online reinforcement learning for diffusion and flow-matching generators.",
)
RunFile = Annotated[str, typer.Argument(metavar="RUN", help="run file, or the name of one in scripts/configs")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings that win over the file")
]
AsJson = Annotated[bool, typer.Option("--json", help="for scripts")]


@app.command()
def train(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="run file, or the name of one")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="go on with the run of a directory")] = None,
) -> None:
    """Train a generator as RUN says, or go on with a run: --resume RUN_DIR [KEY=VALUE]..."""
    settings = _before(lambda: _settings(run, overrides or [], resume))  # before diffusers is loaded

    from flowrl.run.prepare import prepare
    from flowrl.run.train import train as start

    prepared = _before(lambda: prepare(settings, resume=resume is not None))
    _running(lambda: start(prepared))
    prepared.processes.close()


def _settings(run, overrides, resume):
    from flowrl.run.config import load

    check_launcher()
    if resume is None:
        if run is None:
            raise ValueError("train: give a run file, or --resume and the directory of a run.")
        return load(run, overrides)
    from flowrl.run import resume as resuming

    return resuming.load(resume, [*([run] if run is not None else []), *overrides])


@app.command(name="eval")
def evaluate(
    run: RunFile,
    overrides: Overrides = None,
    weights: Annotated[Path | None, typer.Option(help="adapter/ or model/ of a run; default: the base model")] = None,
    as_json: AsJson = False,
) -> None:
    """Score held-out prompts, with the base model or with trained weights."""
    from flowrl.run.evaluation import said
    from flowrl.run.use import evaluation

    log = _running(_before(lambda: evaluation(run, overrides or (), weights)))
    if as_json:
        print(json.dumps(log))
    else:
        print(said(log.pop("evaluation")))
        for name, value in log.items():
            print(f"{name:<32}{value:9.4f}")


@app.command()
def sample(
    run: RunFile,
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option(help="what to draw; may be repeated")] = None,
    weights: Annotated[Path | None, typer.Option(help="adapter/ or model/ of a run; default: the base model")] = None,
    to: Annotated[Path, typer.Option(help="picture to write")] = Path("sample.png"),
    guide: Annotated[int, typer.Option(help="draws of every step, of which the run's rewards choose one")] = 1,
) -> None:
    """Draw pictures or videos of prompts, or of the first held-out ones."""
    from flowrl.run.use import sample as start

    print(start(run, overrides or (), prompt or [], weights, to, guide))


@app.command()
def draw(
    run: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE", help="run file, directory of a run, or a key of `flowrl recipes`")
    ],
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="whose tree; default: the first prompt that is trained")] = None,
    output: Annotated[Path | None, typer.Option(help="picture to write  [default: RECIPE-tree.svg]")] = None,
) -> None:
    """Draw the tree of one prompt: pictures, rewards, and what each step earned."""
    from flowrl.run.draw import tree

    print(_running(_before(lambda: tree(run, overrides or (), prompt, output))))


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="directory of a run")],
    to: Annotated[Path, typer.Option(help="folder to write")],
    checkpoint: Annotated[str, typer.Option(metavar="N|best|last", help="which checkpoint")] = "last",
    merge: Annotated[bool, typer.Option("--merge", help="fuse the adapter into the base: a whole pipeline")] = False,
) -> None:
    """Write the weights of a checkpoint for plain diffusers: an adapter, or a whole pipeline."""
    from flowrl.run.use import export as start

    print(_running(_before(lambda: start(directory, to, checkpoint, merge))))


@app.command()
def plan(
    run: RunFile,
    overrides: Overrides = None,
    gpu_memory: Annotated[float | None, typer.Option(help="GiB of one GPU: says what does not fit")] = None,
    speed: Annotated[float | None, typer.Option(help="network rows a second: says how long it takes")] = None,
    as_json: AsJson = False,
) -> None:
    """Count what RUN will do and the memory that it needs, without touching a network."""
    from flowrl.run.use import plan as start

    found = start(run, overrides or (), gpu_memory)
    if as_json:
        print(json.dumps(found.table | {"memory": asdict(found.memory)}))
        return
    print(f"{'':<22}{'per prompt':>14}{'per update':>14}{'total':>16}")
    for name, row in found.table.items():
        if name != "trainable_parameters":  # printed with the memory that they take
            print(f"{name:<22}{row['per_prompt']:>14,}{row['per_update']:>14,}{row['total']:>16,}")
    print("train_calls, forwards and backwards: before rows of advantage 0 are skipped; evaluation not counted.\n")
    print("on one GPU, without shards; encoding and update are what these two phases need at once:")
    for name, value in asdict(found.memory).items():
        print(f"{name:<22}{value:>14,}" if isinstance(value, int) else f"{name:<22}{value:>14.2f} GiB")
    if speed:
        hours = found.rows / speed / 3600
        print(f"{found.rows:,} rows (forwards + 2 x backwards): {hours:,.1f} hours at {speed:g} a second")
    for line in found.lines:
        print(line)


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="folder of a diffusers pipeline")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[model.KEY=VALUE]...")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="what to draw; may be repeated")] = None,
    steps: Annotated[int, typer.Option(help="of the pictures that are compared")] = 4,
) -> None:
    """Try on a model what training relies on: the pipeline's own pictures, ratio 1, adapters for plain diffusers."""
    from flowrl.run.check import PROMPTS
    from flowrl.run.check import check as start

    failed = 0
    findings = start(model, overrides or (), steps, prompt or PROMPTS)
    while (finding := _before(lambda: next(findings, None))) is not None:
        failed += not finding.passed
        print(f"{'passed' if finding.passed else 'FAILED':<8}{finding.name:<22}{finding.said}", flush=True)
    if failed:
        raise SystemExit(1)


@app.command()
def explain(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="a key of `flowrl recipes`, or a run file")],
) -> None:
    """Print a whole method on one page."""
    from flowrl.recipes import catalogue, find
    from flowrl.run.config import is_run_file, load

    if recipe in catalogue() or not is_run_file(recipe):
        print(explain_page(find(recipe)(), find(recipe).__doc__))
        return
    run = load(recipe)
    print(explain_page(run.build_recipe(), find(str(run.recipe["name"])).__doc__))


@app.command()
def recipes(
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="docs/methods.md: differences and parts")] = False,
) -> None:
    """List the methods."""
    from flowrl.methods import markdown
    from flowrl.recipes import catalogue, describe

    if as_json and as_markdown:
        raise ValueError("--json has no effect with --markdown: give one of them.")
    if as_markdown:
        print(markdown(), end="")
        return
    rows = [describe(key) for key in catalogue()]
    if as_json:
        print(json.dumps(rows))
        return
    columns = ("key", "title", "summary")
    widths = {name: max(len(row[name]) for row in rows) + 2 for name in columns}
    for row in rows:
        print("".join(f"{row[name]:<{widths[name]}}" for name in columns) + row["paper"])


@app.command()
def bench(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="run file; an argument with = is a setting")] = "bench",
    overrides: Overrides = None,
    recipes: Annotated[str, typer.Option(help="names with commas between them, or all")] = "all",
    seeds: Annotated[int | None, typer.Option(help="runs of each recipe  [default: 3]")] = None,
    compute: Annotated[int | None, typer.Option(help="forwards + 2 x backwards of a run  [default: 600000]")] = None,
    output: Annotated[Path, typer.Option(help="folder of the runs and results")] = Path("runs/bench"),
    jobs: Annotated[int | None, typer.Option(help="runs at once, of one thread each  [default: 2 on CPUs]")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="two small updates of each: does every recipe run?")] = False,
) -> None:
    """Compare recipes at equal compute; finished runs are not repeated, interrupted ones go on."""
    from flowrl.run import bench as runs

    given = [*([run] if "=" in run else []), *(overrides or ())]
    asked = {"recipes": recipes, "seeds": seeds, "compute": compute, "output": output, "smoke": smoke}
    planned = _before(lambda: runs.plan_jobs("bench" if "=" in run else run, given, **asked))
    at_once = _before(lambda: runs.check_at_once(jobs, smoke))
    settings = {"run": run, "changes": given, **asked, "output": str(output)}
    ended = _running(lambda: runs.compare(planned, output, settings, at_once=at_once))
    print(f"{output}/bench.md, bench.svg, bench.json")
    if failed := [job for job in ended if job.error]:
        _say(f"{len(failed)} of {len(ended)} runs failed, first {failed[0].name}: {failed[0].error}")
        raise SystemExit(1)


def _before(job):
    """Prepare a job: what is wrong now is wrong on all of a machine, its first process says it, and exit code 2."""
    try:
        return job()
    except PeerLost as error:
        _leave(error)
    except (ValueError, RuntimeError, OSError) as error:
        if LOCAL_RANK == 0:
            _say(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _running(job):
    """Run a job that has started: whatever stops it on any process is reported by one line, and exit code 1."""
    try:
        return job()
    except PeerLost as error:
        _leave(error)
    except (ValueError, RuntimeError, OSError) as error:
        _say(error)
        raise SystemExit(1) from None
    except KeyboardInterrupt as stop:
        if RANK == 0:
            _say(str(stop) or "interrupted.")
        raise SystemExit(stop.code if isinstance(stop, Stopped) else 130) from None


def _leave(error):
    """Say it on every process and end at once: what torch does at the end of Python would wait for those who left."""
    _say(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _say(error):
    who = f"flowrl (process {RANK})" if RANK else "flowrl"
    print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `flowrl` and of scripts/train.py."""
    sys.path.append("")  # my_file:my_function finds a file in the working directory, and no such file shadows a package
    for library in ("bitsandbytes", "torch.utils._pytree"):  # where installed, they warn of what nobody uses
        logging.getLogger(library).setLevel(logging.ERROR)
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    _before(lambda: app(arguments))


if __name__ == "__main__":
    main()
