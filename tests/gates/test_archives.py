"""Archives from outside: what they may not do is refused before anything is unpacked."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
import zipfile

import pytest

from tests import documents as made
from your_ai.errors import UserError
from your_ai.gates.archives import ENTRIES, open_archive

READ = """
import resource, sys
from pathlib import Path
from your_ai.data.lines import RowLimit
from your_ai.data.records import read_records
from your_ai.errors import UserError
try:
    list(read_records(Path(sys.argv[1]), RowLimit()))
except UserError as error:
    print(error)
if sys.platform == "linux":  # ru_maxrss has that of the process that started it
    print(next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if "VmHWM" in x))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def fault(path, name: str = "a") -> str:
    with pytest.raises(UserError) as raised, open_archive(path) as archive:
        list(archive.xml(name))
    return str(raised.value).removeprefix(f"{path}: ")


def test_a_bomb_is_refused_quickly_and_in_little_memory(tmp_path):
    path, name = tmp_path / "a.xlsx", "xl/worksheets/sheet1.xml"
    made.write_zip(path, {each: text for each, text in made.xlsx("").items() if each != name})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(name, bytes(1_000_000_000))
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    message, memory = done.stdout.splitlines()
    assert "would unpack to 1,000,000,000 bytes" in message
    assert end.ru_utime - start.ru_utime < 1.5
    assert int(memory) < 80e6


def test_many_files_are_refused_before_their_names_are_read(tmp_path):
    path = made.write_zip(tmp_path / "a.zip", {str(n): "" for n in range(ENTRIES + 1)})
    assert f"has {ENTRIES + 1:,} files in it" in fault(path)
    padding = struct.pack("<4sQ", b"PK\x01\x02", 0)
    size = 9_000_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, size, 0, 0)
    path.write_bytes(padding + bytes(size - len(padding)) + end)
    assert "a part of 9,000,000 bytes" in fault(path)


def test_more_than_the_directory_says_is_never_unpacked(tmp_path):
    path = made.write_zip(tmp_path / "a.zip", {"a": b"<a>" + b" " * 50_000 + b"</a>"})
    path.write_bytes(path.read_bytes().replace(struct.pack("<L", 50_007), struct.pack("<L", 10)))
    assert "is damaged" in fault(path)


def test_encrypted_and_cut_archives_are_refused(tmp_path):
    path = made.write_zip(tmp_path / "a.zip", {"a": "<a/>"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert "is damaged, cut short" in fault(path)
    at = whole.index(b"PK\x01\x02") + 8
    path.write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    assert "is encrypted" in fault(path)


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        *(("x", "points outside its folder", name) for name in ("../a", "/a", "b/../../a")),
        ("<!DOCTYPE a SYSTEM 'file:///etc/passwd'><a/>", "document type definition", "a"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", "document type definition", "a"),
        ("<a>" * 300, "is nested deeper than 256", "a"),
        ("<a>", "no element found", "a"),
        ("<a>&b;</a>", "undefined entity", "a"),
    ],
)
def test_names_that_lead_out_and_xml_that_could_grow_are_refused(tmp_path, text, reason, name):
    assert reason in fault(made.write_zip(tmp_path / "a.zip", {name: text}))
