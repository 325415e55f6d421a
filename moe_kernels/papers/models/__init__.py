"""The papers' networks, made of layers of moe_kernels.nn."""

from moe_kernels.papers.models.comparison import comparison_mlp
from moe_kernels.papers.models.gpt import GPT
from moe_kernels.papers.models.mixer import Mixer
from moe_kernels.papers.models.mlp import comet_mlp, dense_twin
from moe_kernels.papers.models.mmoe import MMoE
from moe_kernels.papers.models.moe import MoEGPT, MoEViT
from moe_kernels.papers.models.vit import ViT

__all__ = ["GPT", "MMoE", "Mixer", "MoEGPT", "MoEViT", "ViT", "comet_mlp", "comparison_mlp", "dense_twin"]
