"""Gradient checkpointing: what the forward pass keeps of each layer, and what follows.

Layers give tensors the names of `config.KEPT`: `attention` (output y_BTNH and log-sum-exp of
the scores), `qkv` (queries, keys and values), `mlp_in` (x_BTD between the halves of a layer).
A name that is not in the table is an error, never a silent no-op.

Letters: B batch, T sequence, D model width, N query heads, H head width, L layers, G layers
of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, checkpoint_name

from tpjax.config import KEPT, MemoryConfig

_INPUT = "layer_in"  # x_BTD as a layer gets it, which every policy keeps
# cuDNN's attention cannot name what it keeps for its backward pass (output and log-sum-exp).
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"


def name(x: Array, tensor_name: str) -> Array:
    """Gives `x` a name that policies can keep it by."""
    if tensor_name not in KEPT:
        raise ValueError(f"{tensor_name!r} is not in the table of tensor names {KEPT}")
    return checkpoint_name(x, tensor_name)


def group_size(num_layers: int) -> int:
    """Layers of a group of `nested`: the divisor G of L for which the L/G inputs that the
    forward pass keeps and the G that exist while a group is run again are fewest. 1 for a
    prime number of layers, which nested is no use for."""
    divisors = [G for G in range(1, num_layers + 1) if num_layers % G == 0]
    return min(divisors, key=lambda G: num_layers // G + G)


def repeated(memory: MemoryConfig) -> Counter[str]:
    """How often the backward pass runs the parts of each layer again.

    Parts: the projections `qkv`, the `attention` between them and the projection `o`, those
    before (`up`, with the gate) and after (`down`) the nonlinearity, and `gather`: of the
    normed residual stream before each half, and of each weight over fsdp.
    """
    if memory.remat == "none":
        return Counter()
    # Nothing in a layer needs what `down` makes. Gathered weights and activations are
    # needed for the gradients even of projections that are not run again.
    parts = {"gather", "qkv", "attention", "o", "up"}
    parts -= {"qkv", "o", "up"} if memory.remat == "dots" else set()
    parts -= {"attention", "qkv"} & memory.kept
    parts -= {"o"} if "mlp_in" in memory.kept else set()
    found = Counter(parts)
    if memory.remat == "nested":  # a group, for the inputs of its layers
        found.update(("gather", "qkv", "attention", "o", "up", "down"))
    return found


def scan(layer: Callable, x_BTD: Array, stacked: Any, rope: Any, memory: MemoryConfig) -> Array:
    """`layer(x_BTD, weights, rope)` of each layer in turn, differentiated as `memory` says.

    Args:
        stacked: the weights of all layers, [L, ...] each.
        rope: what all layers read and nothing is differentiated by.
    """
    if memory.remat == "nested":
        return _in_groups(layer, memory.offloads_residuals, x_BTD, stacked, rope)

    def body(x_BTD: Array, weights: Any) -> tuple[Array, None]:
        return layer(checkpoint_name(x_BTD, _INPUT), weights, rope), None

    if memory.remat != "none":
        # Inside a scan XLA cannot merge the recomputation with the forward pass, so
        # the barriers that prevent_cse adds would only cost.
        body = jax.checkpoint(body, policy=_policy(memory), prevent_cse=False)
    return jax.lax.scan(body, x_BTD, stacked)[0]


def _policy(memory: MemoryConfig) -> Callable:
    """What is kept, on the device or in the host's memory. The input of a layer needs no
    policy to be kept on the device."""
    keep, names = Saveable, memory.kept
    if memory.offloads_residuals:
        keep, names = Offloadable("device", "pinned_host"), {_INPUT, *memory.kept}
    is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def policy(primitive, *avals, **params):
        if primitive.name == "name":
            kept = params["name"] in names
        elif primitive.name == _CUDNN_ATTENTION:
            kept = "attention" in names
        else:
            kept = memory.remat == "dots" and is_dot(primitive, *avals, **params)
        return keep if kept else Recompute

    return policy


# `nested`. Differentiated by hand: a scan over groups of a scan over layers, checkpointed
# both, would copy each group's weights out of the stack, and its gradients into it.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_groups(layer: Callable, offload: bool, x_BTD: Array, stacked: Any, rope: Any) -> Array:
    return _groups_forward(layer, offload, x_BTD, stacked, rope)[0]


def _groups_forward(layer: Callable, offload: bool, x_BTD: Array, stacked: Any, rope: Any):
    """Keeps the input of each group, in the host's memory if told to."""

    def group(x_BTD: Array, layers: Array) -> tuple[Array, Array]:
        kept = jax.device_put(x_BTD, jax.memory.Space.Host) if offload else x_BTD
        return _run(layer, x_BTD, stacked, rope, layers)[0], kept

    out_BTD, kept = jax.lax.scan(group, x_BTD, _groups(stacked))
    return out_BTD, (kept, stacked, rope)


def _groups_backward(layer: Callable, offload: bool, saved: tuple, dout_BTD: Array):
    """The last group first: run again for the inputs of its layers, and then its layers, the
    last first, each run again and differentiated."""
    kept, stacked, rope = saved
    leaves, structure = jax.tree.flatten(stacked)
    has_gradient = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def one(carry: tuple, saved: tuple) -> tuple[tuple, None]:
        (dx_BTD, gradients), (i, x_BTD) = carry, saved
        weights = _layer_of(leaves, i)

        def again(x_BTD: Array, new: list[Array]) -> Array:
            given = iter(new)
            pairs = zip(weights, has_gradient, strict=True)
            both = [next(given) if moves else old for old, moves in pairs]
            return layer(x_BTD, structure.unflatten(both), rope)

        body = jax.checkpoint(again, prevent_cse=False)
        dx_BTD, gradient = jax.vjp(body, x_BTD, _chosen(weights, has_gradient))[1](dx_BTD)
        gradients = jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, i, 0),
            gradients,
            gradient,
        )
        return (dx_BTD, gradients), None

    def group(carry: tuple, saved: tuple) -> tuple[tuple, None]:
        layers, x_BTD = saved
        if offload:
            x_BTD = jax.device_put(x_BTD, jax.memory.Space.Device)
        with jax.named_scope("rematted_computation"):  # as jax.checkpoint calls it
            inputs = _run(layer, x_BTD, stacked, rope, layers)[1]
        return jax.lax.scan(one, carry, (layers, inputs), reverse=True)[0], None

    carry = (dout_BTD, [jnp.zeros_like(leaf) for leaf in _chosen(leaves, has_gradient)])
    (dx_BTD, gradients), _ = jax.lax.scan(group, carry, (_groups(stacked), kept), reverse=True)
    given = iter(gradients)
    both = [next(given) if moves else None for moves in has_gradient]  # integers have none
    return dx_BTD, structure.unflatten(both), None


def _chosen(leaves: list[Array], mask: list[bool]) -> list[Array]:
    return [leaf for leaf, chosen in zip(leaves, mask, strict=True) if chosen]


_in_groups.defvjp(_groups_forward, _groups_backward)


def _groups(stacked: Any) -> Array:
    """The numbers of the layers, [L/G, G]."""
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    return jnp.arange(num_layers).reshape(-1, group_size(num_layers))


def _run(layer: Callable, x_BTD: Array, stacked: Any, rope: Any, layers: Array):
    """What the layers of these numbers make of x_BTD in turn, and the input of each, stacked."""
    return jax.lax.scan(
        lambda x_BTD, i: (layer(x_BTD, _layer_of(stacked, i), rope), x_BTD), x_BTD, layers
    )


def _layer_of(stacked: Any, i: Array) -> Any:
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), stacked)
