"""The settings of a run: each is declared, given its default and described in this one place.

Each setting is a field of a component of `TrainConfig`. Its name is the YAML key, its name with
dashes is the command-line flag (except those in FLAGS), and its help text serves both. What else is
known of it (bounds, who uses it, whether a resume may change it) is beside its default; all tables
of settings are made of that. This module does not import mlx.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

from your_ai.config.adapter_facts import DORA, FULL, LORA, AdapterFacts
from your_ai.config.by_layer import LayerText
from your_ai.config.checks import check
from your_ai.config.names import (
    AUTO,
    DISTILL,
    FOLDER,
    GENERATING,
    GRPO,
    LOSS,
    REWARD,
    REWARDED,
    SAMPLING,
    SFT,
    SOFT,
)
from your_ai.config.optimizers import OptimizerName
from your_ai.config.setting import ALWAYS, LARGEST, Bounds, Tool, changeable, setting, settings_of

AUTO_SAMPLES = 3  # of --samples auto
RowKind = Literal["answers", "pairs", "labels", "prompts", "tasks", "rated"]
ObjectiveName = Literal[
    "sft", "dpo", "ipo", "simpo", "orpo", "kto", "grpo", "reward", "soft", "distill"
]


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The model to train, and its rows of data."""

    PANEL: ClassVar[str] = "Model and data"

    model: str = changeable(
        "llama-8b",
        "Model: an alias, a folder, or a Hugging Face id.",
        agents="model",
        tool=Tool("A name such as llama-8b, a hub id OWNER/NAME, or a folder; it must be here"),
    )
    data: str = changeable(
        "",
        "Training data: a file (.jsonl, .json, .csv, .tsv, .xlsx, .parquet, .arrow), a document "
        "(.txt, .md, .html, .pdf, .docx, .epub), or a folder of documents, or with train.jsonl "
        "(and valid.jsonl, test.jsonl); several separated by commas, each with =SHARE for how "
        "often its rows are used; hf:OWNER/NAME is a dataset of the hub; - reads standard input.",
        agents="data",
        tool=Tool("A file or folder of rows here, hf:OWNER/NAME, or demo."),
    )
    valid: str = changeable(
        "",
        "Validation data: a file, none, or folder for that in --data; default: that in --data, or "
        "else 2% of the rows are held out (20 to 500 rows).",
        before=FOLDER,
        agents="data",
    )
    columns: tuple[str, ...] = setting(
        (),
        "What the columns are, e.g. prompt=question,completion=answer; the roles are prompt, "
        "completion, messages, text, system, weight, chosen and rejected (pairs), label (kto), "
        "score and margin (reward); default: guessed from their names.",
        before=(),
        agents="text",
    )
    prompt_template: str = changeable(
        "",
        "File with a Jinja template that makes the prompt from the columns of a row.",
        agents="file",
    )
    from_adapter: str = setting(
        "",
        "Start from this adapter: a run, or a folder of your_ai, mlx-lm or PEFT. Its rank, alpha, "
        "blocks, layers and base model become the run's.",
        before="",
        agents="run or path",
        mlxlm="resume_adapter_file",
    )
    max_seq_length: int = setting(
        2048,
        "Maximum sequence length, in tokens.",
        bounds=Bounds(2, 1 << 24),
        in_card=True,
        tool=Tool("Tokens in a row at most.", Bounds(2)),
    )
    too_long: Literal["auto", "error", "truncate", "split"] = setting(
        AUTO,
        "What to do with a row that is longer than --max-seq-length; auto: split the passages of "
        "documents, and refuse other rows.",
    )
    max_row_bytes: int = changeable(
        16_000_000,
        "Maximum size of a row in a data file, in bytes; larger rows are refused.",
        bounds=Bounds(1, 1 << 32),
    )
    packing: bool = setting(
        False, "Pack short rows into one sequence; attention stays within each row.", in_card=True
    )
    mask_prompt: bool = setting(
        True, "Train on the completions only, in rows that have prompts.", in_card=True
    )


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Validation and output: what is measured, saved and told."""

    PANEL: ClassVar[str] = "Validation and output"

    run: str = setting(
        "",
        "Name of the run; default: made of model, data and time.",
        agents="name",
        tool=Tool("Name of the new run; default: made up."),
    )
    supervise: bool = changeable(
        True,
        "Train in a separate process, restarted from its checkpoint if it dies.",
        agents="refused",
    )
    allow_sleep: bool = changeable(
        False,
        "Let a Mac go to sleep while it trains; by default training keeps it awake.",
        before=False,
    )
    notify: bool = changeable(
        True,
        "Show a notification of the system when a run ends that took more than a minute or is "
        "detached.",
        before=True,
    )
    report_to: tuple[str, ...] = changeable(
        (),
        "Trackers to send events to, separated by commas: wandb, swanlab, tensorboard.",
        agents="tracker",
    )
    push_to: str = changeable(
        "",
        "Push the finished adapter to this repo on the hub, ORG/NAME; a new repo is private.",
        agents="network",
    )
    eval_every: int | Literal["auto"] = changeable(
        AUTO,
        "Steps between validations; 0 = only at the end; auto: from 10 to 100, more the more rows "
        "there are.",
        bounds=Bounds(0, LARGEST),
        mlxlm="steps_per_eval",
    )
    save_every: int = changeable(
        100, "Steps between checkpoints; 0 = only at the end.", bounds=Bounds(0, LARGEST)
    )
    keep: int = changeable(
        3, "Number of checkpoints to keep, besides the best one.", bounds=Bounds(1, 1_000_000)
    )
    keep_best: bool = changeable(
        True,
        "Use the checkpoint with the best validation as the result, not the last.",
        before=False,
    )
    best_metric: str = setting(
        LOSS,
        "What the best validation is: loss; exact_match, the share of rows answered exactly; your "
        "own metric as module:function, higher is better, for which the first 64 rows are "
        "answered; or, for pairs and labels, accuracy or margin of their rewards.",
        before=LOSS,
        agents="metric",
    )
    patience: int = changeable(
        0,
        "Stop after this many validations without a better one; 0 = never.",
        bounds=Bounds(0, LARGEST),
        before=0,
    )
    samples: int | Literal["auto"] = changeable(
        AUTO,
        "Number of prompts to answer before and after training, from the test rows, or else from "
        "the held-out rows; auto: 3, if answers are trained and the weights are in memory.",
        bounds=Bounds(0, 1_000_000),
    )
    exact_match: bool = changeable(False, "Measure exact match on the test rows before and after.")


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """The length of training, and the speed of learning."""

    PANEL: ClassVar[str] = "Optimization"

    max_steps: int | None = changeable(
        None,
        "Stop after this many steps (optimizer updates).",
        bounds=Bounds(1, LARGEST),
        mlxlm="iters",
        tool=Tool("Optimizer updates at most.", Bounds(1)),
    )
    epochs: int | Literal["auto"] | None = changeable(
        AUTO,
        "Stop after this many passes over the data; auto: 1 to 50, fewer the more rows there are, "
        "or as many as --max-steps needs.",
        bounds=Bounds(1, 1_000_000),
        tool=Tool("Passes over the data at most.", Bounds(1)),
    )
    batch_size: int | Literal["auto"] = setting(
        AUTO,
        "Rows in a micro-batch, which is split where memory is short; auto: 4, or 8 from 5,000 "
        "rows, or 16 from 50,000.",
        bounds=Bounds(1, 65_536),
        in_card=True,
        tool=Tool("Rows in a micro-batch.", Bounds(1)),
    )
    grad_accumulation: int = setting(
        1,
        "Micro-batches in a step.",
        bounds=Bounds(1, 65_536),
        in_card=True,
        mlxlm="grad_accumulation_steps",
    )
    neftune_alpha: float = setting(
        0.0,
        "Noise on the embeddings in training (NEFTune), e.g. 5; 0 = none.",
        bounds=Bounds(0, 1_000_000),
        before=0.0,
        in_card=True,
    )
    optimizer: OptimizerName = setting("adamw", "Optimizer, from mlx.optimizers.", in_card=True)
    optimizer_bits: Literal[32, 8] = setting(
        32,
        "Bits of the optimizer's states. 8: a quarter of their memory; each is rounded to one of "
        "256 numbers.",
        before=32,
    )
    learning_rate: float = setting(
        2e-4,
        "Peak learning rate; if not given, 1e-4 for reward, and 2e-5 for others but sft and with "
        "--adapter full.",
        bounds=Bounds(0, LARGEST, above=True),
        in_card=True,
        tool=Tool("Peak learning rate.", Bounds(0, above=True)),
    )
    loraplus_ratio: float = setting(
        1.0,
        "The B matrices of the adapters learn this many times as fast (LoRA+), e.g. 16.",
        bounds=Bounds(1, 1_000_000),
        before=1.0,
        in_card=True,
    )
    layerwise_lr_decay: float = setting(
        1.0,
        "Each block learns this many times as fast as the block above it, e.g. 0.9.",
        bounds=Bounds(0, 1, above=True),
        before=1.0,
        in_card=True,
    )
    lr_schedule: Literal["constant", "linear", "cosine", "exponential", "step"] = setting(
        "constant",
        "Learning rate after the warm-up: constant, decaying to --lr-end (linear, cosine), or "
        "multiplied by --lr-decay-rate (exponential; step: all at once).",
        in_card=True,
    )
    lr_end: float = setting(
        0.0,
        "Learning rate at the end of a linear or cosine decay.",
        bounds=Bounds(0, LARGEST),
        before=0.0,
    )
    lr_decay_steps: int | None = setting(
        None,
        "Steps of a linear or cosine decay, or between two multiplications by --lr-decay-rate; "
        "default: those from the warm-up to the last step.",
        bounds=Bounds(1, LARGEST),
        before=None,
    )
    lr_decay_rate: float = setting(
        0.1,
        "Factor on the learning rate for every --lr-decay-steps of exponential or step.",
        bounds=Bounds(0, 1, above=True),
        before=0.1,
    )
    warmup_steps: int | Literal["auto"] = setting(
        AUTO,
        "Steps over which the learning rate rises linearly; auto: a tenth of an epoch, at most 10.",
        bounds=Bounds(0, LARGEST),
        in_card=True,
    )
    warmup_init: float | None = setting(
        None,
        "Learning rate of the first warm-up step, the last one having the peak; default: it rises "
        "from 0 just before the first step to the peak just after the last.",
        bounds=Bounds(0, LARGEST),
        before=None,
    )
    weight_decay: float = setting(0.0, "Weight decay.", bounds=Bounds(0, LARGEST), in_card=True)
    adam_beta1: float = setting(
        0.9,
        "Decay of the mean of the gradients, for adam and adamw.",
        bounds=Bounds(0, 1, under=True),
        before=0.9,
    )
    adam_beta2: float = setting(
        0.999,
        "Decay of the mean of their squares, for adam and adamw.",
        bounds=Bounds(0, 1, under=True),
        before=0.999,
    )
    adam_epsilon: float = setting(
        1e-8,
        "Added to the denominator, for adam and adamw.",
        bounds=Bounds(0, 1, above=True),
        before=1e-08,
    )
    adam_bias_correction: bool = setting(
        True, "Correct the bias of both means in the first steps, for adam and adamw.", before=True
    )
    max_grad_norm: float = setting(
        1.0,
        "Clip the gradient to this global norm; 0 = no clipping.",
        bounds=Bounds(0, LARGEST),
        in_card=True,
    )
    seed: int = setting(
        0, "Seed of all random choices.", bounds=Bounds(0, (1 << 64) - 1), in_card=True
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The objective, and the weights of its terms."""

    PANEL: ClassVar[str] = "Objective: most only with one other than sft"

    objective: ObjectiveName = setting(
        SFT,
        "What is learned: answers (sft), which of two answers is preferred (dpo, ipo, simpo, "
        "orpo), which answers are good and which are bad (kto), what earns a reward (grpo), to "
        "score answers (reward), what a reward model scores highly, through the sampled tokens "
        "(soft), or the predictions of a teacher (distill).",
        before="sft",
        in_card=True,
        tool=Tool("sft, dpo, ipo, simpo, orpo, kto, grpo, reward, soft or distill."),
    )
    beta: float | None = setting(
        None,
        "How much a preference counts against staying near the reference (dpo, ipo, kto), or the "
        "scale of mean log-probabilities (simpo); default: 0.1, or 2 with simpo.",
        bounds=Bounds(1e-6, LARGEST),
        objectives=("dpo", "ipo", "simpo", "kto"),
    )
    label_smoothing: float = setting(
        0.0,
        "Share of preferences that are taken to be wrong, for dpo and simpo.",
        bounds=Bounds(0, 0.5, under=True),
        objectives=("dpo", "simpo"),
    )
    simpo_gamma: float = setting(
        0.5,
        "Margin between the two answers that simpo wants.",
        bounds=Bounds(0, LARGEST),
        objectives=("simpo",),
    )
    orpo_lambda: float = setting(
        0.1, "Weight of the odds ratio in orpo.", bounds=Bounds(0, LARGEST), objectives=("orpo",)
    )
    kto_desirable_weight: float = setting(
        1.0, "Weight of good answers in kto.", bounds=Bounds(0, LARGEST), objectives=("kto",)
    )
    kto_undesirable_weight: float = setting(
        1.0, "Weight of bad answers in kto.", bounds=Bounds(0, LARGEST), objectives=("kto",)
    )
    sft_weight: float = setting(
        0.0,
        "Weight of the cross-entropy of the chosen or good answers, added to the loss of an "
        "objective other than sft.",
        bounds=Bounds(0, LARGEST),
        objectives=("dpo", "ipo", "simpo", "orpo", "kto", DISTILL),
    )
    reference: Literal["start", "none"] = setting(
        "start",
        "Reference of dpo and ipo: the model as the run starts, or none.",
        objectives=("dpo", "ipo"),
    )
    reward_loss: Literal["auto", "pairs", "scores"] = setting(
        AUTO,
        "Loss of a reward model: of a chosen and a rejected answer (pairs: Bradley-Terry), or of "
        "an answer with a score (scores: squared error); auto: what the rows are.",
        objectives=(REWARD,),
    )
    center_rewards: float = setting(
        0.0,
        "Weight of the squared sum of the scores of a pair, which centers them at 0.",
        bounds=Bounds(0, LARGEST),
        objectives=(REWARD,),
    )
    reward: tuple[str, ...] = setting(
        (),
        "Rewards of completions, separated by commas, each with =WEIGHT: exact_match, json_valid, "
        "json_fields, regex:PATTERN, length:TOKENS, contains:TEXT, judge, run:RUN (a "
        "reward model), or your own as module:function.",
        objectives=REWARDED,
        agents="reward",
    )
    reward_model: str = setting(
        "",
        "Reward model that soft trains against, as run:RUN; --reward then is only shown.",
        objectives=(SOFT,),
        agents="reward",
    )
    soft_credit: str = setting(
        "exact",
        "How far back gradients go through sampled tokens in soft: exact, a number of tokens, or "
        "the relative error (below 1) at which they end.",
        objectives=(SOFT,),
        agents="text",
    )
    straight_through: bool = setting(
        True,
        "In soft, sample tokens, and relax only their gradient; relaxed: weighted means of token "
        "embeddings go forward, too.",
        objectives=(SOFT,),
    )
    temperature_end: float | None = setting(
        None,
        "Temperature at the last step of soft, which it changes to linearly.",
        bounds=Bounds(0.01, 100),
        objectives=(SOFT,),
    )
    rollouts: int = setting(
        8,
        "Completions of each prompt, which are compared with each other.",
        bounds=Bounds(2, 4096),
        objectives=(GRPO,),
    )
    prompts_per_step: int = setting(
        4,
        "Prompts of which each step trains the completions.",
        bounds=Bounds(1, 65_536),
        objectives=SAMPLING,
    )
    max_new_tokens: int = setting(
        256,
        "Maximum tokens of a completion.",
        bounds=Bounds(1, 1 << 24),
        objectives=(*SAMPLING, SFT),
    )
    temperature: float = setting(
        1.0,
        "Temperature that completions are sampled with; in soft, of the relaxation.",
        bounds=Bounds(0.01, 100),
        objectives=(*SAMPLING, SFT),
    )
    top_p: float = setting(
        1.0,
        "Sample from the most likely tokens whose total probability is this; 1 = all.",
        objectives=(GRPO, DISTILL, SFT),
    )
    top_k: int = setting(
        0,
        "Sample from this many of the most likely tokens; 0 = all.",
        bounds=Bounds(0, LARGEST),
        objectives=(GRPO, DISTILL, SFT),
    )
    updates_per_batch: int = setting(
        1, "Steps that train the same completions.", bounds=Bounds(1, 1000), objectives=(GRPO,)
    )
    clip_low: float = setting(
        0.2,
        "A token that became less likely by more than this share is not pushed further.",
        bounds=Bounds(0, 1),
        objectives=(GRPO,),
    )
    clip_high: float = setting(
        0.2,
        "A token that became more likely by more than this share is not pushed further.",
        bounds=Bounds(0, LARGEST),
        objectives=(GRPO,),
    )
    kl_beta: float = setting(
        0.0,
        "Weight of the KL divergence from the model as the run starts; 0 = none.",
        bounds=Bounds(0, LARGEST),
        objectives=GENERATING,
    )
    kl: Literal["reverse", "k3"] = setting(
        "reverse",
        "Estimate of the KL divergence: one with the gradient of the reverse KL, or k3 as in the "
        "first papers.",
        objectives=(GRPO,),
    )
    advantage: Literal["group", "dr", "rloo"] = setting(
        "group",
        "How much better than the others a completion is: reward - mean of its prompt's, divided "
        "by their standard deviation (group) or not (dr), or reward - mean of the others (rloo).",
        objectives=(GRPO,),
    )
    importance: Literal["token", "sequence"] = setting(
        "token",
        "Clip the ratio of each token, or that of the completion (GSPO).",
        objectives=(GRPO,),
    )
    loss_normalization: Literal["dapo", "grpo", "dr"] = setting(
        "dapo",
        "All tokens of a step weigh the same (dapo), all completions do (grpo), or tokens do, "
        "divided by --max-new-tokens (dr).",
        objectives=(GRPO,),
    )
    mask_truncated: bool = setting(
        False, "Leave completions out that were cut off at --max-new-tokens.", objectives=(GRPO,)
    )
    environment: str = setting(
        "",
        "Environment that answers the model over several turns: module:Class of yours, or "
        "verifiers:NAME. See docs/environments.md.",
        objectives=(GRPO,),
        agents="code",
    )
    tools: tuple[str, ...] = setting(
        (),
        "Tools that the model may call, separated by commas: each a module with functions of "
        "yours, module:function, or python, which runs code in a sandbox.",
        objectives=(GRPO,),
        agents="code",
    )
    max_turns: int = setting(
        8,
        "Turns of the model in a conversation with an environment or tools.",
        bounds=Bounds(1, 10_000),
        objectives=(GRPO,),
    )
    tool_timeout_s: float = setting(
        30.0,
        "Seconds that a call of a tool, or of an environment, may take.",
        bounds=Bounds(0.01, 86_400),
        objectives=(GRPO,),
    )
    tool_output_characters: int = setting(
        8192,
        "Characters of a tool's result; the rest is cut off.",
        bounds=Bounds(1, 1 << 24),
        objectives=(GRPO,),
    )
    rewritten_turns: Literal["refuse", "split"] = setting(
        "refuse",
        "What to do if the chat template changes earlier turns of a conversation, such as their "
        "reasoning: end it, and the run if that happens often, or train it in parts.",
        objectives=(GRPO,),
    )
    credit: Literal["conversation", "turn"] = setting(
        "conversation",
        "What an advantage is of: the whole conversation, or each turn, compared with those that "
        "began in the same state (GiGPO).",
        objectives=(GRPO,),
    )
    discount: float = setting(
        1.0,
        "With --credit turn, how much a reward counts one turn earlier.",
        bounds=Bounds(0, 1),
        objectives=(GRPO,),
    )
    trust_code: bool = setting(
        False,
        "Let the tool python run the model's code where the system has no sandbox.",
        objectives=(GRPO,),
        agents="refused",
        resumes=True,
    )
    teacher: str = setting(
        "",
        "Teacher of distill, or of sft with --answers-from-teacher: an alias, a folder, a Hugging "
        "Face id, or run:RUN; in distill with the same tokens. Default: the base model itself, "
        "with --teacher-prompt.",
        objectives=(DISTILL, SFT),
        agents="model",
    )
    teacher_prompt: str = setting(
        "",
        "File with a system prompt, or documents, that the teacher sees and the student does not.",
        objectives=(DISTILL, SFT),
        agents="file",
    )
    answers_from_teacher: int = setting(
        0,
        "In sft, let the teacher write this many answers to each prompt of the data first: the "
        "best by --reward is trained, or without it all; 0 = train those in the data.",
        bounds=Bounds(0, 4096),
        objectives=(SFT,),
    )
    distill_on: Literal["data", "student"] = setting(
        "data",
        "What distill compares student and teacher on: the answers in the data, or completions "
        "that the student samples.",
        objectives=(DISTILL,),
    )
    distill_student_share: float | None = setting(
        None,
        "Share of the steps that train completions of the student, the others answers in the "
        "data; default: 0, or 1 with --distill-on student.",
        bounds=Bounds(0, 1),
        objectives=(DISTILL,),
    )
    divergence: str = setting(
        "forward",
        "Divergence of the student from the teacher: forward (the student covers what the teacher "
        "may say), reverse (it says what the teacher finds likely), jsd:B between both, or "
        "sampled (reverse, from the tokens of the student's completions alone).",
        objectives=(DISTILL,),
        agents="text",
        words=("forward", "reverse", "jsd:0.5", "sampled"),
    )
    temperature_distill: float = setting(
        1.0,
        "Temperature that divides the logits of student and teacher in distill.",
        bounds=Bounds(0.01, 100),
        objectives=(DISTILL,),
    )
    teacher_cache: Literal["disk", "off"] = setting(
        "disk",
        "What the teacher computes of the data: kept on disk in the run's folder, or computed "
        "again in each step (off).",
        objectives=(DISTILL,),
    )
    judge_model: str = setting(
        "", "Model that judges, for --reward judge.", objectives=REWARDED, agents="network"
    )
    judge_url: str = changeable(
        "",
        "Base URL of the judge, which speaks OpenAI's protocol; default: OpenAI's own.",
        objectives=REWARDED,
        agents="network",
        in_card=False,
    )
    judge_rubric: str = setting(
        "",
        "YAML file with what the judge looks for; default: a general one.",
        objectives=REWARDED,
        agents="file",
        in_card=False,
    )
    judge_concurrency: int = changeable(
        4,
        "Questions that the judge is asked at the same time.",
        bounds=Bounds(1, 256),
        objectives=REWARDED,
    )
    judge_max_calls: int | None = changeable(
        None,
        "Maximum number of questions to the judge in a run; then its rewards are missing.",
        bounds=Bounds(1, LARGEST),
        objectives=REWARDED,
    )
    judge_timeout_s: float = changeable(
        60.0,
        "How long to wait for an answer of the judge before it is asked again, in seconds.",
        bounds=Bounds(0.01, 3600),
        objectives=REWARDED,
    )


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """The adapter that is added to the model, or the weights that are trained without one."""

    PANEL: ClassVar[str] = "Adapters"

    adapter: Literal["lora", "full"] = setting(
        "lora",
        "What is trained: adapters (lora), or the weights of the blocks themselves (full), of a "
        "model that is not quantized; the result is then a model.",
        before="lora",
        in_card=True,
    )
    blocks_per_period: int | None = setting(
        None,
        "With --adapter full, train this many blocks at a time, chosen at random until all had "
        "their turn (BAdam): only their gradients and optimizer states exist; default: all.",
        bounds=Bounds(1, LARGEST),
        before=None,
        in_card=True,
    )
    period: int = setting(
        50,
        "Steps after which other blocks are trained, with --blocks-per-period.",
        bounds=Bounds(1, LARGEST),
        before=50,
        in_card=True,
    )
    lora_rank: int | Literal["auto"] | LayerText = setting(
        AUTO,
        "Rank of the adapters; auto: 16, or 8 or 4 if no plan fits into the memory limit. By layer "
        "as in 16,mlp=32,block.0-3=8: the last that selects a layer counts.",
        bounds=Bounds(1, 65_536),
        agents="text",
        in_card=True,
        of_adapter=True,
    )
    lora_alpha: float | LayerText = setting(
        32.0,
        "Scale the adapters by alpha / rank; a smaller automatic rank keeps the scale. By layer as "
        "in 32,mlp=64.",
        bounds=Bounds(0, LARGEST, above=True),
        agents="text",
        in_card=True,
        of_adapter=True,
    )
    use_rslora: bool = setting(
        False,
        "Scale the adapters by alpha / sqrt(rank) instead (rsLoRA), for high ranks.",
        before=False,
        in_card=True,
        of_adapter=True,
    )
    lora_layers: int | Literal["all", "auto"] | None = setting(
        AUTO,
        "Number of last blocks to adapt or train, or all; auto: all, or fewer if not even rank 4 "
        "fits into the memory limit.",
        in_card=True,
        of_adapter=True,
        mlxlm="num_layers",
    )
    lora_targets: tuple[str, ...] = setting(
        ("all-linear",),
        "Layers to adapt, separated by commas, or all-linear, those of the blocks; also "
        "embed_tokens and lm_head. With --adapter full, all-linear is all arrays of a block.",
        agents="text",
        in_card=True,
        of_adapter=True,
    )
    lora_experts: bool = setting(
        False,
        "Adapt the routed experts of a mixture of experts, too, where --lora-targets is all-linear "
        "or a name without a dot; their paths, such as mlp.switch_mlp.up_proj, always select them.",
        before=True,
    )
    lora_dropout: float = setting(
        0.0, "Dropout on the input of the adapters.", bounds=Bounds(0, 1, under=True), in_card=True
    )
    use_dora: bool = setting(
        False,
        "Train weight-decomposed adapters (DoRA).",
        in_card=True,
        of_adapter=True,
        mlxlm="fine_tune_type",
    )
    qat: str = setting(
        "",
        "Round the adapted weights in training as the result will be (quantization-aware training):"
        " same, BITS[:GROUP] such as 4:64, or llama.cpp's q4_0 or q8_0.",
        before="",
        agents="text",
        in_card=True,
        of_adapter=True,
        words=("same", "4", "8", "q4_0", "q8_0"),
    )
    train: str = setting(
        "",
        "Train all rows of these, too: embeddings, head, or both, separated by a comma.",
        before="",
        agents="text",
        in_card=True,
        words=("embeddings", "head", "embeddings,head"),
    )
    add_tokens: str = setting(
        "",
        "Add tokens, such as <a>,<b>, or a file with one in a line, and train their embeddings.",
        before="",
        agents="file",
        in_card=True,
    )
    add_special_tokens: str = setting(
        "",
        "Add these tokens, as --add-tokens does, as special ones, which answers are shown without.",
        before="",
        agents="file",
        in_card=True,
    )
    embedding_learning_rate: float | None = setting(
        None,
        "Learning rate of trained embeddings and heads; default: --learning-rate.",
        before=None,
        bounds=Bounds(0, LARGEST),
        in_card=True,
    )
    init: str = setting(
        "",
        "First values of the adapters: loftq, the largest part of what --quantize takes away, or "
        "loftq:N, the same in N rounds that also adjust the quantized weights; pissa, the largest "
        "part of each weight, which the base then lacks. Default: A is random and B is zero.",
        before="",
        agents="text",
        in_card=True,
        words=("loftq", "loftq:5", "pissa"),
    )
    adapter_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "Data type of the adapters' matrices and their gradients, or in which whole weights are "
        "updated. bfloat16: half of their memory; each new value is rounded at random.",
        before="float32",
    )


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The use of memory."""

    PANEL: ClassVar[str] = "Memory"

    max_memory: float | None = changeable(
        None,
        "Memory limit of training, in GB; default: what this machine can give.",
        bounds=Bounds(0, LARGEST, above=True),
        tool=Tool("Memory limit of the process in GB (10**9 bytes); default: what is free."),
    )
    force: bool = changeable(
        False, "Allow a --max-memory above the machine's memory.", agents="refused"
    )
    wait: bool = changeable(
        False,
        "Wait until the other runs in ./runs that train, or waited before, leave --max-memory for "
        "this one; without --max-memory, until they have ended.",
        before=False,
    )
    heavy_writes: bool = changeable(
        False,
        "Allow --adapter full to write more than a tenth of what its disk usually bears; so does "
        "--yes.",
        before=False,
        agents="refused",
    )
    reload_interval: int = changeable(
        0,
        "Reload the weights of the adapted layers every N steps; 0 = only when memory is low.",
        bounds=Bounds(0, LARGEST),
    )
    reload_at: float = changeable(
        0.70,
        "Fraction of the limit above which memory is freed early.",
        bounds=Bounds(0, 1, above=True),
    )
    clear_cache_every: int | None = changeable(
        None,
        "Clear MLX's cache every N steps; default: 10, or 5 with a limit below 10 GB; 0 = never.",
        bounds=Bounds(0, LARGEST),
    )
    leak_threshold_mb: float = changeable(
        50.0,
        "Growth per step, in MB, that counts as a memory leak.",
        bounds=Bounds(0, LARGEST, above=True),
    )
    leak_warmup: int = changeable(
        5, "Number of steps before the check for memory leaks begins.", bounds=Bounds(0, LARGEST)
    )
    wired: bool = changeable(
        False,
        "Keep MLX's buffers in RAM up to the limit, so that macOS swaps none; from macOS 15.",
        before=False,
        agents="refused",
    )
    plan: Literal["auto", "fused", "staged", "streamed"] = changeable(
        "auto",
        "How gradients are computed; every plan gives the same gradients. fused: one graph, "
        "fastest. staged: one block at a time, recomputed in the backward pass as far as its "
        "outputs do not fit, with the vocabulary on disk. streamed: staged, with the weights "
        "on disk that do not fit. auto: the fastest that fits.",
    )
    spill: bool = changeable(
        False,
        "Offload the states of the optimizer to disk, beside the block inputs and gradients; not "
        "with --plan fused.",
    )
    prefix_cache: Literal["off", "memory", "disk"] = setting(
        "off",
        "Cache the activations below the first adapted block, so that those blocks run only once "
        "for each text: in memory, or on disk in the run's folder.",
    )
    prefix_cache_folder: str = changeable(
        "",
        "Folder for --prefix-cache disk that runs share, one at a time; it is kept at the end. "
        "Default: in the run's folder.",
        before="",
        agents="file",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Data type to compute in; auto is float32 on the CPU and bfloat16 on a GPU.",
        in_card=True,
    )
    quantize: Literal[4, 8] | None = setting(
        None,
        "Quantize the model to this many bits first; the copy is kept for later runs.",
        in_card=True,
    )


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The processes that train together."""

    PANEL: ClassVar[str] = "Several processes or machines"

    processes: int = changeable(
        1,
        "Train on this many processes of this machine, each under --max-memory.",
        bounds=Bounds(1, 256),
    )
    hosts: tuple[str, ...] = changeable(
        (),
        "Train on these machines, separated by commas, this one first; see docs/machines.md.",
        agents="refused",
    )
    hostfile: str = changeable(
        "",
        "Train on the machines in this JSON file, in the format of mlx.launch.",
        agents="refused",
    )
    sync: Literal["off", "data", "all"] = changeable(
        "off", "Copy the data (data), or data and model (all), to the other hosts with rsync first."
    )
    heartbeat_timeout_s: float = changeable(
        30.0,
        "A process that is not heard of for so long is lost, in seconds; then all restart.",
        bounds=Bounds(2, 86_400),
    )


