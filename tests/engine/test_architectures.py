"""Every plan on architectures whose trunks do more than call plain blocks one after another.

`python tests/architectures.py` does the same for all of mlx-lm's.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.architectures import PLANS, opened_with_adapters, write_model
from your_ai.engine.build import build_engine
from your_ai.engine.weights import open_model, stream_vocabulary
from your_ai.errors import UserError
from your_ai.memory.facts import facts_of

SPECIAL = [
    "gemma3n",  # several hidden streams, inputs of each block, a trunk that returns logits
    "gemma4_text",  # keys and values that later blocks share
    "hunyuan",  # keys and values that pairs of blocks share
    "rwkv7",  # values of the first block in all others; weights that change at load
    "ministral3",  # factors of each token
    "llama4",  # masks of two kinds, by length
    "nemotron_h",  # blocks of three kinds, a trunk of another name
    "qwen3_next",  # gated delta rule, experts
    "olmo_hybrid",  # a trunk that asks for the class of its blocks
    "gptj",  # blocks called with keywords
    "dbrx",  # a router that reads values of arrays
    "gpt_oss",  # attention with sinks and windows
    "mamba",  # a trunk that requires a cache argument
]
OTHERS = {
    "kimi_k3": "its blocks receive a ResidualBlocks",
    "iquestloopcoder": "its trunk does not call every block once",
    "afm7": "its blocks are not one list",
}
ROOT = Path(__file__).parents[2]
# Prints the outcomes of architectures. Their kernels would take g++ more than a minute;
# test_mixers.py has some of these architectures with kernels, and tests/architectures.py all.
FIND = """
import json, sys
from tests.architectures import found_here
from tests.kernels import fuse

fuse(False)
print(json.dumps({name: found_here(name, (24,)) for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """The outcome of each plan, by architecture."""
    command = [sys.executable, "-c", FIND, *SPECIAL, *OTHERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("model_type", SPECIAL)
def test_gradients_are_those_of_mlx_lm_under_every_plan(outcomes, model_type):
    assert outcomes[model_type] == dict.fromkeys(PLANS, "exact")


@pytest.mark.parametrize(("model_type", "reason"), OTHERS.items())
def test_other_trunks_say_what_they_do(outcomes, model_type, reason):
    found = outcomes[model_type]
    assert found["fused"] == "exact"
    assert f"cannot be split into its blocks ({reason})" in found["staged"]
    assert "\n" not in found["streamed"]
    assert "--plan streamed" in found["streamed"]


@pytest.mark.parametrize(
    ("model_type", "tokens", "refused"),
    [
        ("llama4", 8, False),
        ("llama4", 24, True),
        ("ministral3", 8, False),
        ("ministral3", 24, True),
    ],
)
def test_packing_is_refused_where_the_place_in_the_row_matters(
    tmp_path, model_type, tokens, refused
):
    """Chunks of 16 tokens, and factors that change after 8."""
    opened, adapters = opened_with_adapters(write_model(tmp_path / "m", model_type))
    raised = pytest.raises(UserError, match=f"in rows of {tokens} tokens")
    with raised if refused else contextlib.nullcontext():
        build_engine(
            opened.network, adapters.dropout_keys, "fused", True, opened.tensors, longest=tokens
        )


@pytest.mark.parametrize("model_type", ["gemma3n", "gpt2", "gpt_neox", "internlm2", "mamba2"])
def test_embeddings_and_head_of_any_name_stay_in_the_files_as_estimates_assume(
    tmp_path, model_type
):
    folder = write_model(tmp_path / "m", model_type)
    opened = open_model(folder, mx.float32)
    layers = stream_vocabulary(opened.network, opened.tensors)
    found = sum(array.nbytes for layer in layers.values() for array in layer.parameters().values())
    assert found == facts_of(folder, 4).vocabulary_bytes > 0


@pytest.mark.parametrize("model_type", ["mamba2", "lfm2", "gpt2"])
def test_packing_is_refused_where_blocks_treat_a_row_as_one_text(tmp_path, model_type):
    opened, adapters = opened_with_adapters(write_model(tmp_path / "m", model_type))
    with pytest.raises(UserError, match=r"--packing: its blocks treat a row as one text"):
        build_engine(opened.network, adapters.dropout_keys, "fused", True, opened.tensors)
