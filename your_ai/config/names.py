"""Values of settings that have a meaning elsewhere, and the flags of settings."""

from __future__ import annotations

DEMO = "demo"
# Embedded rows: the value of --data -> the folder with its splits below models/demo.
DEMO_DATA = {
    DEMO: "data",
    "demo-pairs": "pairs",
    "demo-labels": "labels",
    "demo-tools": "tools",
}
# Embedded adapters: the value of --from -> the folder below models/demo.
DEMO_STARTS = {DEMO: "start", "demo-tools": "tools-start"}
ALL_LINEAR = "all-linear"  # of --lora-targets
AUTO = "auto"  # chosen when the run starts, by config/defaults.py, and recorded in its settings
OLD_LAYERS = 4  # what --lora-layers None means in the settings of old runs
# Values of --objective: supervised fine-tuning, rollouts with rewards, a reward model, a policy
# that is trained through its own sampled tokens, and the predictions of a teacher.
SFT, GRPO, REWARD, SOFT, DISTILL = "sft", "grpo", "reward", "soft", "distill"
GENERATING = (GRPO, SOFT)  # their steps train completions that the model samples itself
SAMPLING = (*GENERATING, DISTILL)  # their steps may
# Their completions are rewarded; of sft, answers of a teacher that --answers-from-teacher asks for.
REWARDED = (*GENERATING, SFT)
# The default of other objectives, and of whole weights; docs/objectives.md says why
SMALLER_LEARNING_RATE = 2e-5
LEARNING_RATES = {REWARD: 1e-4, DISTILL: 2e-4}  # of objectives with a default of their own
RANK_WAYS = ("processes", "hosts", "hostfile")  # each starts several processes; a run has one
LOSS, EXACT_MATCH = "loss", "exact_match"  # values of --best-metric
# Values of --best-metric for pairs and labels -> the metric of a validation, higher is better.
REWARD_METRICS = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
NONE, FOLDER = "none", "folder"  # values of --valid: no validation, or only what --data has

FLAGS = {"from_adapter": "--from"}  # `from` cannot be the name of a field


NEGATED = {"straight_through": "--relaxed"}  # flags that turn a setting off


def negated(name: str) -> str:
    """The flag that turns a setting off."""
    return NEGATED.get(name, "--no-" + name.replace("_", "-"))


def flag(name: str) -> str:
    return FLAGS.get(name, "--" + name.replace("_", "-"))


BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}  # what --beta None means


# Which layers of a block a value of --lora-targets selects


def selects(target: str, name: str, *, is_expert: bool = False, experts: bool = False) -> bool:
    """Return whether a target selects the layer at `name`, its path in a block.

    is_expert: whether these are weights of the routed experts of a mixture of experts. They are
        selected by a path such as `switch_mlp.up_proj`; by all-linear and by a name without a dot
        only with --lora-experts.
    experts: the value of --lora-experts.
    """
    if is_expert and not experts and "." not in target:
        return False
    return target == ALL_LINEAR or name == target or name.endswith("." + target)
