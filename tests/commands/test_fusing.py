"""`your_ai fuse` and its output."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import call, make_model
from tests.export.fused_runs import drawn_run
from your_ai.commands.fusing import warning_of
from your_ai.export import fuse_difference as measuring
from your_ai.export.fuse_difference import Difference
from your_ai.hub.check import check_model
from your_ai.modelfiles import shards
from your_ai.nets.saved_adapter import Trained


@pytest.fixture
def trained(tmp_path: Path, data_folder: Path) -> Trained:
    return drawn_run(make_model(tmp_path / "model"), data_folder, strength=0.002)


def test_fuse_writes_a_model_and_measures_the_difference(trained, capsys):
    assert call("fuse", "drawn", "out") == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()[-5:]
    assert lines[0] == "out"
    assert lines[1] == "valid.jsonl: 3 rows, 22 positions"
    assert [line.split(":")[0] for line in lines[2:]] == ["loss", "logits", "most likely token"]
    assert "warning" not in printed.err
    assert check_model(Path("out"))["quantization"]["model.layers.2.mlp.up_proj"]["bits"] == 8


def test_warns_if_fusing_changes_as_much_as_the_adapter(trained, capsys):
    assert call("fuse", "drawn", "out", "--to", "same") == 0
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("warning: fusing changes the logits by 0.")
    assert printed.endswith("; give --to 8 or --to dequantized")


ERASED = "fusing erased the adapter: 14% of its effect is left; give "
AS_FAR = "fusing changes the logits by 0.3, the adapter by 0.2; give "


@pytest.mark.parametrize(
    ("kept", "to", "bits", "warning"),
    [
        (0.14, "same", 4, ERASED + "--to 8 or --to dequantized"),
        (0.14, "auto", 4, ERASED + "--to dequantized"),
        (-0.2, "auto", 4, ERASED.replace("14%", "0%") + "--to dequantized"),
        (0.9, "6", 4, AS_FAR + "--to 8 or --to dequantized"),
        (0.9, "dequantized", None, AS_FAR + "--dtype float32"),
    ],
)
def test_warning_says_which_option_to_use(tmp_path, kept, to, bits, warning):
    fields = {field.name: 0 for field in dataclasses.fields(Difference)}
    found = Difference(**fields | {"mean": 0.3, "effect": 0.2, "kept": kept})
    assert found.erased
    assert warning_of(found, make_model(tmp_path / "out", bits=bits), to) == warning


def test_json_output_is_one_object(trained, capsys):
    assert call("fuse", "drawn", "out", "--to", "same", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == "out"
    assert found["difference"]["erased"] is True
    assert found["difference"]["mean"] > 0


def test_no_measure_skips_the_measurement(trained, capsys, monkeypatch):
    monkeypatch.setattr(measuring, "difference", None)
    assert call("fuse", "drawn", "out", "--no-measure", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"target": "out", "difference": None}


def test_without_names_the_newest_run_is_fused_into_a_folder_named_after_it(trained, capsys):
    assert call("fuse", "--to", "same", "--no-measure") == 0
    printed = capsys.readouterr()
    assert printed.out == "drawn-fused\n"
    assert printed.err.splitlines()[0] == "run: drawn (the newest)"
    check_model(Path("drawn-fused"))


def test_one_name_alone_is_always_the_run(trained, capsys):
    """So that a mistyped run is not taken for the name of a new folder."""
    assert call("fuse", "drown", "--to", "same", "--no-measure") == 2
    assert "/runs; did you mean drawn?" in capsys.readouterr().err
    assert call("fuse", "drawn", "--to", "same", "--no-measure") == 0
    assert capsys.readouterr().out == "drawn-fused\n"


def test_missing_data_skips_the_measurement_with_a_note(trained, data_folder, capsys):
    shutil.rmtree(data_folder)
    assert call("fuse", "drawn", "out") == 0
    printed = capsys.readouterr()
    assert printed.out == "out\n"
    assert "note: the difference was not measured (--data" in printed.err
    check_model(Path("out"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("drawn", "model", "--force"), "model: belongs to the run itself"),
        (("drawn", "data", "--force"), "data: contains files that do not belong to a model"),
        (("drawn", "a[b]"), "mlx-lm cannot load a model from a folder with"),
        (("drawn", "nowhere/out"), "is not a folder; create it first"),
        (("drawn", "out", "--to", "3"), "--to 3: give auto, same, dequantized"),
        (("drawn", "out", "--to", "same", "--dtype", "float32"), "add --to dequantized"),
        (("drawn", "out", "--max-memory", "0.05"), "fusing this model needs at least"),
        (("drawn", "out", "--checkpoint", "9"), "has no such checkpoint; checkpoints: none"),
        (("other", "out"), "no run named other"),
    ],
)
def test_invalid_input_is_reported_in_one_line(trained, capsys, arguments, message):
    assert call("fuse", *arguments) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert message in printed[-1]
    assert not Path("out").exists()
    check_model(trained.base)


@pytest.mark.parametrize("while_", ["writing", "measuring"])
def test_ctrl_c_reports_whether_the_model_is_complete(trained, capsys, monkeypatch, while_):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if while_ == "writing":
        monkeypatch.setattr(shards, "write_array", interrupted)
    else:
        monkeypatch.setattr(measuring, "difference", interrupted)
    assert call("fuse", "drawn", "out") == 130
    printed = capsys.readouterr().err
    if while_ == "writing":
        assert "out: stopped; run the same command to start again" in printed
        assert not Path("out").exists()
    else:
        assert "out: is complete; only the measurement was stopped" in printed
        check_model(Path("out"))
