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
# # The lecture's ladder
#
# The lecture *Memory optimisation of tensor parallelism* has a table: a transformer of 10⁹
# parameters on 4 GPUs needs 120 GB in all, and 50 GB after four techniques. Here the techniques are
# settings of one training step, XLA's compiler for GPUs says what each gives, and the ladder goes
# on below the lecture's last line.
#
# 1. The whole table, for Llama 3.2 1B on four H100s: saved by `python -m experiments.ladder`, which
#    takes some minutes.
# 2. Where the bytes go, rung by rung.
# 3. What it costs.
# 4. A small ladder compiled here, with a rung of your own.
#
# GB are 10⁹ bytes on all GPUs, as in the lecture; GiB are 1024³ bytes on one.

# %%
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Image, Markdown, display

import tpjax
from tpjax.gpus import GPUS
from tpjax.memory.chart import COLUMNS, cells
from tpjax.memory.ladder import FURTHER, TECHNIQUES, Rung, climb, rungs
from tpjax.memory.records import KINDS, gib
from tpjax.memory.scene import COLOURS

begin = time.perf_counter()
RESULTS = Path(tpjax.__file__).parents[1] / "benchmarks" / "results"


def say(text):
    display(Markdown(text))


def table(header, rows):
    sides = ["---", *["--:"] * (len(header) - 1)]
    say("\n".join(f"| {' | '.join(map(str, line))} |" for line in [header, sides, *rows]))


