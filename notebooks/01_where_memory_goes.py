# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where memory goes
#
# A training step of Llama 3.2 1B on four H100s that are not here. XLA's compiler for GPUs runs on
# the CPU; the step is compiled, never run, and the compiler says where every byte goes.
#
# 1. What the step holds at its peak, and when.
# 2. One knob at a time: what each buys and what it costs.
# 3. What moves between the GPUs.
# 4. The same report on a function of your own, and what fits on a card with 8 GB.
#
# It needs no GPU: `pip install 'tpjax[plan,notebooks]'`. A compilation takes some seconds.
# Sizes are of one GPU; 1 GiB is 1024³ bytes. The numbers are computed by the cells, and `assert`
# checks what the text claims.

# %%
import inspect
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from IPython.display import Image, Markdown, display

import tpjax
from tpjax.memory.records import KINDS, gib
from tpjax.memory.scene import COLOURS
from tpjax.pool import DEFAULT_POOL_FRACTION

begin = time.perf_counter()
# First of all: without a driver, JAX is to start on the CPU.
devices = tpjax.start_devices(1)
print("JAX runs on:", devices[0].device_kind)


# %% [markdown]
# JAX may print "Could not find cuda drivers" above. It is right, and does no harm.
#
# Three helpers for showing things:


# %%
def say(text):
    display(Markdown(text))


