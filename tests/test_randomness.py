"""flowrl/randomness.py: every draw has a name."""

import subprocess
import sys

import torch

from flowrl.randomness import generator


def test_a_name_gives_the_same_numbers_in_any_process():
    """The seed is a hash of the name, not Python's own hash, which changes from process to process."""
    code = "import torch, flowrl.randomness as r; print(torch.randn(3, generator=r.generator(7, 2, 'x')).tolist())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(torch.randn(3, generator=generator(7, 2, "x")).tolist())


def test_names_that_differ_anywhere_give_other_numbers():
    names = [(0,), (1,), (0, 0), (0, "a"), (0, "b"), (0, 1, 2), (0, 12), (0, 2, 1), (0, "1"), (0, 1)]
    drawn = {float(torch.rand((), generator=generator(*name))) for name in names}
    assert len(drawn) == len(names)


def test_torchs_generator_is_left_alone():
    before = torch.get_rng_state()
    torch.randn(5, generator=generator(3, "noise"))
    assert torch.equal(torch.get_rng_state(), before)