def read(name):
    """The saved rows that stand on those before them, by name; and those alone."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [{row["name"]: row for row in rows if row["alone"] == alone} for alone in (False, True)]


# %% [markdown]
# ## 1. The table
#
# The lecture names no batch. With 4 sequences of 1024 tokens, a step with no technique at all comes
# near its 120 GB.

# %%
ladder, alone = read("ladder")
display(Image(filename=RESULTS / "ladder.png", width=900))

totals = {name: row["total_gb"] for name, row in ladder.items()}
lecture = {name: row["lecture_gb"] for name, row in ladder.items() if row["lecture_gb"]}
assert abs(totals["none"] / lecture["none"] - 1) < 0.05
assert list(totals.values()) == sorted(totals.values(), reverse=True)
assert all(totals[name] < lecture[name] for name in lecture)

# %% [markdown]
# Each rung has those before it. Each technique alone, on top of none:

# %%
table(
    ["", "alone, GB", "saves", "on the ladder, GB", "saves there"],
    [
        [
            name,
            f"{row['total_gb']:.1f}",
            f"{totals['none'] - row['total_gb']:.1f}",
            f"{totals[name]:.1f}",
            f"{before - totals[name]:.1f}",
        ]
        for (name, row), before in zip(alone.items(), totals.values(), strict=False)
    ],
)

# %% [markdown]
# What a rung changes are settings (`tpjax.MemoryConfig`), each a flag of `experiments.train` and
# `experiments.plan`. *None* against their defaults, then each rung against the one before:

# %%
before = asdict(tpjax.MemoryConfig())
for name in ("none", *TECHNIQUES, *FURTHER):
    settings = ladder[name]["settings"]
    changed = [f"`{key}={value}`" for key, value in settings.items() if value != before[key]]
    say(f"**{name}**: {', '.join(changed)}")
    before = settings

# %% [markdown]
# ## 2. Where the bytes go
#
# With 8 sequences of 2048 tokens, four times the tokens, activations weigh more.

# %%
large, _ = read("ladder_8x2048")
_, panels = plt.subplots(2, figsize=(11, 6), height_ratios=[9, 4], layout="constrained")
for ax, names in zip(panels, (list(large), list(large)[-4:]), strict=True):
    left = [0.0] * len(names)
    for kind in KINDS:
        sizes = [large[name]["figures"]["bytes_by_kind"].get(kind, 0) / 2**30 for name in names]
        ax.barh(names, sizes, left=left, color=COLOURS[kind], label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, total in enumerate(left):
        ax.text(total, y, f" {total:.2f}", va="center", weight="bold")
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1 * max(left))
    ax.spines[["top", "right"]].set_visible(False)
card = GPUS["h100"].memory_bytes / 2**30
panels[0].axvline(card, color=COLOURS["other"], lw=1)
panels[0].text(card, len(large) - 0.6, "what a card has ", ha="right", color=COLOURS["other"])
panels[0].set_title("Llama 3.2 1B, 8 × 2048 tokens, 4 × H100")
panels[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
panels[1].set_xlabel("GiB per GPU at the peak; below, the last rungs on a scale of their own")
plt.show()

first, ckpt = large["none"]["figures"], large["gradient checkpointing"]["figures"]
assert not first["fits"]
assert ckpt["fits"]
assert max(first["bytes_by_kind"], key=first["bytes_by_kind"].get) == "attention"
everything, offloaded = large["everything"], large["everything, offloaded"]
assert everything["total_gb"] <= 8
assert offloaded["total_gb"] <= 5
say(
    f"With no technique the step does not fit into the cards: {gib(first['peak_bytes'])}, most of "
    f"it the attention's scores of all layers. Checkpointing keeps those of one layer at a time. "
    f"From {large['none']['total_gb']:.0f} GB it goes down to {everything['total_gb']:.1f} GB, and "
    f"with residuals and moments in the host's memory to {offloaded['total_gb']:.1f} GB on the "
    f"GPUs and {4 * offloaded['figures']['host_bytes'] / 1e9:.1f} GB there."
)

# %% [markdown]
# The state has to be made, too. *Eager* makes all of it on the first GPU; *lazy* makes each shard
# where it belongs:

# %%
eager, lazy = (large[name]["figures"] for name in ("none", "sharing + lazy loading"))
assert eager["init_peak_bytes"] > 5 * lazy["init_peak_bytes"]
table(
    ["", "at the peak of making the state"],
    [["eager", gib(eager["init_peak_bytes"])], ["lazy", gib(lazy["init_peak_bytes"])]],
)

# %% [markdown]
# ## 3. What it costs
#
# Operations are counted, traffic is that of the compiled program. The seconds are an estimate from
# below, not a measurement: the busiest of matrix units, memory and links, at their published peaks.

# %%
table(
    ["", "peak per GPU", "host", "TFLOP per step", "sent per step", "s per step, at least"],
    [
        [
            name,
            gib((f := row["figures"])["peak_bytes"]),
            gib(f["host_bytes"]),
            f"{f['flops'] / 1e12:.1f}",
            gib(f["wire_bytes"]),
            f"{f['roofline_seconds']:.3f}",
        ]
        for name, row in large.items()
    ],
)
sharing, quantised = (
    large[name]["figures"] for name in ("sharing + lazy loading", "quantisation + mixed precision")
)
assert ckpt["flops"] > sharing["flops"]
assert quantised["wire_bytes"] < 0.6 * ckpt["wire_bytes"]
assert quantised["roofline_seconds"] < ckpt["roofline_seconds"]
say(
    f"Checkpointing computes {ckpt['flops'] / sharing['flops'] - 1:.0%} more, and sends "
    f"{ckpt['wire_bytes'] / sharing['wire_bytes'] - 1:.0%} more. Half the bytes per number send "
    f"half as much, and matrix units are twice as fast with bfloat16 as with TensorFloat-32."
)

# %% [markdown]
# ## 4. A ladder of your own
#
# `climb` compiles rungs for any model, mesh and kind of GPU. SmolLM2 135M on three RTX 4090s, the
# first rungs, and one that is not in the lecture: attention in blocks instead of checkpointing.

# %%
run = tpjax.TrainConfig(
    model=tpjax.preset("smollm2-135m"),
    mesh=tpjax.MeshConfig(tensor=3),
    data=tpjax.DataConfig(batch_size=4, seq_len=1536),
)
none, shared, checkpointed = rungs()[:3]
blocks = Rung(name="attention in blocks", memory=replace(shared.memory, attention="xla"))
rows = list(climb(run, "rtx4090", [none, shared, blocks, checkpointed]))
kept = [number for number, column in enumerate(COLUMNS) if "lecture" not in column]
table([COLUMNS[i] for i in kept], [[cells(row)[i] for i in kept] for row in rows])

sizes = [row.figures.total_gb for row in rows]
assert sizes == sorted(sizes, reverse=True)

# %% [markdown]
# The whole ladder from a terminal: `python -m experiments.ladder --model smollm2-135m --gpu rtx4090
# --mesh tensor=3 --batch-size 4 --seq-len 1536 --json ladder.json --chart ladder.png`.

# %%
used = os.times()
cpu = used.user + used.system + used.children_user + used.children_system
print(f"{time.perf_counter() - begin:.0f} s in all, {cpu:.0f} s of CPU time")
