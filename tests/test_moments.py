"""Adam's moments in 8 bits and by factors, as a user of optax would have them and in our step."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TINY, TINY_GPT2, adam_states, mesh_of, tiny_config
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import moments, optim, quant, updates
from tpjax.layers import PARAMETERS
from tpjax.moments import FACTORED_EPS, Blocks, Factored, Factors, Plain, Rates, factored_cut
from tpjax.precision import noise, uniform
from tpjax.presets import preset
from tpjax.quant import Block, Quantised, dequantise, quantise
from tpjax.sharding import bytes_per_device
from tpjax.state import abstract_state

KEY = jax.random.key(0)
B1, B2, EPS = 0.9, 0.99, 1e-8


@dataclasses.dataclass(frozen=True)
class LinearBlocks:
    """`Blocks`, but for the second moment itself in 255 equal steps instead of its root."""

    block: Block

    def zeros(self, param):
        return Blocks(self.block).zeros(param)

    def step(self, g, mu: Quantised, nu: Quantised, rates: Rates, key):
        first = rates.b1 * dequantise(mu) + (1 - rates.b1) * g
        second = rates.b2 * dequantise(nu) + (1 - rates.b2) * g * g
        step = (first / rates.bias1) / (jnp.sqrt(second / rates.bias2) + rates.eps)
        high, low = map(uniform, noise(key, g))
        stored = quantise(second, self.block, low, signed=False)
        return step, quantise(first, self.block, high), stored


def linear(path, leaf):
    stored = moments.int8(path, leaf)
    return LinearBlocks(stored.block) if isinstance(stored, Blocks) else stored


def adam(storage=None):
    """As any user of optax writes it: no key, no mesh."""
    rate = optax.cosine_decay_schedule(0.05, 400)
    if storage is None:
        return optax.adam(rate, B1, B2, EPS)
    scaled = optim.scale_by_adam(B1, B2, EPS, storage)
    return optax.chain(scaled, optax.scale_by_learning_rate(rate))


def distances(optimizer, curvature, steps: int = 400) -> np.ndarray:
    """How far each weight is from the minimum after noisy descent from a distance of 1."""
    weights = {"w": jnp.ones_like(curvature), "gain": jnp.ones((5,))}

    @jax.jit
    def run(key):
        def one(carry, number):
            weights, state = carry
            noise = jax.random.normal(jax.random.fold_in(key, number), curvature.shape)
            gradients = {"w": curvature * (weights["w"] + 0.3 * noise), "gain": weights["gain"]}
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(weights, updates), state), None

        start = (weights, optimizer.init(weights))
        return jax.lax.scan(one, start, jnp.arange(steps))[0][0]

    end = run(KEY)
    assert np.abs(end["gain"]).max() < 0.05  # float32 in all of them
    return np.abs(np.asarray(end["w"], np.float64))


def curvatures(smallest: float) -> jax.Array:
    """2 × 2048, in each block of 128 from 1 down to `smallest`."""
    assert quant.choose_block((2, 2048)) == Block(1, 128)
    return jnp.tile(jnp.asarray(np.geomspace(1, smallest, 128), jnp.float32), (2, 16))


def test_int8_moments_follow_optax():
    """Gradients in a block differ up to 30-fold."""
    exact, ours = (distances(adam(s), curvatures(1 / 30)) for s in (None, moments.int8))
    assert np.sqrt((exact**2).mean()) < 0.05
    assert np.sqrt((ours**2).mean()) < 1.15 * np.sqrt((exact**2).mean())
    assert ours.max() < 1.5 * exact.max()


def test_tiny_gradients_beside_large_ones():
    """100,000-fold. In steps of the second moment itself small ones are lost, and Adam divides
    by nothing; the square root's least step makes their updates small instead."""
    curvature = curvatures(1e-5)
    exact, ours, naive = (
        distances(adam(storage), curvature) for storage in (None, moments.int8, linear)
    )
    assert exact.max() < 0.5
    assert np.quantile(naive, 0.9) > 10  # a tenth has gone far away from where it started
    assert naive.max() > 1000
    assert ours.max() < 1.5  # none
    small = np.asarray(curvature[0]) < 1 / 1000
    assert np.median(ours[:, small]) < 1
    large = np.asarray(curvature[0]) > 1 / 30
    rms = np.sqrt((ours[:, large] ** 2).mean()), np.sqrt((exact[:, large] ** 2).mean())
    assert rms[0] < 1.25 * rms[1]


