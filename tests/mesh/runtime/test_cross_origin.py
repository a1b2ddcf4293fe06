"""A page in a browser may call where its origin is listed: tests/mesh/http/test_inputs.py."""

from tests.support.small_mesh import PATIENT, chat, client, one_replica

CHAT, APP = "/v1/chat/completions", "https://app.example.com"
ALLOW = "access-control-allow-origin"


async def test_it_is_off_by_default(nats_server):
    headers = {"origin": APP}
    async with one_replica(nats_server, **PATIENT) as mesh, client() as session:
        url = mesh.urls["us"]
        for body, status in ((chat(), 200), (chat(stream=True), 200), ({"model": 7}, 400)):
            async with session.post(url + CHAT, json=body, headers=headers) as answer:
                assert (answer.status, answer.headers.get(ALLOW)) == (status, None)
        async with session.get(url + "/v1/models", headers=headers) as answer:
            assert (answer.status, answer.headers.get(ALLOW)) == (200, None)
        headers |= {"access-control-request-method": "POST"}
        async with session.options(url + CHAT, headers=headers) as answer:
            assert (answer.status, answer.headers.get(ALLOW)) == (405, None)
