"""`distribute`: a plain model, a dims table and a layout become one rank's share of the model, ready to train.

The plan is derived once (layout/rules.py) and everything here executes it: which slice of each parameter is held, what
happens at each boundary, over which axes a gradient is summed. What this engine cannot execute yet is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from crosscut.comm import pairs
from crosscut.comm.context import Context
from crosscut.comm.group import Group
from crosscut.layout import rules
from crosscut.layout.layout import Layout
from crosscut.layout.plan import Ranges
from crosscut.layout.spec import Dims
from crosscut.parallel import clip
from crosscut.parallel.batch import Batch, MicroBatch
from crosscut.parallel.data import BucketReducer, NaiveReducer, Owed, Reducer
from crosscut.parallel.elementwise import require_elementwise
from crosscut.parallel.inspect import accepts_positions, loss_kind, spec_from_module
from crosscut.parallel.loss import LossMode
from crosscut.parallel.masters import Masters
from crosscut.parallel.materialize import build_whole, hold_share
from crosscut.parallel.pipeline.runtime import StageRun, StageWork
from crosscut.parallel.pipeline.schedules import Action, add_communication, build, forward_only
from crosscut.parallel.pipeline.stage import Stage
from crosscut.parallel.store import Store
from crosscut.parallel.supported import DTYPES, refuse_unsupported
from crosscut.parallel.tensor import Boundaries
from crosscut.parallel.tied import TiedEnds

LossFn = Callable[[Tensor, Tensor], Tensor]
derive = lru_cache(maxsize=32)(rules.derive)  # ranks that are threads of one process derive one plan


@dataclass(frozen=True)
class StepOutput:
    """loss: the mean over all `num_tokens` valid tokens of the global batch, the same on every rank."""

    loss: float
    num_tokens: int


def distribute(
    model: nn.Module | Callable[[], nn.Module],
    dims: Dims,
    layout: Layout,
    ctx: Context,
    *,
    loss_fn: LossFn,
    batch: int | None = None,
    seq: int | None = None,
    seed: int = 0,
    bucket_bytes: int = 25_000_000,
) -> DistributedModel:
    """Cut `model` for this rank under `layout`. Called by every rank; returns a DistributedModel.

    model: a callable that builds it, or a module. A built model with an `init_table()` is drawn layout-free, each rank
    only its share; another one is built whole on every rank under manual_seed(seed), then cut. A module that is handed
    over keeps its values (rank 0's, on every rank).
    loss_fn(output, labels) -> the mean over its valid tokens (labels that are not -100) or, with float labels, its
    rows.
    batch, seq: rows of a global batch and tokens a row, for the predicted bytes; by default those of the first batch.
    bucket_bytes: the size of gradient buckets; 0 sums each gradient by itself after backward.

    Raises ValueError (LayoutError) before anything runs when the layout does not fit the model, the model breaks the
    contract of docs/model_contract.md, or the engine cannot execute the layout yet.
    """
    return DistributedModel(model, dims, layout, ctx, loss_fn, batch, seq, seed, bucket_bytes)


class DistributedModel:
    """One rank's share of a model under a layout. Attributes: `plan`, `layout`, `ctx`, `module` (this rank's stage).

    What `module` computes with is in the layout's compute dtype. The parameters that `named_parameters` gives, their
    gradients and the optimizer's state are fp32 at least: without a store copies of all numbers, under one this rank's
    shards.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dims: Dims,
        layout: Layout,
        ctx: Context,
        loss_fn: LossFn,
        batch: int | None,
        seq: int | None,
        seed: int,
        bucket_bytes: int,
    ) -> None:
        refuse_unsupported(layout)
        self.layout, self.ctx, self.loss_fn, self._dims = layout, ctx, loss_fn, dims
        self.module, drawn = build_whole(model, seed, ctx)
        self.spec = spec_from_module(self.module, dims, loss=loss_kind(dims))
        # A plan without a batch size is complete but for the bytes of activations; any legal size will do for it.
        least = layout.micro_batches * layout.mesh.size(layout.batch_axes)
        if seq is None and "seq" in self.spec.input_dims:
            seq, self._sized = layout.mesh.size(layout.axes_of("seq")), False
        else:
            self._sized = batch is not None
        self.plan = derive(self.spec, layout, batch=batch or least, seq=seq)
        ctx.set_mesh(layout.mesh, self.plan.group_axes)
        self.stage = Stage(self.module, self.plan, ctx.coords["pp"], layout.mesh.size("pp"))
        hold_share(self.module, self.plan, ctx, drawn, seed)
        self._compute, self._scalar = DTYPES[layout.precision.compute], DTYPES[layout.precision.scalar]
        self._tied = TiedEnds(self.plan, ctx)
        self._positions = accepts_positions(self.module)
        self._store = Store(self.module, self.plan, ctx)
        self._masters = Masters(self.module, self._compute, but_not=self._store.shards)
        self._held = {**self._masters.held, **self._store.shards}  # what stands for a parameter of the module
        self._boundaries = Boundaries(self.module, self.plan, ctx)
        self._sharder = self._store.drive()
        self._reducer: Reducer = self._make_reducer(bucket_bytes)

    # ---- one step -------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> StepOutput:
        """Forward and backward of one global batch, with every derived collective. Gradients are then complete: summed
        over the ranks that owe a part. Like any `.grad` they add up over calls until `zero_grad`."""
        if len(batch.micro) != self.layout.micro_batches:
            raise ValueError(f"the batch has {len(batch.micro)} micro-batches, the layout {self.layout.micro_batches}")
        pp = self.layout.mesh.size("pp")
        # Without stages a micro-batch's backward follows its forward at once: plain gradient accumulation.
        schedule = build(self.layout.schedule.name if pp > 1 else "1f1b", pp, len(batch.micro))
        actions = schedule[self.stage.index]
        # What earlier calls left is summed already: it is set aside, or the reduction would sum it once more. (A clone,
        # since it may be a view of the bucket that is about to be filled.)
        whole = [p for name, p in self.named_parameters() if name not in self._store.shards]
        earlier = [(p, p.grad.clone()) for p in whole if p.grad is not None]
        for p, _ in earlier:
            p.grad = None
        output = self._run(batch, actions, "step")
        self._reducer.finish()
        self._sharder.finish(len(batch.micro) if self._sharder.reduce_always else 1)
        self._tied.sum(dict(self.named_parameters()), self._store)
        self._sharder.publish()
        for p, before in earlier:
            p.grad = before if p.grad is None else p.grad.add_(before)
        return output()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> StepOutput:
        """The loss of one global batch. Its communication is counted as `control`: it is no part of a step."""
        training = self.module.training
        self.module.eval()
        try:
            with self.ctx.ledger.control():
                schedule = add_communication(forward_only(self.layout.mesh.size("pp"), len(batch.micro)))
                return self._run(batch, schedule[self.stage.index], "control")()
        finally:
            self.module.train(training)

    def clip_grad_norm_(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most max_norm (None: only measure).

        Returns the norm before scaling, 0-d, the same on every rank: each logical element is counted once.
        """
        norm = clip.global_norm(
            (p.grad for name, p in self.named_parameters() if p.grad is not None and self.counts(name)),
            self._world, norm_type, self._scalar, "step",
        )  # fmt: skip
        if max_norm is not None:
            clip.scale_gradients((p for _, p in self.named_parameters()), norm, max_norm)
        return norm

    def optimizer(
        self, cls: type[torch.optim.Optimizer], *, group_fn: Callable | None = None, **kw: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of class `cls` over this rank's parameters, or shards of them, under their names in the model.

        group_fn(name, shape) -> options of that parameter (logical name and whole shape), e.g. {"weight_decay": 0.0};
        parameters with the same options form a group. Where parameters stay whole (zero = 1 and 2), `step` ends with
        the all_gather of what the ranks updated.

        Raises ValueError for an optimizer that needs whole tensors under a store.
        """
        if self._store.shards:
            require_elementwise(cls, kw, f"zero={self.layout.store.zero}")
        groups: dict[tuple, dict[str, Any]] = {}
        for name, p in self.named_parameters():
            if p.requires_grad:
                options = group_fn(name, self.plan.params[name].shape) if group_fn else {}
                groups.setdefault(tuple(sorted(options.items())), {**options, "params": []})["params"].append((name, p))
        # A stage whose parameters are all frozen has an optimizer too: every rank runs the same loop.
        optimizer = cls(list(groups.values()) or [{"params": []}], **kw)
        optimizer.register_step_post_hook(lambda *_: self._sharder.regather())
        return optimizer

    def share_updates(self) -> None:
        """Gather parameters that stay whole after their shards were changed by something else than the optimizer's
        step. Collective; counted as `control`."""
        with self.ctx.ledger.control():
            self._sharder.regather()

    # ---- what a rank holds ----------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, this rank's local parameter, or its shard under a store); a tied parameter once,
        under the first name held."""
        for name, p in self.module.named_parameters():
            yield name, self._held.get(name, p)

    def held_ranges(self, name: str) -> Ranges:
        """Per dim, the [start, stop) ranges of the whole parameter `name` that this rank's tensor of
        `named_parameters()`, its `.grad` and its optimizer state hold: the cuts, narrowed by the store."""
        return self.plan.params[name].stored_ranges(self.ctx.coords, self.layout.mesh.sizes)

    def counts(self, name: str) -> bool:
        """Whether this rank counts its part of `name` in sums over the model, and writes it to checkpoints: it stands
        at coordinate 0 of every axis that replicates the parameter (and, of tied ends, on the first stage)."""
        param, coords = self.plan.params[name], self.ctx.coords
        if coords["pp"] != param.stages[0]:
            return False
        dividing = {"pp", *param.cut_axes, *param.store_axes}
        return all(coords[a] == 0 for a in self.layout.mesh.axes if a not in dividing)

    # ---- inside ---------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> Group:
        return self.ctx.group(self.layout.mesh.axes)

    def _make_reducer(self, bucket_bytes: int) -> Reducer:
        owed = [
            Owed(name, p, self.ctx.group(self.plan.params[name].sum_axes), self._masters.copies.get(name))
            for name, p in self.named_parameters()
            if p.requires_grad and name not in self._store.shards
        ]
        reduce = DTYPES[self.layout.precision.reduce]
        return BucketReducer(owed, bucket_bytes, reduce) if bucket_bytes else NaiveReducer(owed, reduce)

    def _run(self, batch: Batch, actions: Sequence[Action], kind: str) -> Callable[[], StepOutput]:
        """Do the actions. What is returned gives the output: it waits for the loss of all ranks, which is on its way
        while gradients still are."""
        ctx = self.ctx
        self._sharder.reset()
        self._masters.refresh()
        self._size_plan(batch.micro)
        micro = tuple(self._own_labels(m) for m in batch.micro)
        labels, pp = ctx.group(self.plan.loss.label_axes), ctx.group("pp")
        counts = [m.num_terms for m in micro]
        total = torch.tensor(sum(counts), dtype=torch.int64, device=ctx.device)
        losses = torch.zeros((), dtype=self._scalar, device=ctx.device)
        # The number of tokens is needed after the first forward, and travels beside it.
        pending = [labels.all_reduce(total, async_op=True, tag="loss/step", kind=kind)]
        left = set(range(len(micro)))  # whose loss is not in the sum yet

        def forward(m: int, received: Tensor | None) -> Tensor:
            with self._boundaries.watch():
                kwargs = {"positions": micro[m].positions} if self._positions else {}
                self._sharder.before_forward(self._sharder.rest)
                output = self.stage.forward(received, _cast(micro[m].inputs, self._compute), **kwargs)
                self._sharder.after_forward(self._sharder.rest, output)
            if not self.stage.is_last:
                return output
            loss = self._loss(output, micro[m].labels) * (counts[m] / max(int(pending[0].wait()), 1))
            losses.add_(loss.detach())
            left.discard(m)
            if not left:
                pending.append(labels.all_reduce(losses, async_op=True, tag="loss/step", kind=kind))
            return loss

        def last_backward() -> None:
            self._reducer.last_backward()
            self._sharder.last_backward()

        def output() -> StepOutput:
            for handle in pending:
                handle.wait()
            pp.broadcast(losses, src=pp.size - 1, tag="loss/step", kind=kind)
            return StepOutput(float(losses), int(total))

        work = StageWork(forward, lambda m: self._hidden(micro[m]), last_backward, _boundary_tag, self.stage.is_last)
        try:
            StageRun(actions, work, [ctx.group("pp", channel=0), ctx.group("pp", channel=1)], kind).run()
        except BaseException:
            for handle in pending:
                handle.forget()
            raise
        return output

    def _own_labels(self, micro: MicroBatch) -> MicroBatch:
        """Where logits are cut along seq, the loss sees (and counts) the labels of its own part."""
        labels = micro.labels
        for axis in self.plan.loss.label_seq_axes:
            labels = pairs.own_slice(labels, self.ctx.group(axis), 1)
        return replace(micro, labels=labels)

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The user's loss, of outputs as wide as the reported loss: a sum over tokens has no digits to give away."""
        output = tree_map_only(Tensor, lambda x: _cast(x, self._scalar), output)
        with LossMode(output, self.ctx.group(self.plan.loss.vocab_axes), tag="loss/forward"):
            loss = self.loss_fn(output, _cast(labels, self._scalar))
        if loss.ndim:
            raise ValueError(f"loss_fn returned shape {tuple(loss.shape)}; it must return the mean, one number")
        return loss

    def _hidden(self, micro: MicroBatch) -> Tensor:
        """An empty hidden value of the stage boundary, for this micro-batch's rows and length."""
        shape = list(self.plan.hidden_shape)
        shape[0] = micro.inputs.size(0)
        if self.plan.seq is not None:
            shape[1] = shape[1] * micro.inputs.size(1) // self.plan.seq
        return torch.empty(shape, dtype=self._compute, device=self.ctx.device)

    def _size_plan(self, micro: tuple[MicroBatch, ...]) -> None:
        """Derive again with the sizes of the first batch, so that the rules' bytes are those that will be counted."""
        if self._sized:
            return
        rows = micro[0].inputs.size(0) * len(micro)
        for axis in self.layout.batch_axes:
            rows *= self.layout.mesh.size(axis)
        seq = micro[0].inputs.size(1) if self.plan.seq is not None else None
        self.plan = derive(self.spec, self.layout, batch=rows, seq=seq)
        self._sized = True


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _boundary_tag(action: Action) -> str:
    """The rule's name of a transfer between two stages, the same at both ends."""
    assert action.peer is not None
    first = min(action.stage, action.peer)
    return f"stage {first} -> {first + 1}/{'forward' if action.kind.endswith('F') else 'backward'}"
