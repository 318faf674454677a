"""An exported reward model gives the same scores in transformers and PEFT as here."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from tests.export.runs import make_trained
from tests.interop.bases import make_base
from your_ai.data.encode import EncodedRow
from your_ai.evaluation.reward_model import load_reward_model
from your_ai.export import huggingface, peft
from your_ai.export.transformers_names import KNOWN
from your_ai.nets.head import WEIGHT
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import checkpoint

pytestmark = pytest.mark.interop
TOLERANCE = 1e-4
EVERYTHING = {"lora_targets": ("all-linear",), "lora_layers": "all", "use_dora": True}
TEXTS = [np.arange(3, 27), np.arange(40, 48), np.array([9, 9, 30, 5])]


def reward_run(base):
    """A run with random adapters and a random score head."""
    trained = make_trained(base, objective="reward", **EVERYTHING)
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    head = mx.random.normal((1, width), key=mx.random.key(4)) / np.sqrt(width)
    arrays = {**trained.adapter.arrays, WEIGHT: head}
    step = trained.adapter.step or 0
    checkpoint.save_adapter(trained.adapter.folder, arrays, trained.adapter.config, step)
    return open_trained(trained.folder.name)


def scores_here(trained) -> list[float]:
    model = load_reward_model(trained)
    encoded = []
    for text in TEXTS:
        tokens = np.append(text, 0).astype(np.uint32)
        encoded.append(EncodedRow(tokens, np.arange(len(tokens)) == len(text)))
    return model.scores(encoded).tolist()


def scores_of(model) -> list[float]:
    with torch.no_grad():
        return [model(torch.tensor(text)[None]).logits.item() for text in TEXTS]


@pytest.mark.parametrize("architecture", [kind for kind, known in KNOWN.items() if known.scorer])
def test_the_scores_of_a_sequence_classifier_are_those_of_mlx(architecture, tmp_path):
    trained = reward_run(make_base(tmp_path / "base", architecture))
    list(huggingface.write(trained, tmp_path / "out"))
    model, told = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not {name: keys for name, keys in told.items() if keys}
    assert type(model).__name__ == KNOWN[architecture].scorer
    ours = scores_here(trained)
    assert np.std(ours) > 0.01
    assert scores_of(model.eval()) == pytest.approx(ours, abs=TOLERANCE)


def test_padded_texts_have_the_same_scores(tmp_path):
    trained = reward_run(make_base(tmp_path / "base", "llama"))
    list(huggingface.write(trained, tmp_path / "out"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval().float()
    padding, longest = model.config.pad_token_id, max(map(len, TEXTS))
    rows = torch.tensor([[*text, *[padding] * (longest - len(text))] for text in TEXTS])
    with torch.no_grad():
        found = model(rows, attention_mask=(rows != padding).long()).logits[:, 0].tolist()
    assert found == pytest.approx(scores_here(trained), abs=TOLERANCE)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_peft_gives_the_same_scores(architecture, tmp_path):
    base = make_base(tmp_path / "base", architecture)
    trained = reward_run(base)
    peft.write(trained, tmp_path / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    assert scores_of(model) == pytest.approx(scores_here(trained), abs=TOLERANCE)
