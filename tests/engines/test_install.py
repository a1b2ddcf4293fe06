import pytest

from tests.engines import install


def test_an_engine_that_is_not_there_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "ENVIRONMENTS", tmp_path)
    with pytest.raises(AssertionError, match="make test-engines installs dynamo"):
        install.programs(install.DYNAMO)


def test_a_model_is_made_again_when_what_makes_it_changes(tmp_path, monkeypatch):
    made_by = tmp_path / "maker.py"
    monkeypatch.setattr(install, "_MADE_BY", (str(made_by),))
    made_by.write_text("SEED = 1")
    before = install.llama()
    made_by.write_text("SEED = 2")
    assert install.llama() != before
