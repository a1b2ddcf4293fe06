"""Parts that are no text: what they are, when they are equal, and what they weigh."""

import time

import pytest

from mesh.core.prefixes.parts import (
    PART_TOKENS_MAX,
    SLICE_CHARS,
    STAND_IN_BYTES,
    TOKENS_START,
    PartKind,
    PartTokens,
    part_kind,
    stand_in,
)

DATA = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": DATA}}, PartKind.IMAGE),
        ({"type": "image_url", "image_url": {"url": DATA, "detail": "high"}}, PartKind.IMAGE),
        ({"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}, PartKind.IMAGE_LOW),
        ({"type": "image_url", "image_url": DATA}, PartKind.IMAGE),
        ({"type": "input_image", "image_url": DATA, "detail": "low"}, PartKind.IMAGE_LOW),
        ({"image_url": DATA}, PartKind.IMAGE),  # engines infer the type
        ({"type": "image", "image": DATA}, PartKind.IMAGE),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, PartKind.AUDIO),
        ({"type": "audio_url", "audio_url": {"url": DATA}}, PartKind.AUDIO),
        ({"type": "video_url", "video_url": {"url": DATA}}, PartKind.VIDEO),
        ({"type": "file", "file": {"file_data": DATA}}, PartKind.FILE),
        ({"type": "text", "text": "a"}, None),
        ({"type": "refusal", "refusal": "no"}, None),
        ({"type": "text", "image_url": DATA}, None),
        ({"type": ["image_url"]}, None),
        ({"type": 7, "image_url": DATA}, None),
        ({}, None),
    ],
)
def test_kinds_of_parts(part, kind):
    assert part_kind(part) is kind


def url(text, **fields):
    return {"type": "image_url", "image_url": {"url": text, **fields}}


@pytest.mark.parametrize(
    "other",
    [
        url("b"),
        url("ab"),
        url("a", detail="high"),
        url({"a": 1}),
        {"type": "image_url", "image_url": "a"},
        {"type": "image_url", "image_url": {"ur": "la"}},
        {"type": "image_url", "image_url": {"url": "a"}, "uuid": "1"},
        {"type": "image_url", "image_url": {"url": b"a".decode(), "x": None}},
        {"type": "image_url", "image_url": ["url", "a"]},
        {"type": "image_url", "image_url": {"url": "a" * (SLICE_CHARS + 1)}},
    ],
)
def test_different_parts_have_different_stand_ins(other):
    assert stand_in(url("a")) != stand_in(other)
    assert len(stand_in(other)) == STAND_IN_BYTES


def test_the_order_of_names_is_no_difference():
    swapped = {"image_url": {"detail": "low", "url": "a"}, "type": "image_url"}
    assert stand_in(url("a", detail="low")) == stand_in(swapped)


def test_every_byte_of_a_large_part_counts():
    size = 3 * SLICE_CHARS
    whole = stand_in(url("A" * size))
    for at in (0, SLICE_CHARS - 1, SLICE_CHARS, size - 1):
        assert stand_in(url("A" * at + "B" + "A" * (size - at - 1))) != whole
    assert stand_in(url("é" * SLICE_CHARS)) != stand_in(url("é" * (SLICE_CHARS - 1)))


def test_the_largest_part_does_not_hold_the_event_loop():
    """As CPU time, and the best of five: 4 ms, of which a tenfold still fails."""
    part = url("A" * (32 * 1024 * 1024))

    def took_s():
        began = time.thread_time()
        stand_in(part)
        return time.thread_time() - began

    assert min(took_s() for _ in range(5)) < 0.02


def test_the_first_reports_count_alike_and_later_ones_move_it_slowly():
    tokens = PartTokens()
    assert tokens.tokens(PartKind.IMAGE) == TOKENS_START[PartKind.IMAGE]
    for reported in (1000.0, 2000.0, 3000.0):
        tokens.observe((PartKind.IMAGE,), reported)
    assert tokens.tokens(PartKind.IMAGE) == pytest.approx(2000)
    for _ in range(20):
        tokens.observe((PartKind.IMAGE,), 2000.0)
    tokens.observe((PartKind.IMAGE,), 12_000.0)
    assert tokens.tokens(PartKind.IMAGE) == pytest.approx(3000, rel=0.01)


def test_parts_of_two_kinds_share_what_is_reported():
    tokens = PartTokens()
    tokens.observe((PartKind.IMAGE, PartKind.IMAGE, PartKind.IMAGE_LOW), 2 * (2 * 512 + 85))
    assert tokens.tokens(PartKind.IMAGE) == pytest.approx(1024)
    assert tokens.tokens(PartKind.IMAGE_LOW) == pytest.approx(170)


@pytest.mark.parametrize("reported", [-(2.0**60), 0.0, 2.0**60])
def test_estimates_are_bounded(reported):
    tokens = PartTokens()
    for _ in range(100):
        tokens.observe((PartKind.VIDEO, PartKind.FILE), reported)
    assert 1.0 <= tokens.tokens(PartKind.VIDEO) <= PART_TOKENS_MAX
    assert 1.0 <= tokens.tokens(PartKind.FILE) <= PART_TOKENS_MAX
