"""Cuts: which mesh axes divide which named dim, the usual choice per axis, and who wins an axis within one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from crosscut.layout.errors import LayoutError, nearest
from crosscut.layout.mesh import AXES, Mesh

# Dims claim axes in this order within one tensor: an axis cuts only one dim of it.
PRECEDENCE = ("experts", "vocab", "kv_heads", "heads", "mlp", "batch", "seq")
NEVER_CUT = ("embed", "head_dim", "router")
DIM_NAMES = ("batch", "seq", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers", "experts", "router")

# What `--mesh` means when no cuts are written: the usual cuts of each axis name.
USUAL_CUTS: dict[str, tuple[str, ...]] = {
    "pp": ("layers",),
    "rep": ("batch",),
    "dp": ("batch", "experts"),
    "cp": ("seq",),
    "tp": ("heads", "kv_heads", "mlp", "vocab"),
}
WIDTH_DIMS = ("vocab", "kv_heads", "heads", "mlp")  # the dims whose cut divides weights inside a boundary

Cuts = Mapping[str, tuple[str, ...]]


def usual_cuts(mesh: Mesh, sp: bool = False) -> dict[str, tuple[str, ...]]:
    """The usual cuts (dim -> axes, outermost first) of the axes of size > 1; `sp` adds tp to what cuts seq."""
    cuts: dict[str, list[str]] = {}
    for axis in mesh.axes:
        dims = USUAL_CUTS[axis] + (("seq",) if sp and axis == "tp" else ())
        for dim in dims if mesh.size(axis) > 1 else ():
            cuts.setdefault(dim, []).append(axis)
    return normal_cuts(cuts, mesh)


def normal_cuts(cuts: Mapping[str, object], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Checked cuts in one fixed order of dims: `"tp"` becomes `("tp",)`, kv_heads goes with heads.

    Raises LayoutError for an unknown dim or axis (with the nearest name), an axis named twice for one dim, an axis that
    cuts two dims which cannot share it, lists not outermost first, and an axis of size > 1 that cuts nothing.
    """
    out: dict[str, tuple[str, ...]] = {}
    for dim, value in cuts.items():
        if dim not in DIM_NAMES:
            raise LayoutError(f"[cuts] unknown dim {dim!r}{nearest(dim, DIM_NAMES)}")
        if dim in NEVER_CUT:
            raise LayoutError(f"[cuts] {dim} cannot be cut; cut {', '.join(PRECEDENCE)} or layers")
        axes = (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
        for axis in axes:
            if axis not in AXES:
                raise LayoutError(f"[cuts] {dim} = {axis!r}: unknown axis{nearest(str(axis), AXES)}")
            if axes.count(axis) > 1:
                raise LayoutError(f"[cuts] axis {axis!r} cuts {dim} twice; name it once")
        if list(axes) != sorted(axes, key=mesh.axes.index):
            raise LayoutError(f"[cuts] {dim} = {list(axes)} must be outermost first, as the mesh: {list(mesh.axes)}")
        out[dim] = axes
    if out.get("kv_heads", out.get("heads", ())) != out.get("heads", ()):
        raise LayoutError(
            f"[cuts] kv_heads = {list(out['kv_heads'])} must be cut like heads = {list(out.get('heads', ()))}; "
            "leave kv_heads out"
        )
    if "heads" in out:
        out["kv_heads"] = out["heads"]
    _check_sharing(out, mesh)
    order = ("layers", *PRECEDENCE[::-1])
    return {d: out[d] for d in order if out.get(d)}


def _check_sharing(cuts: Cuts, mesh: Mesh) -> None:
    for axis in mesh.axes:
        dims = [d for d, axes in cuts.items() if axis in axes]
        if "layers" in dims and axis != "pp":
            raise LayoutError(f'[cuts] layers = {axis!r}: layers are cut over pp only; write layers = "pp"')
        if axis == "pp" and dims and dims != ["layers"]:
            other = next(d for d in dims if d != "layers")
            raise LayoutError(f"[cuts] {other} = 'pp': pp cuts layers only; cut {other} over dp, cp or tp")
        clash = [d for d in dims if d not in ("batch", "experts")]
        if "batch" in dims and clash:
            raise LayoutError(f"[cuts] axis {axis!r} is cut twice: it divides both batch and {clash[0]}; drop one")
        if mesh.size(axis) > 1 and not dims:
            hint = USUAL_CUTS[axis][0]
            raise LayoutError(f'mesh axis {axis}={mesh.size(axis)} cuts no dim; add {hint} = "{axis}" to [cuts]')


def claims(dims: Iterable[Iterable[str]], cuts: Cuts, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Which axes (of size > 1) cut each tensor dim, where `dims[d]` are the names that make up tensor dim d.

    Names claim their axes in the order PRECEDENCE; an axis that is taken by another tensor dim is not given twice.
    Axes come back outermost first. ``claims([["batch"], ["seq"], ["vocab"]], ...)`` gives tp to vocab, not to seq.
    """
    rows = [tuple(names) for names in dims]
    owner: dict[str, int] = {}
    for name in PRECEDENCE:
        for d, names in enumerate(rows):
            if name in names:
                for axis in cuts.get(name, ()):
                    if mesh.size(axis) > 1:
                        owner.setdefault(axis, d)
    return tuple(tuple(a for a in mesh.axes if owner.get(a) == d) for d in range(len(rows)))
