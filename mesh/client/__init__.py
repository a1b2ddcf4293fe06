"""A client's way into a mesh: the nearest healthy region, and the next one when it fails.

For programs that use the mesh, not for the mesh: nothing here is imported by the rest, and nothing
but the standard library is imported here. Works with any SDK that takes a base URL.

    regions = Regions(urls, lambda url: OpenAI(base_url=url, api_key="unused", max_retries=0))
    answer = regions.call(lambda client: client.chat.completions.create(…))
"""

from mesh.client.regions import AsyncRegions, Regions

__all__ = ["AsyncRegions", "Regions"]
