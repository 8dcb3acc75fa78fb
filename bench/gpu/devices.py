"""Constants of GPUs for the model of time, each with its source.

The constants are for predictions without a GPU and were not measured for this project: ``bench
gpu`` measures the bandwidth of a copy and of a sum, and the rate of a product, in its own run.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_RATIO = 0.7  # measured over expected time below which a result is a finding
MAX_RATIO = 1.4  # measured over expected time above which a result is a finding
TUNING = "EECORE_CUDA_TUNING"


@dataclass(frozen=True)
class Device:
    """The properties of a device that launchers use."""

    num_multiprocessors: int
    shared_bytes: int
    """Bytes of shared memory that a block can request."""
    capability: int


@dataclass(frozen=True)
class Gpu(Device):
    """Constants of a GPU: bytes and operations a second that a good kernel reaches; seconds."""

    name: str
    """As torch calls it, in part."""
    l2_bytes: int
    memory_rate: float
    l2_rate: float
    """Bytes a second from the L2 cache to all multiprocessors, each of which gets its share."""
    tensor_rate: float
    """Operations a second of bfloat16 products by mma.sync, with sums in float32."""
    boundary: float
    """Seconds from the end of a kernel to the first work of the next dependent one, in a graph."""
    early_boundary: float
    """The same if the next kernel may start early."""

    def __post_init__(self) -> None:
        if self.early_boundary > self.boundary:
            raise ValueError(
                f"early_boundary: expected at most boundary={self.boundary}, got "
                f"{self.early_boundary}"
            )


# Multiprocessors and L2 cache of all four: NVIDIA's data sheets and white papers. Shared memory of
# a block, by capability: the CUDA programming guide.
#
# A boundary inside a graph: 1.3 us on an H100 for kernels that do nothing, from "Look Ma, No
# Bubbles! Designing a Low-Latency Megakernel for Llama-1B" (Hazy Research, 27 May 2025). No figure
# was found for the other GPUs, and the same is assumed. This is no lower bound: a chain of empty
# nodes on a laptop's RTX 5070 Ti takes 0.58 us each (github.com/ahrefs/ocannl, issue 488).
_BOUNDARY = 1.3e-6
# With programmatic dependent launch, at capability 90 or more: no published figure was found. An
# assumption: the launch itself is hidden, and the end of the previous kernel and a memory access
# remain.
_EARLY_BOUNDARY = 0.8e-6
# From L2: an assumption of the order of Chips and Cheese's plots ("Nvidia's H100: Funny L2, and
# Tons of Bandwidth", 2 July 2023; "Microbenchmarking Nvidia's RTX 4090", 2 November 2022). For the
# A100 the white paper has 5120 bytes a clock, 7.2 TB/s at 1.41 GHz; two thirds of it is assumed.
_HOPPER_L2, _ADA_L2, _AMPERE_L2 = 5.5e12, 5.0e12, 4.8e12
# Data sheet of the H100 SXM and H200: 989 TFLOP/s without sparsity, through wgmma. mma.sync, which
# most kernels use, reaches less: three fifths are assumed. wgmma in attention, between whose
# products scores are weighed, reaches about as much: 580 to 660 by the paper of FlashAttention-3.
HOPPER_PEAK = 989e12
_HOPPER_MMA = 0.6 * HOPPER_PEAK

GPUS = (
    Gpu(
        name="H200",
        capability=90,
        num_multiprocessors=132,
        shared_bytes=227 << 10,
        l2_bytes=50 << 20,
        # Data sheet: 4.8 TB/s. An assumption: the same share of it as on the H100.
        memory_rate=0.92 * 4.8e12,
        l2_rate=_HOPPER_L2,
        tensor_rate=_HOPPER_MMA,
        boundary=_BOUNDARY,
        early_boundary=_EARLY_BOUNDARY,
    ),
    Gpu(
        name="H100",  # SXM
        capability=90,
        num_multiprocessors=132,
        shared_bytes=227 << 10,
        l2_bytes=50 << 20,
        # STREAM triad of 1 GB on an H100 80GB HBM3, median; the data sheet says 3.35 TB/s
        # (github.com/RightNow-AI/AutoMegaKernel, paper/results/full_h100.json).
        memory_rate=3.08e12,
        l2_rate=_HOPPER_L2,
        tensor_rate=_HOPPER_MMA,
        boundary=_BOUNDARY,
        early_boundary=_EARLY_BOUNDARY,
    ),
    Gpu(
        name="A100-80GB",  # SXM4
        capability=80,
        num_multiprocessors=108,
        shared_bytes=163 << 10,
        l2_bytes=40 << 20,
        # Data sheet: 2.039 TB/s, of which 0.89 is assumed: what an A800 80GB PCIe reaches of its
        # 1.935 (github.com/mli/transformers-benchmarks, issue 4) and an A100-SXM4-40GB of its 1.555
        # (AutoMegaKernel, paper/results/pro_a100.json).
        memory_rate=0.89 * 2.039e12,
        l2_rate=_AMPERE_L2,
        # Data sheet: 312 TFLOP/s, of which 0.69 is assumed: 215 for n=8192 on the same A800.
        tensor_rate=0.69 * 312e12,
        boundary=_BOUNDARY,
        early_boundary=_BOUNDARY,
    ),
    Gpu(
        name="RTX 4090",
        capability=89,
        num_multiprocessors=128,
        shared_bytes=99 << 10,
        l2_bytes=72 << 20,
        # clpeak, float16 vectors, at 248 W; the data sheet says 1.008 TB/s
        # (github.com/krrishnarraj/clpeak, issue 106).
        memory_rate=0.921e12,
        l2_rate=_ADA_L2,
        # n=8192 in float16 (mli/transformers-benchmarks, issue 4); the data sheet says 165.
        tensor_rate=159e12,
        boundary=_BOUNDARY,
        early_boundary=_BOUNDARY,
    ),
)


def known_gpu(device_name: str) -> Gpu | None:
    """The GPU of torch's name, such as "NVIDIA A100-SXM4-80GB"; None without constants."""
    for gpu in GPUS:
        if all(word in device_name for word in gpu.name.split("-")):
            return gpu
    return None


def contradicts(measured: float, expected: float) -> bool:
    """Whether a measured time contradicts the expected one, in either direction."""
    return not MIN_RATIO * expected <= measured <= MAX_RATIO * expected
