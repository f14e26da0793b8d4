"""Peak rates of devices and links, with a source beside every number.

Matrix peaks are dense bf16 unless the name says otherwise (datasheets often print the sparse
figure, twice as high). `DEVICE_SPECS` and `LINK_SPECS` are looked up by configuration.
"""

from __future__ import annotations

from nereus_core.cluster import DeviceSpec, LinkSpec

_LAUNCH = "launch: chosen, not measured, for kernels that follow one another in a captured graph"
_PCIE4 = "PCIe 4.0 x16: 64 GB/s both directions"
_PCIE5 = "PCIe 5.0 x16: 128 GB/s both directions"

A100_SXM_80 = DeviceSpec(
    "a100-sxm-80gb", 312e12, 80 * 2**30, 2.039e12, 1.5e-6, 32e9,
    f"NVIDIA A100 80GB datasheet (2021): 312 TFLOP/s bf16 dense, 2,039 GB/s, {_PCIE4}; {_LAUNCH}",
)  # fmt: skip
H100_SXM = DeviceSpec(
    "h100-sxm", 989e12, 80 * 2**30, 3.35e12, 1.5e-6, 64e9,
    "NVIDIA H100 datasheet (2023): 1,979 TFLOP/s bf16 with sparsity, half of it dense, 3.35 TB/s, "
    f"{_PCIE5}; {_LAUNCH}",
)  # fmt: skip
H200_SXM = DeviceSpec(
    "h200-sxm", 989e12, 141 * 10**9, 4.8e12, 1.5e-6, 64e9,
    f"NVIDIA H200 datasheet (2024): as H100, 141 GB, 4.8 TB/s; {_LAUNCH}",
)  # fmt: skip
CPU_SEAT = DeviceSpec(
    "cpu-seat", 96e9, 3 * 2**30, 12e9, 5e-6, 12e9,
    "one x86-64 core with AVX2 in float32: 2 FMA units x 8 lanes x 2 FLOPs x 3 GHz; memory, its "
    "bandwidth, the same to the host, and launch: chosen, not measured; refined by calibration",
)  # fmt: skip

NVLINK3 = LinkSpec("nvlink3", 300e9, 3e-6, "NVIDIA A100 datasheet: 600 GB/s both directions")
NVLINK4 = LinkSpec("nvlink4", 450e9, 3e-6, "NVIDIA H100 datasheet: 900 GB/s both directions")
INFINIBAND_HDR = LinkSpec("ib-hdr", 25e9, 6e-6, "200 Gbit/s per device (DGX A100 guide)")
INFINIBAND_NDR = LinkSpec("ib-ndr", 50e9, 6e-6, "400 Gbit/s per device (DGX H100 guide)")
LOOPBACK = LinkSpec(
    "loopback", 1.5e9, 60e-6, "chosen, not measured: gloo over loopback TCP on one x86-64 host"
)

DEVICE_SPECS = {s.name: s for s in (A100_SXM_80, H100_SXM, H200_SXM, CPU_SEAT)}
LINK_SPECS = {s.name: s for s in (NVLINK3, NVLINK4, INFINIBAND_HDR, INFINIBAND_NDR, LOOPBACK)}
