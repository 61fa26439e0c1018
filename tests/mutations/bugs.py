"""Bugs of the kinds that cost others days, each a small patch of a named rule or function of crosscut.

`says` is what the verdict must say of it: the exact factor or the contribution that is wrong, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.comm import pairs
from crosscut.layout import rules, sites
from crosscut.parallel import clip, loss, materialize, shard, sharder, tensor, tied
from crosscut.parallel import distribute as engine
from crosscut.parallel.batch import MicroBatch
from crosscut.parallel.data import BucketReducer
from crosscut.parallel.pipeline.runtime import StageRun
from crosscut.testing import parity

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """seed: plants it. kind: as in the list of bug kinds. by: who must find it, "checker", "parity" or "error" (calls
    that do not match)."""

    seed: Callable[[Patch], None]
    kind: str
    mesh: str
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    by: str = "parity"

    @property
    def name(self) -> str:
        return self.seed.__name__


BUGS: list[Bug] = []


def bug(kind: str, mesh: str, says: str = "", by: str = "parity", model: dict[str, Any] | None = None, **options: Any):  # type: ignore[no-untyped-def]
    def add(seed: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append(Bug(seed, kind, mesh, options, model or {}, says, by))
        return seed

    return add


def after_derivation(patch: Patch, change: Callable[[Any], Any]) -> None:
    """The plan says one thing and the engine does another: the placements were right when they were checked."""
    real = engine.derive
    patch.setattr(engine, "derive", lambda *a, **kw: change(real(*a, **kw)))


def without_axis(plan: Any, axis: str, which: Callable[[str], bool]) -> Any:
    params = {n: replace(p, sum_axes=tuple(a for a in p.sum_axes if a != axis)) if which(n) else p
              for n, p in plan.params.items()}  # fmt: skip
    return replace(plan, params=params)


def after_finish(patch: Patch, change: Callable[[Any], None]) -> None:
    real = BucketReducer.finish

    def finish(self: BucketReducer) -> None:
        real(self)
        for bucket in self.buckets:
            change(bucket)

    patch.setattr(BucketReducer, "finish", finish)


def after_backward(patch: Patch, change: Callable[[Any], None]) -> None:
    real = engine.DistributedModel.forward_backward

    def step(self: Any, batch: Any) -> Any:
        out = real(self, batch)
        change(self)
        return out

    patch.setattr(engine.DistributedModel, "forward_backward", step)


def scaled_loss(patch: Patch, factor: Callable[[Any, int], float]) -> None:
    """The loss that goes into backward, micro-batch by micro-batch; the reported one stays."""
    real, calls = engine.DistributedModel._loss, {}  # type: ignore[var-annotated]

    def scaled(self: Any, output: Tensor, labels: Tensor) -> Tensor:
        calls[id(self)] = calls.get(id(self), -1) + 1
        value = real(self, output, labels)
        other = value * factor(self, calls[id(self)] % self.layout.micro_batches)
        return value.detach() + other - other.detach()

    patch.setattr(engine.DistributedModel, "_loss", scaled)


# ---- data parallel --------------------------------------------------------------------------------------------------


@bug("ddp", "dp=2", r"mlp.up.weight.grad differs .* their sum is the reference: the sum over dp is missing")
def one_parameter_is_not_summed(patch: Patch) -> None:
    after_derivation(patch, lambda plan: without_axis(plan, "dp", lambda n: n == "layers.0.mlp.up.weight"))


@bug("ddp", "dp=3", r"is 0.333333 x the reference on every element = 1/dp")
def gradients_are_averaged(patch: Patch) -> None:
    after_finish(patch, lambda bucket: bucket.content.div_(bucket.group.size))


@bug("ddp", "dp=3", r"is 3 x the reference on every element = dp: it is summed over dp once too often")
def gradients_are_summed_twice(patch: Patch) -> None:
    after_finish(patch, lambda bucket: bucket.group.all_reduce(bucket.content))


@bug("ddp", "dp=2", micro_batches=2)
def ranks_sync_after_the_first_micro_batch(patch: Patch) -> None:
    real = StageRun._backward

    def backward(self: StageRun, micro: int, *, last: bool) -> None:
        real(self, micro, last=micro == 0)

    patch.setattr(StageRun, "_backward", backward)


@bug("ddp", "dp=2")
def the_largest_gradient_wins(patch: Patch) -> None:
    def start(self: BucketReducer) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            bucket = self.buckets[self._next]
            bucket.handle = bucket.group.all_reduce(bucket.content, "max", async_op=True, tag="gradients/step")
            self._next += 1

    patch.setattr(BucketReducer, "_start_ready", start)


@bug("ddp", "dp=2", r"rank 0 called all_reduce.* rank 1 called all_reduce", by="error")
def a_rank_skips_a_bucket(patch: Patch) -> None:
    real = BucketReducer._start_ready

    def start(self: BucketReducer) -> None:
        bucket = self.buckets[self._next] if self._next < len(self.buckets) else None
        if bucket is not None and self._next == 1 and bucket.group.rank == 1 and not bucket.missing:
            bucket.handle = type("Skipped", (), {"wait": lambda self: None})()  # this rank never calls
            self._next += 1
        real(self)

    patch.setattr(BucketReducer, "_start_ready", start)


@bug("ddp", "dp=2", r"the sum of this step's and that of the step before: it was not set to zero")
def zero_grad_is_forgotten(patch: Patch) -> None:
    def change(self: Any) -> None:
        now = {n: p.grad.clone() for n, p in self.named_parameters()}
        for n, p in self.named_parameters():
            p.grad = p.grad + self.__dict__.get("_before", {n: torch.zeros_like(p)})[n]
        self._before = now

    after_backward(patch, change)


@bug("ddp", "dp=2", r"is that of the step before: a stale value")
def gradients_are_a_step_late(patch: Patch) -> None:
    def change(self: Any) -> None:
        now = {n: p.grad.clone() for n, p in self.named_parameters()}
        for n, p in self.named_parameters():
            p.grad = self.__dict__.get("_before", now)[n].clone()
        self._before = now

    after_backward(patch, change)


@bug("ddp", "dp=2", r"the output of embed holds the right numbers in the wrong places: rank 1 has what rank 0 should")
def every_rank_gets_the_same_rows(patch: Patch) -> None:
    real = parity.local_batch

    def first_rows(inputs: Tensor, labels: Tensor, layout: Any, ctx: Any) -> Any:
        half = inputs.size(0) // 2
        return real(torch.cat([inputs[:half]] * 2), torch.cat([labels[:half]] * 2), layout, ctx)

    patch.setattr(parity, "local_batch", first_rows)


@bug("ddp", "dp=1", r"lacks the contribution of micro-batch 1", micro_batches=3)
def a_micro_batch_is_lost(patch: Patch) -> None:
    scaled_loss(patch, lambda self, micro: float(micro != 1))


@bug("ddp", "dp=2", r"counts that of dp 0 micro-batch 1, dp 1 micro-batch 1 twice", micro_batches=2)
def a_micro_batch_counts_twice(patch: Patch) -> None:
    scaled_loss(patch, lambda self, micro: 1.0 + micro)


# ---- the loss -------------------------------------------------------------------------------------------------------


@bug("loss-averaging", "dp=2", r"the loss is a mean of means: its parts hold unequal numbers of tokens \(dp 0 \d")
def ranks_average_their_means(patch: Patch) -> None:
    patch.setattr(MicroBatch, "num_terms", property(lambda self: self.inputs.size(0)))


@bug("loss-averaging", "dp=1", r"the loss is a mean of means: .*micro-batch 0 \d", micro_batches=2)
def micro_batches_average_their_means(patch: Patch) -> None:
    patch.setattr(MicroBatch, "num_terms", property(lambda self: self.inputs.size(0)))


def one_axis_too_many(plan: Any) -> Any:
    return replace(plan, label_axes=plan.label_axes + ("tp",))


@bug("loss-averaging", "dp=2,tp=2", r"is 0.5 x the reference on every element = .*1/tp")
def tokens_are_counted_over_tp_too(patch: Patch) -> None:
    after_derivation(patch, lambda plan: replace(plan, loss=one_axis_too_many(plan.loss)))


@bug("loss-averaging", "dp=2,tp=2", r"the token count sums over it", by="checker")
def the_rule_counts_tokens_over_tp_too(patch: Patch) -> None:
    real = rules._loss_plan
    patch.setattr(rules, "_loss_plan", lambda *a: one_axis_too_many(real(*a)))


@bug("loss-averaging", "pp=2", r"is 0.333333 x the reference on every element = 1/micro_batches", micro_batches=3)
def gradients_are_divided_by_micro_batches(patch: Patch) -> None:
    scaled_loss(patch, lambda self, micro: 1 / self.layout.micro_batches)


@bug("loss-averaging", "dp=2", r"weighs contributions that should each count once|each counts the same|scaled by")
def each_rank_divides_by_its_own_tokens(patch: Patch) -> None:
    after_derivation(patch, lambda plan: replace(plan, loss=replace(plan.loss, label_axes=())))


# ---- the gradient norm ----------------------------------------------------------------------------------------------


@bug("grad-norm", "dp=2", r"the gradient norm counts what several ranks hold once on each of them")
def every_replica_counts(patch: Patch) -> None:
    patch.setattr(engine.DistributedModel, "counts", lambda self, name: True)


@bug("grad-norm", "tp=2", r"the gradient norm counts norm.weight 2 times")
def a_replicated_parameter_counts_twice(patch: Patch) -> None:
    real = engine.DistributedModel.counts
    patch.setattr(engine.DistributedModel, "counts", lambda self, name: name == "norm.weight" or real(self, name))


@bug("grad-norm", "pp=2", r"the gradient norm differs between the ranks: each measured what it holds alone")
def stages_clip_by_their_own_norm(patch: Patch) -> None:
    patch.setattr(engine.DistributedModel, "_world", property(lambda self: self.ctx.group(("dp", "tp"))))


@bug("grad-norm", "dp=1,tp=2", r"the gradient norm (leaves out what tp > 0|is the norm of what rank 0) holds")
def shards_of_other_ranks_are_left_out(patch: Patch) -> None:
    real = engine.DistributedModel.counts

    def counts(self: Any, name: str) -> bool:
        return real(self, name) and self.ctx.coords["tp"] == 0

    patch.setattr(engine.DistributedModel, "counts", counts)


@bug("grad-norm", "dp=2", r"the gradient norm is the square of the norm: the root is missing")
def the_root_is_forgotten(patch: Patch) -> None:
    real = clip.global_norm
    patch.setattr(clip, "global_norm", lambda *a: real(*a) ** 2)


@bug("grad-norm", "dp=2")
def gradients_are_clipped_twice(patch: Patch) -> None:
    real = clip.scale_gradients

    def twice(params: Any, norm: Tensor, max_norm: float) -> None:
        params = list(params)
        real(params, norm, max_norm)
        real(params, norm, max_norm)

    patch.setattr(clip, "scale_gradients", twice)


# ---- tensor parallel ------------------------------------------------------------------------------------------------


@bug("tp", "tp=2", r"the output of layers.1.mlp differs .* their sum is the reference: the sum over tp is missing")
def one_output_is_not_summed(patch: Patch) -> None:
    real = pairs._Leave.forward

    def forward(ctx: Any, x: Tensor, group: Any, tag: str) -> Tensor:
        return x.clone() if tag.startswith("layers.1.mlp/") else real(ctx, x, group, tag)

    patch.setattr(pairs._Leave, "forward", staticmethod(forward))


@bug("tp", "tp=2", r"layers.1.attn_norm.weight.grad differs .* their sum is the reference: the sum over tp is missing")
def one_gradient_of_an_input_is_not_summed(patch: Patch) -> None:
    real = pairs._Enter.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, None, None) if ctx.tag.startswith("layers.1.attn/") else real(ctx, grad)

    patch.setattr(pairs._Enter, "backward", staticmethod(backward))


@bug("tp", "tp=3", r"down.bias.grad is 2 x the reference on every element", model={"bias": True})
def a_row_bias_is_added_before_the_sum_too(patch: Patch) -> None:
    def forward(self: torch.nn.Linear, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight, self.bias)

    patch.setattr(tensor, "_forward_without_bias", forward)


@bug("tp", "tp=2", r"attn_norm.weight.grad is 0.5 x the reference on every element = 1/tp: a sum over tp is missing")
def a_norm_gradient_is_divided_by_tp(patch: Patch) -> None:
    def change(self: Any) -> None:
        dict(self.named_parameters())["layers.0.attn_norm.weight"].grad.div_(2)

    after_backward(patch, change)


@bug("tp", "tp=2", r"q_norm.weight.grad differs .* the sum over tp is missing", model={"qk_norm": True})
def the_gradient_of_a_head_norm_is_not_summed(patch: Patch) -> None:
    after_derivation(patch, lambda plan: without_axis(plan, "tp", lambda n: "q_norm" in n))


@bug("tp", "tp=2", r"boundary .* `enter` \(all_reduce in backward\) is missing", by="checker")
def the_rule_of_an_entry_is_lost(patch: Patch) -> None:
    patch.setattr(sites, "entry_actions", lambda *a: ())


@bug("tp", "tp=2", r"boundary .* `leave` \(all_reduce\) is missing at the exit", by="checker")
def the_rule_of_an_exit_is_lost(patch: Patch) -> None:
    patch.setattr(sites, "exit_actions", lambda *a: ())


@bug("tp", "tp=2", r"the output of embed")
def foreign_ids_are_looked_up(patch: Patch) -> None:
    def cut_embedding(embedding: Any, group: Any) -> None:
        start, rows = group.rank * embedding.weight.size(0), embedding.weight.size(0)
        embedding.forward = lambda ids: torch.nn.functional.embedding((ids - start) % rows, embedding.weight)

    patch.setattr(tensor, "cut_embedding", cut_embedding)


@bug("tp", "tp=2")
def every_rank_thinks_the_label_is_its_own(patch: Patch) -> None:
    real = loss._VocabCrossEntropy.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        probs, column, _, valid = ctx.saved_tensors
        ctx = type("Saved", (), {"saved_tensors": (probs, column, valid, valid), "dtype": ctx.dtype})()
        return real(ctx, grad)

    patch.setattr(loss._VocabCrossEntropy, "backward", staticmethod(backward))


@bug("tp", "tp=2", r"layers.\d.weight.grad is 2 x the reference on every element = tp|= tp", model={"kind": "mlp"})
def a_replicated_gradient_is_reduced(patch: Patch) -> None:
    real = pairs.gather

    def gather(x: Tensor, group: Any, dim: int, tag: str = "", back_tag: str = "", *, then: str = "cut") -> Tensor:
        return real(x, group, dim, tag, back_tag or tag, then="cut")

    patch.setattr(pairs, "gather", gather)


# ---- sequence parallel ----------------------------------------------------------------------------------------------


@bug("sp", "dp=2,tp=2", r"norm.weight.grad differs .* the sum over tp is missing", sp=True)
def norm_gradients_are_not_summed_over_tp(patch: Patch) -> None:
    after_derivation(patch, lambda plan: without_axis(plan, "tp", lambda n: "norm" in n))


@bug("sp", "dp=2,tp=2", r"gradient is partial over dp\+tp but is summed over dp", by="checker", sp=True)
def the_rule_of_norms_forgets_tp(patch: Patch) -> None:
    real = rules.sum_axes

    def sum_axes(p: Any, *a: Any) -> tuple[str, ...]:
        return tuple(x for x in real(p, *a) if x != "tp" or "norm" not in p.name)

    patch.setattr(rules, "sum_axes", sum_axes)


@bug("sp", "tp=2", sp=True)
def the_gradient_of_a_gathered_input_is_not_summed(patch: Patch) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        return pairs.own_slice(grad, ctx.group, ctx.dim).contiguous(), None, None, None, None

    patch.setattr(pairs._Gather, "backward", staticmethod(backward))


@bug("sp", "tp=2", sp=True)
def gathered_pieces_come_in_the_wrong_order(patch: Patch) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole = ctx.group.all_gather(grad, ctx.dim, tag=ctx.tag)
        return torch.cat(whole.chunk(ctx.group.size, ctx.dim)[::-1], ctx.dim), None, None, None, None

    patch.setattr(pairs._ScatterSum, "backward", staticmethod(backward))


# ---- pipelines ------------------------------------------------------------------------------------------------------


@bug("pp", "pp=2", micro_batches=2)
def a_stage_uses_another_micro_batchs_labels(patch: Patch) -> None:
    real = engine.DistributedModel._run

    def run(self: Any, batch: Any, actions: Any, kind: str) -> Any:
        if self.stage.is_last:
            labels = [m.labels for m in batch.micro]
            batch = replace(batch, micro=tuple(replace(m, labels=labels[i - 1]) for i, m in enumerate(batch.micro)))
        return real(self, batch, actions, kind)

    patch.setattr(engine.DistributedModel, "_run", run)


@bug("pp", "pp=2", r"embed.weight.grad differs .* the sum over pp is missing", model={"tied": True}, micro_batches=2)
def tied_ends_are_not_summed(patch: Patch) -> None:
    patch.setattr(tied.TiedEnds, "sum", lambda self, params, store: None)


@bug("pp", "pp=2", r"the output of layers.1", micro_batches=2)
def a_stage_sends_the_first_activation_again(patch: Patch) -> None:
    real = StageRun._send

    def send(self: StageRun, action: Any) -> None:
        if action.kind == "SEND_F" and action.micro and 0 in self.outputs:
            self.outputs[action.micro].data.copy_(self.outputs[0].data)
        real(self, action)

    patch.setattr(StageRun, "_send", send)


@bug("pp", "pp=2", r"is zero everywhere, where the reference is not", micro_batches=2)
def the_gradient_stops_at_the_stage_boundary(patch: Patch) -> None:
    real = StageRun._send

    def send(self: StageRun, action: Any) -> None:
        if action.kind == "SEND_B":
            self.inputs[action.micro].grad.zero_()  # type: ignore[union-attr]
        real(self, action)

    patch.setattr(StageRun, "_send", send)


@bug("pp", "pp=2,dp=2", r"the sum over dp is missing", micro_batches=2)
def a_stage_never_reduces(patch: Patch) -> None:
    real = engine.DistributedModel._make_reducer

    def make(self: Any, bucket_bytes: int) -> Any:
        reducer = real(self, bucket_bytes)
        if self.stage.is_first:
            reducer.close()
            reducer.buckets = []
        return reducer

    patch.setattr(engine.DistributedModel, "_make_reducer", make)


# ---- ZeRO and FSDP --------------------------------------------------------------------------------------------------


@bug("zero", "dp=2", r"is 0.5 x the reference on every element = 1/dp", zero=1)
def shards_get_an_average(patch: Patch) -> None:
    real = shard.Unit.__init__

    def init(self: Any, *a: Any, **kw: Any) -> None:
        real(self, *a, **{**kw, "average": True})

    patch.setattr(shard.Unit, "__init__", init)


@bug("zero", "dp=2", r"is the .* of dp \d micro-batch 0|lacks the contribution of", zero=2, micro_batches=2)
def a_shard_keeps_only_the_last_micro_batch(patch: Patch) -> None:
    def finish(self: Any) -> None:
        if self._reducing is not None:
            self.grad, self._reducing = self._reducing.wait(), None

    patch.setattr(shard.Unit, "finish_reduce", finish)


@bug("zero", "dp=2", zero=1)
def updated_parameters_are_not_gathered(patch: Patch) -> None:
    def regather(self: Any, tag: str = "") -> None:
        for unit in self.units:
            unit._versions = unit.versions()

    patch.setattr(sharder.Sharder, "regather", regather)


@bug("zero", "dp=2", r"the gradient norm (leaves out what dp > 0|is the norm of what rank 0) holds", zero=2)
def the_norm_counts_one_shard(patch: Patch) -> None:
    real = engine.DistributedModel.counts
    patch.setattr(engine.DistributedModel, "counts", lambda self, n: real(self, n) and self.ctx.coords["dp"] == 0)


@bug("zero", "dp=2,tp=2", r"norm.weight.grad .* the sum over tp is missing", zero=2, sp=True)
def shards_are_not_summed_further(patch: Patch) -> None:
    patch.setattr(shard.Unit, "start_sums", lambda self, tag="": None)


@bug("fsdp", "rep=2,dp=2", r"differs .* the sum over rep is missing", zero=3)
def replicas_of_shards_are_not_summed(patch: Patch) -> None:
    patch.setattr(shard.Unit, "start_sums", lambda self, tag="": None)


@bug("fsdp", "dp=2", r"the output of ", zero=3)
def shards_are_put_together_in_the_wrong_order(patch: Patch) -> None:
    real = shard.collect
    patch.setattr(shard, "collect", lambda chunks, whole: real(chunks.flip(0).contiguous(), whole))


@bug("fsdp", "dp=3", zero=3)
def gradients_are_spread_without_padding(patch: Patch) -> None:
    def spread(whole: Any, chunks: Tensor) -> None:
        flat = torch.zeros(chunks.numel(), dtype=chunks.dtype)
        if whole is not None:
            flat[-whole.numel() :] = whole.reshape(-1)  # the padding stands before the rows, not after
        chunks.copy_(flat.view(chunks.shape))

    patch.setattr(shard, "spread", spread)


# ---- slices and initial weights -------------------------------------------------------------------------------------


def drawn(patch: Patch, change: Callable[[str, Any, Any, int], tuple[str, Any, int]]) -> None:
    real = materialize.draw

    def draw(name: str, shape: Any, ranges: Any, init: Any, seed: int) -> Tensor:
        name, ranges, seed = change(name, shape, ranges, seed)
        return real(name, shape, ranges, init, seed)

    patch.setattr(materialize, "draw", draw)


@bug("sharding", "tp=2", r"mlp.up.weight before the first step holds the right numbers in the wrong places: rank 0 has")
def two_ranks_swap_their_rows(patch: Patch) -> None:
    def change(name: str, shape: Any, ranges: Any, seed: int) -> Any:
        if name == "layers.1.mlp.up.weight" and len(ranges[0]) == 1 and ranges[0][0][1] - ranges[0][0][0] < shape[0]:
            ((start, stop),) = ranges[0]
            ranges = (((shape[0] - stop, shape[0] - start),), *ranges[1:])
        return name, ranges, seed

    drawn(patch, change)


@bug("sharding", "dp=2,tp=2", r"before the first step", zero=3)
def shards_of_a_cut_weight_are_taken_from_the_whole(patch: Patch) -> None:
    def change(name: str, shape: Any, ranges: Any, seed: int) -> Any:
        width = sum(b - a for a, b in ranges[0])
        return name, (((0, width),), *ranges[1:]), seed  # every rank takes the first rows

    drawn(patch, change)


@bug("init", "tp=2", r"before the first step .*wrong")
def every_tensor_rank_draws_the_same_shard(patch: Patch) -> None:
    def change(name: str, shape: Any, ranges: Any, seed: int) -> Any:
        return name, tuple(((0, sum(b - a for a, b in dim)),) for dim in ranges), seed

    drawn(patch, change)


@bug("init", "pp=2", r"layers.1.*before the first step")
def stages_number_their_layers_from_nought(patch: Patch) -> None:
    drawn(patch, lambda name, shape, ranges, seed: (name.replace("layers.1.", "layers.0."), ranges, seed))


@bug("init", "dp=2", r"differs between rank 0 and rank 1|before the first step")
def ranks_draw_from_one_stream(patch: Patch) -> None:
    count = [0]

    def change(name: str, shape: Any, ranges: Any, seed: int) -> Any:
        count[0] += 1
        return name, ranges, seed + count[0]

    drawn(patch, change)
