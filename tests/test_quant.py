"""Arrays in int8: against NumPy in float64, right on average, the same blocks on every mesh."""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, TINY_GPT2, TINY_QWEN, initial_state, mesh_of, tiny_config, to_numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.stats import norm

from tpjax import quant
from tpjax.config import ConfigError
from tpjax.layers import PARAMETERS, block_of
from tpjax.memory.compiled import absent_devices, compile_lowered
from tpjax.mesh import TENSOR, make_mesh
from tpjax.precision import noise, uniform
from tpjax.presets import preset, preset_names
from tpjax.quant import Block, Quantised, choose_block, dequantise, quantise
from tpjax.resolve import tensor_sizes
from tpjax.sharding import weight_spec
from tpjax.state import abstract_state, create_state

KEY = jax.random.key(0)


def in_numpy(x, block: Block, noise, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix, written with loops over its blocks in float64."""
    rows = np.moveaxis(np.asarray(x, np.float64), block.axis, -1)
    drawn = np.moveaxis(np.broadcast_to(np.asarray(noise, np.float64), x.shape), block.axis, -1)
    codes = np.zeros(rows.shape)
    scales = np.zeros((*rows.shape[:-1], rows.shape[-1] // block.size))
    for where in np.ndindex(*scales.shape):
        run = (*where[:-1], slice(where[-1] * block.size, (where[-1] + 1) * block.size))
        scales[where] = np.abs(rows[run]).max() / levels
        if scales[where]:
            codes[run] = np.floor(rows[run] / scales[where] + drawn[run])
    return np.moveaxis(codes, -1, block.axis), np.moveaxis(scales, -1, block.axis)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("drawn", [False, True], ids=["nearest", "drawn"])
@pytest.mark.parametrize("block", [Block(0, 6), Block(1, 8), Block(2, 5), Block(1, 1)])
def test_equals_numpy(block, drawn, signed):
    """Only where float32 puts a quotient on the other side of a whole number do they differ."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 16, 5)).astype(np.float32) * 10.0 ** rng.integers(
        -9, 9, (12, 1, 1)
    )
    x = jnp.asarray(x if signed else np.abs(x), jnp.float32)
    added = uniform(noise(KEY, x)[0]) if drawn else jnp.float32(0.5)
    ours = quantise(x, block, added, signed=signed)
    levels = 127 if signed else 255
    codes, scales = in_numpy(np.asarray(x), block, added, levels)
    assert ours.codes.dtype == (jnp.int8 if signed else jnp.uint8)
    assert ours.scales.dtype == jnp.float32
    assert ours.block == block or block.size == 1
    np.testing.assert_allclose(ours.scales, scales, rtol=1e-6)
    apart = np.abs(np.asarray(ours.codes, np.float64) - codes)
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.002
    spread = np.repeat(scales, block.size, block.axis)
    np.testing.assert_allclose(dequantise(ours), np.asarray(ours.codes) * spread, rtol=1e-6)
    worst = 1 if drawn else 0.5
    assert (np.abs(np.asarray(dequantise(ours)) - np.asarray(x)) <= spread * worst * 1.001).all()


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_rounding_is_right_on_average(signed):
    """4000 draws of 64 values: each mean within five standard errors, and all of them
    together, by their sum of squares, no further away than chance puts them."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.uniform(-1 if signed else 0, 1, (4, 16)), jnp.float32)

    @jax.jit
    def draws(keys):
        return jax.vmap(
            lambda key: dequantise(
                quantise(x, Block(1, 16), uniform(noise(key, x)[0]), signed=signed)
            )
        )(keys)

    many, count = np.asarray(draws(jax.random.split(KEY, 4000)), np.float64), 4000
    scale = np.abs(np.asarray(x)).max(1, keepdims=True) / (127 if signed else 255)
    fraction = np.mod(np.asarray(x, np.float64) / scale, 1)
    error = scale * np.sqrt(fraction * (1 - fraction) / count) + scale * 1e-4
    z = (many.mean(0) - np.asarray(x, np.float64)) / error
    assert np.abs(z).max() < 5
    assert (z**2).mean() < 1.8  # of 64 values: one in 10⁵ runs
    assert abs(z.mean()) < 5 / 8  # no common tendency up or down


@pytest.mark.parametrize("block", [Block(0, 4), Block(1, 16), Block(2, 32)])
def test_four_bits_equal_numpy(block):
    """The nearest of the sixteen numbers, two to a byte, by loops in float64."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16, 32)).astype(np.float32) * 10.0 ** rng.integers(-9, 9, (8, 1, 1))
    x = x.astype(np.float32)
    x[0] = 0
    ours = quant.quantise4(jnp.asarray(x), block)
    assert (ours.shape, ours.block, ours.bits) == (x.shape, block, 4)
    assert ours.codes.dtype == jnp.uint8
    assert ours.codes.size * 2 == x.size
    rows, codes = (np.moveaxis(np.asarray(a), block.axis, -1) for a in (x, ours.codes))
    scales = np.moveaxis(np.asarray(ours.scales, np.float64), block.axis, -1)
    back = np.moveaxis(np.asarray(dequantise(ours)), block.axis, -1)
    half = block.size // 2
    for where in np.ndindex(*scales.shape):
        run = rows[(*where[:-1], slice(where[-1] * block.size, (where[-1] + 1) * block.size))]
        pairs = codes[(*where[:-1], slice(where[-1] * half, (where[-1] + 1) * half))]
        values = back[(*where[:-1], slice(where[-1] * block.size, (where[-1] + 1) * block.size))]
        unpacked = np.array(quant.NF4)[[*(pairs % 16), *(pairs // 16)]] * scales[where]
        assert abs(scales[where] - np.abs(run).max()) <= 2**-8 * np.abs(run).max() + 1.2e-38
        np.testing.assert_allclose(values, unpacked, rtol=1e-6)
        nearest = np.abs(run[:, None] - np.array(quant.NF4) * scales[where]).min(1)
        np.testing.assert_allclose(np.abs(values - run), nearest, atol=1e-6 * scales[where])


def test_the_sixteen_numbers_are_quantiles_of_a_normal_distribution():
    """As QLoRA's authors make them."""
    most = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    above = norm.ppf(np.linspace(most, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(most, 0.5, 8)[:-1])
    values = np.sort([*above, 0, *below])
    np.testing.assert_allclose(quant.NF4, values / values.max(), atol=1e-6)


def test_four_bits_that_are_not_finite_spoil_their_block():
    x = np.ones((3, 8), np.float32)
    x[1, 2], x[2, 2] = np.inf, np.nan
    back = np.asarray(dequantise(quant.quantise4(jnp.asarray(x), Block(1, 8))))
    np.testing.assert_array_equal(back[0], 1)
    assert not np.isfinite(back[1:]).any()


def test_zeros_tiny_channels_and_what_is_not_finite():
    x = np.zeros((6, 8), np.float32)
    x[1] = np.linspace(-1e-30, 1e-30, 8)
    x[2] = np.linspace(-3e-37, 3e-37, 8)  # its scale would be below float32's normal numbers
    x[3] = 1e-42  # denormal itself
    x[4], x[5] = 1.0, 1.0
    x[4, 3], x[5, 2] = np.inf, np.nan
    for added in (0.5, uniform(noise(KEY, jnp.asarray(x))[0])):
        back = np.asarray(dequantise(quantise(jnp.asarray(x), Block(1, 8), added)))
        np.testing.assert_array_equal(back[0], 0)
        np.testing.assert_allclose(back[1], x[1], atol=1e-30 / 127 * 1.001)
        np.testing.assert_allclose(back[2], x[2], atol=1.2e-38)  # the smallest normal number
        np.testing.assert_allclose(back[3], 0, atol=1.2e-38)
        assert not np.isfinite(back[4:]).any()


def test_a_signless_zero_stays_zero_and_the_largest_stays_the_largest():
    x = jnp.asarray([[0.0, 1.0, 0.25, 3.0]])
    for key in jax.random.split(KEY, 50):
        back = dequantise(quantise(x, Block(1, 4), uniform(noise(key, x)[0]), signed=False))
        assert back[0, 0] == 0
        assert float(back[0, 3]) == pytest.approx(3.0, rel=1e-6)


def test_the_block_by_hand():
    assert choose_block((2048, 8192)) == Block(1, 128)  # 512 of a shard, 128 at most
    assert choose_block((2048, 512)) == Block(0, 128)
    assert choose_block((12, 10)) == Block(1, 5)  # 12 / 4 = 3, 10 / 2 = 5
    assert choose_block((7, 7)) == Block(1, 7)
    assert choose_block((16, 16)) == Block(1, 1)
    assert choose_block((64, 96), [1, 96]) == Block(0, 64)
    assert choose_block((2 * 131,)) == Block(0, 1)  # 131 is prime and above 128
    assert choose_block((2048, 8192), bits=4) == Block(1, 32)
    assert choose_block((12, 2 * 131), [1, 1], bits=4) == Block(0, 12)
    with pytest.raises(ConfigError, match="take a multiple of 4 numbers in a row; use int8"):
        choose_block((7, 2 * 131), bits=4)


# Blocks of the model's parameters, from shapes alone.


def shards_of(letters: str, axes: dict[str, int]) -> list[int]:
    """How many shards each dimension of a weight has."""
    spec = (*weight_spec(letters), *[None] * len(letters))[: len(letters)]
    named = [() if a is None else (a,) if isinstance(a, str) else a for a in spec]
    return [math.prod(axes[axis] for axis in one) for one in named]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", preset_names())
def test_no_block_of_any_preset_straddles_a_shard(name, bits):
    """Every tensor axis that the model allows, and every fsdp axis that divides the blocks
    of D; fsdp up to 16 is allowed where D allows it."""
    model, seen = preset(name), set()
    for parameter, row in PARAMETERS.items():
        if not row.decays or (bits == 4 and row.is_table):
            continue
        shape = [model.sizes[letter] for letter in row.letters]
        block = block_of(model, parameter, bits)
        letter = row.letters[block.axis]
        assert shape[block.axis] % block.size == 0
        assert 1 <= block.size <= quant.BLOCK[bits]
        assert not row.is_table or letter == "D"  # in one row
        blocks_of_D = model.embed_dim // block.size if letter == "D" else model.embed_dim
        for fsdp in divisors(blocks_of_D):
            for tensor in tensor_sizes(model):
                copies = max(1, tensor // model.num_kv_heads)
                axes = {"fsdp": fsdp, "tensor": tensor // copies, "kv_copy": copies}
                shards = shards_of(row.letters, axes)
                assert shape[block.axis] % (shards[block.axis] * block.size) == 0
                seen.add((letter, fsdp, tensor))
        assert all(blocks_of_D % f == 0 for f in divisors(math.gcd(16, model.embed_dim)))
    assert len({tensor for _, _, tensor in seen}) == len(tensor_sizes(model)) > 1


def shards_of_state(config):
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh_of(config)))


@lru_cache
def made_on(mesh: str, model):
    config = tiny_config(mesh, model=model, params="int8", moments="int8")
    return create_state(config, mesh_of(config))


ON_MESHES = pytest.mark.parametrize(
    ("mesh", "model"),
    [("tensor=8", TINY), ("fsdp=8", TINY_GPT2), ("fsdp=2,tensor=2", TINY_QWEN)],
    ids=["copied heads", "fsdp", "both"],
)


@ON_MESHES
def test_equal_bits_on_every_mesh(mesh, model):
    """Codes, scales and moments made in their shards; each shard has whole blocks."""
    state, one = made_on(mesh, model), tiny_config(model=model, params="int8", moments="int8")
    expected = to_numpy(initial_state(one, mesh_of(one)))
    jax.tree.map(np.testing.assert_array_equal, to_numpy(state), expected)
    weights = [
        w for w in jax.tree.leaves(state, is_leaf=quant.is_quantised) if quant.is_quantised(w)
    ]
    assert len(weights) > 15
    for weight in weights:
        assert weight.codes.sharding.spec == weight.scales.sharding.spec
        codes, scales = (a.addressable_shards[0].data.shape for a in (weight.codes, weight.scales))
        axis, size = weight.block.axis, weight.block.size
        assert codes[axis] == scales[axis] * size


@ON_MESHES
def test_a_stored_array_means_the_same_after_resharding(mesh, model):
    """From where it was made → tensor=4 → fsdp=2,tensor=2 → one device."""
    params, values = made_on(mesh, model).params, []
    for other in (mesh, "tensor=4", "fsdp=2,tensor=2", "tensor=1"):
        config = tiny_config(other, model=model, params="int8", moments="int8")
        params = jax.device_put(params, shards_of_state(config).params)
        with jax.set_mesh(mesh_of(config)):
            exact = jax.jit(
                lambda p: jax.tree.map(
                    lambda w: quant.value(w, jnp.float32), p, is_leaf=quant.is_quantised
                )
            )
            values.append(to_numpy(exact(params)))
    for other in values[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, values[0])


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_any_mesh_and_none_give_the_same_bits(axis_types):
    kind = getattr(jax.sharding.AxisType, axis_types.capitalize())
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 32)), jnp.float32)

    def both(x):
        stored = quantise(x, Block(0, 8), uniform(noise(KEY, x)[0]))
        return stored.codes, stored.scales, dequantise(stored)

    expected = both(x)
    sharded = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
    np.testing.assert_array_equal(jax.jit(both)(x)[0], expected[0])
    for ours, theirs in zip(jax.jit(both)(sharded), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding.is_equivalent_to(sharded.sharding, 2)


@pytest.mark.parametrize("mesh_text", ["tensor=4", "fsdp=2,tensor=2"])
def test_quantising_in_shards_moves_nothing(mesh_text):
    config = tiny_config(mesh_text)
    assert config.mesh is not None
    mesh = make_mesh(config.mesh, TINY, absent_devices("h100", 4))
    x = jax.ShapeDtypeStruct(
        (1024, 512), jnp.float32, sharding=NamedSharding(mesh, P(TENSOR, "fsdp"))
    )

    def there_and_back(x, key):
        stored = quantise(x, Block(1, 128), uniform(noise(key, x)[0]))
        return dequantise(Quantised(stored.codes + 1, stored.scales))

    with jax.set_mesh(mesh):
        lowered = jax.jit(there_and_back).lower(x, jax.eval_shape(lambda: KEY))
    step = compile_lowered(lowered, mesh)
    assert step.collectives == []
    text = step.executable.as_text() or ""
    assert "s8[" in text
    assert "[1024,512]" not in text  # nor is anything whole


def test_the_gradient_of_a_stored_weight_goes_to_its_slot():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)), jnp.float32)
    params = {"a": quantise(x, Block(1, 8)), "b": x}

    def loss(slots):
        attached = quant.attach(params, slots)
        a = quant.value(attached["a"], jnp.bfloat16).astype(jnp.float32)
        return (jnp.sin(a) * quant.value(attached["b"], jnp.float32)).sum()

    slots = quant.slots(params, jnp.dtype(jnp.bfloat16))
    assert slots["a"].dtype == jnp.bfloat16
    gradients = jax.grad(loss)(slots)
    a = dequantise(params["a"]).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(gradients["a"], (jnp.cos(a) * x).astype(jnp.bfloat16))
    np.testing.assert_allclose(gradients["b"], jnp.sin(a), rtol=1e-6)
