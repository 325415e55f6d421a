"""The GPUs of `bench predict`, by the figures of their data sheets and of CUDA's table of arithmetic throughput."""

from __future__ import annotations

from dataclasses import dataclass

WARPS_A_CYCLE = 4  # warp instructions that a multiprocessor issues per cycle


@dataclass(frozen=True)
class Gpu:
    """One GPU. Lanes: results that a multiprocessor computes per cycle.

    tflops: dense peaks of matrix instructions in TFLOP/s, by the dtype of their factors.
    fp32, fp64, integer, special: lanes for float32, float64, integers with comparisons, and MUFU (exp2, rcp, ...).
    shared_kb, threads: shared memory and threads of a multiprocessor.
    l2: GB/s that the L2 cache delivers, as measured by https://github.com/te42kyfo/gpu-benches (gpu-l2-cache): A100
        80 GB 5420, H100 PCIe 6900 on 114 multiprocessors at 1.755 GHz, H200 9700, L40 5200. For others a multiprocessor
        is taken to receive 35 bytes a cycle, as on all of these with HBM.
    """

    name: str
    multiprocessors: int
    ghz: float
    gb_per_s: float
    tflops: dict[str, float]
    capability: int = 80
    fp32: int = 64
    fp64: int = 32
    integer: int = 64
    special: int = 16
    shared_kb: int = 164
    threads: int = 2048
    l2: float = 5420

    def peak(self, dtype: str) -> float:
        """Peak of the matrix instructions in FLOP/s; for float32 that of TF32."""
        name = "tf32" if dtype == "float32" else dtype
        if name not in self.tflops:
            raise ValueError(f"bench predict: {self.name} has no TFLOP/s for {name}, only {', '.join(self.tflops)}")
        return 1e12 * self.tflops[name]

    def full_precision(self, dtype: str) -> float:
        """Peak in FLOP/s without less precise factors than `dtype`: float32 and float64 have no matrix instructions."""
        if dtype in self.tflops:
            return self.peak(dtype)
        return 2e9 * self.multiprocessors * self.ghz * (self.fp64 if dtype == "float64" else self.fp32)

    @property
    def cycles(self) -> float:
        """Cycles of all multiprocessors in a microsecond."""
        return 1e3 * self.multiprocessors * self.ghz


def _peaks(bfloat16: float, tf32: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "float16": bfloat16, "tf32": tf32}


GPUS = {
    each.name: each
    for each in (
        Gpu("A100", 108, 1.41, 1940, _peaks(312, 156)),  # 80 GB PCIe
        Gpu("H100", 132, 1.83, 3350, _peaks(989, 495), 90, fp32=128, fp64=64, shared_kb=228, l2=8500),  # SXM
        Gpu("RTX 4090", 128, 2.52, 1008, _peaks(165, 82.6), 89, 128, 2, shared_kb=100, threads=1536, l2=5200),
        Gpu("B200", 148, 1.965, 8000, _peaks(2250, 1100), 100, fp32=128, fp64=64, shared_kb=228, l2=10200),
    )
}


def figures(gpu: Gpu) -> str:
    peaks = ", ".join(f"{name} {value:g} TFLOP/s" for name, value in gpu.tflops.items())
    return f"{gpu.name}: {gpu.multiprocessors} multiprocessors at {gpu.ghz:g} GHz, {gpu.gb_per_s:g} GB/s, {peaks}"
