"""The hosts of a run: what is refused in one line, and how the others are reached."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest

from your_ai.config import build
from your_ai.errors import UserError
from your_ai.run.host import WATCHDOG
from your_ai.session import machines
from your_ai.session.machines import (
    PASSED_ON,
    Machine,
    Machines,
    Tools,
    address_of,
    check_first,
    check_programs,
    check_reachable,
    free_first_port,
    launch_command,
    launcher,
    machines_of,
    paths_to_sync,
    sync_hosts,
)

TWO = Machines((Machine("mac1", ("127.0.0.1",)), Machine("mac2", ("10.0.0.2",))))


def tools(status: int = 0, said: str = "", missing: str = "") -> tuple[Tools, list[list[str]]]:
    """Tools that record what is run; `missing` is not installed."""
    run: list[list[str]] = []

    def record(command):
        run.append(list(command))
        return status, said

    return Tools(record, lambda name: None if name == missing else f"/bin/{name}"), run


def hostfile(tmp_path, content) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def machines_in(tmp_path, content) -> Machines:
    """The hosts that a hostfile names."""
    return machines_of(build({"hostfile": hostfile(tmp_path, content)}, "test"))


def host(name: str, ip: str = "127.0.0.1", **more) -> dict:
    return {"ssh": name, "ips": [ip], **more}


def test_a_hostfile_of_mlx_launch_is_read_with_limits(tmp_path):
    hosts = [host("a"), host("b", "127.0.0.2", max_memory=16)]
    found = machines_in(tmp_path, {"backend": "ring", "envs": ["A=1"], "hosts": hosts})
    assert [h.max_memory for h in found.hosts] == [None, 16]
    written = json.loads(found.as_json())
    assert [h["ssh"] for h in written["hosts"]] == ["127.0.0.1", "b"]  # the first without ssh
    assert written["envs"][0] == "A=1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a hostfile of mlx.launch"),
        ({"hosts": [{"ips": []}]}, "is not a hostfile of mlx.launch"),
        ({"hosts": [host("a")]}, "names one host"),
        ({"hosts": [host("a"), host("a")]}, "a is there twice"),
        ({"hosts": [host("a"), host("-oX")]}, "-oX is no host"),
        ({"hosts": [host("a", "192.0.2.1"), host("b")]}, "the first host must be this machine"),
        ({"backend": "smoke", "hosts": [host("a"), host("b")]}, "backend smoke is unknown"),
        ({"hosts": [host("a", max_memory=-1), host("b")]}, "max_memory must be"),
        ({"hosts": [host("a", max_memory=True), host("b")]}, "max_memory must be"),
        ({"hosts": [{"ssh": "a", "ips": "127.0.0.1"}, host("b")]}, "ips must be a list"),
        ({"hosts": [host("a"), host("b", "10.0.0.1; touch x")]}, "10.0.0.1; touch x is no"),
        ({"hosts": [host("a"), {"ssh": "b", "ips": []}]}, "b has no ips"),
        (
            {"hosts": [host("mac"), host("MAC.", "127.0.0.2")]},
            "MAC. is there twice, as mac as well",
        ),
        ({"hosts": [host("a"), host("b")]}, "b is there twice, as a as well"),
        ({"hosts": [host("a"), host("b", "10.0.0.2")]}, "a has the address 127.0.0.1, at which b"),
        ({"hosts": [host("a", "::1"), host("b", "::2")]}, "needs an IPv4 address"),
        ({"hosts": [host("a"), host("b", "127.0.0.2:80")]}, "needs an IPv4 address"),
        (
            {"hosts": [{"ssh": "a", "ips": ["127.0.0.1", "127.0.0.3"]}, host("b", "127.0.0.2")]},
            "equally many ips for the ring of MLX; b has 1, and a has 2",
        ),
        (
            {"hosts": [host("a", max_memory_gb=3), host("b")]},
            "unknown key max_memory_gb; did you mean max_memory",
        ),
        ({"hosts": [host("a"), host("b"), "c"]}, "a host must be"),
        ({"envs": "A=1", "hosts": [host("a"), host("b")]}, "envs must be a list"),
        ({"envs": ["A"], "hosts": [host("a"), host("b")]}, "envs must be a list"),
        ({"envs": [1], "hosts": [host("a"), host("b")]}, "envs must be a list"),
        ({"hosts": [host("a"), host("x@-oX")]}, "x@-oX is no host"),
    ],
)
def test_wrong_hostfiles_are_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(UserError, match=message) as raised:
        machines_in(tmp_path, content)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["a b", "a;b", "a'b", 'a"b', "a\nb", "a\x1b[31m", "$(b)", "`b`", "~", "a*", "-a", ""]
)
def test_names_that_a_shell_could_read_as_more_are_no_hosts(tmp_path, name):
    with pytest.raises(UserError, match="is no host") as raised:
        machines_in(tmp_path, {"hosts": [host("a"), host(name)]})
    assert str(raised.value).isprintable()
    if name and name.isprintable():
        with pytest.raises(UserError, match="is no host"):
            machines_of(build({"hosts": ("localhost", name)}, "test"))


@pytest.mark.parametrize("name", ["mac1", "mac-2.local", "ann@10.0.0.2", "fe80::1%en0", "möwe"])
def test_usual_names_are_hosts(tmp_path, name):
    hosts = [host("a"), host(name, "127.0.0.2", rdma=None)]
    assert machines_in(tmp_path, {"hosts": hosts}).hosts[1].ssh == name


def test_all_hosts_get_the_places_of_models_and_what_the_gpu_needs(monkeypatch):
    for name in PASSED_ON:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("YOUR_AI_HOME", "/my models")
    assert json.loads(TWO.as_json())["envs"] == ["YOUR_AI_HOME=/my models"]
    monkeypatch.delenv("YOUR_AI_HOME")
    monkeypatch.setenv(WATCHDOG, "1")
    assert json.loads(TWO.as_json())["envs"] == [f"{WATCHDOG}=1"]
    own = replace(TWO, envs=(f"{WATCHDOG}=0",))
    assert json.loads(own.as_json())["envs"] == [f"{WATCHDOG}=0"]


def test_a_host_is_resolved_as_ssh_reads_it():
    for name in ("localhost", "ann@localhost", "ssh://ann@localhost:22", "127.1"):
        assert address_of(name) == "127.0.0.1"


def test_this_machine_is_not_another_host_as_well(monkeypatch):
    monkeypatch.setattr(machines, "is_mine", lambda ip: ip.startswith("10.0.0."))
    given = Machines((Machine("mac", ("10.0.0.1",)), Machine("mac.local", ("10.0.0.2",))))
    with pytest.raises(UserError, match=r"mac\.local is this machine, as mac is"):
        check_first(given)


def test_a_hostfile_may_begin_with_a_byte_order_mark(tmp_path):
    content = "\ufeff" + json.dumps([host("a"), host("b", "127.0.0.2")])
    assert len(machines_in(tmp_path, content).hosts) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": ""}, "an empty name is no host"),
        ({"hosts": "a,,b"}, "an empty name is no host"),
        ({"hosts": ("a", "b", "a")}, "a is there twice"),
        ({"hosts": ("a", "b"), "processes": 2}, "cannot be combined"),
        ({"sync": "data"}, "only works with --hosts"),
        ({"processes": 2, "objective": "soft"}, "not supported with --objective soft"),
        ({"processes": 2, "supervise": False}, "mlx.launch -n 2"),
        (
            {"processes": 2, "prefix_cache": "disk", "prefix_cache_folder": "x"},
            "--prefix-cache-folder cannot be shared",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        build(settings, "test")


def test_a_host_that_cannot_be_reached_is_named():
    given, run = tools(255, "Connection refused")
    with pytest.raises(UserError, match=r"--hosts: mac2 cannot be reached \(Connection refused\)"):
        check_reachable(TWO, given)
    with pytest.raises(UserError, match=r"--hostfile h\.json: mac2 cannot"):
        check_reachable(replace(TWO, option="--hostfile h.json"), given)
    assert run[0][0] == "ssh"
    assert run[0][-2:] == ["mac2", "true"]


def test_a_host_without_your_ai_is_named():
    said = iter([(0, ""), (127, "bash: /x/python: No such file or directory")])
    given = Tools(lambda command: next(said), lambda name: name)
    with pytest.raises(UserError, match=r"mac2 has no your_ai for .*No such file.*same path"):
        check_reachable(TWO, given)


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="ssh is missing"):
        check_reachable(TWO, tools(missing="ssh")[0])
    with pytest.raises(UserError, match="mpirun is missing"):
        check_programs(replace(TWO, backend="mpi"), tools(missing="mpirun")[0])
    with pytest.raises(UserError, match="rsync is missing"):
        sync_hosts(TWO, ["/data"], tools(missing="rsync")[0])
    monkeypatch.setattr(machines.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"mlx\.launch is missing"):
        launcher(tools(missing="mlx.launch")[0])


def test_sync_copies_to_the_same_places(tmp_path):
    given, run = tools()
    sync_hosts(TWO, [str(tmp_path), "/my data"], given)
    assert run[1] == ["rsync", "-aL", "--", f"{tmp_path}/", f"mac2:{tmp_path}/"]
    assert run[3] == ["rsync", "-aL", "-s", "--", "/my data", "mac2:/my data"]


def test_sync_copies_what_the_other_ranks_read(tmp_path):
    """A file that is converted, and a model of the hub's cache, whose files are links."""
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,completion\n" + "a,b\n" * 30)
    settings = {"hosts": ("a", "b"), "sync": "all", "data": str(rows), "model": "o/m"}
    for place, copied in (("models--o--m/snapshots/1f", "models--o--m"), ("models/m", "models/m")):
        (tmp_path / place).mkdir(parents=True)
        found = paths_to_sync(build(settings, "test"), tmp_path / place)
        assert found == [str(rows), str(tmp_path / copied)]
    given, run = tools()
    sync_hosts(TWO, [str(tmp_path / "models--o--m")], given)
    assert run[1][1] == "-a"  # with its links
    demo = {"hosts": ("a", "b"), "sync": "all", "model": "demo", "data": "demo"}
    assert paths_to_sync(build(demo, "test"), tmp_path) == []


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        port = busy.getsockname()[1]
        monkeypatch.setattr(machines, "FIRST_PORT", port)
        monkeypatch.setattr(machines, "PORTS_TRIED", 1)
        with pytest.raises(UserError, match="are in use"):
            free_first_port("127.0.0.1")
    assert free_first_port("127.0.0.1") == port


def test_mlx_launch_gets_the_hosts_and_our_command(tmp_path):
    command = launch_command(TWO, tmp_path / "h.json", ["python", "-m", "x"], 4000)
    assert command[0].endswith("mlx.launch")
    assert command[command.index("--") + 1 :] == ["python", "-m", "x"]
    assert command[command.index("--starting-port") + 1] == "4000"
