"""The objective that the settings choose."""

from __future__ import annotations

from your_ai.config import DISTILL, REWARD, SOFT, TrainConfig
from your_ai.config.divergences import SAMPLED, divergence_of
from your_ai.objectives.distill import Distillation, SampledDivergence
from your_ai.objectives.dpo import DPO, IPO
from your_ai.objectives.grpo import GRPO
from your_ai.objectives.kto import KTO
from your_ai.objectives.objective import Objective
from your_ai.objectives.orpo import ORPO
from your_ai.objectives.reward import BradleyTerry, ScoreRegression
from your_ai.objectives.sft import SUPERVISED
from your_ai.objectives.simpo import SimPO
from your_ai.objectives.soft import SOFT_TOKENS


def objective_of(config: TrainConfig) -> Objective:
    """The objective of a run. Its own defaults hold where a setting is None."""
    beta = {} if config.beta is None else {"beta": config.beta}
    smoothing, more = config.label_smoothing, config.sft_weight
    if config.objective == "dpo":
        return DPO(label_smoothing=smoothing, sft_weight=more, **beta)
    if config.objective == "ipo":
        return IPO(sft_weight=more, **beta)
    if config.objective == "simpo":
        gamma = config.simpo_gamma
        return SimPO(gamma=gamma, label_smoothing=smoothing, sft_weight=more, **beta)
    if config.objective == "orpo":
        return ORPO(odds_weight=config.orpo_lambda, sft_weight=more)
    if config.objective == "kto":
        good, bad = config.kto_desirable_weight, config.kto_undesirable_weight
        return KTO(desirable_weight=good, undesirable_weight=bad, sft_weight=more, **beta)
    if config.objective == "grpo":
        return GRPO(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_beta=config.kl_beta,
            kl=config.kl,
            importance=config.importance,
            normalization=config.loss_normalization,
        )
    if config.objective == REWARD and config.reward_loss == "scores":
        return ScoreRegression()
    if config.objective == REWARD:
        return BradleyTerry(center=config.center_rewards)
    if config.objective == SOFT:
        return SOFT_TOKENS
    if config.objective == DISTILL:
        divergence = divergence_of(config.divergence)
        if divergence.name == SAMPLED:
            return SampledDivergence()
        return Distillation(
            divergence=divergence, temperature=config.temperature_distill, sft_weight=more
        )
    return SUPERVISED


def needs_reference(config: TrainConfig) -> bool:
    """Return whether the loss compares the rows of the data with a reference model."""
    return config.objective in ("dpo", "ipo", "kto") and config.reference != "none"
