# SPDX-License-Identifier: Apache-2.0
"""What the device promises while all goes well: round trips, recovery, forgetting, threads."""

import os
import threading
import time
from pathlib import Path

import flash_testing as ft
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_lifetime.flash import FlashCounterValues, ReadOutcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.flash"


def test_round_trip_into_other_pages(path: Path) -> None:
    with ft.open_device(path) as device:
        key = ft.key_of(1)
        payload = ft.payload_of(key)
        two_dimensional = payload.view(np.float16).reshape(2, -1)
        assert device.write(3, key, [two_dimensional])
        for lengths in ((ft.SLOT_BYTES,), ft.PAGES, (1,) * 1500 + (ft.SLOT_BYTES - 1500,)):
            pages = [bytearray(length) for length in lengths]
            assert device.read(3, key, pages) is ReadOutcome.HIT
            assert b"".join(pages) == payload.tobytes()
        assert device.counters.snapshot() == FlashCounterValues(
            writes=1, bytes_written=ft.SLOT_BYTES, reads=3, bytes_read=3 * ft.SLOT_BYTES
        )


@pytest.mark.parametrize("slot_bytes", [1, 5000, 65536, (1 << 20) + 12345, 3 << 20])
def test_round_trip_of_every_size(path: Path, slot_bytes: int) -> None:
    size = 16 * (slot_bytes + 8192)
    with ft.open_device(path, size=size, slot_bytes=slot_bytes) as device:
        slots = [5, 6, 7, 2]
        keys = [ft.key_of(slot) for slot in slots]
        payloads = [ft.payload_of(key, slot_bytes) for key in keys]
        cut = slot_bytes // 3
        for slot, key, payload in zip(slots, keys, payloads, strict=True):
            assert device.write(slot, key, [payload[:cut], payload[cut:]])
        target = np.zeros(slot_bytes, np.uint8)
        for slot, key, payload in zip(slots, keys, payloads, strict=True):
            target[:] = 0
            assert device.read(slot, key, [target]).hit
            np.testing.assert_array_equal(target, payload)


def test_wrong_key_and_empty_slot_miss(path: Path) -> None:
    with ft.open_device(path) as device:
        ft.write(device, 0, ft.key_of(1))
        for slot, key in ((0, ft.key_of(2)), (0, ft.key_of(1)[:-1]), (1, ft.key_of(1)), (1, b"\0")):
            assert ft.read(device, slot, key)[0] is ReadOutcome.KEY_MISMATCH
        assert device.counters.snapshot().key_mismatches == 4


def test_arguments_out_of_range_are_named(path: Path) -> None:
    with ft.open_device(path) as device:
        good = ft.pages_of(ft.payload_of(b"k"))
        for slot in (-1, device.num_slots):
            with pytest.raises(ValueError, match=f"Slot {slot}"):
                device.write(slot, b"k", good)
        for key in (b"", bytes(37)):
            with pytest.raises(ValueError, match=f"key of {len(key)} bytes"):
                device.read(0, key, good)
        with pytest.raises(ValueError, match="4096 bytes; a slot holds 8192"):
            device.write(0, b"k", good[:1])


def test_last_slot_ends_inside_the_file(path: Path) -> None:
    for size in range(ft.SIZE, ft.SIZE + 3 * 4096, 1024):
        with ft.open_device(path, persist=False, size=size) as device:
            slots = range(device.num_slots)
            assert all(ft.write(device, slot, ft.key_of(slot)) for slot in slots)
            assert os.path.getsize(path) == size
            assert all(ft.hits(device, slot, ft.key_of(slot)) for slot in slots)


def test_recovers_only_what_is_valid(path: Path) -> None:
    with ft.open_device(path) as device:
        assert device.recovered() == []
        for slot in range(8):
            ft.write(device, slot, ft.key_of(slot)[: 4 * (slot + 1)])
        device.invalidate([1, 2, 2, 5, -1, 10**9])
        ft.write(device, 5, ft.key_of(50))
        assert device.recovered() == []
    with ft.open_device(path) as device:
        expected = [(s, ft.key_of(s)[: 4 * (s + 1)]) for s in (0, 3, 4, 6, 7)]
        assert sorted(device.recovered()) == sorted([*expected, (5, ft.key_of(50))])
        assert all(ft.hits(device, slot, key) for slot, key in device.recovered())
        device.invalidate([0])
        assert len(device.recovered()) == 5


