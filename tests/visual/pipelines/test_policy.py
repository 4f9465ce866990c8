"""flowrl/visual/pipelines/policy.py: what is computed once, where modules are, and which texts may come."""

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny_pipelines import one_of_each, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl import randomness
from flowrl.visual.pipelines import contract, parts
from flowrl.visual.policy import Example
from rewards import media
from samplers import rollout
from samplers.kernels import bind, flow_sde

TINY = tiny()
UNUSUAL = [
    "",
    "   ",
    "\U0001f98a\U0001f98a",
    "red " * 300,
    "\u732b",
    "a\nb\t'c' \"d\"",
    "\u05d0\u05d1",
    "a\0b",
    "a red circle",
]


@pytest.fixture(scope="session")
def picture(tmp_path_factory):
    file = tmp_path_factory.mktemp("pictures") / "one.png"
    media.save_png(torch.rand(3, 192, 256, generator=torch.Generator().manual_seed(0)), file)
    return str(file)


@pytest.fixture
def examples_of(picture):
    def make(name, prompts):
        return [Example(p, pictures=(picture,) if TINY[name].conditioned else ()) for p in prompts]

    return make


def drawn(policy, examples, steps=3):
    noise = policy.noise(len(examples), randomness.generator(0, "test"))
    with torch.no_grad():
        return rollout(policy.velocity, noise, policy.encode(examples), policy.sigmas(steps)).leaves()


@pytest.mark.parametrize("name", one_of_each())
def test_a_distinct_prompt_is_encoded_once_in_a_run(policy_of, examples_of, monkeypatch, name):
    """Counted where the pipeline is asked: two prompts, and the empty one that guidance leads away from."""
    policy, asked, inside = policy_of(name), [], []

    def counted(own):
        def encode(text, *rest):
            asked.extend([text] * (not inside))  # a negative prompt may be encoded as a prompt first
            inside.append(text)
            try:
                return own(text, *rest)
            finally:
                inside.pop()

        return encode

    for method in ("encode", "encode_negative"):
        monkeypatch.setattr(policy.family, method, counted(getattr(policy.family, method)))
    for policy.guidance in (1.0, TINY[name].guidance[1], 1.0):
        for prompts in (["a", "b", "a"], ["b"]):
            policy.encode(examples_of(name, prompts))
    assert sorted(asked) == [""] * policy.pairs + ["a", "b"]


class Scalars(TorchDispatchMode):
    """How often a floating-point number of a tensor is looked at: on a GPU, a wait each time."""

    def __init__(self):
        super().__init__()
        self.found, self.inside = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        looked = function is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        self.found += looked and not self.inside
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", one_of_each())
def test_the_denoising_loop_looks_at_no_number(policy_of, examples_of, name):
    """Beside what the network itself does, six steps look at as many numbers as three."""
    policy, counts = policy_of(name), []
    policy.guidance = TINY[name].guidance[1]
    ids = policy.encode(examples_of(name, ["a", "b"]))
    noise = policy.noise(2, randomness.generator(0, "test"))
    for steps in (3, 6):
        sigmas, generators = policy.sigmas(steps), [randomness.generator(0, "noise", i) for i in range(2)]
        with Scalars() as scalars:
            hooks = []
            for network in policy.networks.values():
                hooks.append(network.register_forward_pre_hook(lambda *_: setattr(scalars, "inside", 1)))
                hooks.append(network.register_forward_hook(lambda *_: setattr(scalars, "inside", 0)))
            kernel = bind(flow_sde, eta=0.7)
            rollout(policy.velocity, noise, ids, sigmas, kernel, noisy=range(steps - 1), generators=generators)
            for hook in hooks:
                hook.remove()
        counts.append(scalars.found)
    assert counts[0] == counts[1], counts


