from mesh.core.membership.known_models import KEPT_S, LISTENS_S, MODELS_MAX, KnownModels


def test_names_outlive_their_replicas_for_a_while():
    names = KnownModels()
    names.see(["b", "a"], 0.0)
    names.see(["a"], 10.0)
    names.expire(KEPT_S)
    assert names.names == ("a", "b")
    names.expire(KEPT_S + 5.0)
    assert names.names == ("a",)
    names.expire(KEPT_S + 10.1)
    assert names.names == ()


def test_there_is_a_limit_to_names():
    names = KnownModels()
    names.see((str(number) for number in range(MODELS_MAX + 10)), 0.0)
    assert len(names.names) == MODELS_MAX
    names.see(["0"], 1.0)  # those already known stay fresh
    names.expire(KEPT_S + 0.5)
    assert names.names == ("0",)


def test_models_on_optional_paths_are_known_and_not_named():
    names = KnownModels()
    names.see(["a", "a on /v1/embeddings"], 0.0)
    assert names.names == ("a",)
    assert "a on /v1/embeddings" in names
    names.see(["a"], KEPT_S)
    names.expire(KEPT_S + 1.0)
    assert "a on /v1/embeddings" not in names


def test_replicas_have_had_time_to_be_heard_a_while_after_the_first_report():
    names = KnownModels()
    names.expire(100.0)
    assert not names.has_listened, "nothing has been heard"
    names.see(["a"], 101.0)
    names.see(["b"], 101.0 + LISTENS_S)
    names.expire(100.9 + LISTENS_S)
    assert not names.has_listened
    names.expire(101.0 + LISTENS_S)
    assert names.has_listened
