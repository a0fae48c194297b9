"""cluster.toml: the example is valid, bad files give every fault in one run."""

from __future__ import annotations

from pathlib import Path

import pytest
from gshare.agent.errors import UsageError
from gshare.coordinator.config import ClusterConfig, GpuConfig, NodeConfig, default_cluster_path, load_cluster

EXAMPLE = Path(__file__).parents[1] / "cluster.toml.example"


def load(tmp_path: Path, text: str) -> ClusterConfig:
    (tmp_path / "cluster.toml").write_text(text)
    return load_cluster(tmp_path / "cluster.toml")


def faults(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_the_example_is_valid_and_shows_every_key() -> None:
    cluster = load_cluster(EXAMPLE)
    assert [node.name for node in cluster.nodes] == ["here", "desk", "orin", "cpu-box", "lab"]
    desk = cluster.node("desk")
    assert desk is not None
    assert desk.models == {"HuggingFaceTB/SmolLM2-135M-Instruct": "/data/models/SmolLM2-135M-Instruct"}
    assert desk.environment == {"HF_HUB_OFFLINE": "1"}
    assert desk.identity == str(Path("~/.ssh/id_ed25519").expanduser())
    assert desk.gpus is not None
    assert desk.gpus[0].vram_mb == 24564
    assert [node.gpus for node in cluster.nodes if node.name != "desk"] == [None, None, (), None]
    text = EXAMPLE.read_text()
    for key in (*NodeConfig.__struct_fields__, *GpuConfig.__struct_fields__):
        assert f"{key} =" in text or f"[node.{key}]" in text or f"[[node.{key}]]" in text, key


def test_without_the_default_file_it_says_where_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a file that was named is only said not to be there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"copy cluster\.toml\.example there, or name yours with --cluster"):
        load_cluster(default_cluster_path())
    with pytest.raises(UsageError, match=r"named\.toml: no such file$"):
        load_cluster(tmp_path / "named.toml")


def test_every_fault_in_one_run(tmp_path: Path) -> None:
    text = """\
title = "x"
[[node]]
name = "a/b"
host = "h"
port = 70000
[[node]]
name = "n"
transport = "shh"
gpu = []
[[node]]
name = "n"
host = "-oProxyCommand=x"
max_adapters = -1
[[node]]
transport = "local"
host = "h"
[node.environment]
"A B" = "1"
[[node.gpus]]
type = "RTX 4090"
vram_mb = "24 GB"
"""
    assert sorted(faults(tmp_path, text)) == sorted(
        [
            "cluster.toml:1: unknown key 'title'; known keys: node",
            "cluster.toml:3: node 'a/b', key 'name': 'a/b' holds a path separator; use letters, digits, "
            "'.', '_' and '-'",
            "cluster.toml:5: node 'a/b', key 'port': must be from 1 to 65535, not 70000",
            "cluster.toml:8: node 'n', key 'transport': unknown value 'shh'; known: local, ssh, agent. "
            "Did you mean 'ssh'?",
            "cluster.toml:9: node 'n', key 'gpu': unknown key 'gpu'; did you mean 'gpus'?",
            "cluster.toml:6: node 'n': missing key 'host' (or transport = \"local\" for this machine)",
            "cluster.toml:11: a second node named 'n'; give each its own name",
            "cluster.toml:12: node 'n', key 'host': '-oProxyCommand=x' starts with '-' or holds a space "
            "or control character",
            "cluster.toml:13: node 'n', key 'max_adapters': must be from 0 to 1000000, not -1",
            "cluster.toml:14: node 4: missing key 'name'",
            "cluster.toml:16: node 4, key 'host': has no meaning with transport = \"local\"; leave it out",
            "cluster.toml:17: node 4, key 'environment': 'A B' is no name of an environment variable",
            "cluster.toml:19: node 4, key 'gpus', GPU 1, 'vram_mb': must be a whole number, not '24 GB'",
            "cluster.toml:19: node 4, key 'gpus', GPU 1: missing key 'uuid' (nvidia-smi -L prints it)",
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no [[node]]: name at least one"),
        ("[node]\nname = 'a'\n", "cluster.toml:1: write [[node]] with double brackets"),
        ("[[nodes]]\nname = 'a'\n", "did you mean 'node'?"),
        ("node = [1]\n", "[[node]] 1: must be a table of keys"),
        ("[[node]]\nname = 'a'\nhost = 'x y'\n", "'x y' starts with '-' or holds a space"),
        (
            "[[node]]\nname = 'a'\nhost = 'h'\ngpus = 1\n",
            "cluster.toml:4: node 'a', key 'gpus': must be a list of GPUs",
        ),
        ("[[node]]\nname = 'a'\nhost = 'h'\ngpus = [{uuid = 'G'}, {uuid = 'G'}]\n", "GPU G is listed twice"),
        ("[[node]]\nname = 'a'\nhost = 'h'\nidentity = ''\n", "'' is no path"),
        (
            "[[node]]\nname = 'a'\nhost = 'h'\nmodels = 'm'\n",
            "key 'models': must be a table of texts, not 'm'",
        ),
        ("[[node]\n", "not valid TOML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in line for line in faults(tmp_path, text)), faults(tmp_path, text)


def test_a_gpu_on_two_hosts_is_a_fault_and_two_nodes_of_one_host_may_share_it(tmp_path: Path) -> None:
    block = "[[node]]\nname = '{}'\nhost = '{}'\ngpus = [{{uuid = 'GPU-1'}}]\n"
    assert faults(tmp_path, block.format("a", "h") + block.format("b", "other")) == [
        "cluster.toml:8: GPU GPU-1 is already listed by node 'a' on another host"
    ]
    own = "state_dir = 'of-its-own'\n"
    assert len(load(tmp_path, block.format("a", "h") + block.format("b", "h") + own).nodes) == 2


def test_default_path_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/x")
    assert default_cluster_path() == Path("/x/gshare/cluster.toml")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert default_cluster_path() == Path.home() / ".config/gshare/cluster.toml"


def test_paths_of_a_local_node_start_at_the_file_and_never_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to("/usr/bin/env")
    text = """\
[[node]]
name = "n"
transport = "local"
state_dir = "states/n"
python = "venv/python"
models = { a = "model", b = "./later", c = "owner/name", d = "/data/m" }
"""
    node = load(tmp_path, text).nodes[0]
    assert node.state_dir == str(tmp_path / "states" / "n")
    assert node.python == str(tmp_path / "venv" / "python")  # the link, not where it leads
    assert node.models == {
        "a": str(tmp_path / "model"),
        "b": str(tmp_path / "later"),
        "c": "owner/name",
        "d": "/data/m",
    }
    named = load(tmp_path, text.replace("venv/python", "python3.11").replace("states/n", "~/n")).nodes[0]
    assert (named.python, named.state_dir) == ("python3.11", str(Path.home() / "n"))


def test_paths_of_another_machine_are_left_to_it_or_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    text = "[[node]]\nname = 'n'\nhost = 'h'\nstate_dir = 'g'\nmodels = { a = 'model' }\n"
    node = load(tmp_path, text).nodes[0]
    assert (node.state_dir, node.models) == ("g", {"a": "model"})
    (fault,) = faults(tmp_path, text.replace("'model'", "'../model'"))
    assert "'models': 'a' = '../model' has no folder there to start at: write it absolute" in fault
