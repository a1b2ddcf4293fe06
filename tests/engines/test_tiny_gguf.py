import gguf

from tests.engines import tiny_gguf


def test_the_same_seed_gives_the_same_file(tmp_path):
    for name in ("one", "two"):
        tiny_gguf.write(tmp_path / name, layers=1)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_it_knows_every_character_of_ascii_once(tmp_path):
    tiny_gguf.write(tmp_path / "tiny", layers=1)
    field = gguf.GGUFReader(tmp_path / "tiny").get_field("tokenizer.ggml.tokens")
    tokens = field.contents()
    assert len(tokens) == len(set(tokens)) == tiny_gguf.TOKENS
    assert set(map(chr, range(33, 127))) < set(tokens)
