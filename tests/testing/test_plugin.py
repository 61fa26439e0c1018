"""`@pytest.mark.ranks` as somebody's own tests see it: every way in which a test of several ranks ends."""

import pytest

PROGRAM = """
import os, time, unittest
import pytest, torch, torch.distributed as dist
from helper import doubled

@pytest.fixture
def scale():
    return 3

@pytest.mark.ranks(2, 3)
def test_plain(scale):
    x = torch.full((3,), float(dist.get_rank() * scale))
    dist.all_reduce(x)
    assert x[0] == scale * sum(range(dist.get_world_size()))

@pytest.mark.ranks(2)
def test_assertion(tmp_path):
    print("rank", dist.get_rank(), "was here")
    found = {"rank": min(dist.get_rank(), 1), "same": [1, 2, 3]}
    assert found == {"rank": 0, "same": [1, 2, 3]}

@pytest.mark.ranks(3, backend="threads")
def test_threads(ctx):
    total = ctx.world.all_reduce(torch.tensor([1.0 * ctx.rank]))
    assert total.item() == doubled(2)

@pytest.mark.ranks(2)
def test_mismatch():
    dist.all_reduce(torch.ones(4), dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.MAX)

@pytest.mark.ranks(2, timeout_s=1)
def test_hang():
    if dist.get_rank():
        time.sleep(100)
    dist.all_reduce(torch.ones(4))

@pytest.mark.ranks(2)
def test_killed():
    if dist.get_rank():
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(4))

@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_skipped_on_one():
    if dist.get_rank():
        pytest.skip("not me")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=Exception, strict=True)
def test_expected_to_fail():
    assert dist.get_rank() == 0

@pytest.mark.ranks(2)
def test_expected_inside():
    pytest.xfail("a known bug")

@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.chdir(tmp_path)
    return tmp_path

@pytest.mark.ranks(2)
def test_environment(place):
    assert os.environ.pop("PLACE") == "here" and os.getcwd() == str(place)
    os.environ["LEFT"] = "1"
    os.chdir("/")

@pytest.mark.ranks(2)
def test_environment_of_the_next():
    assert "PLACE" not in os.environ and "LEFT" not in os.environ and os.getcwd() != "/"

class TestOfUnittest(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_alone(self):
        pass

@pytest.mark.ranks(2)
class TestWithSetup:
    def setup_method(self):
        self.value = 7

    def test_setup(self):
        assert self.value == 7

    @staticmethod
    def test_static():
        assert dist.get_world_size() == 2

    @classmethod
    def test_of_the_class(cls):
        assert cls is TestWithSetup

@pytest.mark.ranks(2)
class TestUnsendable:
    def setup_method(self):
        self.made = lambda: 0

    def test_unsendable(self):
        pass

class TestInAClass:
    @pytest.mark.ranks(2, backend="gloo")
    @pytest.mark.parametrize("k", [1, 2])
    def test_method(self, k, ctx):
        assert (ctx.world_size, ctx.backend, k > 0) == (2, "gloo", True)

@pytest.mark.ranks(2)
def test_unsendable(capsys):
    pass

@pytest.mark.ranks(0)
def test_no_ranks():
    pass

@pytest.mark.ranks(2, backend="mpi")
def test_other_backend():
    pass

@pytest.mark.ranks(2, world=3)
def test_other_argument():
    pass

@pytest.mark.ranks(2, timeout_s="long")
def test_other_timeout():
    pass

@pytest.mark.ranks(2, backend="threads")
async def test_awaits():
    raise AssertionError("never awaited")

def test_without_the_mark(ctx):
    pass

@pytest.mark.ranks(2)
def test_after_all_that(ctx):
    assert ctx.world.all_gather(torch.tensor([ctx.rank])).tolist() == [0, 1]
"""


@pytest.fixture
def outcome(pytester):
    pytester.makepyfile(helper="def doubled(x):\n    return 2 * x\n", test_ranks=PROGRAM)
    pytester.makeini("[pytest]\naddopts = --strict-markers\n")
    return pytester.runpytest_subprocess("-p", "no:xdist", timeout=110)


@pytest.mark.xdist_group("processes")
def test_every_end_of_a_test(outcome):
    outcome.assert_outcomes(passed=10, failed=13, errors=2, skipped=1, xfailed=2)
    outcome.stdout.fnmatch_lines(["@pytest.mark.ranks: unittest runs its own methods; use a plain function or class"])
    outcome.stdout.fnmatch_lines(["the fixture ctx needs @pytest.mark.ranks(n) on the test"])
    outcome.stdout.fnmatch_lines(
        [
            # the assertion as pytest shows it, with the two sides compared, and what the rank printed
            "rank 1 of 2 on *: AssertionError: assert {'rank': 1, *",
            ">       assert found == {\"rank\": 0, \"same\": [[]1, 2, 3[]]}",
            "E         {'rank': 1} != {'rank': 0}",
            "test_ranks.py:*: AssertionError",
            "*Captured stdout of rank 1*",
            "rank 1 was here",
            "rank 2 of 3 on threads: *assert 3.0 == 4*",
            "E       assert 3.0 == 4",
            # sentences where no assertion is to blame
            "rank * of 2 *: MismatchError: *all_reduce(*",
            "rank 1 of 2 did not end within 1 s: rank 1 is at test_ranks.py:* in test_hang; rank 0: StuckError: *",
            "rank 1 of 2 (pid *) was killed by SIGKILL*",
            "ranks skipped (not me), but not all: 0 ended otherwise",
            "@pytest.mark.ranks: self.made is a function, which cannot be sent to the ranks *",
            "@pytest.mark.ranks: the fixture 'capsys' gives a CaptureFixture, which cannot be sent *",
            "@pytest.mark.ranks: the number of ranks is 0; use 1 to 16",
            "@pytest.mark.ranks: backend='mpi' is unknown; use one of threads, shm, gloo",
            "@pytest.mark.ranks: unknown argument 'world'; use backend, timeout_s",
            "@pytest.mark.ranks: timeout_s='long' must be positive",
            "@pytest.mark.ranks: test_awaits is async, which ranks do not await; *",
        ]
    )  # fmt: skip
    assert "distributed_c10d.py" not in outcome.stdout.str()


def test_the_plugin_does_not_import_torch(pytester):
    pytester.makepyfile("import sys\n\ndef test_nothing():\n    assert 'torch' not in sys.modules\n")
    pytester.runpytest_subprocess("-p", "no:xdist").assert_outcomes(passed=1)
