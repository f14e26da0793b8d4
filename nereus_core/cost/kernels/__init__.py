"""Seconds of single kernels and messages over their shapes: saturation curves, and their priors.

A curve has a handful of physical parameters (fraction of a peak, launch floor, where a dimension
saturates) and is monotone in every dimension by construction. Fitted on kernels measured by others;
devices and links that nobody measured get the plain roofline.
"""

from nereus_core.cost.kernels.attention import DecodeCurve, PrefillCurve
from nereus_core.cost.kernels.gemm import GemmCurve, layer_gemm_s
from nereus_core.cost.kernels.kernel_set import (
    KernelSet,
    copy_curve,
    kernels_of,
    message_curve,
    prior_fractions,
)
from nereus_core.cost.kernels.messages import Collective, MessageCurve

__all__ = [
    "Collective",
    "DecodeCurve",
    "GemmCurve",
    "KernelSet",
    "MessageCurve",
    "PrefillCurve",
    "copy_curve",
    "kernels_of",
    "layer_gemm_s",
    "message_curve",
    "prior_fractions",
]
