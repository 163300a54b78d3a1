"""Small versions of what benchmarks/convergence.py shows: low precision learns as float32 does.

A made-up language is learnt, of which every next token is one of four; the loss that is
left is measured on text of it that was not trained on.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, mesh_of, tiny_config

from benchmarks.convergence import TECHNIQUES
from tpjax.config import OptimConfig
from tpjax.data import place
from tpjax.state import create_state
from tpjax.step import lower_eval_step, lower_train_step

ROOT = Path(__file__).parent.parent
STEPS, HELD_OUT = 250, 8
LAYERWISE = {"update": "layerwise", "remat": "full"}


def text(seed: int):
    """Tokens, targets and validity of a batch: each token has four successors, the first of
    them as likely as the others together."""
    successors = np.random.default_rng(7).integers(0, TINY.vocab_size, (TINY.vocab_size, 4))
    rng = np.random.default_rng([1, seed])
    tokens = np.zeros((8, 33), np.int32)
    tokens[:, 0] = rng.integers(0, TINY.vocab_size, 8)
    for t in range(32):
        choice = rng.choice(4, 8, p=[0.5, 0.2, 0.2, 0.1])
        tokens[:, t + 1] = successors[tokens[:, t], choice]
    return tokens[:, :-1], tokens[:, 1:], np.ones((8, 32), bool)


@lru_cache
def loss_left(settings: tuple = (), lr: float = 1e-2) -> float:
    """After training, per token of the held-out text."""
    optim = OptimConfig(lr=lr, min_lr=lr / 10, warmup=20)
    model = dataclasses.replace(TINY, num_layers=1)
    config = tiny_config(model=model, steps=STEPS, optim=optim, **dict(settings))
    mesh = mesh_of(config)
    step = lower_train_step(config, mesh).compile()
    evaluate = lower_eval_step(config, mesh).compile()
    state = create_state(config, mesh)
    for number in range(STEPS):
        state, _ = step(state, place(text(number), mesh))
    whole = jax.NamedSharding(mesh, jax.P())
    totals = jax.device_put((np.float32(0), np.int32(0)), whole)
    for number in range(HELD_OUT):
        totals = evaluate(state.params, totals, place(text(STEPS + number), mesh))
    return float(totals[0]) / int(totals[1])


def test_the_language_is_learnt():
    """Its entropy is 1.22; a model that knows nothing is at log 97 = 4.57."""
    assert 1.2 < loss_left(()) < 1.6


INT8 = (("params", "int8"), ("moments", "int8"))


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ((("params", "bf16"), ("moments", "int8")), 0.01),
        (INT8, 0.03),
        ((("params", "int8"), ("moments", "factored"), *LAYERWISE.items()), 0.03),
        ((("compute", "fp16"),), 0.01),
    ],
    ids=lambda value: "-".join(v for _, v in value) if isinstance(value, tuple) else str(value),
)
def test_low_precision_learns_as_float32_does(settings, most):
    assert loss_left(settings) / loss_left() - 1 < most


@pytest.mark.parametrize("name", ["shakespeare", "stdlib"])
def test_the_saved_figures_say_what_the_readme_does(name):
    """Three seeds each: within 1 % of float32, with int8 or factored state within 3 %."""
    saved = json.loads((ROOT / f"benchmarks/results/convergence_{name}.json").read_text())
    losses = saved["losses"]
    assert list(losses) == list(TECHNIQUES)
    means = {technique: statistics.mean(values) for technique, values in losses.items()}
    assert all(len(values) == 3 for values in losses.values())
    readme = (ROOT / "README.md").read_text()
    for technique, mean in means.items():
        gap = mean / means["fp32"] - 1
        assert gap < (0.03 if "int8 parameters" in technique else 0.01), technique
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| {technique} |")]
        assert f"{mean:.3f} ({100 * gap:+.1f} %)" in line.split("|")[3 if name == "stdlib" else 2]


def test_small_updates_need_stochastic_rounding(monkeypatch):
    """At a small learning rate int8 parameters learn what float32 ones do; rounded to nearest
    they learn less."""
    slow, before = 2e-4, np.log(TINY.vocab_size)
    learnt = before - loss_left((), slow)
    assert before - loss_left(INT8, slow) > 0.95 * learnt

    def nearest(bits):
        return jnp.full(bits.shape, 0.5, jnp.float32, out_sharding=jax.typeof(bits).sharding)

    monkeypatch.setattr("tpjax.updates.precision.uniform", nearest)
    assert before - loss_left.__wrapped__(INT8, slow) < 0.9 * learnt
