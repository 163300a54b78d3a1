"""Text from a model: the prompts are read into a cache once, then a token at a time is added.

Two programs, each compiled once: one reads a prompt for each batch shard, the other makes a
token for every sequence. The last token of a prompt is read by the second, so that all tokens
are drawn alike.

Letters: B batch (sequences), T prompt length with padding, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import cache as kv
from tpjax.attention import attend
from tpjax.cache import Cache
from tpjax.checks import require
from tpjax.config import TrainConfig
from tpjax.mesh import BATCH
from tpjax.model import Transformer
from tpjax.rope import rope_tables
from tpjax.sampling import Sampling, next_token
from tpjax.sharding import activation_spec
from tpjax.state import abstract_state, graph, purpose_key

PROMPT_ROUND = 64  # prompts are filled up to a multiple of it, so that fewer lengths compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """What a generator is made for.

    Attributes:
        context: positions of a sequence, prompt and what follows it.
        prompt_len: of the longest prompt, filled up.
        batch_size: sequences, filled up to the batch shards.
        cache: how keys and values are kept.
    """

    context: int
    prompt_len: int
    batch_size: int
    cache: kv.Kind
    sampling: Sampling

    @staticmethod
    def of(
        prompts: Sequence[np.ndarray], context: int, mesh: Mesh, cache: kv.Kind, sampling: Sampling
    ) -> Decoding:
        """For these prompts; a context of at least the longest and one more."""
        longest = max(map(len, prompts))
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        return Decoding(
            context=context,
            prompt_len=min(-(-longest // PROMPT_ROUND) * PROMPT_ROUND, context),
            batch_size=-(-len(prompts) // shards) * shards,
            cache=cache,
            sampling=sampling,
        )


def _through_layers(
    model: Transformer, rope: tuple | None, x_BTD: Array, cache: Cache, mix: Callable
) -> tuple[Array, Cache]:
    """The last block's output, and the cache with what was read on the way.

    Args:
        mix: (cache, layer, q_BTNH, k_BTKH, v_BTKH) → the new cache and y_BTNH.
    """
    block, stacked = nnx.split(model.blocks)

    def layer(carry: tuple, numbered: tuple) -> tuple:
        (x_BTD, cache), (number, weights) = carry, numbered
        written = []

        def attention(*qkv: Array) -> Array:
            new, y_BTNH = mix(cache, number, *qkv)
            written.append(new)
            return y_BTNH

        x_BTD = nnx.merge(block, weights)(x_BTD, rope, attention)
        return (x_BTD, *written), None

    numbers = jnp.arange(model.model.num_layers)
    return jax.lax.scan(layer, (x_BTD, cache), (numbers, stacked))[0]


def prefill(
    config: TrainConfig,
    decoding: Decoding,
    params: dict,
    cache: Cache,
    tokens_BT: Array,
    length_B: Array,
    row: Array,
) -> Cache:
    """The cache with one prompt of each batch shard read.

    Args:
        tokens_BT: a prompt a shard, with padding after it.
        length_B: tokens of each.
        row: which sequence of its shard each is.
    """
    model = nnx.merge(graph(config), params)
    rope = _rope(config, decoding, jnp.arange(tokens_BT.shape[1]))
    how = (config.memory.attention, config.model.sliding_window)

    def mix(cache: Cache, layer: Array, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array) -> tuple:
        cache = kv.store(cache, layer, row, k_BTKH, v_BTKH, length_B)
        return cache, attend(q_BTNH, k_BTKH, v_BTKH, *how)

    return _through_layers(model, rope, model.embed(tokens_BT), cache, mix)[1]


def decode(
    config: TrainConfig,
    decoding: Decoding,
    params: dict,
    cache: Cache,
    tokens_B: Array,
    position_B: Array,
) -> tuple[Cache, Array]:
    """The cache with one more token of each sequence read, and the model's output x_BD there."""
    model = nnx.merge(graph(config), params)
    rope = _rope(config, decoding, position_B[:, None])

    def mix(cache: Cache, layer: Array, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array) -> tuple:
        cache = kv.append(cache, layer, k_BTKH, v_BTKH, position_B)
        return cache, kv.attend(q_BTNH, cache, layer, position_B)

    x_BTD = model.embed(tokens_B[:, None], position_B[:, None])
    x_BTD, cache = _through_layers(model, rope, x_BTD, cache, mix)
    return cache, model.norm(x_BTD)[:, 0]


def _rope(config: TrainConfig, decoding: Decoding, positions: Array):
    """RoPE that changes with the length (`dynamic`) is that of the whole context."""
    model = config.model
    if model.rope is None:
        return None
    return rope_tables(model.rope, model.head_dim, decoding.context, positions)


def step(
    config: TrainConfig,
    decoding: Decoding,
    params: dict,
    cache: Cache,
    tokens_B: Array,
    position_B: Array,
    seed: Array,
    number: Array,
) -> tuple[Cache, Array, Array]:
    """One more token of each sequence: the cache, the new tokens, and their positions."""
    cache, x_BD = decode(config, decoding, params, cache, tokens_B, position_B)
    head_VD = nnx.merge(graph(config), params).head_VD()
    key = jax.random.fold_in(purpose_key(seed, "sampling"), number)
    tokens_B = next_token(x_BD, head_VD, key, config.model.vocab_size, decoding.sampling)
    return cache, tokens_B, position_B + 1