@pytest.mark.parametrize("name", one_of_each())
def test_unusual_texts_are_drawn_beside_usual_ones_and_counted(policy_of, examples_of, name):
    """C75: of any length and script, in one batch; each is what it is alone, and the long one is told of."""
    policy, examples = policy_of(name), examples_of(name, UNUSUAL)
    noise = policy.noise(1, randomness.generator(0, "test")).repeat(len(examples), *[1] * len(policy.shape))
    sigma = torch.full((len(examples),), 0.6)
    with torch.no_grad():
        together = policy.velocity(noise, sigma, policy.encode(examples))
        alone = policy.velocity(noise[:1], sigma[:1], policy.encode(examples[-1:]))
    assert bool(together.isfinite().all()) and torch.allclose(together[-1:], alone, atol=1e-4)
    lines = policy.warnings(examples)
    assert all(line.isascii() for line in lines)
    assert any("of 9 prompts exceed" in line for line in lines) or not policy.family.readers()


@pytest.mark.parametrize("name", ["flux-dev", "sd3", "qwen-image", "wan2.1", "sdxl", "z-image"])
def test_an_adapter_of_another_family_is_one_line(policy_of, tmp_path, name):
    other = "sana" if name != "sana" else "sd3"
    policy_of(other).save(tmp_path)
    with pytest.raises(ValueError, match="adapter") as caught:
        policy_of(name).load(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", one_of_each())
def test_activations_that_are_computed_twice_change_no_gradient(policy_of, examples_of, name):
    """C95: diffusers' own gradient checkpointing, on every network that is trained."""
    gradients = []
    for checkpointing in (False, True):
        policy = policy_of(name, gradient_checkpointing=checkpointing)
        for key, parameter in policy.trainable():
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=randomness.generator(0, key)))
        assert all(network.is_gradient_checkpointing == checkpointing for network in policy.networks.values())
        latents = policy.noise(2, randomness.generator(0, "test"))
        ids = policy.encode(examples_of(name, ["a", "b"]))
        policy.velocity(latents, torch.tensor([0.9, 0.3]), ids).square().sum().backward()
        gradients.append([p.grad for _, p in policy.trainable()])
    for once, twice in zip(*gradients, strict=True):
        torch.testing.assert_close(twice, once, rtol=1e-4, atol=1e-6)
    assert max(float(x.abs().max()) for x in gradients[0]) > 1e-4


