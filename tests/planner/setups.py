"""Random questions to the planner, sane and broken."""

from __future__ import annotations

import copy
import random

from backend.planner import accelerators, catalogue, plan
from backend.planner.capacity import Reserve
from backend.planner.formats import KV, WEIGHTS

BROKEN = (
    None, 0, -1, 1, 3, 7, 1.5, float("nan"), float("inf"), "32", "many", "", [], {}, [1, 2], {"a": 1}, True, False,
    10**9, 10**30, -(10**30), ["full_attention"] * 3, ["x"], [None] * 40, "M*-",
)  # fmt: skip
STRANGE_KEYS = ("kv_shared_layers", "index_topk", "compress_ratios", "new_window", "ssm_heads", "layer_types",
                "text_config", "quantization_config", "sliding_window", "num_experts", "head_dim")  # fmt: skip


SANE = {
    "tp": (1, 1, 2, 4, 8, 16),
    "pp": (1, 1, 1, 2),
    "context": (300, 512, 8192, 131_072),
    "output": (1, 16, 256),
    "batch": (1, 3, 32, 500),
    "shared_prefix": (0, 0, 15, 128),
    "usd_per_gpu_hour": (0.0, 2.0),
    "arrivals_per_s": (0.0, 0.1, 1e6),
    "accept": (0.0, 0.5, 0.99),
    "gamma": (1, 4),
    "draft_cost": (0.0, 0.05),
    "chunk": (512, 10**7),
}
MAD = (0, -1, 1.5, 10**9, 10**30, float("nan"), True)


def random_setup(dice: random.Random, madness: float = 0.05) -> plan.Setup:
    """Any model on any part with any knobs, some of them set to nonsense. Raises PlannerError."""
    model = dice.choice(list(catalogue.models().values()))
    knobs = {name: dice.choice(MAD if dice.random() < madness else sane) for name, sane in SANE.items()}
    return plan.Setup(
        name=model.name,
        arch=model.architecture,
        accelerator=dice.choice(list(accelerators.load().values())),
        weights=dice.choice(list(WEIGHTS.values())),
        kv=dice.choice(list(KV.values())),
        reserve=Reserve(
            utilisation=dice.choice((0.5, 0.9, 1.0, 0.9, 1.5)),
            step_tokens=dice.choice((1, 8192, 10**6)),
            block_size=dice.choice((1, 16, 16, 256, 0)),
        ),
        **knobs,
    )


def random_config(dice: random.Random) -> object:
    """The configuration of a catalogue model with a few values broken."""
    if dice.random() < 0.02:
        return dice.choice((None, [], "config", 3, {}, {"model_type": None}, {"model_type": ["llama"]}))
    config = copy.deepcopy(dice.choice(list(catalogue.models().values())).config)
    for _ in range(dice.randint(1, 2)):
        key = dice.choice((*config, *STRANGE_KEYS))
        if dice.random() < 0.2:
            config.pop(key, None)
        else:
            config[key] = dice.choice(BROKEN)
    return {"model_type": "wrapper", "text_config": config} if dice.random() < 0.1 else config
