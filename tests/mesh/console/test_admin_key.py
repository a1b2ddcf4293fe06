"""Who may change something at the console: whoever has the key; wrong ones are limited."""

import pytest

from mesh.console.admin_key import (
    ADDRESSES_MAX,
    ALL_WRONG_MAX,
    COUNTED_S,
    WRONG_MAX,
    AdminKey,
    KeyRefused,
)
from mesh.console.config import KEY_CHARS_MAX, KEY_CHARS_MIN, KeyUnusable, read_admin_key

KEY = "k" * KEY_CHARS_MIN
RIGHT = f"Bearer {KEY}"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(key: AdminKey, header: str | None, address: str = "a") -> KeyRefused:
    with pytest.raises(KeyRefused) as caught:
        key.require(header, address)
    return caught.value


def test_the_key_is_taken_as_a_bearer_token_and_nothing_else_is():
    key = AdminKey(KEY, Clock())
    key.require(RIGHT, "a")
    for header in (None, "", KEY, f"Basic {KEY}", f"bearer {KEY}"):
        assert "bearer" in str(refusal(key, header))
    for header in ("Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \ud800"):
        assert "not the admin key" in str(refusal(key, header, address=header))
    assert "read-only" in str(refusal(AdminKey(None, Clock()), RIGHT))


def test_after_some_wrong_keys_of_an_address_only_the_right_one_is_accepted():
    clock = Clock()
    key = AdminKey(KEY, clock)
    for _ in range(WRONG_MAX):
        assert refusal(key, "Bearer wrong").retry_after_s is None
    assert refusal(key, "Bearer wrong").retry_after_s == COUNTED_S
    key.require(RIGHT, "a")  # of another user behind the same tunnel or proxy
    assert refusal(key, "Bearer wrong").retry_after_s == COUNTED_S
    assert refusal(key, "Bearer wrong", "another address").retry_after_s is None
    clock.now = COUNTED_S + 0.1
    assert refusal(key, "Bearer wrong").retry_after_s is None


def test_wrong_keys_of_many_addresses_are_limited_together_and_few_are_kept():
    clock = Clock()
    key = AdminKey(KEY, clock)
    for number in range(ALL_WRONG_MAX):
        assert refusal(key, "Bearer wrong", str(number)).retry_after_s is None
    assert refusal(key, "Bearer wrong", "one more").retry_after_s is not None
    key.require(RIGHT, "one more")
    for number in range(ADDRESSES_MAX * 2):
        clock.now += COUNTED_S
        refusal(key, "Bearer wrong", f"later {number}")
    assert len(key._wrong) == ADDRESSES_MAX


@pytest.mark.parametrize(
    "text",
    ["", "short", "two words that are long", "é" * 20, "k" * (KEY_CHARS_MAX + 1), "k\nk" * 9],
)
def test_a_file_without_a_usable_key_is_refused(tmp_path, text):
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(KeyUnusable, match="openssl rand"):
        read_admin_key(file)


def test_a_file_is_read_without_its_end_of_line(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_admin_key(file) == KEY
    with pytest.raises(KeyUnusable, match="No such file"):
        read_admin_key(tmp_path / "none")
