import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.http.files_api import RangeOutside, byte_range

DATA = bytes(range(10))


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-3", DATA[:4]),
        ("bytes=3-", DATA[3:]),
        ("bytes=-4", DATA[-4:]),
        ("bytes=-99", DATA),
        ("bytes=9-9", DATA[9:]),
        ("bytes=2-99999999", DATA[2:]),
        ("Bytes= 1-2 ", DATA[1:3]),
    ],
)
def test_a_range_is_the_bytes_that_it_names(header, found):
    start, end = byte_range(header, len(DATA))
    assert DATA[start:end] == found


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "bytes", "bytes=", "bytes=-", "bytes=3-1", "bytes=a-b", "bytes=0-1,3-4"),
        *("lines=0-3", "bytes=+1-2", "bytes=1 -2", "bytes=\u0661-", "bytes=" + "9" * 99 + "-"),
    ],
)
def test_the_whole_is_the_answer_to_what_is_no_single_range(header):
    assert byte_range(header, len(DATA)) is None


@pytest.mark.parametrize(
    ("header", "size"),
    [("bytes=10-", 10), ("bytes=99-100", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-5", 0)],
)
def test_a_range_without_a_byte_of_the_file_is_an_error(header, size):
    with pytest.raises(RangeOutside):
        byte_range(header, size)


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_a_range_lies_in_the_file(size, first, last):
    try:
        found = byte_range(f"bytes={first}-{last}", size)
    except RangeOutside:
        assert first >= size
        return
    if found is None:
        assert last < first
    else:
        assert 0 <= found.start < found.end <= size
