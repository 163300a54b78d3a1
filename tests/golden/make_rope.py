"""Writes rope.json: transformers' own frequencies for each kind of rotary position.

python tests/golden/make_rope.py     (needs torch and transformers)
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

KINDS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
}


def main() -> None:
    golden = {"transformers": transformers.__version__, "head_dim": 64, "kinds": {}}
    for name, settings in KINDS.items():
        rope = {"rope_type": name, "rope_theta": 500_000.0, **settings}
        config = LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            head_dim=64,
            max_position_embeddings=2048,
            rope_parameters=rope,
        )
        kind = rope["rope_type"]
        lengths = (2048, 8192) if kind == "dynamic" else (8192,)
        for length in lengths:
            frequency, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
            golden["kinds"][f"{name}@{length}"] = {
                "settings": rope,
                "seq_len": length,
                "frequency": frequency.double().tolist(),
                "scale": float(scale),
            }
    Path(__file__).with_name("rope.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
