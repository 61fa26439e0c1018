"""Stock PyTorch programs give on shm what they give on Gloo."""

import pytest
import torch

from shm import stock


@pytest.fixture
def both(pool):
    """Run a program on both back ends and compare what every rank returns: bitwise, or, where Gloo adds more than two
    numbers in an order of its own, closely."""

    def run(program, *args, world_size, exact=True):
        gloo = pool.run(program, *args, world_size=world_size, backend="gloo", timeout_s=100)
        shm = pool.run(program, *args, world_size=world_size, backend="shm", timeout_s=100)
        for rank in range(world_size):
            assert shm[rank].keys() == gloo[rank].keys()
            for name, found in shm[rank].items():
                if exact:
                    assert torch.equal(found, gloo[rank][name]), (rank, name, found, gloo[rank][name])
                else:
                    torch.testing.assert_close(found, gloo[rank][name], rtol=1e-5, atol=1e-6)
        return shm

    return run


@pytest.mark.parametrize("mode", ["plain", "unused", "static", "no_sync", "views"])
def test_ddp(both, mode):
    results = both(stock.ddp, mode, world_size=2)
    for name in ("module.first.weight", "module.last.bias"):
        assert torch.equal(results[0][name], results[1][name])


def test_ddp_on_four_ranks(both):
    both(stock.ddp, "unused", world_size=4, exact=False)


def test_ddp_with_a_communication_hook(both):
    both(stock.ddp_compressed, world_size=2)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_fsdp2(both, mesh):
    both(stock.fsdp, mesh, world_size=torch.Size(mesh).numel(), exact=mesh == (2,))


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallel(both, world_size):
    both(stock.tensor_parallel, world_size=world_size, exact=world_size == 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensor(both, world_size):
    both(stock.dtensors, world_size=world_size, exact=world_size == 2)


@pytest.mark.parametrize("schedule, world_size", [("1f1b", 2), ("gpipe", 4)])
def test_pipelining(both, schedule, world_size):
    both(stock.pipeline, schedule, world_size=world_size)


@pytest.mark.parametrize("mode", ["save", "async"])
def test_distributed_checkpoint(both, tmp_path, mode):
    both(stock.checkpoint, str(tmp_path), mode, world_size=2)


def test_meshes_and_groups(both):
    both(stock.meshes, world_size=4)


def test_sparse_gradients_go_through_gloo(both):
    both(stock.sparse, world_size=2)
