"""Damage that recorders, editors and full disks do to files, for every format's property test."""

from hypothesis import strategies as st

Lines = list[bytes]


def damaged(lines: Lines) -> st.SearchStrategy[Lines]:
    """The lines with one of them cut, overwritten, doubled, or all of them noise."""
    places = st.integers(0, len(lines) - 1)
    return st.one_of(
        st.lists(st.binary(max_size=60), max_size=5),
        st.builds(
            lambda at, cut: [*lines[:at], lines[at][:cut], *lines[at + 1 :]],
            places,
            st.integers(0, 80),
        ),
        st.builds(
            lambda at, offset, bytes_: _overwritten(lines, at, offset, bytes_),
            places,
            st.integers(0, 200),
            st.binary(min_size=1, max_size=4),
        ),
        st.builds(lambda at: [*lines, lines[at]], places),
    )


def _overwritten(lines: Lines, at: int, offset: int, new: bytes) -> Lines:
    line = lines[at]
    offset %= max(1, len(line))
    return [*lines[:at], line[:offset] + new + line[offset + len(new) :], *lines[at + 1 :]]