@pytest.mark.parametrize("name", one_of_each())
def test_what_is_offloaded_is_near_only_while_it_works(policy_of, examples_of, monkeypatch, name):
    """The encoders while texts are encoded, the autoencoder while pictures are; the networks never move."""
    policy, plain, moves = policy_of(name, offload=True), policy_of(name), []
    named = {id(module): part for part, module in policy.pipe.components.items() if isinstance(module, torch.nn.Module)}
    for module in parts.modules(policy.pipe):
        own = module.to
        monkeypatch.setattr(module, "to", lambda *to, m=module, own=own: moves.append((named[id(m)], *to)) or own(*to))
    device, networks = policy.device, set(policy.networks)
    policy.encode(examples_of(name, ["b", "c", "d"]))
    ids, expected = policy.encode(examples_of(name, ["a"])), plain.encode(examples_of(name, ["a"]))
    once = len({part for part, *_ in moves}) * 2
    assert len(moves) == 2 * once, "once for a call, however many texts it encodes"
    encoders = set(named.values()) - networks - (set() if TINY[name].conditioned else {"vae"})
    assert {m[0] for m in moves} == encoders
    for part in encoders:
        mine = [m[1] for m in moves if m[0] == part]
        assert mine == [device, "cpu"] * (len(mine) // 2)
    moves.clear()
    latents = policy.noise(1, randomness.generator(0, "test"))
    sigma = torch.full((1,), 0.5)
    with torch.no_grad():
        assert torch.equal(policy.velocity(latents, sigma, ids), plain.velocity(latents, sigma, expected))
    assert not moves
    assert torch.equal(policy.decode(latents), plain.decode(latents)) and moves == [("vae", device), ("vae", "cpu")]


@pytest.mark.parametrize("name", ["sd3", "flux-kontext", "qwen-image", "sdxl"])
def test_texts_kept_on_a_disk_are_the_same_bits_and_ask_no_encoder(policy_of, examples_of, monkeypatch, tmp_path, name):
    examples, guidance = examples_of(name, ["a", "b"]), TINY[name].guidance[1]
    velocities = []
    for _ in range(2):
        policy = policy_of(name, cache=tmp_path)
        policy.guidance = guidance
        if velocities:
            monkeypatch.setattr(policy.family, "encode", None)
            monkeypatch.setattr(policy.family, "encode_negative", None)
        ids = policy.encode(examples)
        with torch.no_grad():
            noise = policy.noise(2, randomness.generator(0, "test"))
            velocities.append(policy.velocity(noise, torch.tensor([0.9, 0.3]), ids))
    assert torch.equal(*velocities)


@pytest.mark.parametrize("name", ["sd3", "flux-dev", "qwen-image", "wan2.1", "sana"])
def test_slices_and_tiles_of_the_autoencoder_are_diffusers_own(policy_of, name):
    """Slices change nothing; a picture smaller than a tile is decoded as a whole."""
    plain, sliced, tiled = policy_of(name), policy_of(name, vae_slicing=True), policy_of(name, vae_tiling=True)
    assert sliced.pipe.vae.use_slicing and not sliced.pipe.vae.use_tiling
    assert tiled.pipe.vae.use_tiling and not tiled.pipe.vae.use_slicing
    latents = plain.noise(2, randomness.generator(0, "test"))
    assert (sliced.decode(latents) - plain.decode(latents)).abs().max() <= 1 / 255
    assert (tiled.decode(latents) - plain.decode(latents)).abs().max() <= 1 / 255


@pytest.mark.parametrize("name", one_of_each())
def test_with_a_bf16_base_the_pipeline_draws_nearly_the_same(policy_of, examples_of, name):
    """What `flowrl check` says on a GPU: frozen parts in bf16, the autoencoder in fp32."""
    policy = policy_of(name, dtype=torch.bfloat16)
    known = {"steps": 2, "guidance": TINY[name].guidance[1]}
    assert contract.pictures_apart(policy, examples_of(name, ["a red circle", "two"]), **known) < 0.03


@pytest.mark.parametrize("name", ["sdxl", "wan2.1", "flux-dev"])
def test_the_autoencoder_works_unrounded_beside_a_bf16_base_and_is_left_in_its_dtype(policy_of, plain_of, name):
    policy, plain = policy_of(name, dtype=torch.bfloat16), plain_of(name)
    theirs = dict(plain.vae.named_parameters())
    assert all(torch.equal(p, theirs[key]) for key, p in policy.pipe.vae.named_parameters())
    policy.finish("current")
    assert policy.pipe.vae.dtype == torch.bfloat16


def test_a_finished_pipeline_computes_by_itself_again(policy_of):
    """Nothing is left on its modules: a copy of the network would run the original's weights."""
    policy = policy_of("wan2.1", dtype=torch.bfloat16)
    embedder = policy.pipe.transformer.condition_embedder.time_embedder
    adapters = [m for m in policy.pipe.transformer.modules() if isinstance(m, BaseTunerLayer)]
    assert "forward" in vars(embedder) and not any(m.cast_input_dtype_enabled for m in adapters) and adapters
    policy.finish("current")
    assert "forward" not in vars(embedder) and all(m.cast_input_dtype_enabled for m in adapters)


def test_a_pipeline_in_bf16_that_is_asked_to_compute_in_fp32_holds_nothing_in_bf16(plain_of):
    pipe = plain_of("wan2.1").to(torch.bfloat16)
    parts.cast(pipe.transformer, torch.float32)
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["qwen-image", "z-image"])
def test_flash_attention_is_refused_where_texts_are_masked(policy_of, name):
    with pytest.raises(ValueError, match=r"model.attention = flash takes no mask, and .*Pipeline masks texts"):
        policy_of(name, attention="flash")
