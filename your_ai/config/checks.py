"""What the values of settings may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from your_ai.config.adapter_starts import LOFTQ, starting_of
from your_ai.config.by_layer import ByLayer
from your_ai.config.divergences import SAMPLED, divergence_of
from your_ai.config.names import (
    AUTO,
    BETAS,
    DISTILL,
    EXACT_MATCH,
    LOSS,
    RANK_WAYS,
    REWARD,
    REWARD_METRICS,
    SFT,
    SOFT,
    flag,
)
from your_ai.config.optimizers import OPTIMIZERS
from your_ai.config.rounding import rounding_of
from your_ai.config.setting import LARGEST, check_bounds, check_used, settings_of, types_of
from your_ai.errors import UserError
from your_ai.gates.text import counted, nearest, quoted, shortened

TrainConfig = Any  # its module calls `check`

TEXT_CHARACTERS, NAMES = 4096, 1000  # limits of a text, and of a list of names

# Settings that do not fit completions which the run samples itself, with the only value allowed.
NOT_WITH_ROLLOUTS: dict[str, tuple[Any, str]] = {
    "prefix_cache": ("off", "completions are new in every step, so nothing could be reused"),
    "packing": (False, "completions of a step are batched by length"),
    "grad_accumulation": (1, "use --prompts-per-step"),
    "too_long": ("error", "prompts are not shortened; leave long ones out"),
    "best_metric": ("loss", "the best validation is the one with the highest reward"),
}
OF_CONVERSATIONS = (
    "max_turns", "tool_timeout_s", "tool_output_characters", "rewritten_turns", "credit",
    "discount", "trust_code",
)  # fmt: skip
# Settings that do not fit --adapter full, with the only value allowed.
NOT_WITH_WHOLE: dict[str, tuple[Any, str]] = {
    "use_dora": (False, "it trains the weights themselves; leave one of them out"),
    "qat": ("", "only adapters are trained under the rounding of the result"),
    "lora_dropout": (0.0, "there are no adapters, on whose input dropout is"),
    "loraplus_ratio": (1.0, "there is no matrix B"),
    "from_adapter": ("", "fuse that adapter first, and start from the model: your_ai fuse"),
    "prefix_cache": ("off", "it is made for adapters; leave it out"),
    "quantize": (None, "only the weights of a model that is not quantized can be trained"),
    "reload_interval": (0, "no frozen weights of adapted layers are there to be read again"),
    "push_to": ("", "the result is a model; push its folder yourself"),
    "train": ("", "only blocks are trained so; train embeddings and heads beside adapters"),
    "add_tokens": ("", "only blocks are trained so; add tokens beside adapters"),
    "add_special_tokens": ("", "only blocks are trained so; add tokens beside adapters"),
    "init": ("", "there are no adapters"),
}
WITHOUT_LAYERS = ("lora_rank", "lora_alpha", "use_rslora")  # have no meaning with --adapter full
WHOLE_OBJECTIVES = (SFT, "dpo", "ipo", "simpo", "orpo", "kto")


def check(config: TrainConfig) -> None:
    """Raise UserError for a value out of range or a contradiction."""
    check_bounds(config)
    for name, kind in types_of(config.__class__).items():
        value = getattr(config, name)
        if kind in (str, tuple[str, ...]):
            check_texts(name, (value,) if kind is str else value)
    check_adapters(config)
    if config.adapter_kind.is_whole:
        check_whole(config)
    elif config.blocks_per_period is not None:
        raise UserError("--blocks-per-period: only works with --adapter full")
    if config.blocks_per_period is None and not has_default(config, "period"):
        raise UserError("--period: only works with --blocks-per-period")
    check_optimizer(config)
    check_objective(config)
    check_schedule(config)
    if config.prefix_cache_folder and config.prefix_cache != "disk":
        raise UserError("--prefix-cache-folder: is only used with --prefix-cache disk")
    check_ranks(config)
    check_best_metric(config)
    if config.wait and not config.supervise:
        raise UserError("--wait: cannot be combined with --no-supervise; the supervisor waits")
    if config.neftune_alpha and config.prefix_cache != "off":
        raise UserError(
            "--neftune-alpha: the noise changes in each step, so nothing can be cached; use "
            "--prefix-cache off"
        )
    if config.spill and config.plan == "fused":
        raise UserError("--spill: --plan fused has nothing to offload; use --plan staged")


VOCABULARY_PARTS = ("embeddings", "head")
TRAINABLE = (*VOCABULARY_PARTS, ",".join(VOCABULARY_PARTS))


def check_adapters(config: TrainConfig) -> None:
    """Raise UserError for layers that no model has."""
    if isinstance(config.lora_layers, int) and not 1 <= config.lora_layers <= LARGEST:
        number = quoted(config.lora_layers)
        raise UserError(f"--lora-layers {number}: must be at least 1, or all for every block")
    if not config.lora_targets:
        raise UserError("--lora-targets: is empty; try q_proj or all-linear")
    check_by_layer(config)
    if config.qat:
        try:
            rounding_of(config.qat)
        except ValueError as error:
            raise UserError(f"--qat {quoted(config.qat)}: {error}") from error
        for name in ("use_dora", "lora_dropout"):
            if getattr(config, name):
                raise UserError(
                    f"--qat: not supported with {flag(name)}; the rounded weight is that of LoRA "
                    "without dropout"
                )
    check_vocabulary(config)
    check_init(config)


def check_vocabulary(config: TrainConfig) -> None:
    """Raise UserError for a training of embeddings or heads that is not possible."""
    names = config.train.split(",") if config.train else []
    for name in names:
        if name not in VOCABULARY_PARTS or names.count(name) > 1:
            raise UserError(f"--train {quoted(config.train)}: give {' or '.join(TRAINABLE)}")
    new = config.add_tokens or config.add_special_tokens
    option = "--train" if names else "--add-tokens"
    if not (names or new):
        if config.embedding_learning_rate is not None:
            raise UserError("--embedding-learning-rate: only works with --train or --add-tokens")
        return
    if config.objective == SOFT:
        raise UserError(f"{option}: not supported with --objective soft")
    if config.prefix_cache != "off" and (new or "embeddings" in names):
        raise UserError(
            f"{option}: the embeddings change in each step, so nothing can be cached; use "
            "--prefix-cache off"
        )


def check_by_layer(config: TrainConfig) -> None:
    """Raise UserError for numbers by layer that are out of bounds, whatever the model."""
    about = settings_of(config.__class__)
    ranks, alphas = (ByLayer.of(getattr(config, name)) for name in ("lora_rank", "lora_alpha"))
    if alphas.default == AUTO:
        raise UserError("--lora-alpha auto: only the rank may be automatic; give a number")
    for name, numbers in (("lora_rank", ranks), ("lora_alpha", alphas)):
        values = {} if numbers.default == AUTO else {"": numbers.number}
        for given, value in {**values, **{f"{p.text}=": p.value for p in numbers.patterns}}.items():
            bounds = about[name].bounds
            fault = bounds.fault(value) if bounds else ""
            if not fault and numbers is ranks and value != int(value):
                fault = "must be a whole number"
            if fault:
                raise UserError(f"{flag(name)} {given}{value:g}: {fault}")


def check_init(config: TrainConfig) -> None:
    """Raise UserError for first values of adapters that do not exist, or not in such a run."""
    try:
        start = starting_of(config.init)
    except ValueError as error:
        raise UserError(f"--init {quoted(config.init)}: {error}") from error
    if start is None:
        return
    if config.from_adapter:
        raise UserError("--init: the adapters start from those of --from; leave one out")
    if start.name == LOFTQ and config.quantize is None:
        raise UserError(
            f"--init {config.init}: makes up for what quantization takes away; give --quantize 4, "
            "with a model that is not quantized"
        )
    if config.has_ranks:
        raise UserError("--init: is not supported with several processes; train with one")


def check_whole(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit the training of whole weights."""
    for name, (value, reason) in NOT_WITH_WHOLE.items():
        if getattr(config, name) != value:
            raise UserError(f"{flag(name)}: not supported with --adapter full: {reason}")
    if config.objective not in WHOLE_OBJECTIVES:
        raise UserError(
            f"--adapter full: not supported with --objective {config.objective}; use adapters, or "
            f"one of {', '.join(WHOLE_OBJECTIVES)}"
        )
    if config.has_ranks:
        raise UserError("--adapter full: trains in one process; leave --processes and --hosts out")


