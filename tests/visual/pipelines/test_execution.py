"""flowrl/visual/pipelines/execution.py: attention backends, compilation and quantised weights change no result."""

from types import MappingProxyType

import pytest
import torch
from torch import nn

from flowrl import randomness
from flowrl.visual.pipelines import execution, opening
from flowrl.visual.policy import Example

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EXAMPLES = [Example("a red circle"), Example("two blue squares")]


@pytest.fixture
def installed(monkeypatch):
    """Say of every optional package that it is there."""
    monkeypatch.setattr(execution, "need", lambda package, setting: None)


def ask(policy):
    latents = policy.noise(2, randomness.generator(0, "test"))
    return policy.velocity(latents, torch.tensor([0.9, 0.3]), policy.encode(EXAMPLES))


@pytest.mark.parametrize(
    ("setting", "value", "package"),
    [
        ("attention", "xformers", "xformers"),
        ("attention", "flash", "flash_attn"),
        ("quantize", "torchao_8bit", "torchao"),
    ],
)
def test_a_package_that_is_not_installed_is_named(policy_of, monkeypatch, setting, value, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"model\.{setting} = {value} needs the package {package}, which is not"):
        policy_of("flux-dev", **{setting: value})


def test_other_attention_than_torchs_needs_a_gpu(policy_of, installed):
    with pytest.raises(ValueError, match=r"model\.attention = flash needs a GPU\. Accepted here: native\."):
        policy_of("flux-dev", attention="flash")


def test_attention_is_set_through_diffusers(policy_of, installed, monkeypatch):
    network, asked = policy_of("flux-dev").pipe.transformer, []
    monkeypatch.setattr(network, "set_attention_backend", asked.append)
    execution.set_attention(network, "flash", GPU)
    execution.set_attention(network, "native", GPU)
    assert asked == ["flash"]


def test_a_network_that_takes_no_backend_is_told(installed):
    class Plain(nn.Module):
        attn_processors = MappingProxyType({"a": object()})

        def set_attention_backend(self, backend):
            pass

    with pytest.raises(ValueError, match=r"model\.attention = xformers has no effect: Plain takes no backend\."):
        execution.set_attention(Plain(), "xformers", GPU)


@pytest.mark.parametrize("name", ["sd3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sd1.5", "wan2.1"))])
def test_a_compiled_network_keeps_ratio_1_and_the_names_of_its_weights(policy_of, name):
    """`aot_eager`: what is replayed with a gradient is what was drawn without one, and what an eager network says."""
    torch.compiler.reset()
    policy, eager = policy_of(name, compile="aot_eager"), policy_of(name)
    assert [n for n, _ in policy.trainable()] == [n for n, _ in eager.trainable()]
    with torch.no_grad():
        drawn, expected = ask(policy), ask(eager)
    replayed = ask(policy)
    assert replayed.requires_grad and torch.equal(replayed.detach(), drawn)
    assert torch.allclose(drawn, expected, atol=1e-5)
    for each in (policy, eager):
        each.guidance = 1.0
        ask(each).square().sum().backward()
    for (_, p), (_, q) in zip(policy.trainable(), eager.trainable(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-6)


def test_quantised_weights_stay_frozen_and_draw_nearly_the_same(saved, policy_of):
    pytest.importorskip("torchao")
    plain, policy = policy_of("flux-dev"), policy_of("flux-dev", quantize="torchao_8bit")
    kinds = {type(p).__name__ for p in policy.pipe.transformer.parameters()}
    assert any(kind.startswith("Int8") for kind in kinds), kinds
    with torch.no_grad():
        near, exact = ask(policy), ask(plain)
    assert 0 < (near - exact).abs().max() < 0.02 * exact.abs().max()
    ask(policy).square().sum().backward()
    assert all(p.grad is not None and p.dtype == torch.float32 for _, p in policy.trainable())


@pytest.mark.parametrize("settings", [{"rank": 0}, {"rank": 4, "sharded": True}])
def test_quantised_weights_that_would_be_trained_or_shared_out_are_refused(saved, settings):
    with pytest.raises(ValueError, match=r"model\.quantize = torchao_8bit: quantised weights are frozen, and whole"):
        opening.load(saved("flux-dev"), dtype=torch.float32, device=CPU, alpha=1.0, quantize="torchao_8bit", **settings)


def test_bitsandbytes_needs_a_gpu(policy_of):
    with pytest.raises(ValueError, match=r"quantize = bitsandbytes_4bit needs a GPU\. Accepted here: torchao_8bit"):
        policy_of("flux-dev", quantize="bitsandbytes_4bit")


def test_a_loaded_pipeline_is_not_quantised_afterwards(plain_of):
    with pytest.raises(ValueError, match="has no effect on a loaded pipeline"):
        opening.adopt(plain_of("flux-dev"), dtype=None, device=CPU, quantize="torchao_8bit", rank=4, alpha=1.0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("bitsandbytes_4bit", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("bitsandbytes_8bit", {"load_in_8bit": True}),
    ],
)
def test_bits_and_the_dtype_of_arithmetic_reach_diffusers(installed, setting, said):
    config = execution.quantization(setting, ["transformer"], torch.bfloat16).quant_mapping
    assert config.keys() == {"transformer"}
    found = config["transformer"].to_dict()
    assert said.items() <= found.items()
    assert found["bnb_4bit_compute_dtype"] == "bfloat16" or setting == "bitsandbytes_8bit"


class Counting(torch.nn.Module):
    def forward(self, x):
        return x * self.times


def test_more_graphs_than_torch_allows_by_itself_are_compiled():
    """Else it goes on without compiling, silently, from the ninth on; made an error here."""
    torch._dynamo.reset()
    network = Counting()
    execution.compile_in_place(network, "eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for network.times in range(2, 14):
            assert float(network(torch.ones(()))) == network.times