def lower_prefill(config: TrainConfig, mesh: Mesh, decoding: Decoding) -> jax.stages.Lowered:
    """`prefill` for the mesh, the cache updated in place."""
    config = _unsharded(config)
    params, cache = _abstract(config, mesh, decoding)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    tokens = _ints(mesh, (shards, decoding.prompt_len), activation_spec("BT"))
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, cache)
        function = jax.jit(
            partial(prefill, config, decoding), donate_argnums=1, out_shardings=shardings
        )
        length, row = _ints(mesh, (shards,), P(BATCH)), _ints(mesh, (), P())
        return function.lower(params, cache, tokens, length, row)


def lower_step(config: TrainConfig, mesh: Mesh, decoding: Decoding) -> jax.stages.Lowered:
    """`step` for the mesh, the cache updated in place."""
    config = _unsharded(config)
    params, cache = _abstract(config, mesh, decoding)
    rows = _ints(mesh, (decoding.batch_size,), P(BATCH))
    whole = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, cache)
        function = jax.jit(
            partial(step, config, decoding),
            donate_argnums=(1, 3),
            out_shardings=(shardings, rows.sharding, rows.sharding),
        )
        seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=whole)
        return function.lower(params, cache, rows, rows, seed, _ints(mesh, (), P()))


def _unsharded(config: TrainConfig) -> TrainConfig:
    """Without sequence parallelism: one token is no sequence."""
    memory = dataclasses.replace(config.memory, sequence_parallel=False)
    return dataclasses.replace(config, memory=memory)


def _abstract(config: TrainConfig, mesh: Mesh, decoding: Decoding) -> tuple[dict, Cache]:
    sizes = (decoding.batch_size, decoding.context, decoding.cache)
    cache = kv.abstract_cache(config.model, mesh, *sizes)
    return abstract_state(config, mesh).weights, cache


def _ints(mesh: Mesh, shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))


class Generator:
    """A model ready to go on with prompts.

    Raises:
        ConfigError: the context is longer than the model's positions, or logits are no numbers.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, params: dict, decoding: Decoding):
        longest = config.model.max_seq_len
        require(
            decoding.context <= longest,
            f"context={decoding.context} exceeds the {longest} positions of {config.model.name}.",
        )
        self._config = config
        self._mesh, self._params, self._decoding = mesh, params, decoding
        self._prefill = lower_prefill(self._config, mesh, decoding).compile()
        self._step = lower_step(self._config, mesh, decoding).compile()
        self._cache = kv.empty(_abstract(self._config, mesh, decoding)[1])

    def stream(self, prompts: Sequence[np.ndarray], seed: int) -> Iterator[np.ndarray]:
        """One token for each prompt after the other, [len(prompts)], until the context of the
        longest is full.

        Args:
            prompts: of at least one token each.
        """
        rows, lengths = self._read(prompts)
        B, spec = self._decoding.batch_size, P(BATCH)
        tokens = self._put(rows[np.arange(B), lengths - 1], spec)
        position = self._put(lengths - 1, spec)
        for number in range(self._decoding.context - int(lengths.max())):
            self._cache, tokens, position = self._step(
                self._params, self._cache, tokens, position, np.uint32(seed), np.int32(number)
            )
            found = np.asarray(tokens)[: len(prompts)]
            require(
                bool((found < self._config.model.vocab_size).all()),
                "the model's logits are not numbers: its weights are spoilt.",
            )
            yield found

    def _read(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts into the cache; returns them with padding, and their lengths."""
        B, T = self._decoding.batch_size, self._decoding.prompt_len
        rows, lengths = np.zeros((B, T), np.int32), np.ones(B, np.int32)
        for number, prompt in enumerate(prompts):
            rows[number, : len(prompt)], lengths[number] = prompt, len(prompt)
        shards = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        for row in range(B // shards):
            some = np.arange(shards) * (B // shards) + row
            tokens = self._put(rows[some], activation_spec("BT"))
            length = self._put(lengths[some], P(BATCH))
            self._cache = self._prefill(self._params, self._cache, tokens, length, np.int32(row))
        return rows, lengths

    def _put(self, array: np.ndarray, spec: P) -> Array:
        sharding = NamedSharding(self._mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def sample(
    config: TrainConfig, mesh: Mesh, params: dict, prompt: np.ndarray, count: int, seed: int
) -> list[int]:
    """`count` tokens that follow `prompt`; together at most as many as the model has positions."""
    kind = config.memory.compute
    assert kind != "auto"  # resolved
    decoding = Decoding.of([prompt], len(prompt) + count, mesh, kind, Sampling())
    generator = Generator(config, mesh, params, decoding)
    return [int(tokens[0]) for tokens in generator.stream([prompt], seed)]
