"""The optimizers: all that settings, memory and training know of each. No mlx here.

A new one is a name and an entry here. Its states and its temporary arrays are measured by
`tests/training/test_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

OptimizerName = Literal["adamw", "adam", "sgd", "adafactor", "muon", "lion"]


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    class_name: str
    """In mlx.optimizers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are always these."""
    has_betas: bool = False
    """Whether it takes the settings of Adam: --adam-beta1 and so on."""
    decays: bool = True
    """Whether it takes a weight decay."""
    states: int
    """Arrays of the size of a parameter that it keeps between updates."""
    factored: bool = False
    """Whether it keeps a row and a column for each matrix, instead of arrays of its size."""
    signed: tuple[str, ...] = ()
    """Names of states that --optimizer-bits 8 stores with a sign."""
    squares: tuple[str, ...] = ()
    """Names of states that --optimizer-bits 8 stores as their square roots."""
    work: float
    """Arrays of an update per parameter that is updated together: new values and temporaries."""
    work_in_bfloat16: float
    """The same with parameters in bfloat16, per parameter in float32."""
    work_in_8_bits: tuple[int, int] | None = None
    """The same with states in 8 bits, float32 meanwhile: for the largest array, and for others;
    None if there is nothing to store in 8 bits."""
    in_mlxlm: bool = True
    """Whether mlx-lm has it, under the same name."""
    mlxlm_decay: float = 0.0
    """The weight decay that it has there without a setting."""


ADAMW = OptimizerKind(
    class_name="AdamW",
    has_betas=True,
    states=2,
    signed=("m",),
    squares=("v",),
    work=3,
    work_in_bfloat16=4.5,
    work_in_8_bits=(26, 6),
    mlxlm_decay=0.01,
)
# In the order of mlx-lm's messages.
OPTIMIZERS: dict[str, OptimizerKind] = {
    "adam": replace(ADAMW, class_name="Adam", decays=False, mlxlm_decay=0.0),
    "adamw": ADAMW,
    "sgd": OptimizerKind(
        class_name="SGD",
        options={"momentum": 0.0, "dampening": 0.0, "nesterov": False},
        states=1,
        work=1,
        work_in_bfloat16=2.5,
    ),
    "muon": OptimizerKind(
        class_name="Muon",
        options={"momentum": 0.95, "nesterov": True, "ns_steps": 5},
        states=1,
        signed=("v",),
        work=12.1,
        work_in_bfloat16=12.6,
        work_in_8_bits=(26, 7),
        mlxlm_decay=0.01,
    ),
    "adafactor": OptimizerKind(
        class_name="Adafactor",
        options={"relative_step": False, "scale_parameter": False},
        states=0,
        factored=True,
        work=4.1,
        work_in_bfloat16=6.5,
    ),
    "lion": OptimizerKind(
        class_name="Lion",
        states=1,
        signed=("m",),
        work=2,
        work_in_bfloat16=4.5,
        work_in_8_bits=(17, 7),
        in_mlxlm=False,
    ),
}