def table(header, rows):
    sides = ["--:" if str(cell)[:1] in "+−0123456789" else "---" for cell in rows[-1]]
    say("\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, sides, *rows]))


def timeline(report, title=""):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.png"
        tpjax.memory.draw(replace(report, title=title or report.title), path)
        display(Image(path.read_bytes(), width=1000))


# %% [markdown]
# ## 1. One step
#
# Four GPUs on the mesh's `tensor` axis: each has a quarter of every weight matrix.

# %%
run = tpjax.TrainConfig(
    model=tpjax.preset("llama3.2-1b"),
    mesh=tpjax.MeshConfig(tensor=4),
    data=tpjax.DataConfig(batch_size=8, seq_len=2048),
)
dots = tpjax.memory.report_run(run, gpu="h100")

rows = []
for kind, size in dots.bytes_by_kind.items():
    largest = max((line for line in dots.ledger if line.kind == kind), key=lambda line: line.bytes)
    name = f"`{largest.name}` {largest.dtype}{list(largest.shape) or ''}"
    rows.append([kind, gib(size), f"{size / dots.peak_bytes:.1%}", name])
table(["at the peak", "bytes", "share", "its largest array"], rows)

assert sum(line.bytes for line in dots.ledger) == dots.peak_bytes
state = dots.bytes_by_kind["parameters"] + dots.bytes_by_kind["moments"]
expected = 12 * run.model.num_parameters / 4
assert abs(state / expected - 1) < 0.01
say(
    f"The peak is **{gib(dots.peak_bytes)}** on each GPU; the lines of the ledger add up to it. "
    f"A float32 parameter and its two moments are 12 bytes; "
    f"{run.model.num_parameters / 1e9:.2f} billion of them over 4 GPUs are {gib(expected)}. "
    f"The ledger has {gib(state)}."
)

# %% [markdown]
# Shapes are a GPU's own. Where the first number is that of the layers, the array has all layers'
# values; so the largest activations are what the forward pass keeps for the backward pass.
#
# When are they there? From left to right, the instructions in the order in which the GPU gets
# them. What a loop fills has its memory before the loop starts, some of it long before.

# %%
timeline(dots)

peak = dots.timeline.peak
loop = next(loop for loop in dots.timeline.loops if loop.start <= peak <= loop.end)
loops = {loop.name: loop for loop in dots.timeline.loops}
forward, backward, update = (loops[name] for name in ("layers", "backward layers", "update"))
assert loop == backward
assert forward.trips == backward.trips == update.trips == run.model.num_layers
alive = [dots.timeline.total_bytes(p) for p in range(len(dots.timeline.labels))]
assert alive[-1] < 1.01 * min(alive)
say(
    f"The main loops: forward over {forward.trips} layers, the loss piece by piece, backward over "
    f"{backward.trips} layers, and their update one by one. The peak is in the backward one, at "
    f"`{dots.timeline.labels[peak]}`: what the forward pass kept is still allocated, the gradients "
    "are too, and one layer's own work comes on top. At the end hardly more than the state is "
    "left: the new one lies in the old one's memory."
)

# %% [markdown]
# ## 2. One knob at a time
#
# `turn` compiles the step with one setting changed and says in two lines what that does.

# %%
reports = {"remat=dots": dots}


def memory(**settings):
    return replace(run, memory=replace(run.memory, **settings))


def signed(size):
    return f"{'+' if size >= 0 else '−'}{gib(abs(size))}"


def turn(name, config, before=dots):
    after = reports[name] = tpjax.memory.report_run(config, gpu="h100")
    kinds = {
        kind: after.bytes_by_kind.get(kind, 0) - before.bytes_by_kind.get(kind, 0) for kind in KINDS
    }
    largest = sorted(kinds.items(), key=lambda item: -abs(item[1]))[:4]
    changes = [f"{kind} {signed(size)}" for kind, size in largest if abs(size) > 2**20]
    print(
        f"{name}: peak {gib(before.peak_bytes)} → {gib(after.peak_bytes)}, "
        f"sent per step {gib(before.wire_bytes)} → {gib(after.wire_bytes)}\n"
        f"at the peak: {', '.join(changes)}"
    )
    return after


# %% [markdown]
# **What the forward pass keeps.** So far `remat=dots`: each projection's output. `none` keeps
# everything that the backward pass reads:

# %%
none = turn("remat=none", memory(remat="none"))
assert none.peak_bytes > dots.peak_bytes

# %% [markdown]
# `full` keeps each layer's input only. The price is to compute the rest again, with its
# communication:

# %%
full = turn("remat=full", memory(remat="full"))
assert full.peak_bytes < dots.peak_bytes
assert full.wire_bytes > dots.wire_bytes > none.wire_bytes
assert full.bytes_by_kind["activations"] < dots.bytes_by_kind["activations"] / 2

# %% [markdown]
# **The logits.** There is one for each token and each word of the vocabulary. By default they exist
# for one piece of the sequence at a time. All at once, they make a peak of their own:

# %%
whole = turn("loss_chunks=1", memory(loss_chunks=1))
assert len(whole.timeline.loops) == len(dots.timeline.loops) - 1
assert whole.bytes_by_kind["logits"] > 10 * max(dots.timeline.bytes_by_kind["logits"])
say(
    f"The logits take {gib(whole.bytes_by_kind['logits'])}, and the peak moves to "
    f"`{whole.timeline.labels[whole.timeline.peak]}`."
)
timeline(whole, f"{whole.title}, the loss in one piece")

# %% [markdown]
# **Two bytes a parameter.** In bfloat16, rounded stochastically so that small updates are not
# lost, and without a float32 copy. The gradients become smaller with them.

# %%
bf16 = turn("params=bf16", memory(params="bf16"))
saved = dots.bytes_by_kind["parameters"] - bf16.bytes_by_kind["parameters"]
assert abs(saved / (2 * run.model.num_parameters / 4) - 1) < 0.05
assert bf16.bytes_by_kind["gradients"] < dots.bytes_by_kind["gradients"]
assert bf16.bytes_by_kind["moments"] == dots.bytes_by_kind["moments"]

# %% [markdown]
# **Another mesh.** `fsdp=4` shards the batch, and the weights only for keeping: each is gathered
# before it is used.

# %%
fsdp = turn("mesh fsdp=4", replace(run, mesh=tpjax.MeshConfig(fsdp=4)))
assert fsdp.wire_bytes < dots.wire_bytes
assert fsdp.peak_bytes > dots.peak_bytes

# %% [markdown]
# **No donation.** The new state may not be written over the old one:

# %%
kept = turn("donate=False", memory(donate=False))
assert dots.peak_bytes < kept.peak_bytes < dots.peak_bytes + state
for kind in ("activations", "gradients"):
    assert kept.bytes_by_kind[kind] < dots.bytes_by_kind[kind]
say(
    f"The second copy of the state has {gib(state)}, the peak grows by "
    f"{gib(kept.peak_bytes - dots.peak_bytes)}: until the new state is written, XLA keeps "
    "activations and gradients in its place."
)

# %% [markdown]
# All of them side by side:

# %%
table(
    ["", "peak", "against the first", "sent per step"],
    [
        [
            name,
            gib(r.peak_bytes),
            "" if r is dots else signed(r.peak_bytes - dots.peak_bytes),
            gib(r.wire_bytes),
        ]
        for name, r in reports.items()
    ],
)

# %%
fig, ax = plt.subplots(figsize=(11, 4.2), layout="constrained")
left = [0.0] * len(reports)
for kind in KINDS:
    sizes = [r.bytes_by_kind.get(kind, 0) / 2**30 for r in reports.values()]
    label = kind if max(sizes) > 0.05 else None  # what can be seen
    ax.barh(list(reports), sizes, left=left, label=label, color=COLOURS[kind])
    left = [a + b for a, b in zip(left, sizes, strict=True)]
for row, total in enumerate(left):
    ax.text(total, row, f" {total:.2f}", va="center", weight="bold")
ax.invert_yaxis()
ax.set(xlabel="GiB per GPU at the peak", xlim=(0, 1.08 * max(left)), title=dots.title)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## 3. Between the GPUs
#
# Sent by one GPU in one step, by what is sent. *Asynchronous* is what can go on behind other work.

# %%
for report in (dots, fsdp):
    groups = defaultdict(list)
    for c in report.collectives:
        groups[f"{c.op} of {c.kind}"].append(c)
    rows = []
    for name, group in groups.items():
        total = sum(c.wire_bytes for c in group)
        hidden = sum(c.wire_bytes for c in group if c.asynchronous)
        rows.append([total, name, sum(c.count for c in group), f"{hidden / total:.0%}"])
    mesh = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    table(
        [f"mesh {mesh}", "runs", "sent", "asynchronous"],
        [[name, runs, gib(total), hidden] for total, name, runs, hidden in sorted(rows)[::-1]],
    )


def sent(report, *kinds):
    return sum(c.wire_bytes for c in report.collectives if c.kind in kinds)


assert sent(dots, "activations") > 0.9 * dots.wire_bytes
assert sent(fsdp, "parameters", "gradients") > 0.9 * fsdp.wire_bytes

# %% [markdown]
# `tensor` sends activations: more tokens, more to send. `fsdp` sends weights and their gradients,
# however many the tokens.
#
# The report also looks for what costs more than it has to: collectives that the mathematics does
# not need, arrays whole on every GPU, copies. Of all steps above:

# %%
for name, report in reports.items():
    for f in report.findings:
        say(f"`{name}`: {f.message} **{f.remedy}** ({gib(f.bytes)})")

assert not any(f.rule == "unneeded-collective" for r in reports.values() for f in r.findings)
planted = next(f for f in kept.findings if f.rule == "not-donated")
assert planted.bytes > 0.99 * state
assert not any(f.rule == "not-donated" for f in dots.findings)

# %% [markdown]
# The second copy of the state was planted, by `donate=False`. Its remedy, donation, is on by
# default: the step of section 1 has no such finding.

# %% [markdown]
# ## 4. Your own function
#
# Nothing of this needs a model of ours. Attention as the textbook has it, and its gradients:


# %%
def attention(q, k, v):
    scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(scores)
    return jnp.einsum("hqk,khd->qhd", weights, v)


@jax.jit
def gradients(q, k, v):
    return jax.grad(lambda *args: attention(*args).sum(), argnums=(0, 1, 2))(q, k, v)


def heads(tokens):
    return [jax.ShapeDtypeStruct((tokens, 16, 64), jnp.float32)] * 3


def code(function, source):
    """The line of a function that an array comes from, if it is of this function."""
    lines, first = inspect.getsourcelines(function)
    place, _, number = (source or ":0").rpartition(":")
    ours = Path(place).name == Path(inspect.getsourcefile(function)).name
    inside = 0 <= int(number) - first < len(lines)
    return f"`{lines[int(number) - first].strip()}`" if ours and inside else ""


here = tpjax.memory.report(gradients, *heads(4096))
there = tpjax.memory.report(gradients, *heads(4096), gpu="rtx4060")
for where, report in (("this machine", here), ("an RTX 4060", there)):
    say(f"On {where}: {gib(report.peak_bytes)} at the peak, most of it in")
    table(
        ["array", "bytes", "comes from"],
        [
            [f"{x.name} {x.dtype}{list(x.shape)}", gib(x.bytes), code(attention, x.source)]
            for x in report.ledger[:4]
        ],
    )

scores = 16 * 4096**2 * 4
assert there.ledger[0].bytes == scores
assert any("einsum" in code(attention, line.source) for line in there.ledger[:3])
say(
    f"One array with a number for each pair of tokens in each head is {gib(scores)}; the gradients "
    f"need some at once. This machine's compiler and the GPU's make different programs of it: "
    "name the device that you mean."
)

# %% [markdown]
# Twice the tokens, four times the pairs. How many fit on this card?

# %%
rows = []
for tokens in (2048, 4096, 8192):
    report = tpjax.memory.report(gradients, *heads(tokens), gpu="rtx4060")
    rows.append([tokens, gib(report.peak_bytes), "yes" if report.fits else "no"])
table(["tokens", "peak", "fits"], rows)
assert [fits for *_, fits in rows] == ["yes", "yes", "no"]
say(
    f"The card has {gib(report.capacity_bytes)}, of which the driver's context and code take about "
    f"{gib(report.outside_pool_bytes)} (an estimate). JAX gives a program "
    f"{DEFAULT_POOL_FRACTION:.0%} of a card; where that is too little, `report.pool_fraction` "
    "says what to ask for."
)

# %% [markdown]
# A remedy: one head at a time, of which only q, k and v are kept for the gradients.


# %%
@jax.jit
def lean_gradients(q, k, v):
    @jax.checkpoint
    def head(qkv):
        return attention(*(x[:, None] for x in qkv))

    def total(*args):
        return jax.lax.map(head, tuple(x.swapaxes(0, 1) for x in args)).sum()

    return jax.grad(total, argnums=(0, 1, 2))(q, k, v)


lean = tpjax.memory.report(lean_gradients, *heads(tokens), gpu="rtx4060")
assert lean.fits
assert lean.peak_bytes < report.peak_bytes / 8
say(f"{tokens} tokens: {gib(lean.peak_bytes)} instead of {gib(report.peak_bytes)}.")

# %% [markdown]
# And a whole model on this card? SmolLM2 135M, 16 sequences of 2048 tokens:

# %%
small = tpjax.TrainConfig(
    model=tpjax.preset("smollm2-135m"),
    mesh=tpjax.MeshConfig(tensor=1),
    data=tpjax.DataConfig(batch_size=16, seq_len=2048),
)
rows = []
for remat in ("dots", "full"):
    config = replace(small, memory=replace(small.memory, remat=remat))
    report = tpjax.memory.report_run(config, gpu="rtx4060")
    rows.append([f"remat={remat}", gib(report.peak_bytes), "yes" if report.fits else "no"])
table(["", "peak", "fits"], rows)
assert [fits for *_, fits in rows] == ["no", "yes"]

# %% [markdown]
# The same from a terminal, with all flags: `python -m experiments.plan --model smollm2-135m
# --gpu rtx4060 --mesh tensor=1 --batch-size 16 --remat full`.

# %%
used = os.times()
cpu = used.user + used.system + used.children_user + used.children_system
print(f"{time.perf_counter() - begin:.0f} s in all, {cpu:.0f} s of CPU time")
