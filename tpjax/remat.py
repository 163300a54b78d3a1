"""Gradient checkpointing by name: what the forward pass keeps of each layer.

One table of the names that blocks give their tensors, and one of policies made
from them. A name that is not there is an error, never a silent no-op.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

_NAMES = (
    "attention_out",  # y_BTNH, before the output projection
    "attention_lse",  # log-sum-exp of the scores, per query and head
)
# cuDNN's attention cannot name what it keeps for its backward pass (the same two).
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"

_policies = jax.checkpoint_policies
_named = _policies.save_only_these_names(*_NAMES)


def _attention_saveable(primitive, *avals, **params) -> bool:
    return primitive.name == _CUDNN_ATTENTION or _named(primitive, *avals, **params)


_POLICIES = {
    "attention": _attention_saveable,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    "full": _policies.nothing_saveable,
}


def name(x: Array, tensor_name: str) -> Array:
    """Gives `x` a name that policies can keep it by."""
    if tensor_name not in _NAMES:
        raise ValueError(f"{tensor_name!r} is not in the table of tensor names {_NAMES}")
    return checkpoint_name(x, tensor_name)


def rematerialise(body: Callable, policy: str) -> Callable:
    """`body` (of a scan over layers) with `policy`: none, attention, dots or full."""
    if policy == "none":
        return body
    # Inside a scan XLA cannot merge the recomputation with the forward pass, so
    # the barriers that prevent_cse adds would only cost.
    return jax.checkpoint(body, policy=_POLICIES[policy], prevent_cse=False)


def group_size(num_layers: int) -> int:
    """Layers of a group whose input alone is kept: the divisor that keeps the fewest inputs,
    those of the groups and those of the layers of one."""
    divisors = [d for d in range(1, num_layers + 1) if num_layers % d == 0]
    return min(divisors, key=lambda size: num_layers // size + size)
