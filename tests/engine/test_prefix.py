"""The frozen-prefix cache returns what was stored, bit for bit, or nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.batches import PADDING
from your_ai.engine import prefix
from your_ai.engine.prefix import DiskStore, MemoryStore, Span, Store
from your_ai.errors import RunError, UserError

D = 4
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
MODEL = {"model": "abc", "dtype": "float32", "frozen_blocks": "20", "format": "7"}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


TEXTS = [text(5), text(1, 2, 3), text(9, 9), text(1, 2)]


def bits(array: mx.array) -> list:
    return array.view(mx.uint32 if array.dtype.size == 4 else mx.uint16).tolist()


def hidden_of(tokens: np.ndarray, dtype: mx.Dtype = mx.float32, size: int = D) -> mx.array:
    """Random bits derived from a text, (n, D), including infinities, NaNs and -0."""
    rng = np.random.default_rng([len(tokens), *tokens.tolist()])
    whole = np.uint32 if dtype.size == 4 else np.uint16
    values = rng.integers(0, np.iinfo(whole).max, (len(tokens), size), whole, endpoint=True)
    values[0, 0] = 1 << (8 * dtype.size - 1)
    return mx.array(values).view(dtype)


def same(ours: mx.array | None, theirs: mx.array) -> bool:
    return ours is not None and ours.dtype == theirs.dtype and bits(ours) == bits(theirs)


def disk(folder: Path, dtype: mx.Dtype = mx.float32, **changes: str) -> DiskStore:
    return DiskStore(folder, {**MODEL, **changes}, D, dtype)


def fill(store: Store, texts: list[np.ndarray], dtype: mx.Dtype = mx.float32) -> None:
    for tokens in texts:
        store.put(tokens, hidden_of(tokens, dtype))


def held(store: Store, texts: list[np.ndarray]) -> list[bool]:
    """Which texts the store returns; each must be as it was put."""
    found = [store.get(tokens) for tokens in texts]
    assert all(f is None or same(f, hidden_of(t)) for f, t in zip(found, texts, strict=True))
    return [f is not None for f in found]


def refill(store: Store, folder: Path) -> None:
    """Put all texts: the store has them, and so has the one that is opened next."""
    fill(store, TEXTS)
    assert held(store, TEXTS) == [True] * 4
    store.close()
    with contextlib.closing(disk(folder)) as again:
        assert held(again, TEXTS) == [True] * 4


@pytest.fixture
def folder(own_folder: Path) -> Path:
    """A cache of TEXTS, closed."""
    store = disk(own_folder / "prefix")
    fill(store, TEXTS)
    store.close()
    return own_folder / "prefix"


@pytest.fixture(params=["memory", "disk"])
def store(request, own_folder) -> Iterator[Store]:
    store = MemoryStore() if request.param == "memory" else disk(own_folder / "made" / "prefix")
    yield store
    store.close()


# -- stores -------------------------------------------------------------------------------


def test_get_returns_what_was_put(store):
    assert not store.has(TEXTS[1])
    assert store.get(TEXTS[1]) is None
    fill(store, TEXTS)
    assert held(store, TEXTS) == [True] * 4
    assert store.bytes_held == sum(map(len, TEXTS)) * D * 4
    assert not store.has(text(2, 1))
    assert store.get(text(1, 2, 3, 0)) is None


def test_texts_are_found_by_content(store):
    fill(store, TEXTS)
    row = np.zeros((3, 8), np.int64)
    row[1, ::2] = 1, 2, 3, 0
    assert same(store.get(row[1, :6:2]), hidden_of(text(1, 2, 3)))


def test_putting_a_stored_text_again_changes_nothing(store):
    fill(store, TEXTS)
    before = store.bytes_held
    store.put(TEXTS[1], mx.zeros((3, D)))
    assert held(store, TEXTS) == [True] * 4
    assert store.bytes_held == before


def test_store_can_be_closed_twice(store):
    fill(store, TEXTS)
    store.close()
    store.close()


token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


@given(
    texts=st.lists(token_lists, max_size=12),
    reopen_at=st.sets(st.integers(0, 11)),
    dtype=st.sampled_from(DTYPES),
)
def test_any_texts_survive_reopening(texts, reopen_at, dtype):
    with tempfile.TemporaryDirectory() as name:
        store = disk(Path(name), dtype)
        for i, tokens in enumerate(map(np.array, texts)):
            if i in reopen_at:
                store.close()
                store = disk(Path(name), dtype)
            store.put(tokens, hidden_of(tokens, dtype))
        for tokens in map(np.array, texts):
            assert same(store.get(tokens), hidden_of(tokens, dtype))
        kept = {tuple(tokens) for tokens in texts}
        assert store.bytes_held == sum(map(len, kept)) * D * dtype.size
        assert (store.emptied, store.faults) == ("", 0)
        store.close()


def test_hidden_states_of_another_shape_or_dtype_are_refused(own_folder):
    store = disk(own_folder)
    for hidden in (mx.zeros((0, D)), mx.zeros((3, D + 1)), mx.zeros((3, D), mx.float16)):
        with pytest.raises(ValueError, match="hidden states"):
            store.put(text(1, 2, 3), hidden)
    assert store.bytes_held == 0


def test_text_in_memory_does_not_keep_its_batch_alive():
    gc.collect()
    before = mx.get_active_memory()
    store = MemoryStore()
    for i in range(4):
        batch = mx.random.normal((8, 64, 256))  # 512 KB, and a text of 60 KB
        store.put(np.full(60, i, np.int32), batch[3, 2:62])
    del batch
    gc.collect()
    assert store.bytes_held == 4 * 60 * 256 * 4
    assert mx.get_active_memory() - before < 1.3 * store.bytes_held


# -- existing files -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "dtype", "names"),
    [
        ({"model": "def"}, mx.float32, "model"),
        ({"frozen_blocks": "19", "format": "8"}, mx.float32, "frozen_blocks, format"),
        ({"quantization": "4"}, mx.float32, "quantization"),
        ({}, mx.bfloat16, "cache_dtype"),
    ],
)
def test_cache_with_a_different_key_is_emptied(folder, changes, dtype, names):
    store = disk(folder, dtype, **changes)
    assert store.emptied == f"it was made with a different {names}"
    assert store.bytes_held == 0
    assert not any(map(store.has, TEXTS))
    fill(store, TEXTS, dtype)
    store = disk(folder, dtype, **changes)
    assert all(same(store.get(tokens), hidden_of(tokens, dtype)) for tokens in TEXTS)
    assert store.emptied == ""


def test_cache_with_a_different_hidden_size_is_emptied(folder):
    store = DiskStore(folder, MODEL, D // 2, mx.float32)
    assert store.emptied == "it was made with a different cache_hidden_size"
    assert not any(map(store.has, TEXTS))


def test_caches_with_other_keys_share_a_folder(own_folder):
    def opened(**changes: str) -> DiskStore:
        key = {**MODEL, **changes}
        place = prefix.shared_place(own_folder / "shared", key, D, mx.float32)
        return DiskStore(place, key, D, mx.float32, shared=True)

    for key, texts in (({}, TEXTS), ({"frozen_blocks": "5"}, TEXTS[:1])):
        store = opened(**key)
        fill(store, texts)
        store.close()
    whole, one = opened(), opened(frozen_blocks="5")
    assert held(whole, TEXTS) == [True] * len(TEXTS)
    assert held(one, TEXTS) == [True] + [False] * (len(TEXTS) - 1)


def test_shared_cache_is_used_by_one_run_at_a_time(own_folder, monkeypatch):
    monkeypatch.setattr(prefix, "LOCK_WAIT_S", 0.0)
    first = DiskStore(own_folder / "c", MODEL, D, mx.float32, shared=True)
    with pytest.raises(UserError, match="another run is using"):
        DiskStore(own_folder / "c", MODEL, D, mx.float32, shared=True)
    first.close()
    DiskStore(own_folder / "c", MODEL, D, mx.float32, shared=True).close()


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_cache_without_a_valid_key_is_emptied(folder, content):
    (folder / prefix.KEY).unlink()
    if content is not None:
        (folder / prefix.KEY).write_bytes(content)
    store = disk(folder)
    assert store.emptied == "its prefix.json cannot be read"
    assert not any(map(store.has, TEXTS))
    assert disk(folder).emptied == ""


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", [prefix.HIDDEN, prefix.INDEX])
@pytest.mark.parametrize("damage", [Path.unlink, empty])
def test_cache_with_a_missing_file_is_emptied(folder, name, damage):
    damage(folder / name)
    store = disk(folder)
    assert not any(map(store.has, TEXTS))
    assert store.bytes_held == 0
    if (damage, name) != (empty, prefix.INDEX):  # an empty index lists no texts to lose
        assert store.emptied.startswith("its files ")
    fill(store, TEXTS)
    assert held(disk(folder), TEXTS) == [True] * 4


def test_new_cache_does_not_count_as_emptied(own_folder):
    assert [disk(own_folder / "prefix").emptied for _ in range(2)] == ["", ""]
    assert disk(own_folder / "prefix", model="def").emptied == ""


def test_cache_starts_over_after_interrupted_emptying(folder, monkeypatch):
    whole = shutil.copytree(folder, folder.with_name("whole"))
    for stage in range(6):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        with monkeypatch.context() as patch, contextlib.suppress(RunError):
            calls = iter([None] * stage)

            def killed(function, calls=calls):
                def call(*arguments, **options):
                    if next(calls, FULL) is FULL:
                        raise FULL
                    return function(*arguments, **options)

                return call

            patch.setattr(Path, "unlink", killed(Path.unlink))
            patch.setattr(Path, "write_text", killed(Path.write_text))
            disk(folder, model="def")
        store = disk(folder, model="def")
        assert not any(map(store.has, TEXTS))
        fill(store, TEXTS)
        assert held(disk(folder, model="def"), TEXTS) == [True] * 4


@pytest.mark.parametrize("name", [prefix.HIDDEN, prefix.INDEX])
def test_truncated_files_lose_only_the_last_texts(folder, name):
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    row = D * 4
    ends = np.cumsum([len(t) * row if name == prefix.HIDDEN else 32 for t in TEXTS])
    for size in range(1, len(whole[name]) + 1):
        for path, content in whole.items():
            (folder / path).write_bytes(content[:size] if path == name else content)
        store = disk(folder)
        left = (ends <= size).tolist()
        assert held(store, TEXTS) == left
        assert store.faults == 0
        assert bool(store.emptied) == (not any(left) and (name == prefix.HIDDEN or size >= 32))
        refill(store, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


@pytest.mark.parametrize("name", [prefix.HIDDEN, prefix.INDEX])
def test_flipped_bit_drops_texts_but_never_changes_them(folder, name):
    whole = (folder / name).read_bytes()
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        (folder / name).write_bytes(content)
        store = disk(folder)
        lost = held(store, TEXTS).count(False)
        assert lost >= 1
        if name == prefix.HIDDEN:
            assert (lost, store.faults) == (1, 1)
        for tokens in TEXTS:
            assert store.has(tokens) == (store.get(tokens) is not None)
        refill(store, folder)  # the text that was written last counts
        shutil.rmtree(folder)
        fill(disk(folder), TEXTS)


def test_zeros_at_the_end_of_the_index_are_cut_off(folder):
    with (folder / prefix.INDEX).open("ab") as file:
        file.write(bytes(3 * 32))
    store = disk(folder)
    assert held(store, TEXTS) == [True] * 4
    assert (folder / prefix.INDEX).stat().st_size == 4 * 32


def test_read_error_counts_as_a_missing_text(folder, monkeypatch):
    store = disk(folder)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", broken)
        assert store.get(TEXTS[0]) is None
    assert store.faults == 1
    assert not store.has(TEXTS[0])


def test_partial_reads_are_completed(folder, monkeypatch):
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: whole(file, min(size, 7), at))
    assert held(disk(folder), TEXTS) == [True] * 4


def test_remove_deletes_the_cache(folder):
    prefix.remove(folder)
    assert not folder.exists()
    prefix.remove(folder)


# -- a full disk --------------------------------------------------------------------------


@contextlib.contextmanager
def room_for(room_bytes: int) -> Iterator[None]:
    """Make the disk full after `room_bytes` more bytes."""
    write = os.pwrite

    def limited(file, data, offset):
        nonlocal room_bytes
        if not room_bytes:
            raise FULL
        written = write(file, data[:room_bytes], offset)
        room_bytes -= written
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", limited)
        yield


@pytest.mark.parametrize("killed", [False, True])
def test_full_disk_keeps_the_texts_stored_before(own_folder, killed, monkeypatch):
    if killed:  # before the incomplete rest is cut off
        monkeypatch.setattr(DiskStore, "_cut", lambda self: None)
    sizes = np.cumsum([len(t) * D * 4 + 32 for t in TEXTS])
    near = {int(size) + more for size in sizes[:-1] for more in (-33, -32, -31, -1, 0, 1)}
    for room_bytes in sorted(near | {*range(0, int(sizes[-1]), 7), int(sizes[-1]) - 1}):
        folder = own_folder / str(room_bytes)
        store = disk(folder)
        with room_for(room_bytes), pytest.raises(RunError) as caught:
            fill(store, TEXTS)
        assert str(caught.value) == (
            f"{folder}: hidden states cannot be written (No space left on device); "
            "free some disk space, then resume the run, or train with --prefix-cache off"
        )
        left = (sizes <= room_bytes).tolist()
        assert held(store, TEXTS) == left
        if killed:
            store.close()
            store = disk(folder)
            assert held(store, TEXTS) == left
            assert store.emptied == ""
        refill(store, folder)  # the disk has space again


def test_folder_that_cannot_be_created_is_reported(own_folder):
    (own_folder / "file").write_text("")
    with pytest.raises(RunError, match=r"file/prefix: hidden states cannot be written"):
        disk(own_folder / "file" / "prefix")


def test_needed_bytes_counts_tokens_hidden_size_and_dtype():
    assert prefix.needed_bytes(1000, 896, mx.float32) == 1000 * 896 * 4
    assert prefix.needed_bytes(1000, 896, mx.bfloat16) == 1000 * 896 * 2


def test_check_room_refuses_if_the_disk_is_too_small(own_folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    asked = []

    def free(free_bytes: int) -> None:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: (asked.append(path), usage(0, 0, free_bytes))[1]
        )

    folder = own_folder / "run" / "prefix"  # neither exists yet
    tokens = 2_825_000  # 11.3 GB, and 1 GB for checkpoints
    free(12_300_000_000)
    prefix.check_room(folder, tokens, 1000, mx.float32)
    free(4_090_000_000)
    with pytest.raises(UserError) as caught:
        prefix.check_room(folder, tokens, 1000, mx.float32)
    assert str(caught.value) == (
        f"--prefix-cache disk: needs 12.3 GB in {folder}, only 4.0 GB free; "
        "free some disk space, or train with --prefix-cache off"
    )
    assert set(asked) == {own_folder}
    free(12_299_999_999)
    with pytest.raises(UserError, match=r"needs 12.3 GB in .*, only 12.2 GB free"):
        prefix.check_room(folder, tokens, 1000, mx.float32)
    free(0)
    prefix.check_room(folder, 0, 1000, mx.float32)
    assert not folder.parent.exists()


# -- batches ------------------------------------------------------------------------------


@st.composite
def batches(draw) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, list[int]]]]:
    """Packed rows: their tokens and ids, and the texts in them as (row, start, tokens)."""
    length = draw(st.integers(2, 12))
    rows = draw(st.integers(1, 3))
    tokens = np.zeros((rows, length), np.int32)
    ids = np.full((rows, length), PADDING, np.uint32)
    texts = []
    for row in range(rows):
        at = draw(st.integers(0, 2))
        while at < length and draw(st.booleans()):
            count = draw(st.integers(1, length - at))
            content = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
            tokens[row, at : at + count] = content
            ids[row, at : at + count] = len(texts)
            texts.append((row, at, content))
            at += count + draw(st.integers(0, 2))
    return tokens, ids, texts


def plain(spans: list[Span]) -> list[tuple[int, int, list[int]]]:
    return [(span.row, span.start, span.tokens.tolist()) for span in spans]


@given(batch=batches())
def test_spans_of_packed_rows(batch):
    tokens, ids, texts = batch
    assert plain(prefix.spans_of(tokens, ids)) == texts


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), padding=st.integers(0, 3))
def test_spans_of_unpacked_rows(lengths, padding):
    width = max(max(lengths) + padding, 1)
    tokens = np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    rows = np.arange(len(lengths), dtype=np.uint32)[:, None]
    expected = [(b, 0, tokens[b, :n].tolist()) for b, n in enumerate(lengths) if n]
    assert plain(prefix.spans_of(tokens, rows, np.array(lengths))) == expected


def test_spans_of_unpacked_rows_require_lengths():
    with pytest.raises(ValueError, match="lengths"):
        prefix.spans_of(np.zeros((2, 3), np.int32), np.zeros((2, 1), np.uint32))


@given(batch=batches(), dtype=st.sampled_from(DTYPES), on_disk=st.booleans(), data=st.data())
def test_assembled_batch_is_bit_identical(batch, dtype, on_disk, data):
    tokens, ids, texts = batch
    spans = data.draw(st.permutations(prefix.spans_of(tokens, ids)))
    shape = (*tokens.shape, D)
    whole = np.zeros(shape, np.uint32 if dtype.size == 4 else np.uint16)
    for row, start, content in texts:
        whole[row, start : start + len(content)] = bits(hidden_of(np.array(content), dtype))
    hidden = mx.array(whole).view(dtype)
    with tempfile.TemporaryDirectory() as name:
        store = disk(Path(name), dtype) if on_disk else MemoryStore()
        fill(store, [span.tokens for span in spans], dtype)
        assert same(prefix.assemble(store.get, spans, shape, dtype), hidden)
        store.close()


def test_missing_yields_each_missing_text_once(store):
    fill(store, TEXTS[:2])
    found = prefix.missing(store, [TEXTS[2], TEXTS[0], TEXTS[2], TEXTS[3]])
    assert [tokens.tolist() for tokens in found] == [TEXTS[2].tolist(), TEXTS[3].tolist()]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=70))
def test_padded_length_depends_only_on_the_text(tokens):
    row = prefix.padded(np.array(tokens, np.int32))
    assert row.shape == (1, -(-len(tokens) // 32) * 32)
    assert row[0].tolist() == tokens + [0] * (row.size - len(tokens))


@pytest.mark.parametrize("name", [prefix.KEY, prefix.HIDDEN, prefix.INDEX])
def test_cache_with_symbolic_links_starts_over(own_folder, name):
    """The target of a link is neither written nor truncated."""
    texts = [text(1, 2, 3)]
    with contextlib.closing(disk(own_folder / "cache")) as store:
        fill(store, texts)
    kept = own_folder / "kept"
    shutil.move(own_folder / "cache" / name, kept)
    before = kept.read_bytes()
    (own_folder / "cache" / name).symlink_to(kept)
    with contextlib.closing(disk(own_folder / "cache")) as store:
        assert held(store, texts) == [False]
        fill(store, [text(4, 5), *texts])
    assert kept.read_bytes() == before
