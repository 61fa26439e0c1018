"""What is ok, what a warning, what a problem; the exit code; what a bug report must not hold."""

import json
import socket

import pytest

from crosscut.cli.main import main
from crosscut.doctor import examine as examine_module
from crosscut.doctor import hardware, software, system
from crosscut.doctor.examine import can_train, examine, names_here, paste, redact
from crosscut.doctor.finding import ok, problem, warn

GB, MIB = 10**9, 2**20
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "finding, status, part",
    [
        (hardware.cores(8, 8, 1), "ok", "8 usable, 1 NUMA node"),
        (hardware.cores(1, 8, 1), "warn", "1 usable of 8"),
        (hardware.cores(64, 64, 2), "warn", "2 NUMA nodes"),
        (hardware.memory(20 * GB, 24 * GB), "ok", "20.0 GB free of 24.0"),
        (hardware.memory(2 * GB, 24 * GB), "warn", "2.0 GB"),
        (hardware.memory(GB // 2, 24 * GB), "problem", "0.5 GB"),
        (hardware.gpus([], False), "ok", "CPU"),
        (hardware.gpus([], True), "warn", "torch does not"),
        (hardware.gpus(["H200", "H200", "A10"], True), "ok", "2 x H200, 1 x A10"),
        (software.python((3, 9, 18)), "problem", "3.9.18"),
        (software.torch_version("2.7.1+cu126"), "problem", "2.7.1"),
        (software.torch_version("2.10.0"), "ok", "2.10.0"),
        (software.torch_version(None, "ImportError: libtorch.so"), "problem", "libtorch.so"),
        (software.companions({"numpy": "2.0", "rich": None}), "problem", "rich missing"),
        (system.open_files(20_000, 20_000), "ok", "20,000"),
        (system.open_files(system.UNLIMITED, system.UNLIMITED), "ok", "unlimited"),
        (system.open_files(512, 4096), "warn", "512"),
        (system.open_files(64, 64), "problem", "64"),
        (system.locked_memory(8 * MIB, 0), "ok", "8 MiB"),
        (system.locked_memory(8 * MIB, 8), "warn", "8 MiB"),
        (system.shared_memory(64 * MIB, 0), "warn", "64 MiB"),
        (system.shared_memory(24 * GB, 8), "ok", "MiB"),
        (system.shared_memory(None, 0), "ok", "none"),
        (system.ptrace(1), "ok", "scope 1"),
        (system.ptrace(3), "warn", "nobody"),
        (system.temp_folder(), "ok", "writable"),
        (system.host_name(["127.0.1.1"], 1, None), "ok", "loopback"),
        (system.host_name(["127.0.1.1", "::1"], 2, None), "warn", "loopback"),
        (system.host_name(["127.0.1.1"], 2, "eth0"), "ok", "eth0"),
        (system.host_name(["10.0.0.7", "127.0.1.1"], 2, None), "ok", "network"),
        (system.host_name(None, 1, None), "warn", "does not resolve"),
        (system.environment({}), "ok", "no variable"),
        (system.environment({"RANK": "0"}), "problem", "RANK=0"),
        (system.environment({**LAUNCHED, **MEETING}), "ok", "one rank of a launched world"),
        (system.environment({**LAUNCHED, **MEETING, "RANK": "4"}), "problem", "RANK=4"),
        (system.environment({"WORLD_SIZE": "2"}), "warn", "WORLD_SIZE=2"),
        (system.port({}), "ok", "a free one"),
        (system.port({"MASTER_PORT": "70000"}), "problem", "70000"),
        (system.port({"MASTER_PORT": "port"}), "problem", "'port'"),
    ],
)
def test_findings(finding, status, part):
    assert finding.status == status
    assert part in finding.text
    assert bool(finding.fix) == (status != "ok")


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1])
        assert system.port({"MASTER_PORT": number}).status == "problem"
        assert system.port({**LAUNCHED, **MEETING, "MASTER_PORT": number}).status == "ok"  # by the world itself


def test_hosts_of_a_launched_world():
    assert system.num_hosts({**LAUNCHED, **MEETING}) == 2
    assert system.num_hosts({}) == system.num_hosts({"RANK": "0"}) == 1


@pytest.mark.parametrize(
    "facts, expected",
    [
        ({"gloo": True, "shm_why_not": None, "nccl_built": False, "num_gpus": 0}, "ok ok ok ok"),
        ({"gloo": True, "shm_why_not": "it needs Linux", "nccl_built": False, "num_gpus": 0}, "ok ok warn ok"),
        ({"gloo": False, "shm_why_not": None, "nccl_built": False, "num_gpus": 2}, "ok problem ok warn"),
        ({"gloo": True, "shm_why_not": None, "nccl_built": True, "num_gpus": 2}, "ok ok ok ok"),
    ],
)
def test_back_ends(facts, expected):
    found = software.backends(**facts)
    assert [finding.name for finding in found] == ["threads", "gloo", "shm", "nccl"]
    assert " ".join(finding.status for finding in found) == expected


def test_this_machine_and_its_default():
    found = {finding.name: finding for finding in examine()}
    assert len(found) >= 18
    assert can_train(found.values())
    assert "2 ranks use " in found["default"].text
    assert ": torch sees" in found["default"].text  # why


@pytest.mark.parametrize(
    "findings, code, says",
    [
        ([ok("torch", "2.13.0"), warn("memory", "2 GB", "free some")], 0, "training can work here"),
        ([ok("torch", "2.13.0"), problem("gloo", "missing", "install it")], 1, "training cannot work here"),
    ],
)
def test_exit_code_and_json(findings, code, says, monkeypatch, capsys):
    monkeypatch.setattr(examine_module, "examine", lambda: findings)
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert says in shown
    assert findings[1].fix in shown
    assert main(["doctor", "--json", "-"]) == code
    out = json.loads(capsys.readouterr().out)
    assert (out["schema"], out["version"], out["can_train"]) == ("crosscut.doctor", 1, code == 0)
    assert out["rows"][1] == {
        "name": findings[1].name,
        "status": findings[1].status,
        "text": findings[1].text,
        "fix": findings[1].fix,
    }


def test_a_bug_report_holds_no_names_and_no_paths():
    names = ["/home/anna.k", "gpu-box-7", "anna.k"]
    found = [
        problem("torch", "cannot be imported: /home/anna.k/venv/lib/libtorch.so: not found", "ask anna.k"),
        ok("host name", "gpu-box-7 is 10.1.2.3, not 127.0.0.1"),
        ok("/dev/shm", "/dev/shm is 64 MiB, /opt/data is elsewhere; read/write 1/2"),
    ]
    text = paste(found, "0.1.0", names)
    assert text.startswith("crosscut 0.1.0\n")
    assert len(text.splitlines()) == 4
    for private in ("anna", "gpu-box", "/home", "/opt", "10.1.2.3"):
        assert private not in text
    for public in ("cannot be imported", "127.0.0.1", "/dev/shm is 64", "read/write 1/2"):
        assert public in text


def test_the_report_of_this_machine(capsys):
    assert main(["doctor", "--paste"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("crosscut ")
    assert "\x1b" not in shown
    for name in names_here():
        assert name not in shown
    assert redact(shown, names_here()) == shown
    assert main(["doctor", "--paste", "--json", "-"]) == 2
