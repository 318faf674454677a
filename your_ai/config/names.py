"""Values of settings that have a meaning elsewhere, and which objective uses which setting."""

from __future__ import annotations

DEMO = "demo"
# Embedded rows: the value of --data -> the folder with its splits below models/demo.
DEMO_DATA = {DEMO: "data", "demo-pairs": "pairs", "demo-labels": "labels"}
ALL_LINEAR = "all-linear"  # of --lora-targets
AUTO = "auto"  # chosen when the run starts, by config/defaults.py, and recorded in its settings
OLD_LAYERS = 4  # what --lora-layers None means in the settings of old runs
# Values of --objective: supervised fine-tuning, rollouts with rewards, a reward model, and a policy
# that is trained through its own sampled tokens.
SFT, GRPO, REWARD, SOFT = "sft", "grpo", "reward", "soft"
GENERATING = (GRPO, SOFT)  # their steps train completions that the model samples itself
PREFERENCE_LEARNING_RATE = 2e-5  # the default of other objectives; docs/objectives.md says why
LEARNING_RATES = {REWARD: 1e-4}  # of objectives with a default of their own
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


# Settings of one kind of objective -> the objectives that use it.
OBJECTIVES_WITH = {
    "beta": ("dpo", "ipo", "simpo", "kto"),
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "orpo_lambda": ("orpo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "sft_weight": ("dpo", "ipo", "simpo", "orpo", "kto"),
    "reference": ("dpo", "ipo"),
    "reward_loss": (REWARD,),
    "center_rewards": (REWARD,),
    **dict.fromkeys(
        (
            *("rollouts", "top_p", "top_k", "updates_per_batch", "clip_low", "clip_high", "kl"),
            *("advantage", "importance", "loss_normalization", "mask_truncated"),
        ),
        (GRPO,),
    ),
    **dict.fromkeys(
        (
            *("reward", "prompts_per_step", "max_new_tokens", "temperature", "kl_beta"),
            *("judge_model", "judge_url", "judge_rubric", "judge_concurrency"),
            *("judge_max_calls", "judge_timeout_s"),
        ),
        GENERATING,
    ),
    **dict.fromkeys(
        ("reward_model", "soft_credit", "straight_through", "temperature_end"), (SOFT,)
    ),
}
BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}  # what --beta None means
