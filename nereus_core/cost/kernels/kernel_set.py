"""Which curves hold for a device or a link: those measured on its kind, or the plain roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_core.cluster import Cluster, DeviceSpec, LinkSpec
from nereus_core.cost.kernels.attention import DecodeCurve, PrefillCurve
from nereus_core.cost.kernels.gemm import GemmCurve
from nereus_core.cost.kernels.measured import COPIES, DECODE, GEMMS, MESSAGES, PREFILL, SAME_KERNELS
from nereus_core.cost.kernels.messages import Collective, MessageCurve
from nereus_core.cost.op_classes import OpClass

_ROOFLINE = "roofline of the device's peaks; nobody measured its kernels"
_PCIE = MessageCurve(0.0, 1e-5, 1.0, 0.0, 1.0, "alpha-beta; 10 us: chosen, not measured")


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Curves of one kind of device."""

    gemm: GemmCurve
    prefill: PrefillCurve
    decode: DecodeCurve
    measured: bool
    """Whether the parameters were fitted on kernels of such a device."""

    @property
    def fractions(self) -> Mapping[OpClass, float]:
        """Part of its peak that each class reaches where nothing else limits it.

        The share of a curve that calibration may correct: work of a class is counted in seconds at
        this fraction of the peak, so that its prior efficiency is the fraction.
        """
        if not self.measured:
            return {}
        return {
            OpClass.GEMM: self.gemm.compute_fraction,
            OpClass.GEMM_DECODE: self.gemm.bandwidth_fraction,
            OpClass.HEAD: self.gemm.compute_fraction,
            OpClass.ATTENTION_PREFILL: self.prefill.compute_fraction,
            OpClass.ATTENTION_DECODE: self.decode.bandwidth_fraction,
        }


ROOFLINE = KernelSet(
    GemmCurve(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, _ROOFLINE),
    PrefillCurve(1.0, 1.0, 0.0, 0.0, _ROOFLINE),
    DecodeCurve(1.0, 0.0, 0.0, 0.0, _ROOFLINE),
    measured=False,
)
_SETS = {name: KernelSet(GEMMS[name], PREFILL[name], DECODE[name], measured=True) for name in GEMMS}


def kernels_of(spec: DeviceSpec) -> KernelSet:
    """Curves measured on such devices, or on ones with the same processors."""
    return _SETS.get(SAME_KERNELS.get(spec.name, spec.name), ROOFLINE)


def message_curve(what: Collective, link: LinkSpec) -> MessageCurve:
    """Return the measured curve of a link, or the alpha-beta model of its specification.

    A link on which only all-reduces were measured moves other rings alike.
    """
    name = SAME_KERNELS.get(link.name, link.name)
    found = MESSAGES.get((what, name))
    if found is None and what is not Collective.P2P:
        found = MESSAGES.get((Collective.ALL_REDUCE, name))
    return found or MessageCurve(0.0, link.latency_s, 1.0, 0.0, 1.0, f"alpha-beta: {link.source}")


def prior_fractions(cluster: Cluster) -> Mapping[OpClass, float]:
    """Part of the peak that each class reaches on measured devices and links; others are left out.

    Collectives are counted at their curve's fraction of the link's bandwidth, as kernels are.
    """
    found = dict(kernels_of(cluster.device_spec).fractions)
    for op_class, what, link in (
        (OpClass.ALL_REDUCE_INTRA, Collective.ALL_REDUCE, cluster.intra_node),
        (OpClass.ALL_REDUCE_INTER, Collective.ALL_REDUCE, cluster.inter_node),
        (OpClass.ALL_GATHER_INTRA, Collective.ALL_GATHER, cluster.intra_node),
        (OpClass.ALL_GATHER_INTER, Collective.ALL_GATHER, cluster.inter_node),
        (OpClass.P2P_INTRA, Collective.P2P, cluster.intra_node),
        (OpClass.P2P_INTER, Collective.P2P, cluster.inter_node),
    ):
        curve = message_curve(what, link)
        if curve.measured:
            found[op_class] = curve.bandwidth_fraction
    return found


def copy_curve(spec: DeviceSpec) -> tuple[LinkSpec, MessageCurve]:
    """Link and curve of copies between a device and its host's memory."""
    link = COPIES.get(SAME_KERNELS.get(spec.name, spec.name))
    if link is None:
        link = LinkSpec("host-memory", spec.memory_bytes_per_s / 2, 0.0, "a read and a write")
    return link, _PCIE
