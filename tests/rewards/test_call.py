"""A reward is called by name, and its faults stop the run or are left out, as it asks."""

import inspect
import queue
import signal
import threading
import time
import warnings

import pytest
import torch

from rewards.answer import RewardError
from rewards.call import ask
from rewards.reward import Reward

PROMPTS = ["a red cube", "b", "c\nd", "e" * 100]


def _ask(function, weight=1.0, on_error="raise", prompts=PROMPTS, **metadata):
    n = len(prompts)
    media = {"images": torch.zeros(n, 3, 2, 2), "prompts": prompts, "group": torch.arange(n)}
    return ask(Reward("x", function, weight, on_error), media, metadata)


def test_parameters_are_given_by_name_and_a_default_stands_where_there_is_no_column():
    seen = {}

    def reward(tag, group, *, missing="default", images):
        seen.update(tag=tag, group=group, missing=missing, images=images)
        return group

    value, valid = _ask(reward, tag=list("abcd"), other=[1, 2, 3, 4])
    assert value.tolist() == [[0], [1], [2], [3]] and valid.all()
    assert seen["tag"] == list("abcd") and seen["missing"] == "default" and seen["images"].shape == (4, 3, 2, 2)


def test_the_documented_signature_gets_all_other_metadata_columns():
    seen = {}

    def reward(images, prompts, tag, **metadata):
        seen.update(metadata=metadata, tag=tag)
        return [0.0] * len(prompts)

    _ask(reward, tag=list("abcd"), other=[1, 2, 3, 4])
    assert seen == {"tag": list("abcd"), "metadata": {"other": [1, 2, 3, 4]}}


def test_an_invalid_value_stops_with_reward_index_prompt_and_value():
    """C04"""
    with pytest.raises(ValueError) as fault:
        _ask(lambda images: [0.1, float("nan"), 0.3, None])
    assert str(fault.value) == (
        f"reward 'x' returned 2 of 4 values that are not finite: image 1 (prompt 'b'): nan; "
        f"image 3 (prompt '{'e' * 60}...'): None. on_error: mask leaves such samples out."
    )


def test_at_most_five_invalid_values_are_shown_and_a_prompt_stays_on_its_line():
    """C04"""
    with pytest.raises(RewardError, match=r"8 of 8 values .* image 4 \(prompt 'a\\nb'\): inf; and 3 more") as fault:
        _ask(lambda images: [float("inf")] * 8, prompts=["a\nb"] * 8)
    assert "image 5" not in str(fault.value) and "\n" not in str(fault.value)


def test_masked_values_are_invalid_and_hold_zero():
    """C04"""
    with pytest.warns(UserWarning, match="2 of 4 values that are not finite: image 1 .*: nan; image 3 .*; left out"):
        value, valid = _ask(lambda images: [0.1, float("nan"), 0.3, None], on_error="mask")
    assert valid.tolist() == [True, False, True, False]
    assert value.flatten().tolist() == pytest.approx([0.1, 0, 0.3, 0])


def test_a_sample_is_invalid_where_one_of_its_components_is():
    """C04"""
    answer = {"soft": [1, 2, 3, 4], "strict": [1, None, 1, 1]}
    with pytest.warns(UserWarning, match="reward 'x', component 'strict', returned 1 of 4"):
        value, valid = _ask(lambda images: answer, weight={"strict": 1, "soft": 0.5}, on_error="mask")
    assert value.tolist() == [[1, 1], [0, 2], [1, 3], [1, 4]] and valid.tolist() == [True, False, True, True]


def test_an_exception_names_the_reward_and_keeps_its_cause():
    with pytest.raises(RewardError) as fault:
        _ask(lambda images: 1 / 0)
    line = inspect.currentframe().f_lineno - 1
    assert str(fault.value) == (
        f"reward 'x' raised ZeroDivisionError: division by zero (test_call.py:{line}; 4 images, "
        "first prompt 'a red cube')"
    )
    assert isinstance(fault.value.__cause__, ZeroDivisionError)


def test_a_masked_exception_makes_the_whole_call_invalid_with_all_its_columns():
    with pytest.warns(UserWarning, match="ZeroDivisionError.*; all of them are left out"):
        value, valid = _ask(lambda images: 1 / 0, weight={"strict": 1, "soft": 1}, on_error="mask")
    assert value.tolist() == [[0, 0]] * 4 and not valid.any()


@pytest.mark.parametrize("answer", [[1.0], None, 3.0, torch.ones(4, 2), {"a": [1.0] * 4, "b": [1.0] * 4}])
def test_masking_does_not_excuse_a_wrong_shape_or_type(answer):
    """C05, C06"""
    with pytest.raises(RewardError, match="reward 'x'"):
        _ask(lambda images: answer, on_error="mask")


def test_a_reward_runs_without_gradient():
    value, _ = _ask(lambda images: [torch.is_grad_enabled()] * 4)
    assert not value.any()


def test_a_reward_computes_on_the_gpu_of_the_thread_that_asks(monkeypatch):
    """A new thread starts with the first GPU, whatever its parent has chosen."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.append((gpu, threading.current_thread())))
    _ask(lambda images: chosen.append(("asked", threading.current_thread())) or [0.0] * 4)
    (gpu, set_in), (asked, called_in) = chosen
    assert (gpu, asked) == (3, "asked") and set_in is called_in is not threading.current_thread()


def test_without_a_gpu_none_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: pytest.fail("it would start CUDA"))
    assert _ask(lambda images: [0.0] * 4)[1].all()


def test_a_good_answer_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ask(lambda images: [1, 2, 3, 4], on_error="mask")


@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_a_reward_that_hangs_is_told_after_its_deadline(on_error):
    """Whatever on_error says: what hangs cannot be asked again."""
    released = threading.Event()
    reward = Reward("slow", lambda images: released.wait(30), 1.0, on_error, deadline=0.2)
    media = {"images": torch.zeros(4, 3, 2, 2), "prompts": PROMPTS, "group": torch.arange(4)}
    with pytest.raises(RewardError, match=r"^reward 'slow' did not answer within 0.2 s \(4 images\)$"):
        ask(reward, media, {})
    released.set()


def test_what_a_reward_raises_is_not_taken_for_a_missed_deadline():
    """A reward that reads a queue of its own may raise the very exception that waiting for it does."""
    with pytest.raises(RewardError, match="reward 'x' raised Empty"):
        _ask(lambda images: queue.SimpleQueue().get(timeout=0.01))


def test_an_interrupt_reaches_the_main_thread_while_a_reward_hangs():
    released = threading.Event()
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _ask(lambda images: released.wait(20), on_error="mask")
    released.set()
    assert time.monotonic() - began < 10


def test_a_reward_is_asked_without_gradient_and_leaves_no_thread():
    before = threading.active_count()
    weight = torch.ones(4, requires_grad=True)
    value, _ = _ask(lambda images: weight * 2 if not torch.is_grad_enabled() else None)
    assert value.flatten().tolist() == [2.0] * 4 and not value.requires_grad
    time.sleep(0.05)
    assert threading.active_count() <= before
