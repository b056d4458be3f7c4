"""A cursor through a list of buffer views."""

import array

import pytest

from peerstore.transport.base import IOV_MAX, BufferCursor


def worked_off(views, most_bytes, step):
    """Return the bytes seen if each transfer takes at most ``step`` bytes of a window."""
    seen = b""
    with BufferCursor(views) as cursor:
        while cursor.left:
            window = cursor.window(most_bytes)
            assert 0 < sum(view.nbytes for view in window) <= most_bytes
            assert len(window) <= IOV_MAX
            assert all(view.nbytes for view in window)
            part = b"".join(window)[:step]
            cursor.advance(len(part))
            seen += part
    return seen


@pytest.mark.parametrize("step", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize("most_bytes", [1, 3, 64, 10_000])
def test_cursor_yields_every_byte_once_in_order(most_bytes, step):
    sizes = [0, 1, 1, 5, 0, 64, 200, 3, 0]
    data = bytes(range(251)) + bytes(23)
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(data)[at : at + size])
        at += size
    assert worked_off(views, most_bytes, step) == data[:at]


def test_no_more_views_at_a_time_than_the_kernel_takes():
    data = bytes(range(256)) * 20
    assert worked_off([memoryview(data)[at : at + 1] for at in range(len(data))], 1 << 20, 1 << 20) == data


def test_windows_are_released_at_the_next_window_and_at_the_end():
    target = array.array("d", bytes(800))
    with memoryview(target) as view:
        with BufferCursor([view]) as cursor:
            (first,) = cursor.window(100)
            cursor.advance(100)
            (second,) = cursor.window(100)
            with pytest.raises(ValueError, match="released"):
                first[0]
            assert second[0] == 0
        with pytest.raises(ValueError, match="released"):
            second[0]
    target.append(1)


def test_given_views_are_not_released():
    view = memoryview(bytearray(10))
    with BufferCursor([view]) as cursor:
        assert cursor.window(10) == [view]
    assert view.nbytes == 10
