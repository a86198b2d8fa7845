"""Mutation test of the emulator: faults planted in the shipped kernels, each of which it must notice.

A fault is caught if the emulator reports a finding, or if the result misses the float64 reference, under at least one
of the seeds. Every entry changes what the kernel may do: an edit without consequence does not belong here.
``python -m tests.mutations`` prints the list and the catch rate.
"""

from __future__ import annotations

from tests.mutations import (
    depthwise_band,
    depthwise_box,
    depthwise_epilogue,
    depthwise_lanes,
    depthwise_march,
    depthwise_pairs,
    depthwise_pairs_wgrad,
    depthwise_patch,
    depthwise_planes,
    depthwise_toeplitz,
    depthwise_window,
    direct,
    grouped_sm90,
    halo_sm80,
    halo_sm80_f64,
    halo_sm80_wgrad,
    halo_sm90,
    halo_sm90_classes,
    halo_sm90_edges,
    halo_sm90_implicit_gemm,
    halo_sm90_moments,
    halo_sm90_planes,
    halo_sm90_pointwise,
    halo_sm90_staging,
    halo_sm90_stores,
    halo_sm90_streams,
    halo_sm90_wgrad,
    halo_sm90_wgrad_edges,
    halo_sm90_wgrad_ss,
    reduce,
    residual,
)
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *direct.MUTATIONS,
    *reduce.MUTATIONS,
    *halo_sm80.MUTATIONS,
    *halo_sm80_f64.MUTATIONS,
    *halo_sm80_wgrad.MUTATIONS,
    *grouped_sm90.MUTATIONS,
    *halo_sm90.MUTATIONS,
    *halo_sm90_classes.MUTATIONS,
    *halo_sm90_edges.MUTATIONS,
    *halo_sm90_staging.MUTATIONS,
    *halo_sm90_stores.MUTATIONS,
    *halo_sm90_streams.MUTATIONS,
    *halo_sm90_wgrad.MUTATIONS,
    *halo_sm90_wgrad_edges.MUTATIONS,
    *halo_sm90_wgrad_ss.MUTATIONS,
    *halo_sm90_pointwise.MUTATIONS,
    *halo_sm90_planes.MUTATIONS,
    *halo_sm90_implicit_gemm.MUTATIONS,
    *halo_sm90_moments.MUTATIONS,
    *residual.MUTATIONS,
    *depthwise_band.MUTATIONS,
    *depthwise_box.MUTATIONS,
    *depthwise_epilogue.MUTATIONS,
    *depthwise_lanes.MUTATIONS,
    *depthwise_march.MUTATIONS,
    *depthwise_pairs.MUTATIONS,
    *depthwise_pairs_wgrad.MUTATIONS,
    *depthwise_patch.MUTATIONS,
    *depthwise_planes.MUTATIONS,
    *depthwise_toeplitz.MUTATIONS,
    *depthwise_window.MUTATIONS,
)
