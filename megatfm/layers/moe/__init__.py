"""Mixtures of experts: a router chooses which experts a token goes through, and with which weights."""

from megatfm.layers.moe import (
    deepseek_v2,
    deepseek_v3,
    expert_choice,
    gshard,
    hash,
    noisy_top_k,
    soft,
    switch,
    top_k,
)
from megatfm.layers.moe.experts import Experts, without_capacity
from megatfm.layers.moe.moe import MoE
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput
from megatfm.layers.moe.soft import SoftMoE

__all__ = [
    "ROUTERS",
    "Experts",
    "MoE",
    "Router",
    "RouterOutput",
    "SoftMoE",
    "deepseek_v2",
    "deepseek_v3",
    "expert_choice",
    "gshard",
    "hash",
    "noisy_top_k",
    "soft",
    "switch",
    "top_k",
    "without_capacity",
]