COMPONENTS = (
    DataSettings,
    ObjectiveSettings,
    AdapterSettings,
    OptimizationSettings,
    MemorySettings,
    OutputSettings,
    RankSettings,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    RankSettings,
    MemorySettings,
    AdapterSettings,
    ObjectiveSettings,
    OptimizationSettings,
    OutputSettings,
    DataSettings,
):
    """All settings of a training run."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def generates(self) -> bool:
        """True if each step trains completions that the model samples itself."""
        return self.objective in GENERATING or self.student_share == 1

    @property
    def student_share(self) -> float:
        """The share of the steps of distill that train completions of the student; else 0."""
        if self.objective != DISTILL:
            return 0.0
        given = self.distill_student_share
        return float(self.distill_on == "student") if given is None else given

    @property
    def samples_completions(self) -> bool:
        """True if some steps train completions that the model samples itself."""
        return self.generates or self.student_share > 0

    @property
    def converses(self) -> bool:
        """True if completions are conversations with an environment or tools."""
        return bool(self.environment or self.tools)

    @property
    def completions_of_prompt(self) -> int:
        """The completions of each prompt, which are compared with each other."""
        return self.rollouts if self.objective == GRPO else 1

    @property
    def sample_count(self) -> int:
        """The number of held-out prompts answered before and after training, if there are any."""
        if isinstance(self.samples, str):
            return 0 if self.generates or self.objective == REWARD else AUTO_SAMPLES
        return self.samples

    @property
    def scores_completions(self) -> bool:
        """True if the completions of a step are scored before they are trained."""
        return self.objective == GRPO and (self.updates_per_batch > 1 or self.kl_beta > 0)

    @property
    def texts_together(self) -> int:
        """Texts that the objective compares, so that they go through the model together."""
        if self.objective == REWARD and self.reward_loss == "scores":
            return 1
        return 2 if self.row_kind in ("pairs", "labels", "rated") else 1

    @property
    def row_kind(self) -> RowKind:
        """The kind of rows in the data."""
        kinds: dict[str, RowKind] = {
            SFT: "answers",
            DISTILL: "answers",
            "kto": "labels",
            REWARD: "rated",
        }
        asks = self.generates or self.answers_from_teacher
        if self.environment:
            return "tasks"
        return "prompts" if asks else kinds.get(self.objective, "pairs")

    @property
    def trained_kind(self) -> RowKind:
        """The kind of rows that are trained: of prompts that a teacher answers, its answers."""
        return "answers" if self.answers_from_teacher else self.row_kind

    @property
    def measured_kind(self) -> Literal["answers", "chosen"]:
        """The part of the rows that an evaluation takes: of pairs, the chosen answers."""
        return "answers" if self.row_kind in ("answers", "prompts", "tasks") else "chosen"

    @property
    def has_first_adapter(self) -> bool:
        """True if the adapters start from the values in the run's folder `start/`."""
        return bool(self.from_adapter or self.init)

    @property
    def adapter_kind(self) -> AdapterFacts:
        """The kind of the adapters that are trained."""
        if self.adapter == FULL.name:
            return FULL
        return DORA if self.use_dora else LORA

    @property
    def has_ranks(self) -> bool:
        """True if these settings start several processes."""
        return self.processes > 1 or bool(self.hosts or self.hostfile)

    def uses(self, name: str) -> bool:
        """Return whether the run uses a setting."""
        answered = bool(self.answers_from_teacher) and ABOUT[name].used_by(self.objective)
        return answered or is_used(name, self.objective)

    def fixed_on_resume(self) -> dict[str, str]:
        """The settings that must not change when a run is resumed, as text."""
        return {
            name: repr(value)
            for name, value in dataclasses.asdict(self).items()
            if not (ABOUT[name].resumes or name == "run" or value == ABOUT[name].before)
        }


