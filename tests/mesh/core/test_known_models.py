from mesh.core.cluster_events import KEPT_S, MODELS_MAX, KnownModels


def test_names_outlive_who_served_them_for_a_while():
    names = KnownModels()
    names.hear(["b", "a"], 0.0)
    names.hear(["a"], 10.0)
    names.expire(KEPT_S)
    assert names.known() == ("a", "b")
    names.expire(KEPT_S + 5.0)
    assert names.known() == ("a",)
    names.expire(KEPT_S + 10.1)
    assert names.known() == ()


def test_there_is_a_limit_to_names():
    names = KnownModels()
    names.hear((str(number) for number in range(MODELS_MAX + 10)), 0.0)
    assert len(names.known()) == MODELS_MAX
    names.hear(["0"], 1.0)  # those already known stay fresh
    names.expire(KEPT_S + 0.5)
    assert names.known() == ("0",)