def check_given(config: TrainConfig, given: Iterable[str]) -> None:
    """Raise UserError if the user gave a setting of adapters for a run that has none."""
    unused = sorted(set(given) & {*WITHOUT_LAYERS})
    if config.adapter_kind.is_whole and unused:
        raise UserError(f"{flag(unused[0])}: --adapter full adds no layers; leave it out")
    check_answers_used(config, given)


def check_optimizer(config: TrainConfig) -> None:
    """Raise UserError for settings that the optimizer does not use."""
    kind = OPTIMIZERS[config.optimizer]
    if config.optimizer_bits == 8 and kind.work_in_8_bits is None:
        raise UserError(
            f"--optimizer-bits 8: --optimizer {config.optimizer} keeps no states of the size of "
            "the adapters; use it without --optimizer-bits"
        )
    if config.weight_decay and not kind.decays:
        raise UserError(
            f"--weight-decay: --optimizer {config.optimizer} does not support it; use adamw"
        )
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon", "adam_bias_correction"):
        if not kind.has_betas and not has_default(config, name):
            raise UserError(f"{flag(name)}: --optimizer {config.optimizer} does not use it")


def check_ranks(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit several processes or hosts."""
    ways = [n for n in RANK_WAYS if not has_default(config, n)]
    if len(ways) > 1:
        raise UserError(f"{flag(ways[0])}: cannot be combined with {flag(ways[1])}")
    twice = [host for host in config.hosts if config.hosts.count(host) > 1]
    if twice:
        raise UserError(
            f"--hosts: {shortened(twice[0])} is there twice; for several processes on one machine "
            "use --processes"
        )
    if config.sync != "off" and not (config.hosts or config.hostfile):
        raise UserError(f"--sync {config.sync}: only works with --hosts or --hostfile")
    if not ways:
        return
    way = flag(ways[0])
    if config.objective == SOFT:
        raise UserError(f"{way}: not supported with --objective soft")
    if config.prefix_cache_folder:
        raise UserError(
            f"{way}: each process caches its own rows, so --prefix-cache-folder cannot be shared; "
            "leave it out"
        )
    if not config.supervise:
        raise UserError(
            f"--no-supervise: cannot be combined with {way}; or start the processes yourself: "
            "mlx.launch -n 2 your_ai train --no-supervise ..."
        )


def check_best_metric(config: TrainConfig) -> None:
    """Raise UserError for a metric that does not exist, or not with the objective."""
    name, found = config.best_metric, quoted(config.best_metric)
    known = (LOSS, EXACT_MATCH, *REWARD_METRICS)
    if name not in known and ":" not in name:
        raise UserError(
            f"--best-metric {found}: must be loss, exact_match or module:function, or for pairs "
            f"and labels accuracy or margin{nearest(name, known)}"
        )
    if config.trained_kind == "answers" and name in REWARD_METRICS:
        raise UserError(
            f"--best-metric {name}: --objective {config.objective} compares no answers; use loss, "
            "exact_match or module:function"
        )
    if config.trained_kind != "answers" and name not in (LOSS, *REWARD_METRICS):
        raise UserError(
            f"--best-metric {found}: not supported with --objective {config.objective}; use loss, "
            "accuracy or margin"
        )


def check_schedule(config: TrainConfig) -> None:
    """Raise UserError for a learning rate out of range, or that the schedule does not use."""
    users = {
        "lr_end": ("linear", "cosine"),
        "lr_decay_steps": ("linear", "cosine", "exponential", "step"),
        "lr_decay_rate": ("exponential", "step"),
    }
    for name, schedules in users.items():
        if config.lr_schedule not in schedules and not has_default(config, name):
            raise UserError(
                f"{flag(name)}: --lr-schedule {config.lr_schedule} does not use it; choose "
                f"{' or '.join(schedules)}"
            )
    if config.warmup_init is not None and not config.warmup_steps:
        raise UserError("--warmup-init: there is no warm-up; give --warmup-steps")


def has_default(config: TrainConfig, name: str) -> bool:
    return bool(getattr(config, name) == config.__dataclass_fields__[name].default)


def in_effect(config: TrainConfig, name: str) -> Any:
    """The value that a run uses for a setting: its objective may have a default of its own."""
    value = getattr(config, name)
    return BETAS.get(config.objective) if name == "beta" and value is None else value


def check_objective(config: TrainConfig) -> None:
    """Raise UserError for settings of another objective, or out of range."""
    known = settings_of(config.__class__)
    check_used(known, (n for n in known if not has_default(config, n)), config.objective)
    both = config.kto_desirable_weight + config.kto_undesirable_weight
    if config.objective == "kto" and not both:
        raise UserError("--kto-desirable-weight and --kto-undesirable-weight: one must be above 0")
    if config.objective == SFT:
        check_answers(config)
        return
    if config.objective == DISTILL:
        check_distill(config)
    if config.generates:
        check_rollouts(config)
    elif config.too_long == "split" and config.objective != DISTILL:
        raise UserError(
            f"--too-long split: --objective {config.objective} compares whole answers; use truncate"
        )
    if not config.mask_prompt:
        raise UserError(f"--no-mask-prompt: not supported with --objective {config.objective}")
    if config.objective == REWARD and config.sample_count:
        raise UserError(
            "--samples: --objective reward trains a model that scores, not one that answers"
        )
    if config.objective == DISTILL:
        return
    if config.exact_match and not config.generates:
        raise UserError(f"--exact-match: not supported with --objective {config.objective}")
    for name in ("lora_dropout", "neftune_alpha"):
        if getattr(config, name):
            raise UserError(
                f"{flag(name)}: not supported with --objective {config.objective}, which compares "
                "several passes that the noise would make different"
            )


def check_rollouts(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit completions sampled by the run itself."""
    for name, (value, reason) in NOT_WITH_ROLLOUTS.items():
        if getattr(config, name) != value and not has_default(config, name):
            raise UserError(
                f"{flag(name)}: not supported with --objective {config.objective}: {reason}"
            )
    if config.objective == SOFT:
        check_soft(config)
    check_conversations(config)
    check_sampled(config)


def check_conversations(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit conversations with environments or tools, or
    that only these use."""
    if config.environment and config.tools:
        raise UserError("--tools: cannot be combined with --environment, which has its own")
    names = [text.partition("=")[0].strip() for text in config.reward]
    if "environment" in names and not config.environment:
        raise UserError("--reward environment: only works with --environment, which gives it")
    if not config.converses:
        for name in OF_CONVERSATIONS:
            if not has_default(config, name):
                raise UserError(f"{flag(name)}: only works with --environment or --tools")
        return
    if config.has_ranks:
        raise UserError(
            "--environment and --tools: are not supported with several processes; train with one"
        )
    if config.credit == "conversation" and not has_default(config, "discount"):
        raise UserError("--discount: only works with --credit turn")
    if config.rewritten_turns == "split" and config.importance == "sequence":
        raise UserError(
            "--importance sequence: not supported with --rewritten-turns split, whose parts are "
            "sequences of their own"
        )
    if config.credit == "turn" and config.advantage == "rloo":
        raise UserError("--advantage rloo: not supported with --credit turn; use group or dr")


def check_sampled(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit completions which are sampled and rewarded."""
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top-p {config.top_p}: must be above 0 and at most 1")
    judges = any(text.partition("=")[0].strip() == "judge" for text in config.reward)
    if judges and not config.judge_model:
        raise UserError("--reward judge: --judge-model is missing; name the model that judges")
    given = ("judge_model", "judge_url", "judge_rubric")
    if not judges and (unused := [n for n in given if not has_default(config, n)]):
        raise UserError(f"{flag(unused[0])}: only works with --reward judge")


def check_answers_used(config: TrainConfig, names: Iterable[str]) -> None:
    """Raise UserError if one of the settings only works where a teacher writes the answers of sft,
    and none does."""
    if config.objective != SFT or config.answers_from_teacher:
        return
    about = settings_of(config.__class__)
    for name in names:
        if about[name].objectives and name != "answers_from_teacher":
            raise UserError(
                f"{flag(name)}: --objective sft uses it only with --answers-from-teacher N, the "
                "answers that a teacher writes to each prompt"
            )


def check_answers(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit answers which a teacher writes."""
    about = settings_of(config.__class__)
    check_answers_used(config, (name for name in about if not has_default(config, name)))
    if not config.answers_from_teacher:
        return
    if not (config.teacher or config.teacher_prompt):
        raise UserError(
            "--answers-from-teacher: --teacher is missing: the model that answers, as an alias, a "
            "folder or run:RUN; or give --teacher-prompt, and the base model does"
        )
    if config.reward and config.answers_from_teacher == 1:
        raise UserError(
            "--reward: chooses among several answers to a prompt; give --answers-from-teacher 2 "
            "or more, or leave it out"
        )
    for text in config.reward:
        if text.partition(":")[0].strip() == "run":
            raise UserError(
                f"--reward {shortened(text)}: a reward model cannot choose the answers of a "
                "teacher; use another reward"
            )
    check_sampled(config)


def check_distill(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit the predictions of a teacher."""
    try:
        found = divergence_of(config.divergence)
    except ValueError as error:
        raise UserError(f"--divergence {quoted(config.divergence)}: {error}") from error
    share = config.student_share
    if config.distill_on == "student" and share != 1:
        raise UserError(
            f"--distill-student-share {share:g}: is the share of the steps with --distill-on data; "
            "leave --distill-on out"
        )
    if found.name == SAMPLED:
        if share != 1:
            raise UserError(
                "--divergence sampled: is estimated from tokens that the student samples; use "
                "--distill-on student"
            )
        if not has_default(config, "temperature_distill"):
            raise UserError("--temperature-distill: --divergence sampled does not use it")
        for name in ("temperature", "top_p", "top_k"):
            if not has_default(config, name):
                raise UserError(
                    f"{flag(name)}: --divergence sampled is estimated from tokens with the "
                    "probabilities that the student gives them; leave it out, or use --divergence "
                    "reverse"
                )
    if config.sft_weight and share:
        raise UserError(
            "--sft-weight: completions of the student have no expected tokens; use it with "
            "--distill-on data"
        )
    if not config.samples_completions:
        for name in ("prompts_per_step", "max_new_tokens", "temperature", "top_p", "top_k"):
            if not has_default(config, name):
                raise UserError(
                    f"{flag(name)}: only works with completions of the student; use --distill-on "
                    "student or --distill-student-share"
                )
    if not has_default(config, "teacher_cache") and share == 1:
        raise UserError(
            "--teacher-cache: completions are new in every step, so nothing could be reused"
        )
    if config.teacher_prompt and config.too_long not in (AUTO, "error"):
        raise UserError(
            f"--too-long {config.too_long}: not supported with --teacher-prompt, as teacher and "
            "student would read other parts of a row; leave long rows out"
        )


def check_teacher_given(config: TrainConfig) -> None:
    """Raise UserError if a distillation has no teacher."""
    if config.objective == DISTILL and not (config.teacher or config.teacher_prompt):
        raise UserError(
            "--teacher is missing: the model whose predictions are learned, as an alias, a folder "
            "or run:RUN; or give --teacher-prompt"
        )


def check_soft(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit training through sampled tokens."""
    kind, colon, name = config.reward_model.partition(":")
    is_run = kind.strip() == "run" and bool(colon) and bool(name.strip())
    if config.reward_model and not is_run:
        raise UserError(
            f"--reward-model {quoted(config.reward_model)}: expected run:NAME, a run with "
            "--objective reward"
        )
    if credit_of(config.soft_credit) is None:
        raise UserError(
            f"--soft-credit {quoted(config.soft_credit)}: must be exact, a number of tokens, or a "
            "relative error between 0 and 1"
        )
    if config.spill:
        raise UserError("--spill: not supported with --objective soft")
    if config.plan == "staged":
        raise UserError("--plan staged: not supported with --objective soft; use fused or streamed")


def credit_of(text: str) -> Literal["exact"] | int | float | None:
    """The value of --soft-credit: exact, a number of tokens, or a share; None if it is neither."""
    text = text.strip()
    if text == "exact":
        return "exact"
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def check_texts(name: str, texts: tuple[str, ...]) -> None:
    if len(texts) > NAMES:
        count = counted(len(texts), "name")
        raise UserError(f"{flag(name)}: {count}; at most {NAMES:,} are allowed")
    for text in texts:
        if len(text) > TEXT_CHARACTERS:
            raise UserError(
                f"{flag(name)} {shortened(text)}: is longer than {TEXT_CHARACTERS:,} characters"
            )
        if not text.isprintable():
            raise UserError(f"{flag(name)} {quoted(text)}: contains control characters")
