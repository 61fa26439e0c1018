"""Runs one stage's list of actions: forwards, backwards, and the sends and receives between them.

Any list that parallel/pipeline/validate.py accepts can be run. Sends are asynchronous; the next receive is posted
before the computation that precedes it, so that transfers run beside compute. Activations and gradients travel over two
communicators, each in one direction, in the order of the list: no rank can wait for another in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.comm.group import Group, Handle
from crosscut.parallel.pipeline.schedules import RECVS, SENDS, Action


@dataclass
class StageWork:
    """What the runtime needs of a stage.

    forward(micro, received) -> its output: a hidden value, or the scaled loss on the last stage.
    buffer(micro) -> an empty tensor for a hidden value of that micro-batch (or its gradient: they have one shape).
    before_last_backward() is called ahead of the stage's last backward. tag(action): the rule's name of a transfer.
    """

    forward: Callable[[int, Tensor | None], Tensor]
    buffer: Callable[[int], Tensor]
    before_last_backward: Callable[[], None]
    tag: Callable[[Action], str]
    is_last: bool


class StageRun:
    """One pass of one stage through its list of actions. `channels`: the pp group for activations and the one for
    gradients; a stage's peer is its index in them. kind: `step` or `control`, for the ledger."""

    def __init__(
        self, actions: Sequence[Action], work: StageWork, channels: Sequence[Group], kind: str = "step"
    ) -> None:
        self.actions, self.work, self.channels, self.kind = actions, work, channels, kind
        self.backwards = [i for i, a in enumerate(actions) if a.kind == "B"]
        self.inputs: dict[int, Tensor] = {}  # micro -> received activation, the leaf that gathers its gradient
        self.outputs: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}  # micro -> received gradient of the output
        self.posted: dict[int, Handle[Tensor]] = {}  # by index of the receive in the list
        self.sends: list[Handle[Tensor]] = []

    def run(self) -> None:
        """Do every action, in order; returns when all sends have gone."""
        for i, action in enumerate(self.actions):
            if action.is_compute:
                self._post_next_receive(after=i)
            if action.kind == "F":
                self._forward(action.micro)
            elif action.kind == "B":
                self._backward(action.micro, last=i == self.backwards[-1])
            elif action.kind in SENDS:
                self._send(action)
            else:
                self._receive(i)
        for handle in self.sends:
            handle.wait()

    def _forward(self, micro: int) -> None:
        received = self.inputs.get(micro)
        self.outputs[micro] = self.work.forward(micro, received)
        if not self.backwards:  # nothing will come back
            self.inputs.pop(micro, None)

    def _backward(self, micro: int, *, last: bool) -> None:
        if last:
            self.work.before_last_backward()
        output, received = self.outputs.pop(micro), self.inputs.get(micro)
        if output.requires_grad:
            torch.autograd.backward(output, None if self.work.is_last else self.grads.pop(micro))
        if received is not None and received.grad is None:
            received.grad = torch.zeros_like(received)  # the stage did not use it: zeros go back, not silence

    def _send(self, action: Action) -> None:
        if action.kind == "SEND_F":
            value = (self.outputs[action.micro] if self.backwards else self.outputs.pop(action.micro)).detach()
        else:
            grad = self.inputs.pop(action.micro).grad
            assert grad is not None
            value = grad
        assert action.peer is not None
        group = self.channels[action.channel]
        self.sends.append(group.send(value, action.peer, async_op=True, tag=self.work.tag(action), kind=self.kind))

    def _post(self, i: int) -> Handle[Tensor]:
        action = self.actions[i]
        assert action.peer is not None
        group = self.channels[action.channel]
        buffer = self.work.buffer(action.micro)
        return group.recv(buffer, action.peer, async_op=True, tag=self.work.tag(action), kind=self.kind)

    def _post_next_receive(self, after: int) -> None:
        """Post the next receive of the list, if it is not, so that it runs beside the computation at hand."""
        for i in range(after + 1, len(self.actions)):
            if self.actions[i].kind in RECVS:
                if i not in self.posted:
                    self.posted[i] = self._post(i)
                return

    def _receive(self, i: int) -> None:
        value = (self.posted.pop(i, None) or self._post(i)).wait()
        action = self.actions[i]
        if action.kind == "RECV_F":
            self.inputs[action.micro] = value.requires_grad_(torch.is_grad_enabled())
        else:
            self.grads[action.micro] = value
