"""Nothing between client and engine."""

from tests.programs.bench.systems.system import Place, System, until_it_answers


async def direct(place: Place) -> System:
    """The engines themselves; clients that know one address only use the first."""
    urls = tuple(place.engines)
    settings = "the engines themselves; wrk knows the first alone"
    return await until_it_answers(place, System("direct", urls, settings))
