"""The allow-list of further routes of engines: `routes` of a region, `--route` of an agent."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from schemas.ids import PATH_PATTERN, is_path

LISTED_MAX = 4  # a heartbeat has room for so many beside the known ones


def checked_routes(paths: Sequence[str]) -> tuple[str, ...]:
    """Exact paths, each once, none of them the mesh's own. Raises ValueError that says what to
    change."""
    # A mesh.toml that lists none is read without these, which load the shapes of all requests.
    from schemas.engine_routes import ALIASES, ENGINE_PATHS
    from schemas.routes import ROUTES

    own_paths = {route.path.partition("/{")[0] for route in ROUTES}
    for path in paths:
        if not is_path(path):
            raise ValueError(
                f"{path[:80]!r} is no path: write it like /v1/foo, in lower-case letters, digits, "
                "hyphens and underscores"
            )
        if path in ENGINE_PATHS or path in ALIASES:
            raise ValueError(f"{path} is served anyway: leave it out")
        if any(path == own or path.startswith(own + "/") for own in own_paths):
            raise ValueError(f"{path} is a path of the mesh itself: leave it out")
    if len(set(paths)) > LISTED_MAX:
        raise ValueError(f"list at most {LISTED_MAX} paths")
    return tuple(dict.fromkeys(paths))


ListedRoutes = Annotated[
    tuple[Annotated[str, Field(json_schema_extra={"pattern": PATH_PATTERN})], ...],
    Field(max_length=LISTED_MAX),
    AfterValidator(checked_routes),
]
