"""Cross-entropy whose logits are cut over the vocab, and how a user's loss is made to use it.

The loss of a step is the sum over all tokens divided by the number of valid tokens of the whole batch, counted over
ranks and micro-batches before the first of them; a mean of per-rank means would weigh tokens by the rank that holds
them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from crosscut.comm.group import Group
from crosscut.parallel.batch import IGNORE


class _VocabCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[label] with each rank holding V/t of the columns; whole logits never exist.

    Three all_reduces of one number a token: the maximum, the sum of exponentials, the label's logit.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (vocab-parallel embedding and loss).
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, group: Group, ignore: int, tag: str) -> Tensor:
        wide = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        width = wide.size(-1)
        start = group.rank * width
        valid_T = labels_T != ignore
        mine_T = valid_T & (labels_T >= start) & (labels_T < start + width)
        column_T1 = torch.where(mine_T, labels_T - start, 0).unsqueeze(-1)

        max_T = group.all_reduce(wide.max(dim=-1).values, "max", tag=tag)
        shifted_TV = wide - max_T.unsqueeze(-1)
        target_T = shifted_TV.gather(-1, column_T1).squeeze(-1).masked_fill(~mine_T, 0.0)
        exp_TV = shifted_TV.exp_()
        sum_T = group.all_reduce(exp_TV.sum(dim=-1), tag=tag)
        target_T = group.all_reduce(target_T, tag=tag)

        probs_TV = exp_TV.div_(sum_T.unsqueeze(-1))
        ctx.save_for_backward(probs_TV, column_T1, mine_T, valid_T)
        ctx.dtype = logits_TV.dtype
        return (sum_T.log() - target_T).masked_fill(~valid_T, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probs_TV, column_T1, mine_T, valid_T = ctx.saved_tensors
        grad_TV = probs_TV.clone()
        grad_TV.scatter_add_(-1, column_T1, -mine_T.unsqueeze(-1).to(grad_TV.dtype))
        grad_TV.mul_((valid_T.to(grad_TV.dtype) * grad).unsqueeze(-1))
        return grad_TV.to(ctx.dtype), None, None, None, None


def vocab_cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, *, ignore_index: int = IGNORE, tag: str = ""
) -> Tensor:
    """Sum (not mean) of the cross-entropy over valid labels. logits (..., V / group.size), labels (...) int64 of the
    whole vocab; the result is the same on every rank of `group`. Computed in fp32 (fp64 for fp64 logits).

    Raises ValueError for a label outside [0, V) that is not `ignore_index`.
    """
    vocab = logits.size(-1) * group.size
    flat = labels.reshape(-1)
    bad = (flat != ignore_index) & ((flat < 0) | (flat >= vocab))
    if bool(bad.any()):
        raise ValueError(f"label {int(flat[bad][0])} is outside the vocab [0, {vocab}) and is not {ignore_index}")
    return _VocabCrossEntropy.apply(logits.reshape(-1, logits.size(-1)), flat, group, ignore_index, tag)


# What a loss may do to vocab-cut logits before cross_entropy: nothing that looks across the vocab.
_SHAPING = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze contiguous float double to type clone __getitem__ narrow "
    "size dim "
    "numel __get__ is_floating_point stride is_contiguous requires_grad_ __len__ view_as".split()
)


class LossMode(TorchFunctionMode):
    """While a user's loss runs: cross_entropy over cut logits becomes the vocab-cut one, and a mean over no valid token
    is 0, not NaN (a rank whose labels are all ignored still takes part).

    Anything but reshaping that touches cut logits outside cross_entropy would see a rank's part of the vocab only: it
    is refused by name.
    """

    def __init__(self, logits: Tensor, vocab_group: Group, tag: str = "") -> None:
        super().__init__()
        self.group, self.tag = vocab_group, tag
        # id -> tensor: holding the tensors keeps their ids from being used again
        self.cut: dict[int, Tensor] = {id(logits): logits} if vocab_group.size > 1 else {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if not self.cut or not any(id(a) in self.cut for a in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name not in _SHAPING:
            raise ValueError(
                f"the loss calls {name} on logits whose vocab is cut over {self.group.label}={self.group.size}: "
                f"each rank "
                f"would see its part only; use torch.nn.functional.cross_entropy, or do not cut vocab"
            )
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            if out.ndim == 0 or out.size(-1) != next(iter(self.cut.values())).size(-1):
                raise ValueError(
                    f"the loss reshapes logits whose vocab is cut over {self.group.label} with {name} so that the "
                    f"vocab is "
                    f"no longer the last dim; keep it last up to cross_entropy"
                )
            self.cut[id(out)] = out
        return out

    def _cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = IGNORE,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        if weight is not None:
            raise ValueError(
                "cross_entropy(weight=...) is not supported: its mean is not over tokens; weigh samples instead"
            )
        if ignore_index != IGNORE:
            raise ValueError(f"cross_entropy(ignore_index={ignore_index}): mark ignored labels with {IGNORE}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"cross_entropy(reduction={reduction!r}) in a loss: use 'mean' (or 'sum')")
        if id(input) in self.cut:
            if label_smoothing or target.is_floating_point():
                raise ValueError(
                    "cross_entropy over a cut vocab takes class indices and no label_smoothing; do not cut vocab"
                )
            total = vocab_cross_entropy(input, target, self.group, ignore_index=ignore_index, tag=self.tag)
        else:
            total = F.cross_entropy(
                input, target, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
            )
        if reduction == "sum":
            return total
        count = target.numel() if not target.is_floating_point() else target.size(0)
        if not target.is_floating_point():
            count = int((target != ignore_index).sum())
        return total / max(count, 1)
