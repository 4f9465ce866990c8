"""Processes of their own without seconds of imports: forks of a server that has imported everything and run nothing.

Nothing of the tests' process is in them but its environment and its path; nothing that they leave is in it.
"""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "flowrl.run.train",
        "flowrl.visual.toy",
        "flowrl.visual.pipelines.sd3",
        "torch.distributed.fsdp",
        "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    ]
)


def start(code: str, **environment: str):
    """Run a piece of Python code."""
    folder = Path(tempfile.mkdtemp())
    process = SERVER.Process(target=_live, args=(code, environment, folder))
    process.start()
    process.said = folder
    return process


def end(process, timeout: float) -> SimpleNamespace:
    """How it ended, as subprocess tells it, and what it said; killed after so many seconds."""
    process.join(timeout)
    late = process.exitcode is None
    process.kill()
    process.join()
    assert not late, f"no end after {timeout:g} s"
    out, err = ((process.said / name).read_text(encoding="utf-8") for name in ("1", "2"))
    return SimpleNamespace(code=process.exitcode, out=out, err=err)


def _live(code, environment, folder):
    for stream in (1, 2):
        os.dup2(os.open(folder / str(stream), os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(environment)
    sys.argv = ["-c"]
    import torch

    torch.set_num_threads(1)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
