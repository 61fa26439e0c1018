"""See every call that torch's process groups are given, by whatever program, and decide when it is made.

`intercept(observer)` puts an `InterceptedGroup` in the place of the world's process group, and of every group made
afterwards (`new_group`, device meshes, `split_group`). torch calls a group from Python (torch.distributed) and from C++
(functional collectives, DDP's reducer): both find the one that is registered. It describes each call as a `Call`, asks
its observer, and lets the inner group do the work. What holds a group from before (a DDP model, a variable) goes on
with that one, unseen.

    class Log:                               # an observer
        def on_call(self, group, asked):     # asked.start() makes the call, now or later
            print(asked.call.where())
            return Started(asked.start())
        def on_done(self, group, call, error): ...
        def on_close(self, group): ...

    with intercept(Log()):
        ...
"""

from crosscut.comm.intercept.group import Asked as Asked
from crosscut.comm.intercept.group import InterceptedGroup as InterceptedGroup
from crosscut.comm.intercept.group import Observer as Observer
from crosscut.comm.intercept.group import Running as Running
from crosscut.comm.intercept.group import Started as Started
from crosscut.comm.intercept.place import Interception as Interception
from crosscut.comm.intercept.place import intercept as intercept
