"""Pickles parsed as data: values round-trip, and no pickle runs code."""

import contextlib
import os
import pickle
import pickletools
import struct
import sys
from collections import OrderedDict
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.sagemaker.safe_pickle import PersistentRef, PickledCall, PickledName, RefusedPickleError, parse_pickle

NOTHING: frozenset[PickledName] = frozenset()

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 255), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_round_trips(value, protocol):
    if protocol == 2 and _has_bytes(value):
        return  # protocol 2 makes bytes by calling a codec
    assert parse_pickle(pickle.dumps(value, protocol), NOTHING) == value


def _has_bytes(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, inner))


@given(plain, st.data())
def test_a_cut_off_pickle_is_refused(value, data):
    whole = pickle.dumps(value, 4)
    with pytest.raises(RefusedPickleError):
        parse_pickle(whole[: data.draw(st.integers(0, len(whole) - 1))], NOTHING)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data):
    with contextlib.suppress(RefusedPickleError):
        parse_pickle(b"\x80\x04" + data, {PickledName("os", "system")}, most_values=1000)


def test_names_are_not_resolved_and_calls_are_not_made():
    made = parse_pickle(pickle.dumps(Fraction(1, 2), 4), {PickledName("fractions", "Fraction")})
    assert type(made) is PickledCall
    assert made.kind == PickledName("fractions", "Fraction")


def test_persistent_reference_is_kept():
    assert parse_pickle(b"\x80\x02K\x07Q.", NOTHING) == PersistentRef(7)


class Runs:
    """Its pickle calls something."""

    def __init__(self, what, *args):
        self.what = what, args

    def __reduce__(self):
        return self.what


def text_protocol(module, name, argument):
    return f"c{module}\n{name}\n(S'{argument}'\ntR.".encode()


MARKER = "sagemaker-was-here"
ATTACKS = {
    "os.system": pickle.dumps(Runs(os.system, f"touch {MARKER}"), 4),
    "os.system, protocol 2": pickle.dumps(Runs(os.system, f"touch {MARKER}"), 2),
    "os.system, protocol 0": text_protocol("os", "system", f"touch {MARKER}"),
    "os.system by INST": f"(S'touch {MARKER}'\nios\nsystem\n.".encode(),
    "os.system by OBJ": f"\x80\x02(cos\nsystem\nX{chr(5)}\0\0\0touchio.".encode("latin-1"),
    "builtins.eval": pickle.dumps(Runs(eval, f"open({MARKER!r}, 'w').close()"), 4),
    "builtins.exec": pickle.dumps(Runs(exec, f"open({MARKER!r}, 'w').close()"), 4),
    "builtins.__import__": pickle.dumps(Runs(__import__, "antigravity"), 4),
    "builtins.getattr": b"\x80\x04cbuiltins\ngetattr\n(cos\nenviron\n\x8c\x05clear\x86R)R.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x11os.path.os.system\x93\x8c\x02ls\x85R.",
    "nested calls": b"\x80\x04cbuiltins\nlist\n(cbuiltins\nmap\n(cbuiltins\neval\n](\x8c\x011etRtR.",
    "a call of what a call gave": b"\x80\x04cfractions\nFraction\n)R)R.",
    "a call of a string": b"\x80\x04\x8c\x02os)R.",
    "state for a class": b"\x80\x04cfractions\nFraction\n}\x8c\x01aK\x01sb.",
    "state for a list": b"\x80\x04]}\x8c\x01aK\x01sb.",
    "items of a class": b"\x80\x04cfractions\nFraction\n\x8c\x01aK\x01s.",
    "appending to a class": b"\x80\x04cfractions\nFraction\nK\x01a.",
    "an extension": b"\x80\x04\x82\x01.",
    "an out-of-band buffer": b"\x80\x05\x97.",
    "a memo of four billion": b"\x80\x04K\x01r\xff\xff\xff\xffj\xfe\xff\xff\xff.",
    "a string of four billion": b"\x80\x04X\xff\xff\xff\xff.",
    "bytes of eight exabytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
    "a byte array of a terabyte": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "an integer of 200 bytes": b"\x80\x04\x8a\xc8" + b"\x7f" * 200 + b".",
    "an integer in decimal": b"\x80\x04L" + b"9" * 5000 + b"L\n.",
    "a tuple whose hash takes forever": b"\x80\x04}K\x01\x94"
    + b"".join(b"h" + bytes([index]) + b"\x86\x94" for index in range(60))
    + b"K\x01s.",
    "a list as a key": b"\x80\x04}]K\x01s.",
    "a mark as a value": b"\x80\x04((\x85.",
    "a mark in the memo": b"\x80\x04(\x94.",
    "more values than agreed": b"\x80\x04" + b"]" * 3000 + b".",
    "more after the end": pickle.dumps(1, 4) + b"N.",
    "an end too early": b"\x80\x04.",
    "a protocol of tomorrow": b"\x80\x09N.",
    "a name without an end": b"\x80\x04c" + b"a" * 5000,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_pickles_are_refused_and_do_nothing(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    with pytest.raises(RefusedPickleError):
        parse_pickle(ATTACKS[attack], {PickledName("fractions", "Fraction")}, most_values=2000)
    assert not list(tmp_path.iterdir())
    assert "antigravity" not in set(sys.modules) - before


def test_the_attacks_are_real(tmp_path, monkeypatch):
    """The refused pickles would run code."""
    monkeypatch.chdir(tmp_path)
    for name in ("os.system", "os.system, protocol 2", "os.system, protocol 0", "builtins.exec"):
        pickle.loads(ATTACKS[name])
        assert (tmp_path / MARKER).exists(), name
        (tmp_path / MARKER).unlink()


def test_allowed_names_are_still_not_called():
    """A pickle of allowed names only creates no object: calls are returned as data."""
    data = pickle.dumps(OrderedDict(), 2)
    assert any(opcode.name == "REDUCE" for opcode, _, _ in pickletools.genops(data))
    made = parse_pickle(data, {PickledName("collections", "OrderedDict"), PickledName("__builtin__", "list")})
    assert type(made) is PickledCall
