"""One rank's part of the depth: the model's own forward, from its first layer to the next stage's.

The model keeps its forward. On a stage after the first, the modules before the layers are stubs that return the
received activation, and the first layer held gets it whatever was made of it in between; on a stage before the last,
the forward is left where it would enter the next stage's first layer, so that what stands between two layers runs
once, on the stage of the first. What else the forward makes for its layers (rotary tables, masks) it makes on every
stage, from arguments that every stage has.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from crosscut.layout.plan import Plan


class _StageDone(Exception):
    """Carries the value that the next stage's first layer reads out of the model's forward."""

    def __init__(self, output: Tensor) -> None:
        super().__init__("the stage is done")
        self.output = output


class _Received(nn.Module):
    """Stands where a module of another stage stood."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__()
        self._stage = [stage]  # in a list, or nn.Module would register the cycle
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        received = self._stage[0].received
        if received is None:
            raise ValueError(
                f"{self._name} lives on another pipeline stage; only what runs before the layers may be called here"
            )
        return received


class _NextStage(nn.Module):
    """Stands where the next stage's first layer stood: here this stage's forward ends."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not args or not isinstance(args[0], Tensor):
            raise ValueError(
                "under pp the hidden value, one tensor, must be the first positional argument of each layer"
            )
        raise _StageDone(args[0])


class Stage:
    """The modules of one pipeline stage. `module` is the whole model, cut down in place; names stay those of the model.

    Raises ValueError when the model breaks a clause of docs/model_contract.md that cutting by depth needs.
    """

    def __init__(self, module: nn.Module, plan: Plan, stage: int, num_stages: int) -> None:
        self.module, self.index, self.num_stages = module, stage, num_stages
        self.received: Tensor | None = None
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if num_stages > 1:
            self._cut(plan)

    def _cut(self, plan: Plan) -> None:
        assert plan.layers is not None
        layers = self.module.get_submodule(plan.layers)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(f"{plan.layers} is a {type(layers).__name__}; the layers must be one nn.ModuleList")
        held = [(str(i), layer) for i, layer in enumerate(layers) if plan.layer_stages[i] == self.index]
        layers._modules = OrderedDict(held)  # keeps the model's numbering in every name
        if not self.is_last:
            layers._modules[str(int(held[-1][0]) + 1)] = _NextStage()
        for name in plan.before if not self.is_first else ():
            self._replace(name)
        for name in plan.after if not self.is_last else ():
            self._replace(name)
        self._called: list[str] = []
        for name, layer in held:
            layer.register_forward_pre_hook(self._note(name))
        if not self.is_first:
            held[0][1].register_forward_pre_hook(self._feed, with_kwargs=True)
        self._held = [name for name, _ in held]

    def _replace(self, name: str) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.module.get_submodule(parent), child, _Received(self, name))

    def _note(self, name: str) -> Any:
        def hook(layer: nn.Module, args: tuple) -> None:
            self._called.append(name)

        return hook

    def _feed(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not args:
            raise ValueError("under pp the hidden value must be the first positional argument of each layer")
        return (self.received, *args[1:]), kwargs

    def forward(self, received: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the stage: the model's output on the last stage, the last held layer's output on the others."""
        if self.num_stages == 1:
            return self.module(*args, **kwargs)
        self.received, self._called = received, []
        try:
            output = self.module(*args, **kwargs)
        except _StageDone as done:
            output = done.output
        else:
            if not self.is_last:
                raise ValueError(
                    f"the forward never called layer {self._held[-1]}: under pp every layer runs once, in order"
                )
        finally:
            self.received = None
        if self._called != self._held:
            raise ValueError(
                f"the forward called layers {', '.join(self._called)} where this stage holds "
                f"{', '.join(self._held)}: under pp every layer runs once, in order"
            )
        return output
