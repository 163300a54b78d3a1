"""What blocks are made of: weights, norms, the embedding.

Letters: B batch, T sequence, D model width, N query heads, K key/value heads,
H head width, F feed-forward width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tpjax import quant
from tpjax.config import MemoryConfig, ModelConfig
from tpjax.mesh import TENSOR
from tpjax.precision import DTYPES
from tpjax.sharding import activation_spec, residual_spec, undeal, weight_spec

INIT_STD = 0.02  # GPT-2's, for every matrix


@dataclass(frozen=True)
class Row:
    """One parameter: its dimensions by letter, how it starts, whether it decays."""

    letters: str
    init: str = "normal"  # normal | residual (normal / √2L) | adapter | ones | zeros
    decays: bool = True

    @property
    def is_adapter(self) -> bool:
        """Whether it is trained beside frozen weights; always float32."""
        return "A" in self.letters

    @property
    def is_table(self) -> bool:
        """Whether each row belongs to a token or a position."""
        return self.letters[0] in "VT"


_GAIN, _SHIFT = Row("D", "ones", decays=False), Row("D", "zeros", decays=False)


def _zeros(letters: str) -> Row:
    return Row(letters, "zeros", decays=False)


def _adapter_in(letters: str) -> Row:
    return Row(letters, "adapter", decays=False)


PARAMETERS = {
    "embedding": Row("VD"),
    "positions": Row("TD"),
    "head": Row("VD"),
    "gain": _GAIN,
    "shift": _SHIFT,
    "q": Row("DNH"),
    "k": Row("DKH"),
    "v": Row("DKH"),
    "o": Row("NHD", "residual"),
    "q_bias": _zeros("NH"),
    "k_bias": _zeros("KH"),
    "v_bias": _zeros("KH"),
    "o_bias": _zeros("D"),
    "q_gain": Row("H", "ones", decays=False),
    "k_gain": Row("H", "ones", decays=False),
    "gate": Row("DF"),
    "up": Row("DF"),
    "down": Row("FD", "residual"),
    "gate_bias": _zeros("F"),
    "up_bias": _zeros("F"),
    "down_bias": _zeros("D"),
    "q_a": _adapter_in("DA"),
    "k_a": _adapter_in("DA"),
    "v_a": _adapter_in("DA"),
    "o_a": _adapter_in("NHA"),
    "gate_a": _adapter_in("DA"),
    "up_a": _adapter_in("DA"),
    "down_a": _adapter_in("FA"),
    "q_b": _zeros("ANH"),
    "k_b": _zeros("AKH"),
    "v_b": _zeros("AKH"),
    "o_b": _zeros("AD"),
    "gate_b": _zeros("AF"),
    "up_b": _zeros("AF"),
    "down_b": _zeros("AD"),
}


def make_weight(model: ModelConfig, memory: MemoryConfig, rngs: nnx.Rngs, name: str) -> nnx.Param:
    """The parameter `name` of the table, made in its shards: no device draws the rest, and
    of a vocabulary's table a part of the rows at a time.

    The draws depend on the key and the position in the whole array, so every
    mesh starts from the same bits.
    """
    row = PARAMETERS[name]
    shape = tuple(model.sizes[letter] for letter in row.letters)
    spec = weight_spec(row.letters, replicated_V=memory.embedding == "replicated")

    def stored(value: Array) -> Array | quant.Quantised:
        if row.is_adapter:
            return value
        if memory.params in DTYPES:
            return value.astype(DTYPES[memory.params])
        bits = 4 if memory.params == "nf4" and not row.is_table else 8
        return in_blocks(model, name, value, bits) if row.decays else value

    if row.init in ("ones", "zeros"):
        value = jnp.full(shape, row.init == "ones", jnp.float32, out_sharding=spec)
        return nnx.Param(stored(value), name=name)
    std = {
        "normal": INIT_STD,
        "residual": INIT_STD / math.sqrt(2 * model.num_layers),
        "adapter": 1 / math.sqrt(3 * math.prod(shape[:-1])),  # as PEFT's, which are uniform
    }[row.init]
    parts = model.table_parts if row.letters[0] == "V" else 1

    def draw(key: Array) -> Array | quant.Quantised:
        some = (shape[0] // parts, *shape[1:])
        return stored(std * jax.random.normal(key, some, jnp.float32, out_sharding=spec))

    key = rngs.params()
    keys = key[None] if parts == 1 else jax.random.split(key, parts)
    dealt = jax.lax.map(draw, keys)
    value = jax.tree.map(lambda x: undeal(jnp.swapaxes(x, 0, 1)), dealt)
    return nnx.Param(value, name=name)


def in_blocks(model: ModelConfig, name: str, value: Array, bits: quant.Bits) -> quant.Quantised:
    """The matrix `name`, or rows of it, quantised."""
    block = block_of(model, name, bits)
    return quant.quantise(value, block) if bits == 8 else quant.quantise4(value, block)


def block_of(model: ModelConfig, name: str, bits: quant.Bits = 8) -> quant.Block:
    """The blocks of the matrix `name` in 8 or 4 bits, whatever is stored so of it.

    A block never lies in two rows of a table (V, T). `tensor` divides the heads, so that
    no allowed one cuts a block; of `fsdp` the divisors of D / block size are allowed.
    """
    letters, sizes = PARAMETERS[name].letters, model.sizes
    shards = {"H": 1, "D": quant.MAX_SHARDS} | dict.fromkeys("NKF", sizes["N"])
    shape = [sizes[letter] for letter in letters]
    most = [shards.get(letter, sizes[letter]) for letter in letters]
    return quant.choose_block(shape, most, bits)


def read(weight: nnx.Param, dtype, *, gathered: bool = True) -> Array:
    """A weight as the mathematics uses it: in the compute dtype, then gathered over fsdp; of
    a table that lies whole on the tensor axis each device's rows, the gradient put together.

    Every weight is read here, so that what travels is the smaller dtype, and one that is
    stored in 8 or 4 bits needs no second model.
    """
    letters = PARAMETERS[weight.get_metadata()["name"]].letters
    return reshard(quant.value(weight.get_value(), dtype), weight_spec(letters, gathered=gathered))


def contract(equation: str, x: Array, weight: Array, out_spec: P | None = None) -> Array:
    """An einsum of activations with a weight that comes as it is stored (`read` without
    gathering): it is gathered over fsdp here, and its gradient is made in its shards.

    Args:
        equation: activations, weight and result by letter, such as "BTD,DF->BTF".
        out_spec: of the result, where the equation sums over a sharded dimension.
    """
    return _contract(equation, out_spec, jax.typeof(weight).sharding.spec, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _contract(equation: str, out_spec: P | None, stored: P, x: Array, weight: Array) -> Array:
    return _contract_forward(equation, out_spec, stored, x, weight)[0]


def _contract_forward(equation: str, out_spec: P | None, stored: P, x: Array, weight: Array):
    whole = (None if axes is None or "fsdp" in axes else axes for axes in stored)
    gathered = reshard(weight, P(*whole))
    return jnp.einsum(equation, x, gathered, out_sharding=out_spec), (x, gathered)


def _contract_backward(equation: str, out_spec: P | None, stored: P, saved, g: Array):
    """Asked for in its shards, the weight's gradient is scattered over fsdp and summed over
    data. Asked for whole, as differentiating the einsum would, it is summed over both."""
    x, gathered = saved
    letters_x, letters_w, letters_y = equation.replace("->", ",").split(",")
    if out_spec is not None:  # once for both
        g = reshard(g, activation_spec(letters_y))
    dx = jnp.einsum(
        f"{letters_y},{letters_w}->{letters_x}",
        g,
        gathered,
        out_sharding=jax.typeof(x).sharding.spec,
    )
    dw = jnp.einsum(f"{letters_x},{letters_y}->{letters_w}", x, g, out_sharding=stored)
    return dx, dw


_contract.defvjp(_contract_forward, _contract_backward)


class Norm(nnx.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm over D, computed in float32."""

    def __init__(self, model: ModelConfig, memory: MemoryConfig, rngs: nnx.Rngs):
        self.centred, self.eps = model.norm == "layernorm", model.norm_eps
        make = partial(make_weight, model, memory, rngs)
        self.gain = make("gain")
        self.shift = make("shift") if model.norm_bias else None

    @jax.named_scope("norm")
    def __call__(self, x_BTD: Array) -> Array:
        x = x_BTD.astype(jnp.float32)
        if self.centred:
            x -= x.mean(-1, keepdims=True)
        x = rms_norm(x, read(self.gain, jnp.float32), self.eps)
        if self.shift is not None:
            x += read(self.shift, jnp.float32)
        return x.astype(x_BTD.dtype)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """x / √(mean x² + eps) · gain over the last dimension, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return (x32 * scale * gain).astype(x.dtype)


def embed(table_VD: Array, tokens_BT: Array, sequence_parallel: bool) -> Array:
    """Vocabulary-parallel lookup: each device looks up the rows it has, and a
    (reduce-)sum over the tensor axis puts them together. Returns x_BTD.

    `table_VD` comes as it is stored and is gathered over fsdp here. Only one
    device adds something other than zero, so the sum is exact in any dtype.
    """

    @partial(
        jax.shard_map,
        in_specs=(weight_spec("VD"), activation_spec("BT")),
        out_specs=residual_spec(sequence_parallel),
    )
    def lookup(table_vd: Array, tokens_bT: Array) -> Array:
        table_vD = gather_fsdp(table_vd, axis=1)
        rows = table_vD.shape[0]
        row_bT = tokens_bT - jax.lax.axis_index(TENSOR) * rows
        row_bT = jnp.where((row_bT >= 0) & (row_bT < rows), row_bT, rows)
        x = _take_rows(table_vD, row_bT, rows)
        if sequence_parallel:
            return jax.lax.psum_scatter(x, TENSOR, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x, TENSOR)

    return lookup(table_VD, reshard(tokens_BT, activation_spec("BT")))


def gather_fsdp(weight: Array, axis: int) -> Array:
    """Inside a shard_map: a weight's fsdp shards put together along `axis`, for use
    with a device's own part of the batch. Its gradient is summed over `data` and
    reduce-scattered over `fsdp`."""
    weight = jax.lax.pcast(weight, "data", to="varying")
    if jax.lax.axis_size("fsdp") == 1:  # XLA:CPU would copy it
        return weight
    return jax.lax.all_gather(weight, "fsdp", axis=axis, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _take_rows(table_vD: Array, row_bT: Array, rows: int) -> Array:
    """table_vD[row_bT], zero where the row is `rows`."""
    return table_vD.at[row_bT].get(mode="fill", fill_value=0)


def _take_rows_backward(rows: int, row_bT: Array, g_bTD: Array) -> tuple[Array, None]:
    """Adds up many tokens, so in float32; not before the gradient is there (XLA
    would make the zeros to add to at the start of the step and keep them)."""
    zero, g_bTD = jax.lax.optimization_barrier((jnp.float32(0), g_bTD))
    total = jnp.broadcast_to(zero, (rows, g_bTD.shape[-1]))
    return total.at[row_bT].add(g_bTD.astype(jnp.float32), mode="drop").astype(g_bTD.dtype), None


_take_rows.defvjp(
    lambda table_vD, row_bT, rows: (_take_rows(table_vD, row_bT, rows), row_bT),
    _take_rows_backward,
)
