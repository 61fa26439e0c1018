"""Small worlds of rank threads that train a little, for the tests of checkpoints and of going on."""

import torch

from crosscut import Layout, distribute, local_batch, spawn
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.dims import mlp_dims, transformer_dims
from crosscut.models.mlp import MLP, mean_square
from crosscut.models.transformer import Transformer, next_token_loss

SMALL = {"vocab": 24, "embed": 24, "layers": 4, "heads": 6, "mlp": 36}
BATCH, SEQ = 12, 8


def parts_of(cfg):
    """(build, dims, loss_fn) of a reference model."""
    if isinstance(cfg, MLPConfig):
        return lambda: MLP(cfg), mlp_dims(cfg), mean_square
    return lambda: Transformer(cfg), transformer_dims(cfg), next_token_loss


def make(ctx, cfg, mesh, optimizer="adamw", seed=0, **layout):
    """A distributed model (fp64, unless `layout` says otherwise) and its optimizer."""
    where = Layout.of(mesh, **{"compute": "fp64", **layout})
    build, dims, loss_fn = parts_of(cfg)
    seq = None if isinstance(cfg, MLPConfig) else SEQ
    model = distribute(build, dims, where, ctx, loss_fn=loss_fn, batch=BATCH, seq=seq, seed=seed)
    if optimizer == "adamw":
        return model, model.optimizer(torch.optim.AdamW, lr=1e-2)
    return model, model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9 if optimizer == "momentum" else 0.0)


def train(model, optimizer, cfg, steps):
    """`steps` optimizer steps on data that depends on the step, the row and the place in it."""
    for step in steps:
        g = torch.Generator().manual_seed(100 + step)
        if isinstance(cfg, MLPConfig):
            batch = local_batch(
                torch.randn(BATCH, cfg.dim, generator=g, dtype=torch.float64), None, model.layout, model.ctx
            )
        else:
            ids = torch.randint(cfg.vocab, (BATCH, SEQ + 1), generator=g)
            batch = local_batch(ids[:, :-1], ids[:, 1:], model.layout, model.ctx)
        model.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()


def held(model, optimizer):
    """This rank's pieces: {name: (ranges, value)}, of parameters and of optimizer state."""
    out = {}
    for name, p in model.named_parameters():
        plan = model.plan.params[name]
        main = plan.tied_to or name
        ranges = model.held_ranges(name)
        out[main] = (ranges, p.detach().clone())
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                out[f"{key} of {main}"] = (ranges if value.ndim == p.ndim else (), value.clone())
    return out


def whole(ranks, shapes):
    """The whole tensors from every rank's pieces; replicas must agree to the bit."""
    out = {}
    for rank in ranks:
        for name, (ranges, value) in rank.items():
            shape = shapes[name.rpartition(" of ")[2]] if ranges else ()
            filled, seen = out.setdefault(name, (value.new_zeros(shape), torch.zeros(shape, dtype=torch.bool)))
            index = tuple(torch.cat([torch.arange(a, b) for a, b in dim or ((0, 0),)]) for dim in ranges)
            if not ranges:
                assert not seen or torch.equal(filled, value)
                filled.copy_(value)
                seen.fill_(True)
                continue
            grid = torch.meshgrid(*index, indexing="ij")
            assert torch.equal(torch.where(seen[grid], filled[grid], value), value), name
            filled[grid] = value
            seen[grid] = True
    assert all(bool(seen.all()) for _, seen in out.values())
    return {name: filled for name, (filled, _) in out.items()}


def world(fn, mesh, *args, **kwargs):
    """`fn(ctx, mesh, *args)` on the ranks of `mesh`, as threads."""
    size = Layout.of(mesh).mesh.world_size
    return spawn(fn, mesh, *args, world_size=size, backend="threads", **kwargs)


def transformer(**kw):
    """A small transformer's config."""
    return TransformerConfig(**{**SMALL, **kw})
