"""Adapters: made, switched off, saved so that plain diffusers loads them, and taken back."""

import pytest
import torch
from safetensors.torch import load_file

from flowrl import randomness
from flowrl.visual.pipelines import lora
from flowrl.visual.policy import Example
from samplers import rollout

PROMPTS = ["a red circle", "two blue squares", "a green cross"]


def trained(opened, kind="base", rank=4, alpha=16.0, size=0.5, **settings):
    """A policy whose adapter is far from zero, as after a long run."""
    policy = opened(kind, rank=rank, alpha=alpha, **settings)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            parameter.add_(size * torch.randn(parameter.shape, generator=randomness.generator(0, name)) / rank)
    return policy


def drawn(policy, steps=4):
    ids = policy.encode([Example(p) for p in PROMPTS])
    noise = policy.noise(3, randomness.generator(0, "noise"))
    with torch.no_grad():
        return policy.decode(rollout(policy.velocity, noise, ids, policy.sigmas(steps)).leaves())


def drawn_by(pipe, policy, steps=4):
    """The same pictures by plain diffusers."""
    noise = policy.noise(3, randomness.generator(0, "noise"))
    return pipe(
        prompt=PROMPTS, sigmas=torch.linspace(1, 1 / steps, steps).tolist(), latents=noise, guidance_scale=1.0,
        max_sequence_length=policy.family.max_sequence_length, output_type="pt",
    ).images  # fmt: skip


def test_a_fresh_adapter_is_exactly_the_base(opened):
    assert torch.equal(drawn(opened(rank=4, alpha=16.0)), drawn(opened()))


def test_only_the_adapter_is_trained_in_fp32_and_touches_no_global_generator(opened):
    state = torch.get_rng_state()
    policy = opened(rank=4, alpha=16.0)
    assert torch.equal(torch.get_rng_state(), state)
    names = [name for name, _ in policy.trainable()]
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    again, other = opened(rank=4, alpha=16.0), opened(rank=4, alpha=16.0, seed=1)
    for (name, one), (_, two), (_, three) in zip(*(p.trainable() for p in (policy, again, other)), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three) == (".lora_B." in name)


@pytest.mark.parametrize("kind", ["base", "sd3.5"])
def test_plain_diffusers_draws_what_the_trained_policy_draws(opened, plain, tmp_path, kind):
    """C58: effect and strength, with alpha four times the rank; a loader that ignores alpha is off by far."""
    policy = trained(opened, kind)
    policy.save(tmp_path / "adapter")
    ours, start = drawn(policy), drawn(opened(kind))
    pipe = plain(kind)
    pipe.load_lora_weights(tmp_path / "adapter")
    theirs = drawn_by(pipe, policy)
    assert (ours - theirs).abs().max() <= 1.01 / 255
    assert (ours - start).abs().max() > 8 / 255
    weak = plain(kind)
    weak.load_lora_weights(tmp_path / "adapter")
    weak.set_adapters(weak.get_active_adapters(), [4 / 16])
    assert (drawn_by(weak, policy) - ours).abs().max() > 8 / 255  # what alpha = rank would draw


def test_alpha_counts_when_an_adapter_is_taken_back(opened, tmp_path):
    policy = trained(opened)
    policy.save(tmp_path / "adapter")
    fresh = opened(rank=4, alpha=16.0)
    fresh.load(tmp_path / "adapter")
    assert torch.equal(drawn(fresh), drawn(policy))
    with pytest.raises(ValueError, match=r"alpha 16.*model\.lora\.alpha"):
        opened(rank=4, alpha=4.0).load(tmp_path / "adapter")