class Resolved(TrainConfig):
    """The settings with which a run trains: none is automatic but `samples`."""

    batch_size: int
    epochs: int | None
    eval_every: int
    warmup_steps: int
    lora_rank: int | LayerText
    lora_layers: int | Literal["all"] | None


def last_step(config: TrainConfig, steps_per_epoch: int) -> int:
    """The last step: --max-steps or the end of --epochs, whichever comes first."""
    limits = [] if config.max_steps is None else [config.max_steps]
    if isinstance(config.epochs, int):
        limits.append(config.epochs * steps_per_epoch)
    return min(limits, default=steps_per_epoch)


def is_due(every: int, step: int) -> bool:
    """Return whether something that happens every `every` steps (0 = never) happens at this one."""
    return every > 0 and step % every == 0


FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
TYPES = {name: kind for name, kind in typing.get_type_hints(TrainConfig).items() if name in FIELDS}

ABOUT = settings_of(TrainConfig)
# Settings that old runs do not have, with the values that they trained with.
ADDED = {name: about.before for name, about in ABOUT.items() if about.before is not ALWAYS}
# Settings that decide which adapter layers a model has.
ADAPTER_SETTINGS = tuple(name for name, about in ABOUT.items() if about.of_adapter)
# Settings of one kind of objective -> the objectives that use it.
OBJECTIVES_WITH = {name: about.objectives for name, about in ABOUT.items() if about.objectives}
# Panels of the help -> the settings in them.
PANELS = {
    kind.PANEL: tuple(name for name in FIELDS if name in settings_of(kind)) for kind in COMPONENTS
}


def is_used(name: str, objective: str) -> bool:
    """Return whether every run with an objective uses a setting."""
    about = ABOUT[name]
    return about.used_by(objective) and not (objective == SFT and about.objectives)
