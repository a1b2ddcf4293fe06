"""Models on optional paths: their names, and how heartbeats and digests come to them and back."""

from dataclasses import replace

from mesh.core.model.served_names import (
    KEPT_RESPONSE,
    answered_names,
    beat_by_all_names,
    beat_by_name,
    digest_by_name,
    is_for_others,
    is_keeper_name,
    is_model,
    kept_name,
    model_of,
    models_by_path,
    models_only,
    served_name,
    work_name,
)
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from schemas.ids import MODEL_CHARS_MAX, ModelId
from schemas.response_calls import RESPONSE
from schemas.state import KnownRoutes, ModelCapacity
from tests.mesh.core.build import MODEL, beat, digest

NAME = served_name(MODEL, EMBEDDINGS)
TWO, ONE = ModelCapacity(ready=2, free=2), ModelCapacity(ready=1, free=0)


def test_a_name_leads_back_to_its_model():
    for path in (CHAT, COMPLETIONS):
        assert served_name(MODEL, path) == MODEL
    assert NAME != MODEL
    assert (model_of(NAME), model_of(MODEL)) == (MODEL, MODEL)
    assert (is_model(MODEL), is_model(NAME)) == (True, False)


def test_a_heartbeat_names_what_its_engine_answers():
    plain = beat("a")
    assert beat_by_name(plain) is plain
    listed = beat_by_name(replace(plain, paths=("/v1/foo",)))  # by an operator
    assert listed.models == (MODEL, f"{MODEL} on /v1/foo")
    assert beat_by_name(replace(plain, paths=(EMBEDDINGS,))).models == (MODEL, NAME)


def test_a_name_too_long_for_other_messages_is_left_out():
    long = ModelId("m" * MODEL_CHARS_MAX)
    found = beat_by_name(beat("a", models=(long, MODEL), paths=(EMBEDDINGS,)))
    assert found.models == (long, MODEL, NAME)


def test_a_path_is_the_model_s_and_what_is_not_known_is_let_through():
    emb = ModelId("emb")
    routes = KnownRoutes(unknown=(MESSAGES,), lacking={MODEL: (EMBEDDINGS,), emb: (MESSAGES,)})
    found = beat_by_name(beat("a", models=(MODEL, emb), paths=(EMBEDDINGS,), routes=routes))
    on_emb, messages = served_name(emb, EMBEDDINGS), served_name(MODEL, MESSAGES)
    assert found.models == (MODEL, emb, on_emb, messages)
    assert answered_names(found) == [MODEL, emb, on_emb]
    unknown = beat_by_all_names(beat("a", routes=KnownRoutes(unknown=(RESPONSES,))))
    assert kept_name("us", "a") in unknown.models
    lacking = KnownRoutes(lacking={emb: (RESPONSES,)})
    named = beat_by_all_names(beat("a", models=(MODEL, emb), paths=(RESPONSES,), routes=lacking))
    assert not [name for name in named.models if name.startswith(f"{emb} on")]


def test_a_digest_says_the_same_after_it_was_sent():
    capacities = {MODEL: TWO, NAME: ONE}
    sent = digest("eu", models=models_only(capacities), models_by_path=models_by_path(capacities))
    assert sent.models == {MODEL: TWO}
    assert sent.models_by_path == {EMBEDDINGS: {MODEL: ONE}}
    assert digest_by_name(sent).models == capacities


def test_calls_about_responses_go_to_any_replica_or_region_that_makes_some():
    plain = beat("a", region="us")
    assert beat_by_all_names(plain) is plain
    named = beat_by_all_names(replace(plain, paths=(RESPONSES,)))
    here, abroad = kept_name("us", "a"), kept_name("us")
    assert here in named.models and abroad not in named.models
    assert {work_name(here), work_name(abroad)} == {f"{KEPT_RESPONSE} on {RESPONSE}"}
    assert is_keeper_name(here) and not is_for_others(abroad) and not is_model(here)
    more = {RESPONSES: {ModelId("b"): ONE, MODEL: TWO}}
    sent = digest("us", models={MODEL: TWO, ModelId("b"): ONE}, models_by_path=more)
    assert digest_by_name(sent).models[abroad] == TWO
    assert (
        abroad not in digest_by_name(digest("us", models_by_path={EMBEDDINGS: {MODEL: ONE}})).models
    )
    assert RESPONSE not in models_by_path(digest_by_name(sent).models)


def test_within_a_label_the_path_counts_as_the_model_does():
    by_label = {"de": {MODEL: TWO}, "fr": {ModelId("other"): ONE}}
    sent = digest(
        "eu",
        models={MODEL: TWO},
        models_by_label=by_label,
        models_by_path={EMBEDDINGS: {MODEL: ONE}, "/v1/foo": {MODEL: ONE}},
    )
    found = digest_by_name(sent)
    listed = ModelId(f"{MODEL} on /v1/foo")
    assert found.models == {MODEL: TWO, NAME: ONE, listed: ONE}
    assert found.models_by_label == {
        "de": {MODEL: TWO, NAME: TWO, listed: TWO},
        "fr": {ModelId("other"): ONE},
    }
    plain = digest("eu")
    assert digest_by_name(plain) is plain


def test_names_follow_each_change_of_a_heartbeat():
    """What is kept of the last one is for its models, paths and replica alone."""
    first = replace(beat("g0"), paths=(EMBEDDINGS, RESPONSES))
    for changed in (
        {"models": (MODEL, ModelId("other"))},
        {"paths": (MESSAGES,)},
        {"replica": "g1"},
        {"running": 7},
    ):
        before, after = beat_by_all_names(first), beat_by_all_names(replace(first, **changed))
        assert before == beat_by_all_names(first)
        expected = {*beat_by_name(replace(first, **changed)).models}
        keepers = {*after.models} - expected
        assert keepers == {*filter(is_keeper_name, after.models)}
        assert all(str(after.replica) in name for name in keepers)
        assert bool(keepers) == (RESPONSES in after.paths)
        assert replace(after, models=()) == replace(first, **(changed | {"models": ()}))
