"""MoEBERT: splits a dense feed-forward layer into experts by the importance of its neurons; its distillation loss.

    I_j    = sum over samples s of | sum_c W1_jc dL_s/dW1_jc + sum_r W2_rj dL_s/dW2_rj |
    expert e = the `share` most important neurons, then every E-th of the others from the e-th on, at most `hidden`

I_j is the importance of hidden neuron j, W1 (neurons, D) and W2 (Dout, neurons) are the weights of the layer's two
nn.Linear, and L_s is the loss of sample s. e counts from 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.losses import symmetric_kl
from moe_kernels.ops._checks import check_int

SPLIT_ACTIVATIONS = ("relu", "gelu", "silu", "tanh")  # act(0) = 0, so zero weights of padding neurons stay zero


class NeuronImportance:
    """Importance I (neurons) of the hidden neurons of fc2(act(fc1(x))), summed over all passes inside the `with` block.

    `value` holds the sum. The first dimension of fc1's input counts samples. The loss must be a sum over samples, and
    a sample's loss must depend on its own rows alone. Biases do not count.

    Let dpre be the gradient of pre = fc1(x), b fc1's bias, and dh the gradient of h, the input of fc2. The two terms of
    I_j are sum_t dpre_tj (pre_tj - b_j) and sum_t h_tj dh_tj over the tokens t of a sample, so no weight gradient of a
    single sample is needed.

    A forward pass with gradients enabled raises ValueError if fc1's output or fc2's input requires none.

    Source: Zuo et al. 2022 (MoEBERT), section 3.2; as in its code, the absolute value is of the sum of both terms.

    Example:
        >>> fc1, fc2 = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        >>> with NeuronImportance(fc1, fc2) as importance:
        ...     fc2(fc1(torch.randn(3, 4)).relu()).square().sum().backward()
        >>> importance.value.shape
        torch.Size([6])
    """

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear) -> None:
        if fc1.out_features != fc2.in_features:
            raise ValueError(
                f"NeuronImportance: fc2 must take the {fc1.out_features} features of fc1, got {fc2.in_features}"
            )
        self.fc1, self.fc2 = fc1, fc2
        self.value = fc1.weight.new_zeros(fc1.out_features)

    def __enter__(self) -> NeuronImportance:
        self._hooks = [
            self.fc1.register_forward_hook(lambda module, args, out: self._hook_gradient(out, self.fc1.bias)),
            self.fc2.register_forward_pre_hook(lambda module, args: self._hook_gradient(args[0], None)),
        ]
        self._first: list[Tensor] = []
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook_gradient(self, x: Tensor, bias: Tensor | None) -> None:
        """Hooks onto the gradient of x, which gives one of the two terms of I; the later hook updates `value`."""
        if not x.requires_grad:
            if torch.is_grad_enabled():
                raise ValueError("NeuronImportance: fc1's output and fc2's input must require gradients")
            return

        def add(grad: Tensor) -> None:
            value = x.detach() if bias is None else x.detach() - bias.detach()
            products = (value * grad).flatten(1, -2).sum(1) if x.dim() > 2 else value * grad
            self._first.append(products)
            if len(self._first) == 2:
                self.value += (self._first[0] + self._first[1]).abs().sum(0)
                self._first = []

        x.register_hook(add)


def split_neurons(importance: Tensor, num_experts: int, hidden: int, share: int) -> list[Tensor]:
    """For each expert the int64 indices of its neurons: the `share` most important of all, then its own.

    Both parts are in descending importance. An expert gets at most `hidden` neurons. If num_experts does not divide the
    number of neurons that are not common, the last experts may get one neuron less.

    Example:
        >>> split_neurons(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]), num_experts=2, hidden=3, share=1)
        [tensor([0, 1, 3]), tensor([0, 2, 4])]
    """
    check_int("split_neurons", "share", share, 0, min(hidden, len(importance)), "neurons that all experts have")
    order = importance.argsort(descending=True, stable=True)
    common, others = order[:share], order[share:]
    return [torch.cat([common, others[e::num_experts]])[:hidden] for e in range(num_experts)]


@torch.no_grad()
def split_ffn(
    fc1: nn.Linear, fc2: nn.Linear, importance: Tensor, num_experts: int, hidden: int, share: int, activation: str
) -> ExpertMLP:
    """An ExpertMLP; each expert has copies of some neurons of fc2(act(fc1(x))) and of the whole bias of fc2.

    Args:
        importance: (neurons).
        num_experts, hidden, share: as in `split_neurons`; MoEBERT splits 3072 neurons with 4, 768 and 512. An expert
            that gets fewer than `hidden` neurons is padded with zero weights.
        activation: "relu", "gelu", "silu" or "tanh".

    MoEBERT's experts contain a LayerNorm and the residual; here both are outside.

    Example:
        >>> fc1, fc2 = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        >>> experts = split_ffn(fc1, fc2, torch.rand(6), num_experts=2, hidden=4, share=2, activation="relu")
        >>> experts.w_in.shape
        torch.Size([2, 4, 4])
    """
    if activation not in SPLIT_ACTIVATIONS:
        raise ValueError(f"split_ffn: activation must be relu, gelu, silu or tanh; got {activation!r}")
    experts = ExpertMLP(num_experts, fc1.in_features, hidden, fc2.out_features, activation=activation, bias=True).to(
        fc1.weight
    )
    for parameter in experts.parameters():
        parameter.zero_()
    for e, neurons in enumerate(split_neurons(importance, num_experts, hidden, share)):
        count = len(neurons)
        experts.w_in[e, :, :count] = fc1.weight[neurons].t()
        experts.w_out[e, :count] = fc2.weight[:, neurons].t()
        if fc1.bias is not None and experts.b_in is not None:
            experts.b_in[e, :count] = fc1.bias[neurons]
        if fc2.bias is not None and experts.b_out is not None:
            experts.b_out[e] = fc2.bias
    return experts


def distillation_loss(
    student: Sequence[Tensor], teacher: Sequence[Tensor], logits: Tensor, teacher_logits: Tensor
) -> Tensor:
    """Mean squared difference of each pair of hidden states, summed over the pairs, plus symmetric_kl of the logits.

    Args:
        student, teacher: the outputs of the embedding and of every layer, in equal shapes. The teacher gets no
            gradient; run it in eval mode, without dropout.
        logits, teacher_logits: (B, classes).

    Source: MoEBERT, section 3.4, which adds 5 times this loss to the task's cross-entropy.

    Example:
        >>> hidden, logits = [torch.zeros(2, 3)], torch.zeros(2, 5)
        >>> distillation_loss(hidden, [torch.ones(2, 3)], logits, logits)
        tensor(1.)
    """
    if len(student) != len(teacher):
        raise ValueError(
            f"distillation_loss: expected {len(teacher)} hidden states like the teacher's, got {len(student)}"
        )
    layers = sum(F.mse_loss(own, other.detach()) for own, other in zip(student, teacher, strict=True))
    return layers + symmetric_kl(logits, teacher_logits.detach())