def test_a_merged_adapter_is_a_whole_pipeline_that_draws_the_same(opened, plain, tmp_path):
    """Plain diffusers loads it without knowing of adapters."""
    policy = trained(opened, "sd3.5")
    ours, start = drawn(policy), drawn(opened("sd3.5"))
    policy.merge()
    assert policy.folder == "model" and not policy.pipe.get_list_adapters()
    policy.save(tmp_path / "model")
    pipe = plain("sd3.5", tmp_path / "model")
    assert not any("lora" in name for name, _ in pipe.transformer.named_parameters())
    assert (drawn_by(pipe, policy) - ours).abs().max() <= 1.01 / 255 and (ours - start).abs().max() > 8 / 255


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"rank": 2, "alpha": 16.0}, r"rank 2 on 47 modules \(attn\.add_k_proj, .*attn\.to_v\)"),
        ({"rank": 4, "alpha": 16.0, "targets": ("attn.to_q",)}, r"rank 4 on 6 modules \(attn\.to_q\)"),
    ],
)
def test_an_adapter_of_another_shape_is_refused_with_both(opened, tmp_path, settings, ours):
    trained(opened).save(tmp_path / "adapter")
    with pytest.raises(ValueError, match=rf"has rank 4 on 47 modules \(.*\); model\.lora says {ours}\.$"):
        opened(**settings).load(tmp_path / "adapter")


def test_a_folder_without_an_adapter_is_refused(opened, tmp_path):
    with pytest.raises(ValueError, match="holds no adapter: it has no pytorch_lora_weights"):
        opened(rank=4, alpha=16.0).load(tmp_path)


def test_keys_are_those_of_diffusers_whatever_the_adapter_is_called(opened, tmp_path, monkeypatch):
    """C60: no adapter's name in the file, and the same file from a policy whose adapter has another name."""
    trained(opened).save(tmp_path / "one")
    monkeypatch.setattr(lora, "NAME", "old")
    renamed = opened(rank=4, alpha=16.0)
    assert "old" in renamed.pipe.transformer.peft_config
    renamed.save(tmp_path / "two")
    one, two = (load_file(tmp_path / name / lora.FILE) for name in ("one", "two"))
    assert one.keys() == two.keys() and len(one) == 2 * (4 * 6 + 3 * 6 + 5)
    assert all(key.startswith("transformer.transformer_blocks.") for key in one)
    assert not any(word in key for key in one for word in ("policy", "old", "default", "base_model"))
    assert all(not torch.equal(one[key], two[key]) for key in one if "lora_B" in key)


def test_an_adapter_of_no_tensors_is_not_saved(opened, tmp_path, monkeypatch):
    """C60."""
    policy = trained(opened)
    monkeypatch.setattr(lora, "get_peft_model_state_dict", lambda *args, **rest: {})
    with pytest.raises((RuntimeError, ValueError)):
        policy.save(tmp_path / "adapter")


def test_an_adapter_that_is_not_read_back_is_an_error(opened, tmp_path, monkeypatch):
    """C58: the file is read back after every save."""
    policy = trained(opened)
    kind = type(policy.pipe)
    read = kind.lora_state_dict
    doubled = lambda weights, *rest: ({name: 2 * x for name, x in weights.items()}, *rest)  # noqa: E731
    monkeypatch.setattr(kind, "lora_state_dict", lambda *args, **named: doubled(*read(*args, **named)))
    with pytest.raises(RuntimeError, match="does not read back the adapter"):
        policy.save(tmp_path / "adapter")


def test_switching_the_adapter_off_gives_the_base_and_keeps_what_is_trainable(opened):
    """C55: also when something fails in between."""
    policy = trained(opened)
    before, start = drawn(policy), drawn(opened())
    trainable = [name for name, _ in policy.trainable()]
    with pytest.raises(KeyError), lora.without_lora([policy.pipe.transformer]):
        assert (drawn(policy) - start).abs().max() <= 1.01 / 255
        raise KeyError
    assert torch.equal(drawn(policy), before) and [name for name, _ in policy.trainable()] == trainable


def test_an_adapter_may_sit_on_other_modules(opened, plain, tmp_path):
    policy = trained(opened, targets=("ff.net.0.proj", "attn.to_q"))
    policy.save(tmp_path / "adapter")
    pipe = plain()
    pipe.load_lora_weights(tmp_path / "adapter")
    assert (drawn(policy) - drawn_by(pipe, policy)).abs().max() <= 1.01 / 255
    assert len(policy.trainable()) == 2 * 2 * 6