def rates(count: int = 1) -> Rates:
    return Rates(B1, B2, 1 - jnp.float32(B1) ** count, 1 - jnp.float32(B2) ** count, EPS)


def start(storage, shape, seed: int = 0):
    """A gradient of very different sizes, with zeros, and moments of some steps before."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-7, 0, shape)
    g = jnp.asarray(rng.standard_normal(shape) * sizes, jnp.float32)
    mu, nu = storage.zeros(g)
    for number in range(3):
        scaled = g * (1 + 0.1 * number)
        key = jax.random.fold_in(KEY, number)
        _, mu, nu = storage.step(scaled, mu, nu, rates(number + 1), key)
    return g, mu, nu


def test_what_is_not_zero_never_becomes_zero():
    storage = Blocks(Block(1, 16))
    g, mu, nu = start(storage, (8, 32))
    g = g.at[0].set(0)
    mu, nu = (Quantised(m.codes.at[0].set(0), m.scales) for m in (mu, nu))
    step = jax.jit(storage.step)
    for number in range(50):  # decaying under gradients of nothing too
        update, mu, nu = step(g * (number < 20), mu, nu, rates(5), jax.random.key(number))
        second = np.asarray(dequantise(nu))
        assert (second[0] == 0).all()
        assert (second[1:] > 0).all()
        assert np.isfinite(np.asarray(update)).all()
        # At most as many steps as the largest first moment has of the smallest second one.
        assert np.abs(update).max() < 300


@pytest.mark.parametrize("storage", [Blocks(Block(1, 16)), Factored(Block(1, 16))])
def test_the_first_moment_is_right_on_average(storage):
    g, mu, nu = start(storage, (4, 32))
    keys = jax.random.split(KEY, 3000)
    steps = jax.jit(jax.vmap(lambda key: storage.step(g, mu, nu, rates(4), key)[:2]))
    update, stored = steps(keys)
    exact = B1 * np.asarray(dequantise(mu), np.float64)
    exact = exact + (1 - B1) * np.asarray(g if isinstance(storage, Blocks) else 0)
    if isinstance(storage, Factored):  # of the updates it returns, which are divided by bias1
        exact = np.asarray(update[0], np.float64) * float(rates(4).bias1)
    assert np.ptp(np.asarray(update), axis=0).max() == 0  # what it does now is not rounded
    drawn = np.asarray(jax.vmap(dequantise)(stored), np.float64)
    scale = np.repeat(np.asarray(stored.scales[0], np.float64), 16, 1)
    z = (drawn.mean(0) - exact) / (scale / np.sqrt(12 * 3000) * 2 + 1e-12)
    assert np.abs(z).max() < 5
    assert abs(z.mean()) < 0.5


def test_both_moments_and_the_parameter_round_apart():
    """One noise for two arrays would tie their errors together."""
    g = jnp.linspace(0.1, 1, 4096).reshape(4, 1024)
    storage = Blocks(Block(1, 128))
    mu, nu = storage.zeros(g)
    _, mu, nu = storage.step(g, mu, nu, rates(), KEY)

    def error(stored, exact):
        spread = np.repeat(np.asarray(stored.scales), 128, 1)
        return np.ravel((np.asarray(dequantise(stored)) - np.asarray(exact)) / spread)

    first, second = error(mu, (1 - B1) * g), error(nu, jnp.sqrt((1 - B2) * g * g))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(4096)


# By factors.


def factored_in_numpy(gradients, cut: int | None):
    """Steps in float64, with the first moment whole; `cut` None: a table."""
    mu = rows = columns = 0.0
    for count, g in enumerate(gradients, 1):
        square = np.asarray(g, np.float64) ** 2 + FACTORED_EPS
        flat = square.reshape(square.shape[0] if cut is None else np.prod(square.shape[:cut]), -1)
        rows = B2 * rows + (1 - B2) * flat.mean(1)
        columns = B2 * columns + (1 - B2) * flat.mean(0)
        second = rows[:, None] if cut is None else np.outer(rows, columns) / rows.mean()
        corrected = np.broadcast_to(second / (1 - B2**count), flat.shape).reshape(g.shape)
        update = np.asarray(g, np.float64) / (np.sqrt(corrected) + EPS)
        update /= max(1.0, np.sqrt((update**2).mean()))
        mu = B1 * mu + (1 - B1) * update
        yield mu / (1 - B1**count), mu, rows, columns


@pytest.mark.parametrize(
    ("shape", "cut", "block"),
    [((12, 16), 1, Block(1, 16)), ((6, 4, 8), 2, Block(0, 3)), ((40, 8), None, Block(1, 8))],
    ids=["matrix", "heads", "table"],
)
def test_factors_equal_numpy(shape, cut, block):
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-2, 1, (shape[0],) + (1,) * (len(shape) - 1))
    gradients = [rng.standard_normal(shape).astype(np.float32) * sizes for _ in range(4)]
    gradients = [jnp.asarray(g, jnp.float32) for g in gradients]
    storage = Factored(block, is_table=cut is None)
    assert cut in (None, factored_cut(shape))
    mu, nu = storage.zeros(gradients[0])
    for count, (g, expected) in enumerate(
        zip(gradients, factored_in_numpy(gradients, cut), strict=True), 1
    ):
        update, mu, nu = storage.step(g, mu, nu, rates(count), jax.random.key(count))
        step, first, rows, columns = expected
        np.testing.assert_allclose(nu.rows.ravel(), rows, rtol=1e-5)
        if cut is not None:
            np.testing.assert_allclose(nu.columns.ravel(), columns, rtol=1e-5)
        spread = np.repeat(np.asarray(mu.scales), block.size, block.axis)
        assert (np.abs(np.asarray(dequantise(mu)) - first) <= 1.001 * spread).all()
        np.testing.assert_allclose(update, step, rtol=1e-5, atol=1e-5)
        mu = Quantised(
            jnp.ones(shape, jnp.int8), jnp.asarray(first, jnp.float32)
        )  # as the reference


def test_where_a_matrix_is_cut():
    """Where both sides together are the smallest: D | N·H, N·H | D."""
    assert factored_cut((2048, 32, 64)) == 1
    assert factored_cut((32, 64, 2048)) == 2
    assert factored_cut((10, 10)) == 1


def test_factored_steps_are_no_longer_than_one_on_average():
    """A gradient that grows 100-fold at once would make steps of many times the rate."""
    storage = Factored(Block(1, 16))
    g, _, nu = start(storage, (8, 32))
    update, _, _ = storage.step(100 * g, storage.zeros(g)[0], nu, rates(4), KEY)
    assert np.sqrt(np.square(update).mean()) <= (1 - B1) / float(rates(4).bias1) * 1.0001


# In optax, and in our state.


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_works_under_any_mesh_as_without(axis_types):
    kind = getattr(jax.sharding.AxisType, axis_types.capitalize())
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    optimizer = adam(moments.int8)
    weights = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((64, 128)), jnp.float32)}

    @jax.jit
    def steps(weights):
        state = optimizer.init(weights)
        for _ in range(3):
            updates, state = optimizer.update(jax.tree.map(jnp.sin, weights), state, weights)
            weights = optax.apply_updates(weights, updates)
        return weights, state

    expected = steps(weights)
    sharded = jax.device_put(weights, NamedSharding(mesh, P("a", "b")))
    found = steps(sharded)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.float64(a), np.float64(b)
        if a.max() > 10:  # codes: sums in another order tip a rounding
            assert (a == b).mean() > 0.99
            assert np.abs(a - b).max() <= 1
        else:
            np.testing.assert_allclose(a, b, atol=1e-5)
    codes = found[1][0].mu["w"].codes
    assert codes.sharding.is_equivalent_to(sharded["w"].sharding, 2)


def test_mapping_over_layers_gives_each_its_own_scalars():
    optimizer = optim.scale_by_adam(B1, B2, EPS, moments.int8)
    stacked = {"w": jnp.ones((3, 16, 32))}
    state = jax.vmap(optimizer.init)(stacked)
    updates, state = jax.jit(jax.vmap(optimizer.update))(stacked, state)
    assert state.step.tolist() == [1, 1, 1]
    assert state.mu["w"].codes.shape == (3, 16, 32)
    np.testing.assert_allclose(updates["w"], 1, rtol=1e-5)


def test_without_a_key_every_step_rounds_anew():
    optimizer = optim.scale_by_adam(B1, B2, EPS, moments.int8)
    g = jnp.asarray(np.random.default_rng(0).standard_normal((64, 128)), jnp.float32)
    state = optimizer.init(g)
    _, one = optimizer.update(g, state)
    again = optimizer.update(g, state)[1]
    np.testing.assert_array_equal(one.mu.codes, again.mu.codes)
    other = optimizer.update(g, state._replace(step=jnp.int32(1)))[1]
    assert (np.asarray(one.mu.codes) != np.asarray(other.mu.codes)).mean() > 0.2


@pytest.mark.parametrize("model", [TINY, TINY_GPT2], ids=lambda model: model.name)
@pytest.mark.parametrize("kind", ["int8", "factored"])
def test_states_lie_as_their_parameters(kind, model):
    """Codes and scales in the parameter's shards, means of rows as the rows."""
    config = tiny_config("data=2,fsdp=2,tensor=2", model=model, moments=kind)
    state = abstract_state(config, mesh_of(config))
    parts, states = updates.split(state.params), adam_states(state)
    of_part = {"rest": parts.rest, "blocks": parts.blocks}
    of_part |= {name: {name: table} for name, table in parts.tables.items()}
    assert of_part.keys() == states.keys()
    for part, params in of_part.items():
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        mus, nus = (structure.flatten_up_to(m) for m in (states[part].mu, states[part].nu))
        for (path, param), mu, nu in zip(leaves, mus, nus, strict=True):
            row = PARAMETERS[path[-1].key]
            if not row.decays:
                assert mu.dtype == nu.dtype == jnp.float32
                assert mu.sharding == nu.sharding == param.sharding
                continue
            for stored in (mu, nu) if kind == "int8" else (mu,):
                assert stored.codes.sharding.spec == param.sharding.spec
                assert stored.scales.sharding.spec == param.sharding.spec
                assert stored.codes.dtype == (jnp.int8 if stored is mu else jnp.uint8)
            if kind == "factored":
                assert isinstance(nu, Factors)
                lead = 1 if part == "blocks" else 0  # the layers
                spec = (*param.sharding.spec, *[None] * param.ndim)[: param.ndim]
                cut = 1 if row.is_table else factored_cut(param.shape[lead:])
                assert nu.rows.sharding.spec == P(*spec[: lead + cut])
                assert (nu.columns is None) == row.is_table
                if nu.columns is not None:
                    assert nu.columns.sharding.spec == P(*spec[:lead], *spec[lead + cut :])


