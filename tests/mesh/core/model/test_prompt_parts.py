"""Parts that are no text: what they are, when they are equal, and what they weigh."""

import time

import pytest

from mesh.core.model.prompt_parts import (
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


def test_the_first_reports_move_it_more_than_later_ones():
    tokens, image = PartTokens(), (PartKind.IMAGE,)
    assert tokens.tokens(PartKind.IMAGE) == TOKENS_START[PartKind.IMAGE]
    tokens.observe(image, 1000.0, 0.0)
    assert tokens.tokens(PartKind.IMAGE) == pytest.approx((512 + 1000) / 2)
    for _ in range(40):
        tokens.observe(image, 2000.0, 100.0)
    assert tokens.tokens(PartKind.IMAGE) == pytest.approx(2000, rel=0.02)
    tokens.observe(image, 4000.0, 0.0)
    assert tokens.tokens(PartKind.IMAGE) == pytest.approx(2200, rel=0.02)


@pytest.mark.parametrize(("reported", "learned"), [(1e6, 2.5), (-1e6, 0.625), (0.0, 0.625)])
def test_one_report_is_no_more_than_a_hint(reported, learned):
    tokens = PartTokens()
    tokens.observe((PartKind.IMAGE,), reported, 0.0)
    assert tokens.tokens(PartKind.IMAGE) == learned * TOKENS_START[PartKind.IMAGE]


def test_a_long_text_with_one_image_teaches_nothing_of_images():
    tokens, start = PartTokens(), TOKENS_START[PartKind.IMAGE]
    for reported in (-5000.0, 8000.0):  # the text's estimate is off by thousands
        tokens.observe((PartKind.IMAGE,), reported, 3.1 * start)
        assert tokens.tokens(PartKind.IMAGE) == start
    tokens.observe((PartKind.IMAGE,), 2 * start, 2.9 * start)
    assert tokens.tokens(PartKind.IMAGE) == 1.5 * start


def test_parts_of_two_kinds_share_what_is_reported():
    tokens = PartTokens()
    tokens.observe((PartKind.IMAGE, PartKind.IMAGE, PartKind.IMAGE_LOW), 2 * (2 * 512 + 85), 0.0)
    assert tokens.tokens(PartKind.IMAGE) == pytest.approx(1.5 * 512)
    assert tokens.tokens(PartKind.IMAGE_LOW) == pytest.approx(1.5 * 85)


@pytest.mark.parametrize("reported", [-(2.0**60), 0.0, 2.0**60])
def test_estimates_are_bounded(reported):
    tokens = PartTokens()
    for _ in range(100):
        tokens.observe((PartKind.VIDEO, PartKind.FILE), reported, 0.0)
    assert 1.0 <= tokens.tokens(PartKind.VIDEO) <= PART_TOKENS_MAX
    assert 1.0 <= tokens.tokens(PartKind.FILE) <= PART_TOKENS_MAX