def test_clear_forgets_for_good_even_writes_in_flight(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, cleared = os.pwritev, []
    with ft.open_device(path) as device:
        ft.write(device, 0, ft.key_of(0))

        def clear_in_between(descriptor: int, buffers: list, offset: int, *flags: int) -> int:
            if not flags and not cleared:
                cleared.append(True)
                device.clear()
            return real_write(descriptor, buffers, offset, *flags)

        monkeypatch.setattr(os, "pwritev", clear_in_between)
        assert not ft.write(device, 1, ft.key_of(1))
        assert not ft.hits(device, 0, ft.key_of(0))
        assert not ft.hits(device, 1, ft.key_of(1))
        assert ft.write(device, 2, ft.key_of(2))
    with ft.open_device(path) as device:
        assert device.recovered() == [(2, ft.key_of(2))]


def test_without_persist_starts_empty_and_leaves_nothing(path: Path) -> None:
    with ft.open_device(path) as device:
        ft.write(device, 0, ft.key_of(0))
    with ft.open_device(path, persist=False, dtype="float32", size=ft.SIZE * 2) as device:
        assert device.recovered() == []
        assert not ft.hits(device, 0, ft.key_of(0))
    assert not path.exists()


def test_emptied_file_hides_its_old_records(path: Path) -> None:
    with ft.open_device(path) as device:
        ft.write(device, 0, ft.key_of(0))
    device = ft.open_device(path, persist=False)
    saved = path.read_bytes()  # as a kill would leave it
    device.close()
    path.write_bytes(saved)
    with ft.open_device(path) as device:
        assert device.recovered() == []


def test_slot_rewritten_during_its_read_is_not_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read = os.preadv
    with ft.open_device(path) as device:
        ft.write(device, 0, ft.key_of(0))

        def rewrite_first(*arguments: object) -> int:
            monkeypatch.undo()
            assert ft.write(device, 0, ft.key_of(1))
            return real_read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", rewrite_first)
        assert ft.read(device, 0, ft.key_of(0))[0] is ReadOutcome.KEY_MISMATCH
        assert ft.hits(device, 0, ft.key_of(1))
        assert device.counters.snapshot().checksum_failures == 0


def test_closed_device_misses_and_touches_nothing(path: Path) -> None:
    device = ft.open_device(path)
    ft.write(device, 0, ft.key_of(0))
    device.close()
    before = path.read_bytes()
    assert not ft.write(device, 0, ft.key_of(1))
    assert ft.read(device, 0, ft.key_of(0))[0] is ReadOutcome.CLOSED
    device.invalidate([0])
    device.clear()
    device.close()
    assert path.read_bytes() == before


def test_close_waits_for_transfers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.pwritev
    started, go_on = threading.Event(), threading.Event()

    def slow_write(*arguments: object) -> int:
        started.set()
        assert go_on.wait(20)
        return real_write(*arguments)  # type: ignore[arg-type]

    device = ft.open_device(path)
    monkeypatch.setattr(os, "pwritev", slow_write)
    results: list[bool] = []
    writer = threading.Thread(target=lambda: results.append(ft.write(device, 0, ft.key_of(0))))
    writer.start()
    assert started.wait(20)
    closer = threading.Thread(target=device.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go_on.set()
    writer.join(20)
    closer.join(20)
    assert results == [True]
    with ft.open_device(path) as device:
        assert ft.hits(device, 0, ft.key_of(0))


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 7), st.integers(0, 5)),
        st.tuples(st.just("read"), st.integers(0, 7), st.integers(0, 5)),
        st.tuples(st.just("invalidate"), st.integers(0, 7), st.integers(1, 3)),
        st.tuples(st.sampled_from(["reopen", "clear"]), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations)
def test_behaves_like_a_dict(tmp_path: Path, operations: list[tuple[str, int, int]]) -> None:
    path = tmp_path / "model.flash"
    path.unlink(missing_ok=True)
    model: dict[int, bytes] = {}
    device = ft.open_device(path)
    for operation, slot, number in operations:
        key = ft.key_of(number)
        if operation == "write":
            assert ft.write(device, slot, key)
            model[slot] = key
        elif operation == "read":
            assert ft.hits(device, slot, key) == (model.get(slot) == key)
        elif operation == "invalidate":
            device.invalidate(range(slot, slot + number))
            for gone in range(slot, slot + number):
                model.pop(gone, None)
        elif operation == "clear":
            device.clear()
            model.clear()
        else:
            device.close()
            device = ft.open_device(path)
            assert dict(device.recovered()) == model
    assert all(ft.hits(device, slot, key) for slot, key in model.items())
    device.close()


def test_sixteen_threads(path: Path) -> None:
    """Half of the slots are one thread's own; the rest are fought over, where only misses may show."""
    failures: list[str] = []
    contested_hits = [0] * 16

    def work(thread: int) -> None:
        try:
            generator = np.random.default_rng(thread)
            for turn in range(60):
                own, key = 32 + thread, ft.key_of(1000 * thread + turn)
                assert ft.write(device, own, key)
                assert ft.hits(device, own, key)
                slot, contested = int(generator.integers(0, 4)), ft.key_of(int(generator.integers(3)))
                ft.write(device, slot, contested)
                contested_hits[thread] += ft.hits(device, slot, ft.key_of(int(generator.integers(3))))
                if turn % 7 == 0:
                    device.invalidate([slot, slot + 4])
        except BaseException as error:
            failures.append(repr(error))

    with ft.open_device(path, size=1 << 20) as device:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert sum(contested_hits) > 0
        counters = device.counters.snapshot()
        assert counters.writes == 16 * 60 * 2
        assert counters.reads == 16 * 60 + sum(contested_hits)
    with ft.open_device(path, size=1 << 20) as device:
        recovered = dict(device.recovered())
        assert all(recovered[32 + thread] == ft.key_of(1000 * thread + 59) for thread in range(16))
        assert all(ft.hits(device, 32 + thread, recovered[32 + thread]) for thread in range(16))


def test_a_million_records_are_recovered_in_two_seconds(path: Path) -> None:
    from vllm_lifetime.flash.layout import RECORD_DTYPE, pack_record, valid_slots

    count = 1_000_000
    some = [pack_record(slot, ft.key_of(slot), slot, 7) for slot in range(20_000)]
    table = np.zeros(count, RECORD_DTYPE)
    table[: len(some)] = np.frombuffer(b"".join(some), RECORD_DTYPE)
    # The rest look valid up to their checksum, which costs as much to find out.
    table["state"], table["key_length"], table["slot"] = 1, 36, np.arange(count)
    started = time.process_time()
    slots = valid_slots(table, 7)
    seconds = time.process_time() - started
    assert slots.tolist() == list(range(20_000))
    assert seconds < 2