def test_bytes_of_the_state_by_hand():
    """Llama-3.2-1B: 16 layers of 2048, blocks of 64 or 128."""
    model = preset("llama3.2-1b")
    L, D, F, V = 16, 2048, 8192, model.padded_vocab_size
    matrices = V * D + L * (2 * D * 2048 + 2 * D * 512 + 3 * D * F)
    gains = (2 * L + 1) * D
    scalars = {}

    def held(kind: str, params: str) -> tuple[int, int]:
        config = tiny_config(model=dataclasses.replace(model, max_seq_len=64), moments=kind)
        memory = dataclasses.replace(config.memory, params=params)
        config = dataclasses.replace(config, memory=memory)
        state = abstract_state(config, mesh_of(config))
        scalars[kind] = sum(
            leaf.dtype.itemsize * leaf.size
            for leaf in jax.tree.leaves(state.opt_state)
            if leaf.dtype == jnp.int32
        )
        return bytes_per_device(state.params), bytes_per_device(state.opt_state)

    params, fp32 = held("fp32", "fp32")
    assert params == 4 * (matrices + gains)
    assert fp32 - scalars["fp32"] == 8 * (matrices + gains)
    params, int8 = held("int8", "int8")
    scales = 4 * matrices // 128  # every matrix has D or F in blocks of 128
    assert params == matrices + scales + 4 * gains
    assert int8 - scalars["int8"] == 2 * (matrices + scales) + 8 * gains
    _, factored = held("factored", "int8")
    means = V + L * (4 * D + 2 * 2048 + 2 * 512 + 3 * (D + F))
    assert factored - scalars["factored"] == matrices + scales + 4 * means + 8 * gains
    assert max(scalars.values()) < 200 * L
    assert (params + int8) / (matrices + gains) < 3.11


def test_names_for_bytes_and_kinds():
    storage = partial(optim.moment_storage, TINY)
    leaf = jnp.zeros((32, 8, 8))

    def of(kind: str, name: str):
        return storage(kind)((jax.tree_util.DictKey(name),), leaf)

    assert of("fp32", "q") == Plain(jnp.dtype(jnp.float32))
    assert of("bf16", "gain") == Plain(jnp.dtype(jnp.bfloat16))
    assert of("int8", "gain") == of("factored", "q_bias") == Plain(jnp.dtype(jnp.float32))
    assert isinstance(of("int8", "q"), Blocks)
    assert of("factored", "embedding").is_table
    assert not of("factored", "q").is_table
