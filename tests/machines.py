"""Recorded machines: Macs with 8 to 128 GB, and two Linux machines."""

from __future__ import annotations

from your_ai.doctor.machine import MachineInfo

GIB, GB = 1 << 30, 10**9
VERSIONS = {"python": "3.12.8", "mlx": "0.32.4", "mlx_lm": "0.32.2", "your_ai": "0.1.0"}

STORE = "/a-place-of-mine/your_ai"  # private: must not appear in reports


def mac(ram: float, recommended: float, chip: str, **changes: object) -> MachineInfo:
    """An idle Mac; sizes are in GiB."""
    recommended_bytes = int(recommended * GIB)
    return MachineInfo(
        **{
            "system": "Darwin",
            "release": "15.5",
            "architecture": "arm64",
            "chip": chip,
            "cores": 10,
            "device": "metal",
            "ram_bytes": int(ram * GIB),
            "recommended_bytes": recommended_bytes,
            "max_buffer_bytes": 3 * recommended_bytes // 4,
            "wired_limit_bytes": 0,
            "available_bytes": int(0.9 * ram * GIB),
            "held_bytes": 60_000_000,
            "swap_bytes": 0,
            "pressure": 1,
            "disk_free_bytes": 200 * GB,
            "store": STORE,
            "store_writable": True,
            **VERSIONS,
            **changes,
        }
    )


MACS = {
    8: mac(8, 5.33, "Apple M1", cores=8, release="14.7"),
    16: mac(16, 11.84, "Apple M2", cores=8),
    24: mac(24, 17.76, "Apple M4"),
    36: mac(36, 28.08, "Apple M3 Pro", cores=12),
    64: mac(64, 48, "Apple M1 Max", release="14.2"),
    128: mac(128, 107.52, "Apple M4 Max", cores=16),
}
CUDA = MachineInfo(
    system="Linux", release="6.8.0", architecture="x86_64", chip="AMD Ryzen 9 7950X", cores=16,
    device="cuda", nvidia=True, ram_bytes=64 * GIB, available_bytes=60 * GIB, held_bytes=GB // 4,
    gpu_bytes=24 * GIB, gpu_free_bytes=23 * GIB, swap_bytes=0, pressure=1,
    disk_free_bytes=500 * GB, store=STORE, store_writable=True, **VERSIONS,
)  # fmt: skip
CPU = MachineInfo(
    system="Linux", release="6.18.44", architecture="x86_64", chip="AMD EPYC", cores=2,
    device="cpu", ram_bytes=25_276_502_016, available_bytes=23_809_253_376,
    held_bytes=30_003_200, swap_bytes=0, pressure=1, disk_free_bytes=69_700_079_616,
    openblas="/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3",
    store=STORE, store_writable=True, **VERSIONS,
)  # fmt: skip
RECORDED = {**{f"Mac {gb} GB": found for gb, found in MACS.items()}, "CUDA": CUDA, "CPU": CPU}
