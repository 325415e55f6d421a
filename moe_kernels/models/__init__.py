"""The papers' networks, made of layers of moe_kernels.nn."""

from moe_kernels.models.comparison import comparison_mlp
from moe_kernels.models.gpt import GPT
from moe_kernels.models.mixer import Mixer
from moe_kernels.models.mlp import comet_mlp, dense_twin
from moe_kernels.models.mmoe import MMoE
from moe_kernels.models.moe import MoEGPT, MoEViT
from moe_kernels.models.vit import ViT

__all__ = ["GPT", "MMoE", "Mixer", "MoEGPT", "MoEViT", "ViT", "comet_mlp", "comparison_mlp", "dense_twin"]
