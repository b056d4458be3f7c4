"""Contract of every source of a member list, and cases of single sources."""

from __future__ import annotations

import json
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from integration.hyperpod.cluster.pod_resource_config import HYPERPOD_FILE, PodResourceConfig
from peerstore.errors import InvalidNameError, RequestError, UnavailableError
from peerstore.membership.discovery import (
    DISCOVERY_ENTRY_POINTS,
    HeadlessServiceDns,
    MembersFile,
    StaticMembers,
    parse_discovery,
)
from peerstore.membership.topology import (
    NodeId,
    PeerNode,
    labels_from_kubernetes,
    load_node_labels,
    node_from_ip,
    validate_address,
)
from tests.support.example_counts import examples

ADDRESSES = ["10.0.0.3", "10.0.0.1", "10.0.0.2"]


def expected_nodes(addresses=ADDRESSES) -> list[PeerNode]:
    return [PeerNode(NodeId(one), f"{one}:7070") for one in sorted(addresses)]


class Source:
    """A discovery source that a test controls."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "nodes.json"
        self.version = 0

    def publish(self, addresses: list[str]) -> None: ...
    def damage(self) -> None: ...
    def open(self): ...


class StaticList(Source):
    def publish(self, addresses):
        self.text = ",".join(f"{one}={one}:7070" for one in addresses)

    def open(self):
        return parse_discovery(f"static:{self.text}")


class RosterFile(Source):
    def publish(self, addresses):
        self.version += 1
        listed = [{"id": one, "address": f"{one}:7070"} for one in addresses]
        self.path.write_text(json.dumps({"version": self.version, "nodes": listed}))

    def damage(self):
        self.path.write_bytes(self.path.read_bytes()[:-5])

    def open(self):
        return parse_discovery(f"file:{self.path}")


class HyperPodFile(RosterFile):
    def publish(self, addresses):
        self.version += 1
        stamp = f"2026-01-31T12:00:{self.version:02}Z"
        told = {"ips": addresses, "current_pod_ip": addresses[0], "ips_timestamp": stamp}
        self.path.write_text(json.dumps(told))

    def open(self):
        return parse_discovery(f"hyperpod:{self.path}")


class Dns(Source):
    def publish(self, addresses):
        self.addresses = list(addresses)

    def damage(self):
        self.addresses = None

    def resolve(self, name, port):
        assert (name, port) == ("agents.svc", 7070)
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self.addresses

    def open(self):
        return HeadlessServiceDns("agents.svc", 7070, resolve=self.resolve, clock=lambda: 1e9)


SOURCES = {"static": StaticList, "file": RosterFile, "hyperpod": HyperPodFile, "dns": Dns}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    return SOURCES[request.param](tmp_path)


def skip_if_static(source) -> None:
    if isinstance(source, StaticList):
        pytest.skip("a static list never changes and cannot fail")


# -- promises of all --------------------------------------------------------------------------------------------------


def test_all_nodes_are_named_in_the_order_of_their_ids(source):
    source.publish(ADDRESSES)
    assert list(source.open().member_list().nodes) == expected_nodes()


def test_nodes_with_the_same_source_have_the_same_member_list(source):
    source.publish(ADDRESSES)
    assert source.open().member_list().list_version == source.open().member_list().list_version


def test_unchanged_member_list_keeps_its_version(source):
    source.publish(ADDRESSES)
    discovery = source.open()
    assert discovery.member_list() == discovery.member_list()


def test_change_is_detected_with_a_higher_version(source):
    skip_if_static(source)
    source.publish(ADDRESSES)
    discovery = source.open()
    before = discovery.member_list()
    source.publish(ADDRESSES[1:])
    after = discovery.member_list()
    assert list(after.nodes) == expected_nodes(ADDRESSES[1:])
    assert after.version > before.version


def test_unreachable_source_is_unknown_and_may_recover(source):
    skip_if_static(source)
    source.publish(ADDRESSES)
    discovery = source.open()
    discovery.member_list()
    source.damage()
    for _ in range(2):
        with pytest.raises(UnavailableError):
            discovery.member_list()
    source.publish(ADDRESSES[:2])
    assert list(discovery.member_list().nodes) == expected_nodes(ADDRESSES[:2])


# -- lists ------------------------------------------------------------------------------------------------------------


def test_a_static_list_has_names_addresses_and_failure_domains():
    roster = parse_discovery("static:n2=host-2:7071, n1=[fd00::1]:7070/rack=r1/zone=a/b,").member_list()
    assert roster.version == 1
    assert roster.nodes == (
        PeerNode(NodeId("n1"), "[fd00::1]:7070", (("rack", "r1"), ("zone", "a/b"))),
        PeerNode(NodeId("n2"), "host-2:7071"),
    )


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("n2", "write name=host:port"),
        ("n2=", "write host:port"),
        ("n2=host", "write host:port"),
        ("n2=host:0", "write host:port"),
        ("n2=host:70000", "write host:port"),
        ("n2=fd00::1:7070", "write host:port"),
        ("../n2=host:1", "node name"),
        ("n2=host:1/rack", "write host:port"),
        ("n2=host:1/rack=", "label 'rack='"),
        ("n2=host:1/rack=a/rack=b", "given twice"),
    ],
)
def test_invalid_entry_is_named(entry, says):
    with pytest.raises(RequestError, match="node '") as error:
        StaticMembers(f"n1=host:7070,{entry}")
    assert entry in str(error.value)
    assert says in str(error.value)


def test_duplicate_or_empty_list_is_refused():
    with pytest.raises(RequestError, match="'n1' is listed twice"):
        StaticMembers("n1=a:1,n1=b:1")
    with pytest.raises(RequestError, match="without a node"):
        StaticMembers(" , ")


@pytest.mark.parametrize("text", ["", "static", "file:", "hyperpod:", "dns:", "etcd:host:1", "dns:a:b:c", "dns:name:x"])
def test_unknown_source_is_refused(text):
    with pytest.raises(RequestError):
        parse_discovery(text)


def test_configuration_selects_the_discovery_source():
    assert isinstance(parse_discovery("hyperpod"), PodResourceConfig)
    assert HYPERPOD_FILE == "/opt/ml/input/config/pod_resourceconfig.json"
    with pytest.raises(UnavailableError, match=r"/nowhere/x\.json"):
        parse_discovery("hyperpod:/nowhere/x.json").member_list()
    (local,) = parse_discovery("dns:127.0.0.1:7171").member_list().nodes  # by the system's own resolver
    assert local == PeerNode(NodeId("127.0.0.1"), "127.0.0.1:7171")
    assert parse_discovery("dns:127.0.0.1").member_list().nodes[0].address == "127.0.0.1:7070"


def test_a_source_that_cannot_be_loaded_is_named(monkeypatch):
    points = [EntryPoint("other", "absent_package:members", DISCOVERY_ENTRY_POINTS)]
    monkeypatch.setattr("peerstore.membership.discovery.entry_points", lambda *, group: points)
    with pytest.raises(RequestError, match="absent_package:members, which adds discovery 'other', cannot be loaded"):
        parse_discovery("other:place")
    with pytest.raises(RequestError, match=r"dns:name:port, other\[:\.\.\.\]"):
        parse_discovery("etcd:host:1")


# -- files ------------------------------------------------------------------------------------------------------------


def test_file_supplies_labels_and_memory(tmp_path):
    path = tmp_path / "nodes.json"
    told = {"id": "n1", "address": "a:1", "labels": {"zone": "a", "rack": "r"}, "memory_bytes": 5}
    path.write_text(json.dumps({"version": 4, "nodes": [told]}))
    roster = MembersFile(path).member_list()
    assert (roster.version, roster.nodes) == (4, (PeerNode(NodeId("n1"), "a:1", (("rack", "r"), ("zone", "a")), 5),))


@pytest.mark.parametrize(
    "told",
    [
        {"version": 1},
        {"version": 1, "nodes": []},
        {"version": "1", "nodes": [{"id": "n", "address": "a:1"}]},
        {"version": -1, "nodes": [{"id": "n", "address": "a:1"}]},
        {"version": 1, "nodes": [{"id": "n"}]},
        {"version": 1, "nodes": [{"id": "n", "address": "a"}]},
        {"version": 1, "nodes": [{"id": "n", "address": "a:1", "label": {}}]},
        {"version": 1, "nodes": [{"id": "n", "address": "a:1", "labels": {"rack": "a b"}}]},
        {"version": 1, "nodes": [{"id": "n", "address": "a:1"}, {"id": "n", "address": "b:1"}]},
    ],
)
def test_invalid_file_is_refused(tmp_path, told):
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(told))
    with pytest.raises(RequestError, match=str(path)):
        MembersFile(path).member_list()


@pytest.mark.parametrize("half", [b"", b"{", b'{"version": 1, "nodes": [{"id": "n1", "addr', b"\xff\xfe"])
def test_partial_member_list_file_is_unknown(tmp_path, half):
    path = tmp_path / "nodes.json"
    path.write_bytes(half)
    for discovery in (MembersFile(path), PodResourceConfig(path)):
        with pytest.raises(UnavailableError, match=str(path)):
            discovery.member_list()


# -- HyperPod ---------------------------------------------------------------------------------------------------------


def pod_resource_config(path, ips, stamp="7"):
    path.write_text(json.dumps({"ips": ips, "current_pod_ip": None, "ips_timestamp": stamp}))
    return PodResourceConfig(path, port=9)


def test_missing_rank_addresses_make_the_member_list_unknown(tmp_path):
    discovery = pod_resource_config(tmp_path / "f", ["10.0.0.1", None, "10.0.0.3", None])
    with pytest.raises(UnavailableError, match=r"of rank 1, 3 yet \(4 ranks\)"):
        discovery.member_list()
    with pytest.raises(UnavailableError, match="of any rank"):
        pod_resource_config(tmp_path / "f", []).member_list()


def test_pods_of_a_node_are_a_single_node(tmp_path):
    roster = pod_resource_config(tmp_path / "f", ["10.0.0.2", "10.0.0.2", "fd00::2"]).member_list()
    assert [one.address for one in roster.nodes] == ["10.0.0.2:9", "[fd00::2]:9"]
    assert roster.nodes[1].id == "fd00-0000-0000-0000-0000-0000-0000-0002"


@pytest.mark.parametrize(
    ("stamp", "version"),
    [
        ("7", 7),
        (7, 7),
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01T01:00:00.250+01:00", 250),
        ("1970-01-02", 86400000),
        ("1970-01-01T00:00:01.123456789Z", 1123),
        ("1970-01-01T00:00:01.9z", 1900),
    ],
)
def test_operator_timestamp_is_the_version(tmp_path, stamp, version):
    assert pod_resource_config(tmp_path / "f", ["10.0.0.1"], stamp).member_list().version == version


@pytest.mark.parametrize(
    ("ips", "stamp"),
    [
        (["10.0.0.1"], "soon"),
        (["host"], "7"),
        (["10.0.0.1"], None),
        ("x", "7"),
        (["10.0.0.1"], "9" * 5000),
        ([None] * 100_002, "7"),
    ],
)
def test_unexpected_operator_file_is_refused(tmp_path, ips, stamp):
    with pytest.raises(RequestError, match=str(tmp_path)):
        pod_resource_config(tmp_path / "f", ips, stamp).member_list()


def test_endless_file_is_not_read_completely(tmp_path):
    with (tmp_path / "f").open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    with pytest.raises(RequestError, match="longer than 64 MiB"):
        PodResourceConfig(tmp_path / "f").member_list()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["10.0.0.1", "::1", "7"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ips", "ips_timestamp"]), inner),
    max_leaves=6,
)


@hypothesis.given(_JSON | st.fixed_dictionaries({"ips": st.lists(_JSON, max_size=3), "ips_timestamp": _JSON}))
@hypothesis.settings(max_examples=examples(60), deadline=None)
def test_any_file_is_a_member_list_unknown_or_refused(told):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        path.write_text(json.dumps(told))
        try:
            roster = PodResourceConfig(path).member_list()
        except (RequestError, UnavailableError):
            return
    assert {one.id for one in roster.nodes} == {node_from_ip(ip, 7070).id for ip in told["ips"]}


def test_reader_sees_one_complete_version_during_replacement(tmp_path):
    path = tmp_path / "f"
    discovery = pod_resource_config(path, ["10.0.0.1"], "1")

    def replace() -> None:
        for version in range(2, 200):
            ips = [f"10.0.0.{rank % 250 + 1}" for rank in range(version)]
            (tmp_path / "f.tmp").write_text(json.dumps({"ips": ips, "ips_timestamp": str(version)}))
            (tmp_path / "f.tmp").replace(path)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(replace)
        last = 0
        while last < 199:
            roster = discovery.member_list()
            assert len(roster.nodes) == roster.version
            assert roster.version >= last
            last = roster.version
        writing.result()


# -- DNS --------------------------------------------------------------------------------------------------------------


def test_dns_change_never_lowers_the_version():
    answers, times = [["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"], ["10.0.0.3"]], [100.0, 50.0]
    discovery = HeadlessServiceDns("x", resolve=lambda *_: answers.pop(0), clock=lambda: times.pop(0))
    assert [discovery.member_list().version for _ in range(4)] == [1, 100_000, 100_001, 100_001]


def test_missing_addresses_or_names_make_the_member_list_unknown():
    def resolve_unknown_name(name, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolve in (resolve_unknown_name, lambda *_: []):
        with pytest.raises(UnavailableError, match="agents"):
            HeadlessServiceDns("agents", resolve=resolve).member_list()


def test_dual_stack_pod_is_a_single_node():
    discovery = HeadlessServiceDns("x", resolve=lambda *_: ["fd00::1", "10.0.0.1", "10.0.0.1"])
    assert [one.id for one in discovery.member_list().nodes] == ["10.0.0.1"]


# -- names and labels -------------------------------------------------------------------------------------------------


def test_addresses():
    for good in ("host:1", "10.0.0.1:65535", "[::1]:7070", "a.b-c.svc:80"):
        assert validate_address(good) == good
    for bad in ("host", ":1", "host:", "host:+1", "host:१", "ho st:1", "::1:7070", "a/b:1"):
        with pytest.raises(RequestError):
            validate_address(bad)
    with pytest.raises(RequestError, match="not an IP"):
        node_from_ip("host", 1)


LAYER = "topology.k8s.aws/network-node-layer-"


@pytest.mark.parametrize(
    ("labels", "ours"),
    [
        ({}, {}),
        ({"kubernetes.io/hostname": "x", "topology.kubernetes.io/zone": "us-east-1a"}, {"zone": "us-east-1a"}),
        (
            {LAYER + "1": "nn-1", LAYER + "2": "nn-2", LAYER + "3": "nn-3", "topology.kubernetes.io/zone": "a"},
            {"rack": "nn-3", "switch": "nn-2", "spine": "nn-1", "zone": "a"},
        ),
        (
            {f"{LAYER}{layer}": f"nn-{layer}" for layer in range(1, 5)},
            {"rack": "nn-4", "switch": "nn-3", "spine": "nn-2"},
        ),
        ({LAYER + "1": "nn-1", LAYER + "2": "nn-2", LAYER + "3": ""}, {"rack": "nn-2", "switch": "nn-1"}),
        ({"topology.k8s.aws/ultraserver-id": "us-1"}, {"ultraserver": "us-1"}),
        ({"topology.k8s.aws/zone-id": "use1-az1"}, {"zone": "use1-az1"}),
        ({"topology.k8s.aws/zone-id": "use1-az1", "topology.kubernetes.io/zone": "us-east-1a"}, {"zone": "us-east-1a"}),
    ],
)
def test_kubernetes_labels_become_failure_domains(labels, ours):
    assert labels_from_kubernetes(labels) == tuple(sorted(ours.items()))


def test_invalid_label_is_refused():
    with pytest.raises(InvalidNameError, match="zone"):
        labels_from_kubernetes({"topology.kubernetes.io/zone": "a b"})


@pytest.mark.parametrize(
    "written",
    [
        json.dumps({"kind": "Node", "metadata": {"labels": {LAYER + "3": "nn-3", "topology.kubernetes.io/zone": "a"}}}),
        json.dumps({LAYER + "3": "nn-3", "topology.kubernetes.io/zone": "a", "kubernetes.io/hostname": "h"}),
        f'app="trainer"\n{LAYER}3="nn-3"\nquoted="a \\"b\\""\ntopology.kubernetes.io/zone="a"\n',
        'rack="nn-3"\nzone="a"',
        f'{LAYER}3="another"\nrack="nn-3"\nzone="a"',
    ],
    ids=["node", "labels", "downward", "ours", "ours first"],
)
def test_labels_are_read_from_a_file(tmp_path, written):
    (tmp_path / "labels").write_text(written)
    assert load_node_labels(f"file:{tmp_path}/labels") == (("rack", "nn-3"), ("zone", "a"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "Expecting property name"),
        ('{"metadata": {}}', "neither a node with labels"),
        ('{"metadata": 7}', "neither a node with labels"),
        ('{"rack": 7}', "neither a node with labels"),
        ("rack=r1", "not of the form"),
        ('rack="r 1"', "label 'rack=r 1' is not allowed"),
        (b"\xff\xfe", "utf-8"),
        (None, "No such file"),
    ],
)
def test_file_without_labels_is_refused_by_name(tmp_path, written, said):
    path = tmp_path / "labels"
    if written is not None:
        path.write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(RequestError, match=said) as raised:
        load_node_labels(f"file:{path}")
    assert str(path) in str(raised.value)


def test_labels_may_be_given_inline():
    assert load_node_labels("zone=a,rack=r1") == (("rack", "r1"), ("zone", "a"))
    assert load_node_labels("") == ()
