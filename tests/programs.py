"""Programs as users write them, for what is said of any program: a small model whose
weights are sharded by hand, compiled for H100s by XLA's GPU compiler; no GPU is needed.

Letters: B batch, T sequence, D model width, F feed-forward width, V vocabulary, L layers.
"""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax.memory import report
from tpjax.memory.compiled import absent_mesh
from tpjax.memory.records import Finding

B, T, D, F, V, L = 8, 512, 512, 2048, 8192, 4
BF16, F32 = jnp.bfloat16, jnp.float32

tensor4 = lru_cache(partial(absent_mesh, "h100", {"tensor": 4}))
data4 = lru_cache(partial(absent_mesh, "h100", {"data": 4}))
data2_tensor2 = lru_cache(partial(absent_mesh, "h100", {"data": 2, "tensor": 2}))


def on(mesh, shape, spec=None, dtype=F32):
    spec = P() if spec is None else spec
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def found(function, *args, donate=(), **options) -> dict[str, list[Finding]]:
    """Findings of a function, by rule."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in report(jax.jit(function, donate_argnums=donate), *args, **options).findings:
        assert finding.message
        assert finding.remedy
        by_rule.setdefault(finding.rule, []).append(finding)
    return by_rule


def only(findings: dict[str, list[Finding]], rule: str) -> Finding:
    (finding,) = findings[rule]
    return finding


# A small model as users write it: weights for `mesh`, a forward pass, a loss.


def weights(mesh, axis: str | None = "tensor", embedding: P | None = None, dtype=F32) -> dict:
    """Sharded by Megatron's pattern over an axis; the embedding by its vocabulary."""
    return {
        "embedding": on(mesh, (V, D), P(axis) if embedding is None else embedding, dtype),
        "up": on(mesh, (L, D, F), P(None, None, axis), dtype),
        "down": on(mesh, (L, F, D), P(None, axis), dtype),
    }


def tokens(mesh, axis: str | None = None, rows: int = B) -> dict:
    return {name: on(mesh, (rows, T), P(axis), jnp.int32) for name in ("inputs", "targets")}


def layer(x, w, read=lambda w: w.astype(BF16)):
    return x + jax.nn.gelu(x @ read(w["up"])) @ read(w["down"]), None


def forward(params, batch, wrap=jax.checkpoint, body=layer):
    x = jnp.take(params["embedding"].astype(BF16), batch["inputs"], axis=0)
    stacked = {name: params[name] for name in ("up", "down")}
    return jax.lax.scan(wrap(body), x, stacked)[0]


def cross_entropy(params, x, batch, spec=None):
    logits = jnp.einsum(
        "BTD,VD->BTV", x, params["embedding"].astype(BF16), preferred_element_type=F32
    )
    logits = logits if spec is None else constrain(logits, spec)
    target = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - target).mean()


def loss(params, batch, **how):
    return cross_entropy(params, forward(params, batch, **how), batch)


def sgd(params, batch):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))
